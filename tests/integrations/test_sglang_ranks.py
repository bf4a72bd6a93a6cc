"""Two ranks of an engine, two processes: what one cannot do, none does."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from integrations.sglang_toy import checkpoint, model_of, step
from safetensors.torch import save_file

from gymfast.delta import encode
from gymfast.delta.hf_delta import publish_delta, pull
from gymfast.integrations.sglang_messages import LocalVersion, Piece, Update, pack


def payloads(frame: bytes, *, is_lost: bool = False) -> list[str]:
    """The messages that bring a frame; `is_lost` leaves its bytes out."""
    sent = [] if is_lost else [pack("an update", Piece(0), frame)]
    sent.append(pack("an update", Update(frame_bytes=len(frame))))
    return [base64.b64encode(payload).decode() for payload in sent]


def run(folder: Path, steps: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """What each rank saw after each step."""
    file = folder / "steps.json"
    file.write_text(json.dumps(steps))
    command = [sys.executable, "-m", "integrations.sglang_rank"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), folder / "store", file],
            cwd=Path(__file__).parents[1],
            stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    return [json.loads(rank.communicate(timeout=200)[0]) for rank in ranks]


def bits(weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    parameters = model_of(weights).named_parameters()
    return {name: value.view(torch.int16).tolist() for name, value in parameters}


def test_ranks_fail_together_and_are_healed_together(tmp_path: Path) -> None:
    first, second, third = checkpoint(0), step(checkpoint(0), 1), checkpoint(2)
    anchor, delta, other = encode(None, first), encode(first, second), encode(None, third)
    fine = [None, None]
    seen = run(
        tmp_path,
        [
            {"break_after": fine, "payloads": [payloads(anchor)] * 2},
            {"break_after": fine, "payloads": [payloads(delta), payloads(delta, is_lost=True)]},
            {"break_after": fine, "payloads": [payloads(anchor)] * 2},
            {"break_after": [None, 2], "payloads": [payloads(delta)] * 2},
            {"break_after": fine, "payloads": [payloads(other)] * 2},
        ],
    )
    for rank in seen:
        assert [step["is_flagged"] for step in rank] == [False, True, False, True, False]
        assert rank[1]["error"].startswith("rank 1: FormatError: 0 of")
        assert rank[1]["weights"] == bits(first)
        assert rank[2]["weights"] == bits(first)
        assert rank[3]["error"] == "rank 1: RuntimeError: the loader broke"
        assert (rank[4]["error"], rank[4]["weights"]) == ("", bits(third))


def test_ranks_of_a_host_load_a_local_checkpoint_together(tmp_path: Path) -> None:
    """The second rank has a place of its own, which is a version behind at first."""
    weights = [checkpoint(0)]
    weights.append(step(weights[0], 1))
    for number, state in enumerate(weights):
        (tmp_path / f"c{number}").mkdir()
        save_file(state, tmp_path / f"c{number}" / "model.safetensors")
    publish_delta(tmp_path / "versions", 1, tmp_path / "c0", tmp_path / "c1")
    for name, number in (("new", 1), ("old", 0)):
        pull(tmp_path / name, tmp_path / "c0", tmp_path / "versions", number)

    def message(name: str, number: int) -> list[str]:
        version = LocalVersion(str(tmp_path / name), str(tmp_path / "versions"), "", number)
        return [base64.b64encode(pack("an update", Update(local=version))).decode()]

    fine, ready = [None, None], message("new", 1)
    seen = run(
        tmp_path,
        [
            {"break_after": fine, "payloads": [message("old", 0)] * 2},
            {"break_after": fine, "payloads": [ready, message("old", 1)]},
            {"break_after": [None, 2], "payloads": [ready] * 2},
            {"break_after": fine, "payloads": [ready] * 2},
        ],
    )
    for rank in seen:
        assert [step["is_flagged"] for step in rank] == [False, False, True, False]
        assert (rank[0]["error"], rank[0]["weights"]) == ("", bits(weights[0]))
        assert "rank 1: ChainError" in rank[1]["error"]
        assert "holds version 0, version 1 is to be loaded: pull it first" in rank[1]["error"]
        assert rank[1]["weights"] == bits(weights[0])
        assert rank[2]["error"] == "rank 1: RuntimeError: the loader broke"
        assert (rank[3]["error"], rank[3]["weights"]) == ("", bits(weights[1]))
