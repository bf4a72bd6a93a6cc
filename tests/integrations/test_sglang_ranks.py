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

from gymfast.delta import encode
from gymfast.integrations.sglang_messages import Piece, Update, pack


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
