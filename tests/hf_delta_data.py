"""Version directories for tests: slime's own, and a writer and a reader from the format text.

The two functions at the end share no code with gymfast: they are written from the description of
the format, with the packages `zstandard`, `xxhash` and `blake3` that slime uses.
"""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path

import blake3
import numpy as np
import pytest
import xxhash
import zstandard

from gymfast.delta import Tensor
from gymfast.delta.safetensors_header import build_header

GOLDEN = Path(__file__).parents[2] / "shared" / "data" / "hf-delta-golden"
CHAINS = ("xor-xxh3-128", "xor-adler32", "overwrite-blake3")
NUM_VERSIONS = 5


def golden_chain(name: str) -> Path:
    """The folder of a chain: `base`, `versions`, `expected`; skips where there is none."""
    folder = GOLDEN / name
    if not folder.is_dir():
        pytest.skip("needs ../shared/data/hf-delta-golden")
    return folder


def version_of(chain: Path, number: int) -> Path:
    return chain / "versions" / f"weight_v{number:06d}"


def expected_of(chain: Path, number: int) -> Path:
    return chain / "expected" / f"v{number:06d}.safetensors"


def digest(algorithm: str, data: bytes) -> str:
    if algorithm == "adler32":
        return f"{zlib.adler32(data):08x}"
    return (xxhash.xxh3_128 if algorithm == "xxh3-128" else blake3.blake3)(data).hexdigest()


def difference(encoding: str, old: np.ndarray, new: np.ndarray) -> bytes:
    if encoding == "xor":
        return (old ^ new).tobytes()
    at = np.flatnonzero(old != new)
    return struct.pack("<I", at.size) + at.astype("<u4").tobytes() + new[at].tobytes()


def write_version(
    source: Path,
    number: int,
    old: dict[str, Tensor],
    new: dict[str, Tensor],
    encoding: str = "xor",
    algorithm: str = "xxh3-128",
    num_ranks: int = 1,
) -> Path:
    """A delta version as several ranks publish it: the tensors are dealt out among them."""
    path = source / f"weight_v{number:06d}"
    path.mkdir(parents=True)
    changed = [n for n in new if not np.array_equal(old[n].data, new[n].data)]
    weight_map = {}
    for rank in range(num_ranks):
        names = changed[rank::num_ranks]
        file = f"model-{rank:05d}-of-{num_ranks:05d}.safetensors"
        if names:
            stored = {n: difference(encoding, old[n].data, new[n].data) for n in names}
            frames = {n: zstandard.compress(data, 1) for n, data in stored.items()}
            digests = {n: digest(algorithm, new[n].data.tobytes()) for n in names}
            write_file(path / file, frames, digests)
            weight_map |= dict.fromkeys(names, file)
    write_index(path, number, weight_map, encoding, algorithm)
    return path


def write_file(path: Path, frames: dict[str, bytes], digests: dict[str, str]) -> None:
    start, _ = build_header(((n, "U8", (len(f),)) for n, f in frames.items()), digests)
    path.write_bytes(start + b"".join(frames.values()))


def write_index(path: Path, number: int, weight_map: dict, encoding: str, algorithm: str) -> None:
    metadata = {
        "version": f"{number:06d}",
        "base_version": f"{number - 1:06d}",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": algorithm,
    }
    index = {"metadata": metadata, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def apply_independently(path: Path, weights: dict[str, bytearray]) -> None:
    """Applies a version to tensors in memory, as the description of the format says."""
    index = json.loads((path / "model.safetensors.index.json").read_text())
    metadata = index["metadata"]
    assert metadata["compression_format"] == "zstd"
    assert metadata["version"] == path.name.removeprefix("weight_v")
    assert int(metadata["base_version"]) == int(metadata["version"]) - 1
    seen = {}
    for file in sorted(path.glob("*.safetensors")):
        blob = file.read_bytes()
        (length,) = struct.unpack("<Q", blob[:8])
        header = json.loads(blob[8 : 8 + length])
        digests = header.pop("__metadata__")
        for name, entry in header.items():
            assert entry["dtype"] == "U8"
            begin, end = (8 + length + at for at in entry["data_offsets"])
            data = zstandard.ZstdDecompressor().decompress(blob[begin:end])
            new = np.frombuffer(weights[name], np.uint8)
            if metadata["delta_encoding"] == "xor":
                new ^= np.frombuffer(data, np.uint8)
            else:
                (count,) = struct.unpack("<I", data[:4])
                at = np.frombuffer(data[4 : 4 + 4 * count], "<u4")
                assert len(data) == 4 + 5 * count
                new[at] = np.frombuffer(data[4 + 4 * count :], np.uint8)
            assert digest(metadata["checksum_format"], bytes(weights[name])) == digests[name], name
            assert name not in seen
            seen[name] = file.name
    assert seen == index["weight_map"]
