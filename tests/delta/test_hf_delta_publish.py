"""Version directories that gymfast writes, read by gymfast and by the tests' own reader."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from delta_checkpoints import read, write, write_sharded
from delta_weights import changed, random_tensor
from hf_delta_data import CHAINS, NUM_VERSIONS, apply_independently, expected_of, golden_chain
from safetensors.numpy import load_file

from gymfast.delta import Tensor
from gymfast.delta.hf_delta.publish import (
    StagedDirectory,
    VersionWriter,
    publish_delta,
    publish_full,
)
from gymfast.delta.hf_delta.pull import pull
from gymfast.delta.hf_delta.version import open_version
from gymfast.errors import ConflictError, FormatError
from gymfast.testing.compare import assert_bits_equal

DTYPES = ("BF16", "F32", "F8_E4M3", "I64", "BOOL", "F4")
ALGORITHMS = ("xxh3-128", "blake3", "adler32")


def weights_of(seed: int) -> dict[str, Tensor]:
    rng = np.random.default_rng(seed)
    weights = {d.lower(): random_tensor(d, (6, 50), rng) for d in DTYPES}
    shapes = {"large": (300, 1000), "one": (1,), "empty": (0, 3), "scalar": ()}
    return weights | {name: random_tensor("BF16", shape, rng) for name, shape in shapes.items()}


def step(weights: dict[str, Tensor], rng: np.random.Generator) -> dict[str, Tensor]:
    densities = (0.0, 0.001, 0.02, 0.5, 1.0)
    return {n: changed(t, float(rng.choice(densities)), rng) for n, t in weights.items()}


def assert_readers_agree(folder: Path, base: dict[str, Tensor], states: list) -> None:
    """The two readers get every state of a chain of deltas from the one before."""
    memory = {name: bytearray(tensor.data.tobytes()) for name, tensor in base.items()}
    for number, state in enumerate(states, 1):
        path = folder / "versions" / f"weight_v{number:06d}"
        apply_independently(path, memory)
        assert {n: bytes(d) for n, d in memory.items()} == {
            n: t.data.tobytes() for n, t in state.items()
        }
        pull(folder / "local", folder / "base", folder / "versions", number)
        assert_bits_equal(read(folder / "local"), state)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_two_readers_accept_every_version_of_a_chain(tmp_path, encoding, algorithm) -> None:
    rng = np.random.default_rng(7)
    base = weights_of(0)
    write_sharded(tmp_path / "base", base)
    states = [step(base, rng)]
    states += [step(states[0], rng), base]
    old = tmp_path / "base"
    for number, state in enumerate(states, 1):
        new = write_sharded(tmp_path / f"state-{number}", state)
        report = publish_delta(
            tmp_path / "versions", number, old, new, encoding=encoding, algorithm=algorithm
        )
        assert report.path.name == f"weight_v{number:06d}"
        assert 0 < report.num_changed <= report.num_tensors == len(base)
        old = new
    assert_readers_agree(tmp_path, base, states)


@pytest.mark.parametrize("name", CHAINS)
def test_the_golden_chains_written_again_mean_the_same(name: str, tmp_path: Path) -> None:
    chain = golden_chain(name)
    encoding, _, algorithm = name.partition("-")
    shutil.copytree(chain / "base", tmp_path / "base")
    old = chain / "base"
    for number in range(1, NUM_VERSIONS + 1):
        new = expected_of(chain, number)
        published = publish_delta(
            tmp_path / "versions", number, old, new, encoding=encoding, algorithm=algorithm
        )
        theirs = chain / "versions" / published.path.name
        assert digests_of(published.path) == digests_of(theirs)
        assert index_of(published.path)["metadata"] == index_of(theirs)["metadata"]
        assert {p.name for p in published.path.iterdir()} == {p.name for p in theirs.iterdir()}
        old = new
    states = [read(expected_of(chain, number)) for number in range(1, NUM_VERSIONS + 1)]
    assert_readers_agree(tmp_path, read(chain / "base"), states)


def digests_of(path: Path) -> dict[str, str]:
    version = open_version(path)
    assert version is not None
    with version:
        return {name: tensor.digest for name, tensor in version.tensors.items()}


def index_of(path: Path) -> dict:
    return json.loads((path / "model.safetensors.index.json").read_text())


def test_a_version_of_several_files_is_read_by_the_safetensors_library_too(tmp_path) -> None:
    base, rng = weights_of(1), np.random.default_rng(2)
    write_sharded(tmp_path / "base", base)
    new = {name: changed(tensor, 1.0, rng) for name, tensor in base.items()}
    out = tmp_path / "versions" / "weight_v000001"
    with StagedDirectory(out) as staged:
        writer = VersionWriter(staged, 1, "xor", "xxh3-128", max_file_bytes=1000)
        names = [name for name in base if writer.add(name, base[name].data, new[name].data)]
        writer.commit()
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 2
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    loaded = [name for file in files for name in load_file(out / file)]
    assert sorted(loaded) == sorted(names)
    assert_readers_agree(tmp_path, base, [new])


def test_no_change_is_an_index_and_nothing_else(tmp_path: Path) -> None:
    write_sharded(tmp_path / "base", weights_of(1))
    report = publish_delta(tmp_path / "versions", 1, tmp_path / "base", tmp_path / "base")
    assert (report.num_changed, report.stored_bytes) == (0, 0)
    assert [path.name for path in report.path.iterdir()] == ["model.safetensors.index.json"]
    assert index_of(report.path)["weight_map"] == {}


def test_a_full_version_resets_the_chain(tmp_path: Path) -> None:
    first, second = weights_of(1), weights_of(2)
    write_sharded(tmp_path / "base", first)
    new = write_sharded(tmp_path / "new", second, num_shards=3)
    pull(tmp_path / "local", tmp_path / "base", tmp_path / "versions", 0)
    report = publish_full(tmp_path / "versions", 1, new)
    assert report.is_full
    assert open_version(report.path) is None
    pull(tmp_path / "local", tmp_path / "base", tmp_path / "versions", 1)
    assert_bits_equal(read(tmp_path / "local"), second)
    assert {p.name for p in (tmp_path / "local").iterdir()} - {".weight_sync"} == {
        path.name for path in new.iterdir()
    }


def test_a_published_version_is_not_changed(tmp_path: Path) -> None:
    write_sharded(tmp_path / "base", weights_of(1))
    publish_full(tmp_path / "versions", 1, tmp_path / "base")
    for publish in (publish_full, lambda s, n, new: publish_delta(s, n, new, new)):
        with pytest.raises(ConflictError, match="weight_v000001 is published already"):
            publish(tmp_path / "versions", 1, tmp_path / "base")
    assert [path.name for path in (tmp_path / "versions").iterdir()] == ["weight_v000001"]


@pytest.mark.parametrize("change", ["shape", "dtype", "more", "less"])
def test_what_a_delta_cannot_say_is_refused(tmp_path: Path, change: str) -> None:
    rng = np.random.default_rng(0)
    old = {"kept": random_tensor("BF16", (4, 6), rng), "moved": random_tensor("F32", (8,), rng)}
    new = dict(old)
    if change == "less":
        del new["moved"]
    elif change == "more":
        new["moved2"] = old["moved"]
    else:
        new["moved"] = random_tensor("F32" if change == "shape" else "I32", (2, 4), rng)
    paths = [write(tmp_path / f"{i}.safetensors", w) for i, w in enumerate((old, new))]
    with pytest.raises(FormatError, match=r"'moved2?' is .* publish a full version"):
        publish_delta(tmp_path / "versions", 1, *paths)
    assert not (tmp_path / "versions").exists()


def test_unusable_options_are_the_callers_mistake(tmp_path: Path) -> None:
    for number, options in (
        (0, {}),
        (1, {"encoding": "raw"}),
        (1, {"algorithm": "crc32"}),
    ):
        with pytest.raises(ValueError, match="expected"):
            publish_delta(tmp_path, number, tmp_path, tmp_path, **options)


def test_an_overwrite_beyond_its_positions_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("gymfast.delta.hf_delta.stored._MAX_POSITIONS", 100)
    weights = {"w": Tensor("U8", (101,), np.zeros(101, np.uint8))}
    new = {"w": Tensor("U8", (101,), np.ones(101, np.uint8))}
    paths = [write(tmp_path / f"{i}.safetensors", w) for i, w in enumerate((weights, new))]
    with pytest.raises(FormatError, match=r"101 bytes.*publish with the encoding xor"):
        publish_delta(tmp_path / "versions", 1, *paths, encoding="overwrite")
    assert not list((tmp_path / "versions").iterdir())
    assert publish_delta(tmp_path / "versions", 1, *paths).num_changed == 1
