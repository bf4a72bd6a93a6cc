"""Version directories through a store: put by the trainer, made again on the host of an engine.

Below `<run>/` lie `stream`, which names the layout and the run of the trainer, and for each version
`weight_vNNNNNN/FILE.packed`, a packed file (docs/hf-delta.md, 5) for each file, and
`weight_vNNNNNN/contents`, the names of those that the rank with the index sees: it puts that last,
and it is fetched first. What is fetched is named there or in the index; nothing is looked for by
`list`, nothing is renamed.
"""

from __future__ import annotations

import json
import logging
import random
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from gymfast.delta.files import os_errors, wait_for_lock
from gymfast.delta.hf_delta.packed_file import check_of, pack_file
from gymfast.delta.hf_delta.packed_table import Table, carried, carry, read_table
from gymfast.delta.hf_delta.unpacked_file import unpack_file
from gymfast.delta.hf_delta.version import INDEX_NAME, version_name
from gymfast.delta.safetensors_files import SUFFIX, is_plain
from gymfast.errors import FormatError, NotFoundError, StoreError
from gymfast.integrations.patience import Patience
from gymfast.stores import Store, open_store
from gymfast.sync.keys import RunKeys

_STREAM_FILE = ".gymfast-stream"
_LOCK_FILE = ".gymfast-lock"
_LAYOUT = b"gymfast-versions-2 "
_CONTENTS = "contents"
_log = logging.getLogger(__name__)


class _Index(msgspec.Struct):
    weight_map: dict[str, str]
    metadata: dict[str, Any] | None = None


class StoreMirror:
    """One run in a store."""

    def __init__(
        self,
        store: str | Store,
        run: str,
        *,
        threads: int | None = None,
        patience: Patience | None = None,
        as_changes: bool = True,
    ) -> None:
        """Threads (None: all cores) pack and unpack; a fetch has patience with every object.

        Without as_changes files are put as they are: for lines that are faster than packing.
        Raises ValueError for an unusable address or run, as open_store does.
        """
        self._store = open_store(store) if isinstance(store, str) else store
        self._run = RunKeys(run).run
        self._as_changes = as_changes
        self._threads, self._patience = threads, patience or Patience()

    def begin(self) -> None:
        """Removes what an earlier run of this name left, and names the new one."""
        for key in list(self._store.list(f"{self._run}/weight_v")):
            self._store.delete(key)
        self._store.put(f"{self._run}/stream", _LAYOUT + secrets.token_hex(16).encode())

    def put(self, version: Path) -> None:
        """Puts every file of a version directory that is visible here, then their names.

        What another rank has put already is not put again: each begins with another file. Safe to
        repeat. Raises StoreError if the store fails, FormatError for a damaged file.
        """
        if not version.exists():
            return  # a rank without changes on a host of its own
        with os_errors("put", version):
            files = [f for f in version.iterdir() if f.is_file() and not f.name.startswith(".")]
        random.shuffle(files)
        before = after = num_there = 0
        for file in files:
            key = self._key(version.name, file.name)
            if self._has(key, file):
                num_there += 1
                continue
            counted: list[int] = []
            self._store.put(key, self._pack(file, counted))
            before, after = before + file.stat().st_size, after + sum(counted)
        names = sorted(file.name for file in files)
        if _is_whole(names):
            frame = carry(json.dumps(names).encode(), _CONTENTS)
            self._store.put(f"{self._run}/{version.name}/{_CONTENTS}", frame)
        _log.info(
            "%s: %d files of %d bytes put into the store as %d bytes (%.2fx), %d were there",
            *(version.name, len(files) - num_there, before, after),
            *(after / before if before else 0, num_there),
        )

    def fetch(self, source: Path, target: int) -> None:
        """Makes the directories of all versions up to target that are not there yet.

        Safe to call from several processes of a host. Those of an earlier run are removed first.
        Raises NotFoundError, StoreError or FormatError if a version cannot be had; directories are
        there completely or not at all.
        """
        source.mkdir(parents=True, exist_ok=True)
        with os_errors("fetch versions to", source), _locked(source / _LOCK_FILE):
            stream = self._patience.wait(self._get_stream)
            note = source / _STREAM_FILE
            if not note.exists() or note.read_bytes() != stream:
                for path in source.glob("weight_v*"):
                    shutil.rmtree(path)
                note.write_bytes(stream)
            for number in range(1, target + 1):
                if not (source / version_name(number)).exists():
                    self._fetch_version(source / version_name(number))

    def _fetch_version(self, path: Path) -> None:
        partial_path = path.with_name(f".{path.name}.partial")
        if partial_path.exists():
            shutil.rmtree(partial_path)
        partial_path.mkdir()
        num_bytes = 0
        wanted = set(self._patience.wait(partial(self._contents, path.name)))
        if INDEX_NAME in wanted:
            num_bytes = self._fetch_file(path.name, partial_path / INDEX_NAME)
            index = _read_index(partial_path / INDEX_NAME, path.name)
            files = set(index.weight_map.values())
            is_delta = "delta_encoding" in (index.metadata or {})
            wanted = files if is_delta else (wanted | files) - {INDEX_NAME}
        for name in sorted(wanted):
            if not is_plain(name, ""):
                raise FormatError(f"{path.name}: {name!r} is no plain name of a file: not fetched")
            num_bytes += self._fetch_file(path.name, partial_path / name)
        made = sum(file.stat().st_size for file in partial_path.iterdir())
        partial_path.rename(path)
        _log.info("%s: %d bytes made of %d bytes in the store", path.name, made, num_bytes)

    def _fetch_file(self, version: str, out: Path) -> int:
        """Writes a file of a version; its bytes in the store."""
        key = self._key(version, out.name)
        size, table = self._patience.wait(partial(self._table, key))
        if table.name != out.name:
            raise StoreError(
                f"{key}: holds {table.name!r}, expected {out.name!r}: remove it and put it again"
            )
        read = partial(self._store.get_range, key)
        unpack_file(read, table, out, key, threads=self._threads)
        return size

    def _contents(self, version: str) -> list[str]:
        key = f"{self._run}/{version}/{_CONTENTS}"
        frame = self._store.get(key, max_bytes=self._store.size(key))
        names: list[str] = json.loads(carried(frame, _CONTENTS))
        return names

    def _pack(self, file: Path, sizes: list[int]) -> Iterator[bytes]:
        """A packed file; notes the sizes of its parts, as the store may not show it yet."""
        for piece in pack_file(file, threads=self._threads, as_changes=self._as_changes):
            sizes.append(len(piece))
            yield piece

    def _has(self, key: str, file: Path) -> bool:
        """Whether exactly this file is there."""
        try:
            _, table = self._table(key)
        except (NotFoundError, FormatError):
            return False
        with os_errors("read", file):
            return table.check == check_of(file)

    def _table(self, key: str) -> tuple[int, Table]:
        size = self._store.size(key)
        return size, read_table(partial(self._store.get_range, key), size, key)

    def _get_stream(self) -> bytes:
        stream = self._store.get(f"{self._run}/stream", max_bytes=1024)
        if not stream.startswith(_LAYOUT):
            raise StoreError(
                f"run {self._run}: its layout is not {_LAYOUT.decode().strip()}: another version "
                "of gymfast put it; install the same one for trainer and engines"
            )
        return stream

    def _key(self, version: str, name: str) -> str:
        return f"{self._run}/{version}/{name}.packed"


def _read_index(path: Path, version: str) -> _Index:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Index)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise FormatError(
            f"{version}: {INDEX_NAME} is no index of a version ({error}): publish it again"
        ) from error


def _is_whole(names: list[str]) -> bool:
    """Whether these are what a version is known by: an index, or the only file that has tensors."""
    weights = [name for name in names if name.endswith(SUFFIX)]
    return INDEX_NAME in names or (len(weights) == 1 and "-of-" not in weights[0])


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        wait_for_lock(file.fileno(), path)
        yield
