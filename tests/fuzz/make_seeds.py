"""Writes seeds for fuzz_parse: small frames that hold every kind, mode, status and geometry.

PYTHONPATH=tests python tests/fuzz/make_seeds.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from delta_frames import blocks, digest_of, frame, header, row, tensor

from gymfast.delta.encode import encode
from gymfast.delta.state import State
from gymfast.delta.tensors import Tensor

Weights = dict[str, Tensor]


def _tensor(dtype: str, shape: tuple[int, ...], num_bytes: int, seed: int) -> Tensor:
    data = np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)
    return Tensor(dtype, shape, data)


def _stepped(tensor: Tensor, every: int, step: int) -> Tensor:
    data = tensor.data.copy()
    data[::every] += np.uint8(step)
    return Tensor(tensor.dtype, tensor.shape, data)


def _base() -> Weights:
    weights = {
        "scalar": _tensor("F32", (), 4, 1),
        "empty": _tensor("BF16", (0, 3), 0, 2),
        "packed": _tensor("F4", (3, 5), 8, 3),
        "bytes": _tensor("F8_E4M3", (70,), 70, 4),
        "model.layers.0.w": _tensor("BF16", (32, 32), 2048, 5),
        "optimizer": _tensor("F64", (9,), 72, 6),
        "gone": _tensor("I32", (4,), 16, 7),
        "retyped": _tensor("U16", (6,), 12, 8),
        "n\u00e4me": _tensor("BOOL", (2, 2), 4, 9),
    }
    weights["tied"] = weights["model.layers.0.w"]
    return weights


def _next(base: Weights, every: int, step: int) -> Weights:
    new = {name: _stepped(tensor, every, step) for name, tensor in base.items() if name != "gone"}
    new["retyped"] = _tensor("F32", (3,), 12, 10)
    new["added"] = _tensor("C64", (2,), 16, 11)
    new["tied"] = new["model.layers.0.w"]
    new["empty"], new["bytes"] = base["empty"], base["bytes"]
    return new


def _with_skippable(data: bytes) -> bytes:
    """A section of type 0x80 behind HEADER; the target repairs the checks."""
    return data[:40] + b"\x80\0\3\0\0\0\0\0" + bytes(8) + b"abc" + data[40:]


def _two_sections() -> bytes:
    """A tensor of eight blocks of which two BLOCKS sections carry some; the writer has no such."""
    new = bytes(range(8))
    sections = [
        header(),
        tensor("t", shape=(8,), tiles=(8, 1, 1)),
        blocks([(5, new[1:2], 1), (0, b"", 0)], first_block=1),
        blocks([(5, new[4:5], 4)], first_block=4),
    ]
    return frame(sections, [row(2, digest_of(new))])


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    base = _base()
    frames = {"anchor": encode(None, base), "nothing": encode(base, base)}
    for profile in ("auto", "fast", "small"):
        for every, step in ((300, 1), (7, 1), (2, 9), (1, 77)):
            new = _next(base, every, step)
            frames[f"{profile}-{every}"] = encode(base, new, profile=profile)
    small_blocks = State.copy_of(base, block_units=64, tiled=True)
    frames["tiled"] = encode(small_blocks, _next(base, 5, 1))
    frames["skippable"] = _with_skippable(frames["nothing"])
    frames["two-sections"] = _two_sections()
    for name, data in frames.items():
        (folder / name).write_bytes(data)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
