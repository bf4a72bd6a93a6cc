"""A plug-in of vLLM, for tests: one step of one rank fails, or waits, while a file says so.

`install` puts it into a folder for PYTHONPATH. The file of GYMFAST_TEST_FAULT holds the step (pull
or load) and the rank.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

FAULT = "GYMFAST_TEST_FAULT"


def install(folder: Path) -> dict[str, str]:
    """Variables with which a server finds this module as an installed plug-in."""
    metadata = folder / "faults-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: faults\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nfaults = vllm_faults:register\n"
    )
    shutil.copy(__file__, folder)
    return {"PYTHONPATH": str(folder), FAULT: str(folder / "fault")}


def register() -> None:
    """Called by vLLM in each of its processes."""
    from gymfast.integrations.canonical import CanonicalCopy
    from gymfast.integrations.vllm_reload import LayerwiseReload

    CanonicalCopy.pull = _failing("pull", CanonicalCopy.pull)  # type: ignore[method-assign]
    LayerwiseReload._load_group = _failing(  # type: ignore[method-assign]
        "load", LayerwiseReload._load_group
    )


def _failing(step: str, original: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    def call(*arguments: Any, **options: Any) -> Any:
        file = Path(os.environ[FAULT])
        if file.exists() and file.read_text().split() == [step, str(torch.distributed.get_rank())]:
            raise RuntimeError(f"injected: the {step} failed")
        return original(*arguments, **options)

    return call
