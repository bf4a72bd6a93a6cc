"""Version directories through a store: put by the trainer, made again on the host of an engine.

Below `<run>/` lie `stream`, which names the run of the trainer, and `weight_vNNNNNN/FILE.frame`:
a gymfast frame of each file, which carries its own digests. The index is put last by the rank that
wrote it, and fetched first.
"""

from __future__ import annotations

import fcntl
import json
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from gymfast.delta import State, Tensor, encode, restore
from gymfast.delta.files import os_errors, read_whole
from gymfast.delta.hf_delta.publish import write_new
from gymfast.delta.hf_delta.version import INDEX_NAME, version_name
from gymfast.delta.safetensors_files import SUFFIX, is_plain
from gymfast.errors import FormatError, StoreError
from gymfast.stores import open_store
from gymfast.sync.keys import RunKeys

_STREAM_FILE = ".gymfast-stream"
_LOCK_FILE = ".gymfast-lock"


class StoreMirror:
    """One run in a store."""

    def __init__(self, store: str, run: str) -> None:
        """Raises ValueError for an unusable address or run, as open_store does."""
        self._store = open_store(store)
        self._run = RunKeys(run).run

    def begin(self) -> None:
        """Removes what an earlier run of this name left, and names the new one."""
        for key in list(self._store.list(f"{self._run}/weight_v")):
            self._store.delete(key)
        self._store.put(f"{self._run}/stream", secrets.token_hex(16).encode())

    def put(self, version: Path) -> None:
        """Puts every file of a version directory that is visible here; the index last."""
        if not version.exists():
            return  # a rank without changes on a host of its own
        files = sorted(version.iterdir(), key=lambda file: (file.name == INDEX_NAME, file.name))
        for file in files:
            content = Tensor("U8", (size := file.stat().st_size,), _read(file, size))
            self._store.put(self._key(version.name, file.name), encode(None, {file.name: content}))

    def fetch(self, source: Path, target: int) -> None:
        """Makes the directories of all versions up to target that are not there yet.

        Safe to call from several processes of a host. Those of an earlier run are removed first.
        Raises NotFoundError, StoreError or FormatError if a version cannot be had; directories are
        there completely or not at all.
        """
        source.mkdir(parents=True, exist_ok=True)
        with os_errors("fetch versions to", source), _locked(source / _LOCK_FILE):
            stream = self._store.get(f"{self._run}/stream", max_bytes=1024)
            note = source / _STREAM_FILE
            if not note.exists() or note.read_bytes() != stream:
                for path in source.glob("weight_v*"):
                    shutil.rmtree(path)
                note.write_bytes(stream)
            for number in range(1, target + 1):
                if not (source / version_name(number)).exists():
                    self._fetch_version(source / version_name(number))

    def _fetch_version(self, path: Path) -> None:
        partial = path.with_name(f".{path.name}.partial")
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir()
        index = self._get(path.name, INDEX_NAME)
        files = set(json.loads(index)["weight_map"].values())
        for name in sorted(files):
            if not is_plain(name, SUFFIX):
                raise FormatError(f"{path.name}: {name!r} is no plain name of a file: not fetched")
            write_new(partial / name, [self._get(path.name, name)])
        write_new(partial / INDEX_NAME, [index])
        partial.rename(path)

    def _get(self, version: str, name: str) -> bytes:
        key = self._key(version, name)
        frame = self._store.get(key, max_bytes=self._store.size(key))
        state = State.empty()
        restore(state, frame, allow_new_names=True)
        if list(state.tensors) != [name]:
            raise StoreError(f"{key}: holds {list(state.tensors)}, expected {name!r}: put it again")
        content: bytes = state.tensors[name].data.tobytes()
        return content

    def _key(self, version: str, name: str) -> str:
        return f"{self._run}/{version}/{name}.frame"


def _read(file: Path, size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    content = np.frombuffer(read_whole(file), np.uint8)
    if content.size != size:
        raise StoreError(f"{file}: {content.size} bytes, a moment ago {size}: it is being written")
    return content


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
