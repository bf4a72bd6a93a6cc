"""Checkpoints on disk, good and bad, for the tests of the Python layer."""

from __future__ import annotations

import io
import json
from pathlib import Path

from gymfast.delta import Tensor
from gymfast.delta.checkpoint import (
    Checkpoint,
    apply_checkpoint,
    apply_checkpoint_in_place,
    encode_checkpoint,
)
from gymfast.delta.safetensors_header import build_header


def write(path: Path, weights: dict[str, Tensor], metadata: dict[str, str] | None = None) -> Path:
    """A safetensors file of any dtypes, tensors in the order given."""
    start, _ = build_header(((n, t.dtype, t.shape) for n, t in weights.items()), metadata or {})
    path.write_bytes(start + b"".join(t.data.tobytes() for t in weights.values()))
    return path


def write_sharded(path: Path, weights: dict[str, Tensor], num_shards: int = 2) -> Path:
    """A directory of shards with an index and a configuration beside them."""
    path.mkdir()
    weight_map = {}
    for i in range(num_shards):
        name = f"model-{i + 1:05}-of-{num_shards:05}.safetensors"
        shard = {n: t for j, (n, t) in enumerate(weights.items()) if j % num_shards == i}
        write(path / name, shard, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
    index = {"metadata": {"total_size": 0, "kept": "yes"}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text("{}")
    return path


def read(path: Path) -> dict[str, Tensor]:
    with Checkpoint.open(path) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.names}


def frame_of(old: Path | None, new: Path, **options) -> bytes:
    out = io.BytesIO()
    encode_checkpoint(old, new, out, **({"backend": "cpu"} | options))
    return out.getvalue()


def apply_to(base: Path, frame: bytes, out: Path | None, backend: str = "cpu") -> None:
    """Applies to a new checkpoint, or in place if out is None."""
    if out is None:
        apply_checkpoint_in_place(base, frame, backend=backend)
    else:
        apply_checkpoint(base, frame, out, backend=backend)


def raw(path: Path, header: object, data: bytes = b"") -> Path:
    """A file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(start: int, end: int, dtype: str = "U8", shape: object = None) -> dict[str, object]:
    shape = [end - start] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
