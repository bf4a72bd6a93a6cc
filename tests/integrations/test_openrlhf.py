"""OpenRLHF's trainer and engine actors, with a run between them.

With OpenRLHF's own source (GYMFAST_OPENRLHF_SOURCE) its classes are those that are derived from,
with stubs for Ray, DeepSpeed and vLLM; without it a stand-in of the same signatures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gymfast.errors import GymfastError
from gymfast.integrations import openrlhf as adapter

SOURCE = os.environ.get("GYMFAST_OPENRLHF_SOURCE", "")
HERE = Path(__file__).parent
ONE_CALL = [["gymfast_pull"], ["gymfast_pull"]]


def run(folder: Path, *steps: Any, num_ranks: int = 2, **settings: Any) -> list[Any]:
    """The notes of each rank."""
    script = {
        "folder": str(folder),
        "source": SOURCE,
        "num_ranks": num_ranks,
        "zero_stage": 3,
        "tensor_parallel": 1,
        "is_colocated": False,
        "steps": steps,
        **settings,
    }
    command = [sys.executable, "-m", "integrations.openrlhf_rank", json.dumps(script)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [
        subprocess.Popen([*command, str(rank)], cwd=HERE.parent, **pipes)
        for rank in range(num_ranks)
    ]
    notes = []
    for rank in ranks:
        out, err = rank.communicate(timeout=60)
        assert rank.returncode == 0, err
        notes.append(json.loads(out.splitlines()[-1]))
    return notes


@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [
        (1, {"zero_stage": 2, "is_colocated": True}),
        pytest.param(2, {"zero_stage": 3}, marks=pytest.mark.long),
        pytest.param(2, {"zero_stage": 2, "tensor_parallel": 2}, marks=pytest.mark.long),
    ],
    ids=["zero-2-colocated", "zero-3", "tensor-parallel"],
)
def test_row_26_each_sync_is_one_call_to_each_engine(
    tmp_path: Path, num_ranks: int, settings: dict[str, Any]
) -> None:
    steps = (["sync"], ["train"], ["sync"], ["sync"], ["train"], ["sync"])
    first, *others = run(tmp_path, *steps, num_ranks=num_ranks, **settings)
    for version, note in enumerate(first):
        assert note == {
            "error": "",
            "held": [True, True],
            "calls": ONE_CALL,
            "versions": [str(version)] * 2,
            "resets": [version + 1] * 2,
        }
    for notes in others:
        assert [(note["error"], note["calls"]) for note in notes] == [("", [[], []])] * 4


def test_a_failure_is_named_on_all_ranks_of_zero_3_and_the_next_sync_goes_on(
    tmp_path: Path,
) -> None:
    first, second = run(
        tmp_path,
        *(["sync"], ["break", "fails", True], ["train"], ["sync"]),
        *(["break", "fails", False], ["sync"]),
        *(["break", "keeps_cache", True], ["train"], ["sync"]),
        *(["lose"], ["sync"]),
    )
    text = "engine 1 of 2 failed at gymfast_pull: RuntimeError: injected: the engine core is dead"
    assert first[1]["error"] == f"EngineError: {text}"
    assert second[1]["error"] == (
        f"GymfastError: the sync of weights failed on rank 0: EngineError: {text}"
    )
    assert (first[1]["held"], first[1]["versions"]) == ([True, False], ["1", "0"])
    assert (first[2]["error"], first[2]["held"], first[2]["calls"]) == ("", [True, True], ONE_CALL)
    assert "version 3 is loaded, but vLLM kept its prefix cache" in first[3]["error"]
    assert first[3]["versions"] == ["3", "2"], "none of which old keys and values are used"
    assert "5 of 11 tensors did not come" in first[4]["error"]
    assert "failed on rank 0: CoverageError" in second[4]["error"]
    assert first[4]["calls"] == [[], []]


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys; sys.path.append(sys.argv[1]); from integrations import openrlhf_stubs;"
        "openrlhf_stubs.install(None); from gymfast.integrations import openrlhf;"
        "openrlhf.main(sys.argv[2:])"
    )
    command = [sys.executable, "-c", code, str(HERE.parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_launcher_installs_and_passes_the_flags_on() -> None:
    done = launch("file:///runs", "demo", "--vllm.num_engines", "2")
    assert done.returncode == 0, done.stderr
    arguments, replaced = done.stdout.splitlines()
    assert arguments.endswith("train_ppo_ray.py', '--vllm.num_engines', '2']")
    assert replaced == "['Trainer', True]"


def test_the_launcher_needs_store_and_run() -> None:
    with pytest.raises(
        SystemExit, match=r"usage: python -m gymfast.integrations.openrlhf STORE RUN"
    ):
        adapter.main(["--vllm.num_engines", "2"])


def test_a_store_that_no_engine_can_see_is_refused() -> None:
    with pytest.raises(ValueError, match="store is 'memory:x', which no engine can see"):
        adapter.install("memory:x", "run")


def test_another_layout_is_refused_and_nothing_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    class Trainer:
        def _init_vllm_sync_group(self, backend): ...

        def broadcast_to_vllm(self, version): ...

    module = ModuleType("openrlhf.trainer.ray.ppo_actor")
    module.ActorPPOTrainer = Trainer  # type: ignore[attr-defined]
    for name in ("openrlhf", "openrlhf.trainer", "openrlhf.trainer.ray"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(GymfastError, match=r"Trainer.broadcast_to_vllm takes \('version',\)"):
        adapter.install("file:///runs", "run")
    assert module.ActorPPOTrainer is Trainer


def test_without_openrlhf_there_is_one_clear_sentence() -> None:
    with pytest.raises(GymfastError, match=r"no openrlhf is installed here: there is no module"):
        adapter.install("file:///runs", "run")
