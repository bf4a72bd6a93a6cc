"""Checkpoints on disk: one safetensors file, or a directory of shards with an index."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from gymfast.delta.files import open_regular, os_errors, read_into, read_whole
from gymfast.delta.journal import recover
from gymfast.delta.memory import U8
from gymfast.delta.safetensors_header import (
    Header,
    HeaderEntry,
    header_bytes_of,
    load_json,
    parse_header,
)
from gymfast.delta.tensors import Tensor
from gymfast.errors import FormatError, NotFoundError

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
DEFAULT_NAME = "model.safetensors"
MAX_INDEX_BYTES = 100_000_000


@dataclass(frozen=True)
class Shard:
    """One safetensors file of a checkpoint, open for reading."""

    path: Path
    fd: int
    header: Header

    @property
    def name(self) -> str:
        """Its plain file name."""
        return self.path.name


@dataclass(frozen=True)
class CheckpointTensor:
    """Where a tensor lies: the number of its shard, and the offset of its bytes in that file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    shard: int
    start: int


class OpenShards:
    """Files that are open together, and closed at the end of a `with`."""

    shards: tuple[Shard, ...]

    def close(self) -> None:
        """Closes the files; raises GymfastError for what the system says."""
        shards, self.shards = self.shards, ()
        with ExitStack() as stack:
            for shard in shards:
                stack.enter_context(os_errors("close", shard.path))
                stack.callback(os.close, shard.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Checkpoint(OpenShards):
    """The tensors of a checkpoint, read on demand with pread; nothing stays in memory.

    Files are kept open, so that a checkpoint replaced by rename is still read as it was.
    """

    def __init__(self, path: Path, shards: list[Shard], index: Index | None) -> None:
        """Use Checkpoint.open."""
        self.path = path
        self.shards = tuple(shards)
        self.index = index
        self.is_directory = path.is_dir()
        self._tensors = _collect(shards)

    @classmethod
    def open(cls, path: Path | str, *, needs_recovery: bool = True) -> Checkpoint:
        """A checkpoint with all its headers checked; an interrupted in-place update is finished.

        Whoever holds the journal already says needs_recovery=False.

        Raises NotFoundError if there is none, FormatError for damaged or hostile files, and
        GymfastError for what the system says.
        """
        path = Path(path)
        if needs_recovery:
            recover(path)
        with os_errors("open checkpoint", path):
            index = read_index(path) if path.is_dir() else None
            files = [resolve_shard(path, n) for n in index.files] if index else [_single_file(path)]
            shards: list[Shard] = []
            try:
                shards.extend(open_shard(file) for file in files)
                checkpoint = cls(path, shards, index)
                if index is not None:
                    index.check(checkpoint)
            except BaseException:
                for shard in shards:
                    os.close(shard.fd)
                raise
        return checkpoint

    @property
    def names(self) -> tuple[str, ...]:
        """All names: shard by shard in the order of file names, in a shard by position."""
        return tuple(self._tensors)

    def spec(self, name: str) -> CheckpointTensor:
        """Dtype, shape and place of a tensor; KeyError if there is none of this name."""
        return self._tensors[name]

    def read(self, name: str) -> Tensor:
        """A tensor in memory of its own.

        Raises KeyError if there is none, FormatError if the file became shorter.
        """
        spec = self._tensors[name]
        tensor = Tensor(spec.dtype, spec.shape, np.empty(spec.num_bytes, np.uint8))
        self.read_into(name, 0, tensor.data)
        return tensor

    def read_into(self, name: str, start: int, out: U8) -> None:
        """Fills out with the bytes of a tensor from a byte offset in it.

        Raises KeyError, ValueError beyond the tensor, FormatError if the file became shorter.
        """
        spec = self._tensors[name]
        if start < 0 or start + out.size > spec.num_bytes:
            end = start + out.size
            raise ValueError(f"bytes {start} to {end} of {name!r}, which has {spec.num_bytes}")
        shard = self.shards[spec.shard]
        if out.size:
            with os_errors("read", shard.path):
                read_into(shard.fd, out.data, spec.start + start, shard.path)


@dataclass(frozen=True)
class Index:
    """An index file: which shard has which tensor."""

    name: str
    weight_map: dict[str, str]
    metadata: dict[str, Any]

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the shards, sorted."""
        return tuple(sorted(set(self.weight_map.values())))

    def check(self, checkpoint: Checkpoint) -> None:
        """Raises FormatError if index and shards do not list the same tensors."""
        for name in checkpoint.names:
            file = checkpoint.shards[checkpoint.spec(name).shard].name
            if self.weight_map.get(name) != file:
                stated = self.weight_map.get(name, "nothing")
                raise FormatError(
                    f"{checkpoint.path / self.name}: tensor {name!r} is in {file}, the index says "
                    f"{stated}: files of two checkpoints are mixed; copy it again"
                )
        if missing := sorted(self.weight_map.keys() - set(checkpoint.names)):
            raise FormatError(
                f"{checkpoint.path / self.name}: tensor {missing[0]!r} is in no shard (nor are "
                f"{len(missing) - 1} more): copy the checkpoint again"
            )


def read_index(directory: Path) -> Index | None:
    """The index of a checkpoint directory, or None if it has none but one safetensors file.

    Raises NotFoundError if there is neither, FormatError if the index is damaged or names files
    outside the directory.
    """
    found = sorted(p.name for p in directory.iterdir() if p.name.endswith(INDEX_SUFFIX))
    if len(found) > 1:
        raise FormatError(f"{directory} has {len(found)} indexes ({', '.join(found)}), expected 1")
    if not found:
        return None
    path = resolve_shard(directory, found[0], suffix=INDEX_SUFFIX)
    num_bytes = path.stat().st_size
    if num_bytes > MAX_INDEX_BYTES:
        raise FormatError(f"{path}: {num_bytes} bytes, limit {MAX_INDEX_BYTES}")
    table = load_json(bytes(read_whole(path)), str(path))
    weight_map = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(
            f"{path}: no table 'weight_map' of tensor names: no index of a checkpoint"
        )
    for name, file in weight_map.items():
        if not isinstance(file, str) or not is_plain(file, SUFFIX):
            raise FormatError(
                f"{path}: tensor {name!r} is in {file!r}, expected the plain name of a "
                f"{SUFFIX} file in this directory"
            )
    metadata = table.get("metadata")
    return Index(found[0], weight_map, metadata if isinstance(metadata, dict) else {})


def resolve_shard(directory: Path, name: str, *, suffix: str = SUFFIX) -> Path:
    """The path of a file in a checkpoint directory.

    A symbolic link may lead to another file in it, or to the blobs of a Hugging Face cache.
    Raises FormatError if it leads elsewhere or the name is not plain.
    """
    if not is_plain(name, suffix):
        raise FormatError(f"{directory}: {name!r} is not the plain name of a {suffix} file")
    path = directory / name
    if path.is_symlink():
        home, target = directory.resolve(), path.resolve()
        is_cache = home.parent.name == "snapshots" and target.parent == home.parents[1] / "blobs"
        if target.parent != home and not is_cache:
            raise FormatError(
                f"{path} is a symbolic link to {target}, outside the checkpoint: refused; copy the "
                "file into the directory"
            )
    return path


def is_plain(name: str, suffix: str) -> bool:
    """Whether a name is that of a visible file with this suffix, and no path."""
    is_path = "/" in name or "\\" in name or name.startswith(".")
    return name.endswith(suffix) and not is_path and name.isprintable() and len(name) <= 255


def _single_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    found = sorted(p.name for p in path.iterdir() if is_plain(p.name, SUFFIX))
    if not found:
        raise NotFoundError(f"{path}: no *{INDEX_SUFFIX} and no *{SUFFIX} file in this directory")
    if len(found) > 1:
        raise FormatError(
            f"{path}: {len(found)} {SUFFIX} files ({', '.join(found[:3])}, …) and no "
            f"*{INDEX_SUFFIX} that says which belong together: name one file"
        )
    return resolve_shard(path, found[0])


def open_shard(path: Path) -> Shard:
    """A safetensors file, open, its header checked.

    Raises NotFoundError, FormatError for a damaged or hostile file, GymfastError for what the
    system says.
    """
    with os_errors("open", path):
        fd = open_regular(path)
        try:
            file_bytes = os.fstat(fd).st_size
            prefix = bytearray(min(8, file_bytes))
            read_into(fd, memoryview(prefix), 0, path)
            text = bytearray(header_bytes_of(bytes(prefix), file_bytes, str(path)))
            read_into(fd, memoryview(text), 8, path)
            return Shard(path, fd, parse_header(bytes(text), file_bytes, str(path)))
        except BaseException:
            os.close(fd)
            raise


def _collect(shards: list[Shard]) -> dict[str, CheckpointTensor]:
    tensors: dict[str, CheckpointTensor] = {}
    for number, shard in enumerate(shards):
        for entry in shard.header.tensors:
            known = tensors.get(entry.name)
            if known is not None:
                raise FormatError(
                    f"{shard.path}: tensor {entry.name!r} is in {shards[known.shard].name} too: "
                    "write the checkpoint again"
                )
            tensors[entry.name] = _placed(entry, number)
    return tensors


def _placed(entry: HeaderEntry, shard: int) -> CheckpointTensor:
    return CheckpointTensor(
        entry.name, entry.dtype, entry.shape, entry.num_bytes, shard, entry.start
    )
