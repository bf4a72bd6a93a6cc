"""A call of each operation of gymfast._cuda that it takes, to be spoiled by a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType

import numpy as np
from cuda_backend import aligned

GEOMETRY = {"num_units": 1000, "unit_bytes": 2, "cols": 1000, "tile_rows": 1, "tile_cols": 300}
RUN = {"first_block": 0, "num_blocks": 4}
CODE = {"class_shift": 0, "class_base": 0, "has_base": True}


@dataclass
class Call:
    """One operation with arguments that it takes, to be spoiled by a test."""

    function: Callable[..., object]
    arguments: dict[str, object] = field(default_factory=dict)

    def __call__(self) -> object:
        return self.function(**self.arguments)

    def arrays(self) -> dict[str, np.ndarray]:
        return {k: v for k, v in self.arguments.items() if isinstance(v, np.ndarray)}


def memory(size: int) -> np.ndarray:
    return aligned(np.full(size, 0xA5, np.uint8))


def digest_call(module: ModuleType) -> Call:
    arrays = {"data": memory(2000), "digests": memory(64)}
    return Call(module.digest_blocks, GEOMETRY | RUN | arrays | {"stream": 0})


def encode_call(module: ModuleType) -> Call:
    scratch = module.encode_scratch_bytes(**GEOMETRY, profile=0, num_blocks=4)
    arrays = {
        "base": memory(2000),
        "new": memory(2000),
        "digests": memory(64),
        "body": memory(module.encode_body_capacity(**GEOMETRY, num_blocks=4)),
        "sections": memory(80),
        "scratch": memory(scratch),
    }
    rest = {"profile": 0, "blocks_per_section": 2, "update": True, "stream": 0}
    return Call(module.encode_blocks, GEOMETRY | RUN | CODE | arrays | rest)


def gather_call(module: ModuleType) -> Call:
    rest = {"profile": 0, "num_blocks": 4, "stream": 0}
    scratch = memory(module.encode_scratch_bytes(**GEOMETRY, profile=0, num_blocks=4))
    return Call(module.gather_undo, GEOMETRY | rest | {"scratch": scratch})


def rollback_call(module: ModuleType) -> Call:
    arrays = {
        "data": memory(2000),
        "counts": aligned(np.array([3, 0, 0, 2], np.uint32)),
        "index": memory(20),
        "before": memory(10),
    }
    return Call(module.rollback_blocks, GEOMETRY | RUN | arrays | {"stream": 0})


def sample_call(module: ModuleType) -> Call:
    arrays = {"data": memory(2000), "out": memory(1000)}
    rest = {"num_units": 1000, "unit_bytes": 2, "stream": 0}
    return Call(module.sample_classes, arrays | rest)


def apply_call(module: ModuleType) -> Call:
    arrays = {
        "data": memory(2000),
        "body": memory(100),
        "digests": memory(64),
        "sections": aligned(np.array([[0, 4, 0, 100, 0]], np.uint64)),
        "result": memory(16),
        "scratch": memory(module.apply_scratch_bytes(**GEOMETRY, num_blocks=4)),
    }
    return Call(module.apply_blocks, GEOMETRY | RUN | CODE | arrays | {"stream": 0})


def move_call(module: ModuleType) -> Call:
    arrays = {"bucket": memory(1000), "table": memory(80), "digest": memory(8)}
    return Call(module.move_pieces, arrays | {"num_tiles": 3, "is_packing": True, "stream": 0})


CALLS = {
    "digest": digest_call,
    "encode": encode_call,
    "gather": gather_call,
    "rollback": rollback_call,
    "sample": sample_call,
    "apply": apply_call,
    "move": move_call,
}
ARRAYS = {
    "digest": ["data", "digests"],
    "encode": ["base", "new", "digests", "body", "sections", "scratch"],
    "gather": ["scratch"],
    "rollback": ["data", "counts", "index", "before"],
    "sample": ["data", "out"],
    "apply": ["data", "body", "digests", "sections", "result", "scratch"],
    "move": ["bucket", "table", "digest"],
}
