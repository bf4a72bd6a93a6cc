"""PEFT's two files of an adapter, and a folder with those of the versions of a run.

See docs/adapters.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path

import numpy as np

from gymfast.delta.files import os_errors, read_whole, sync_directory
from gymfast.delta.hf_delta.publish import write_new
from gymfast.delta.safetensors_files import Checkpoint
from gymfast.delta.safetensors_header import build_header
from gymfast.delta.temporary import make_temporary, remove, sweep
from gymfast.errors import ConflictError
from gymfast.integrations.canonical import CanonicalCopy
from gymfast.integrations.lora_adapter import CONFIG, LoraAdapter, config_text, parse_config
from gymfast.integrations.update_request import InitRequest

TENSORS = "adapter_model.safetensors"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def read_adapter(folder: Path | str) -> LoraAdapter:
    """The adapter of a folder with PEFT's two files.

    Raises NotFoundError, GymfastError for what the system says, FormatError, CoverageError,
    ValueError for a configuration that is not LoRA's.
    """
    path = Path(folder)
    config = parse_config(bytes(read_whole(path / CONFIG)), str(path / CONFIG))
    with Checkpoint.open(path / TENSORS) as checkpoint:
        return LoraAdapter(config, {name: checkpoint.read(name) for name in checkpoint.names})


def write_adapter(adapter: LoraAdapter, folder: Path | str) -> Path:
    """Writes PEFT's two files into a new folder, whole or not at all, and durable.

    A folder that holds the same adapter already stays as it is. Raises ConflictError for one that
    holds something else, GymfastError for what the system says.
    """
    path = Path(folder).absolute()
    with os_errors("write adapter", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        sweep(path)
        if path.exists():
            _require_same(adapter, path)
            return path
        temporary, lock = make_temporary(path, is_directory=True)
        try:
            write_new(temporary / TENSORS, _pieces(adapter))
            write_new(temporary / CONFIG, [config_text(adapter.config)])
            sync_directory(temporary)
            temporary.rename(path)
            sync_directory(path.parent)
        except BaseException:
            remove(temporary)
            raise
        finally:
            os.close(lock)
    return path


class LoraFolder:
    """Versions of a run of adapters as folders NAME@vNUMBER, which engines load by path.

    It has to lie where the engines see it under the same path; several servers may share it. Not
    thread-safe.
    """

    def __init__(self, folder: Path | str, name: str, follow: InitRequest) -> None:
        """Follows the run; nothing is read yet.

        Raises ValueError for a name that is no plain word, or a request without a run, and what
        `Subscriber` raises.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(f"name is {name!r}, expected letters, digits, '.', '_' and '-'")
        if not follow.store:
            raise ValueError("an adapter comes from a run: name its store and run")
        self.path, self.name = Path(folder).absolute(), name
        self._copy: CanonicalCopy = follow.open()
        self._needed: dict[str, frozenset[int]] = {}

    def name_of(self, version: int) -> str:
        """The name that engines know a version by."""
        return f"{self.name}@v{version}"

    def version_of(self, name: str) -> int | None:
        """The version that a name stands for; None for that of another adapter."""
        start, _, number = name.rpartition("@v")
        is_ours = start == self.name and number.isascii() and number.isdecimal()
        return int(number) if is_ours else None

    def path_of(self, version: int) -> Path:
        """Where the files of a version lie, or would lie."""
        return self.path / self.name_of(version)

    def pull(self, version: int) -> Path:
        """The folder of a version, which is fetched unless it is there.

        Raises what `CanonicalCopy.pull`, `LoraAdapter.of_weights` and `write_adapter` raise.
        """
        path = self.path_of(version)
        if path.is_dir():  # it was renamed into place, so it is whole
            return path
        self._copy.pull(version)
        tensors = dict(self._copy.tensors(self._copy.names, np.empty(0)))
        return write_adapter(LoraAdapter.of_weights(tensors), path)

    def versions(self) -> list[int]:
        """The versions that lie there, in ascending order."""
        if not self.path.is_dir():
            return []
        found = (self.version_of(path.name) for path in self.path.iterdir())
        return sorted(version for version in found if version is not None)

    def retain(self, server: str, needed: Collection[int], *, newest: int) -> None:
        """Removes the versions that no server needs, and that are not among the newest.

        A server needs what it said last. Raises GymfastError for what the system says.
        """
        self._needed[server] = frozenset(needed)
        older = self.versions()[:-newest] if newest else self.versions()
        for version in set(older).difference(*self._needed.values()):
            with os_errors("remove adapter", self.path_of(version)):
                remove(self.path_of(version))

    def close(self) -> None:
        """Gives lease and staging back."""
        self._copy.close()


def _pieces(adapter: LoraAdapter) -> Iterable[bytes | memoryview]:
    entries = [(name, t.dtype, t.shape) for name, t in adapter.tensors.items()]
    yield build_header(entries, {"format": "pt"})[0]
    for tensor in adapter.tensors.values():
        yield memoryview(tensor.data)


def _require_same(adapter: LoraAdapter, path: Path) -> None:
    mine, other = adapter.weights(), read_adapter(path).weights()
    is_same = mine.keys() == other.keys() and all(
        (t.dtype, t.shape) == (other[n].dtype, other[n].shape)
        and np.array_equal(t.data, other[n].data)
        for n, t in mine.items()
    )
    if not is_same:
        raise ConflictError(
            f"{path} holds another adapter, which an engine may have loaded under that name: "
            "choose another folder, or another name"
        )
