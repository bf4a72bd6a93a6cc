"""Where the real files of SGLang are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from integrations.sglang_real import unpack_wheel


@pytest.fixture(scope="session")
def sglang_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds `sglang/srt`: that of GYMFAST_SGLANG_SOURCE, or from the wheel."""
    given = os.environ.get("GYMFAST_SGLANG_SOURCE")
    return Path(given) if given else unpack_wheel(tmp_path_factory.mktemp("sglang"))
