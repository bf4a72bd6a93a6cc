"""Version directories through a store, as slime's hooks carry them: docs/integrations/slime.md."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import ClassVar

import numpy as np
import xxhash
import zstandard

from benchmarks.codec import Buffers, Codec
from benchmarks.data import Pair
from benchmarks.hf_delta import (
    Level1Overwrite,
    Level1Xor,
    Published,
    SparseOverwrite,
    SparseXor,
)
from gymfast.delta.hf_delta.stored import Stored, file_name, file_pieces, index_text
from gymfast.delta.safetensors_files import open_shard
from gymfast.integrations.store_mirror import StoreMirror
from gymfast.stores import MemoryStore

_RUN = "run"


class Carried(Codec):
    """A directory that is there: encode puts it into a store in memory, apply fetches it."""

    digest: ClassVar[str] = "of each tensor of a frame"
    published: ClassVar[type[Published]]

    def __init__(self, pair: Pair, buffers: Buffers, threads: int = 1) -> None:
        super().__init__(pair, buffers, threads)
        self._folder = Path(tempfile.mkdtemp(prefix="gymfast-hf-store-"))
        self._names = self._write_version(self.published(pair, buffers))
        self.reset_encode()
        self.encode()

    def __del__(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def reset_encode(self) -> None:
        self._store = MemoryStore()
        self._mirror = StoreMirror(self._store, _RUN, threads=self.threads)
        self._mirror.begin()

    def encode(self) -> None:
        self._mirror.put(self._folder / "weight_v000001")

    def reset_apply(self) -> None:
        shutil.rmtree(self._folder / "host", ignore_errors=True)

    def apply(self) -> None:
        self._mirror.fetch(self._folder / "host", 1)

    def check(self) -> tuple[float, float]:
        seconds = []
        for reset, run in ((self.reset_encode, self.encode), (self.reset_apply, self.apply)):
            reset()
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        super().reset_encode()
        self._apply_fetched()
        self._check_bits("fetch")
        return seconds[0], seconds[1]

    @property
    def frame_bytes(self) -> int:
        return sum(self._store.size(key) for key in self._store.list(f"{_RUN}/weight_v"))

    def _write_version(self, published: Published) -> list[str]:
        """Publishes without a rank; the names of the tensors that changed."""
        published.reset_encode()
        published.encode()
        stored = {
            name: Stored(frame, xxhash.xxh3_128_hexdigest(new.view(np.uint8)), 0)
            for (name, new), frame in zip(self.new.items(), published.frame, strict=True)
            if frame
        }
        path, file = self._folder / "weight_v000001", file_name(0, 1)
        path.mkdir()
        (path / file).write_bytes(b"".join(file_pieces(stored)))
        encoding = "overwrite" if published.is_overwrite else "xor"
        index = index_text(1, encoding, "xxh3-128", dict.fromkeys(stored, file))
        (path / "model.safetensors.index.json").write_bytes(index)
        return list(stored)

    def _apply_fetched(self) -> None:
        """What the fetched file makes of the old state, decoded by another zstd."""
        shard = open_shard(self._folder / "host" / "weight_v000001" / file_name(0, 1))
        blob = shard.path.read_bytes()
        assert [entry.name for entry in shard.header.tensors] == self._names
        for entry in shard.header.tensors:
            frame = blob[entry.start : entry.start + entry.num_bytes]
            content = np.frombuffer(zstandard.decompress(frame), np.uint8)
            data = self.work[entry.name].view(np.uint8)
            if self.published.is_overwrite:
                values = 4 + 4 * int(content[:4].view("<u4")[0])
                data[content[4:values].view("<u4")] = content[values:]
            else:
                data ^= content


class StoredLevel1Xor(Carried):
    """The directory of slime's updater."""

    name: ClassVar[str] = "store: xor, zstd level 1"
    published = Level1Xor


class StoredSparseXor(Carried):
    """The directory of ours."""

    name: ClassVar[str] = "store: gymfast xor"
    published = SparseXor


class StoredLevel1Overwrite(Carried):
    """The directory of slime's updater."""

    name: ClassVar[str] = "store: overwrite, zstd level 1"
    published = Level1Overwrite


class StoredSparseOverwrite(Carried):
    """The directory of ours."""

    name: ClassVar[str] = "store: gymfast overwrite"
    published = SparseOverwrite


HF_STORE: tuple[type[Carried], ...] = (
    StoredLevel1Xor,
    StoredSparseXor,
    StoredLevel1Overwrite,
    StoredSparseOverwrite,
)
