"""A fake engine with slime's methods, and a receiver of version directories written for the tests.

The receiver shares no code with gymfast. The one of slime itself takes its place where its source
is given.
"""

from __future__ import annotations

import json
import shutil
import struct
import zlib
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import blake3
import numpy as np
import xxhash
import zstandard
from slime_stubs import Method

from gymfast.integrations.slime import pre_read

PATCH = Path("docker") / "patch" / "latest" / "sglang-pull_weights.patch"
METHODS = (
    *("pull_weights", "pause_generation", "flush_cache", "update_weights_from_disk"),
    "continue_generation",
)
Pull = Callable[[str, str, str, int], None]


class Engine:
    """Keeps a local checkpoint, serves what it loaded last, and fails when told to."""

    def __init__(self, name: str, base: Path, source: Path, local: Path, pull: Pull) -> None:
        self.name = name
        self.base, self.source, self.local = base, source, local
        self.pull = pull
        self.calls: list[str] = []
        self.failures: list[tuple[str, str]] = []
        self.pauses: list[str] = []
        self.is_paused = False
        self.served = ""
        self.handle = type("Handle", (), {m: Method(self._method(m)) for m in METHODS})()

    def note(self) -> dict[str, Any]:
        return {
            "calls": list(self.calls),
            "served": self.served,
            "is_paused": self.is_paused,
            "pauses": self.pauses,
        }

    def _method(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            how = next((how for method, how in self.failures if method == name), None)
            if how is not None:
                self.failures.remove((name, how))
            if how == "before":
                raise ConnectionError(f"engine {self.name} is not reachable")
            if how == "refuse":
                return {"success": False, "message": f"engine {self.name} has no room"}
            getattr(self, f"_{name}")(*args, **kwargs)
            if how == "after":
                raise ConnectionError(f"the answer of engine {self.name} was lost")
            return {"success": True, "message": "Success."}

        return call

    def _pull_weights(self, target_version: int) -> None:
        self.pull(str(self.local), str(self.base), str(self.source), target_version)

    def _pause_generation(self, mode: str = "retract") -> None:
        self.pauses.append(mode)
        self.is_paused = True

    def _continue_generation(self) -> None:
        self.is_paused = False

    def _flush_cache(self) -> None:
        assert self.is_paused

    def _update_weights_from_disk(self, model_path: str, weight_version: str) -> None:
        assert self.is_paused
        assert Path(model_path).name == "local"
        self.served = digest_of(self.local)


def digest_of(checkpoint: Path) -> str:
    """One digest of all tensors of a checkpoint, by name and bytes."""
    return digest_of_bytes(read_tensors(checkpoint))


def digest_of_bytes(tensors: dict[str, bytes]) -> str:
    text = [f"{name} {sha256(tensors[name]).hexdigest()}" for name in sorted(tensors)]
    return sha256("\n".join(text).encode()).hexdigest()[:16]


def read_tensors(checkpoint: Path) -> dict[str, bytes]:
    tensors = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        blob, header = _open(file)
        del header["__metadata__"]
        tensors |= {name: blob[begin:end] for name, (begin, end) in header.items()}
    return tensors


def receiver_of(source: Path | str | None, has_store: bool = False) -> Pull:
    """A receiver that calls the pre-read hook first if there is a store, as slime's does."""
    receive = _receiver_of(Path(source) if source else None)
    if not has_store:
        return receive

    def fetch_and_receive(local: str, base: str, versions: str, target: int) -> None:
        if target > 0:
            pre_read(versions, target)
        receive(local, base, versions, target)

    return fetch_and_receive


def _receiver_of(source: Path | None) -> Pull:
    """slime's own receiver, out of the patch in its checkout; that of the tests without one."""
    if source is None:
        return pull
    module = ModuleType("slime_receiver")
    text = (source / PATCH).read_text().partition("weight_sync/local_checkpoint.py\n@@")[2]
    lines = [line[1:] for line in text.splitlines()[1:] if line.startswith("+")]
    exec(compile("\n".join(lines), str(source / PATCH), "exec"), module.__dict__)
    return module.pull


def pull(local: str, base: str, source: str, target: int) -> None:
    """What an engine host does, as the format describes it; deltas only."""
    folder, state = Path(local), Path(local) / ".weight_sync" / "state.json"
    if not state.exists():
        shutil.copytree(base, folder, dirs_exist_ok=True)
        _note(state, 0)
    (state.parent / "lock").touch()
    for number in range(int(json.loads(state.read_text())["version"]) + 1, target + 1):
        changed = apply_version(
            Path(source) / f"weight_v{number:06d}", number, read_tensors(folder)
        )
        for file in folder.glob("*.safetensors"):
            _write_changed(file, changed)
        _note(state, number)


def apply_version(version: Path, number: int, old: dict[str, bytes]) -> dict[str, bytes]:
    """The new bytes of every tensor that a version names; checks all that the format states."""
    index = json.loads((version / "model.safetensors.index.json").read_text())
    metadata = index["metadata"]
    assert metadata["version"] == f"{number:06d}"
    assert metadata["base_version"] == f"{number - 1:06d}"
    assert metadata["compression_format"] == "zstd"
    new: dict[str, bytes] = {}
    files = sorted(version.iterdir())
    names = {}
    for file in (f for f in files if f.suffix == ".safetensors"):
        blob, header = _open(file)
        digests = header.pop("__metadata__")
        for name, (begin, end) in header.items():
            assert name not in names, f"{name} is in {names[name]} and in {file.name}"
            names[name] = file.name
            content = zstandard.ZstdDecompressor().decompress(blob[begin:end])
            new[name] = _patched(old[name], content, metadata["delta_encoding"])
            found = _digest(metadata["checksum_format"], new[name])
            assert found == digests[name], f"{file}: {name}"
    assert names == index["weight_map"]
    shards = [f"model-{i:05d}-of-{len(files) - 1:05d}.safetensors" for i in range(len(files) - 1)]
    assert [f.name for f in files] == [*shards, "model.safetensors.index.json"]
    return new


def _patched(old: bytes, content: bytes, encoding: str) -> bytes:
    new = np.frombuffer(old, np.uint8).copy()
    if encoding == "xor":
        return (new ^ np.frombuffer(content, np.uint8)).tobytes()
    (count,) = struct.unpack("<I", content[:4])
    positions = np.frombuffer(content[4 : 4 + 4 * count], "<u4")
    assert np.all(np.diff(positions.astype(np.int64)) > 0)
    new[positions] = np.frombuffer(content[4 + 4 * count :], np.uint8)
    return new.tobytes()


def _digest(algorithm: str, data: bytes) -> str:
    if algorithm == "adler32":
        return f"{zlib.adler32(data):08x}"
    return (xxhash.xxh3_128 if algorithm == "xxh3-128" else blake3.blake3)(data).hexdigest()


def _open(file: Path) -> tuple[bytes, dict[str, Any]]:
    blob = file.read_bytes()
    (length,) = struct.unpack("<Q", blob[:8])
    header = json.loads(blob[8 : 8 + length])
    for name, entry in header.items():
        if name != "__metadata__":
            header[name] = tuple(8 + length + at for at in entry["data_offsets"])
    return blob, {"__metadata__": {}} | header


def _write_changed(file: Path, changed: dict[str, bytes]) -> None:
    blob, header = _open(file)
    data = bytearray(blob)
    for name in changed.keys() & header.keys():
        begin, end = header[name]
        data[begin:end] = changed[name]
    file.write_bytes(data)


def _note(state: Path, number: int) -> None:
    state.parent.mkdir(exist_ok=True)
    state.write_text(json.dumps({"version": f"{number:06d}"}))
