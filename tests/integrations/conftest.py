"""Where the real files of SGLang are, and fake engines."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from integrations.fake_engine import FakeEngine
from integrations.fake_run import FakeRun, Start
from integrations.sglang_real import unpack_wheel
from slime_group_run import engines


@pytest.fixture(scope="session")
def sglang_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds `sglang/srt`: that of GYMFAST_SGLANG_SOURCE, or from the wheel."""
    given = os.environ.get("GYMFAST_SGLANG_SOURCE")
    return Path(given) if given else unpack_wheel(tmp_path_factory.mktemp("sglang"))


@pytest.fixture(scope="session")
def group_engines() -> Iterator[dict[str, str]]:
    """Addresses of engines "a" to "c" in processes, which updaters over process groups reach."""
    given = os.environ.get("GYMFAST_SGLANG_SOURCE")
    with engines("abc", Path(given) if given else None) as addresses:
        yield addresses


@pytest.fixture(scope="session")
def fake_engine() -> Iterator[FakeEngine]:
    """The process of fake engines, one after the other."""
    engine = FakeEngine()
    yield engine
    engine.close()


@pytest.fixture(params=["vllm", "sglang"])
def kind(request: pytest.FixtureRequest) -> str:
    """Whose endpoints and adapter a fake engine has."""
    return request.param


@pytest.fixture
def start(fake_engine: FakeEngine, kind: str, tmp_path: Path) -> Start:
    """Makes a run and an engine that follows it."""
    return lambda **options: FakeRun(fake_engine, kind, tmp_path, **options)
