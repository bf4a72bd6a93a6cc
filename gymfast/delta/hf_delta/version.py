"""A version directory, parsed and checked: what slime's updater publishes per weight sync.

`weight_vNNNNNN/` with `model.safetensors.index.json` and safetensors files. A delta version names
its encoding in the metadata of the index; anything else is a full version, an ordinary checkpoint.
The format is described in docs/hf-delta.md.
"""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gymfast.delta.files import os_errors, read_whole
from gymfast.delta.hf_delta.digests import HEX_DIGITS, check_stated
from gymfast.delta.safetensors_files import (
    MAX_INDEX_BYTES,
    SUFFIX,
    OpenShards,
    Shard,
    is_plain,
    open_shard,
    resolve_shard,
)
from gymfast.delta.safetensors_header import HeaderEntry, load_json
from gymfast.errors import ChainError, FormatError, NotFoundError

INDEX_NAME = "model.safetensors.index.json"
ENCODINGS = ("xor", "overwrite")
COMPRESSION = "zstd"
_NUMBER = re.compile(r"[0-9]{1,18}")


def version_name(number: int) -> str:
    """The name of the directory of a version."""
    return f"weight_v{number:06d}"


@dataclass(frozen=True)
class StoredTensor:
    """A compressed tensor of a version: its shard, its bytes there, the digest of the result."""

    name: str
    shard: int
    start: int
    num_bytes: int
    digest: str


class DeltaVersion(OpenShards):
    """A delta version, its files open; every tensor once, in the order of files and bytes."""

    def __init__(
        self, path: Path, metadata: _Metadata, shards: list[Shard], tensors: list[StoredTensor]
    ) -> None:
        """Use open_version."""
        self.path = path
        self.number = metadata.version
        self.base = metadata.base_version
        self.encoding = metadata.encoding
        self.algorithm = metadata.algorithm
        self.shards = tuple(shards)
        self.tensors = {tensor.name: tensor for tensor in tensors}

    @property
    def stored_bytes(self) -> int:
        """Compressed bytes of all tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    def file_of(self, tensor: StoredTensor) -> Path:
        """The file that a tensor is in."""
        return self.shards[tensor.shard].path


def open_version(path: Path | str) -> DeltaVersion | None:
    """A delta version with everything checked but the zstd frames; None if it is a full version.

    Raises NotFoundError if there is no such directory, ChainError if its number is not the one of
    its name or its base not the version before, FormatError for a damaged or incomplete version
    and for two different new states of one tensor.
    """
    path = Path(path)
    with os_errors("open version", path), ExitStack() as stack:
        found = _read_metadata(path)
        if found is None:
            return None
        metadata, weight_map = found
        shards: list[Shard] = []
        for name in sorted(p.name for p in path.iterdir() if is_plain(p.name, SUFFIX)):
            shards.append(open_shard(resolve_shard(path, name)))
            stack.callback(os.close, shards[-1].fd)
        tensors = _collect(path, shards, metadata.algorithm)
        _check_map(path, weight_map, shards, tensors)
        stack.pop_all()
        return DeltaVersion(path, metadata, shards, list(tensors.values()))


def is_delta_file(shard: Shard) -> bool:
    """Whether a safetensors file looks like one of a delta version: a digest for each tensor."""
    names = {tensor.name for tensor in shard.header.tensors}
    return bool(names) and names == shard.header.metadata.keys()


@dataclass(frozen=True)
class _Metadata:
    version: int
    base_version: int
    encoding: str
    algorithm: str


def _read_metadata(directory: Path) -> tuple[_Metadata, dict[str, Any]] | None:
    if not directory.parent.is_dir():
        raise NotFoundError(
            f"{directory.parent}: there is no such folder, expected that of the published versions"
        )
    if not directory.is_dir():
        raise NotFoundError(
            f"{directory}: there is no such version: it was not published (yet), or removed"
        )
    path = resolve_shard(directory, INDEX_NAME, suffix=".json")
    if not path.exists():
        return None
    num_bytes = path.stat().st_size
    if num_bytes > MAX_INDEX_BYTES:
        raise FormatError(f"{path}: {num_bytes} bytes, limit {MAX_INDEX_BYTES}")
    index = load_json(bytes(read_whole(path)), str(path))
    if not isinstance(index, dict):
        raise FormatError(f"{path}: no table: no index of a version; copy it again")
    metadata = index.get("metadata", {})
    if not isinstance(metadata, dict):
        raise FormatError(f"{path}: 'metadata' is no table: no index of a version; copy it again")
    if "delta_encoding" not in metadata:
        return None
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise FormatError(f"{path}: no table 'weight_map' of tensor names; copy it again")
    return _parse_metadata(directory, metadata, f"{path}: metadata"), weight_map


def _parse_metadata(directory: Path, metadata: dict[str, Any], where: str) -> _Metadata:
    version, base = (_number(metadata, key, where) for key in ("version", "base_version"))
    if directory.name != version_name(version) and directory.name.startswith("weight_v"):
        raise ChainError(
            f"{where}: version {version}, but the directory is {directory.name}: it was renamed or "
            "copied to a wrong place; publish this version again"
        )
    if base != version - 1:
        raise ChainError(
            f"{where}: version {version} builds on {base}, expected {version - 1}: publish this "
            "version again"
        )
    _choice(metadata, "compression_format", (COMPRESSION,), where)
    return _Metadata(
        version,
        base,
        _choice(metadata, "delta_encoding", ENCODINGS, where),
        _choice(metadata, "checksum_format", tuple(HEX_DIGITS), where),
    )


def _number(metadata: dict[str, Any], key: str, where: str) -> int:
    value = metadata.get(key)
    text = str(value) if type(value) is int else value
    if not isinstance(text, str) or not _NUMBER.fullmatch(text):
        raise FormatError(
            f"{where}: {key} is {value!r}, expected digits such as '000012': publish this version "
            "again"
        )
    return int(text)


def _choice(metadata: dict[str, Any], key: str, choices: tuple[str, ...], where: str) -> str:
    value = metadata.get(key)
    if value not in choices:
        raise FormatError(
            f"{where}: {key} is {value!r}, expected {' or '.join(choices)}: written by a newer "
            "publisher, or damaged; update gymfast or publish this version again"
        )
    return str(value)


def _collect(path: Path, shards: list[Shard], algorithm: str) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for number, shard in enumerate(shards):
        for entry in shard.header.tensors:
            tensor = _stored(entry, number, shard, algorithm)
            first = tensors.setdefault(tensor.name, tensor)
            if first.digest != tensor.digest:
                raise FormatError(
                    f"{path}: tensor {tensor.name!r} is in {shards[first.shard].name} with digest "
                    f"{first.digest} and in {shard.name} with {tensor.digest}: two ranks published "
                    "different states of it; make them agree and publish this version again"
                )
    return tensors


def _stored(entry: HeaderEntry, number: int, shard: Shard, algorithm: str) -> StoredTensor:
    where = f"{shard.path}: tensor {entry.name!r}"
    if entry.dtype != "U8" or len(entry.shape) != 1 or entry.num_bytes == 0:
        raise FormatError(
            f"{where}: {entry.dtype} of shape {list(entry.shape)}, expected one row of U8 with a "
            "zstd frame: no file of a delta version; publish this version again"
        )
    digest = check_stated(shard.header.metadata.get(entry.name), algorithm, where)
    return StoredTensor(entry.name, number, entry.start, entry.num_bytes, digest)


def _check_map(
    path: Path, weight_map: dict[str, Any], shards: list[Shard], tensors: dict[str, StoredTensor]
) -> None:
    """Index and files name the same tensors: a file that is not there yet is found by this."""
    where = path / INDEX_NAME
    names_of = {shard.name: {tensor.name for tensor in shard.header.tensors} for shard in shards}
    for name, file in weight_map.items():
        if not isinstance(file, str) or file not in names_of:
            raise FormatError(
                f"{where}: tensor {name!r} is in {file!r}, which is not there: the version is "
                "incomplete; wait for it, or copy it again"
            )
        if name not in names_of[file]:
            raise FormatError(
                f"{where}: tensor {name!r} is not in {file}: files of two versions are mixed; copy "
                "or publish this version again"
            )
    unnamed = sorted(tensors.keys() - weight_map.keys())
    if unnamed:
        file = shards[tensors[unnamed[0]].shard].name
        raise FormatError(
            f"{where}: tensor {unnamed[0]!r} of {file} is not named: files of two versions are "
            "mixed; copy or publish this version again"
        )
