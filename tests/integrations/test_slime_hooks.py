"""slime's two visibility hooks: trainer and engine hosts share a store and no directory."""

from __future__ import annotations

import json
import logging
import shutil
import sys
import threading
from argparse import Namespace
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from delta_checkpoints import read
from hf_delta_data import (
    CHAINS,
    NUM_VERSIONS,
    apply_independently,
    expected_of,
    golden_chain,
    version_of,
    write_version,
)
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file
from slime_engine import apply_version, pull, read_tensors
from slime_run import weights_at

from gymfast.delta.hf_delta import open_version, publish_delta, publish_full
from gymfast.delta.hf_delta import pull as pull_ours
from gymfast.errors import FormatError, GymfastError, NotFoundError, StoreError
from gymfast.integrations.patience import Patience
from gymfast.integrations.slime import post_write, pre_read
from gymfast.integrations.store_mirror import StoreMirror
from gymfast.stores import Blob, MemoryStore
from gymfast.testing.weights import rl_like_update, rl_like_weights


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Checkpoints `c0` to `c3`, and the environment of both hooks."""
    monkeypatch.setenv("GYMFAST_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("GYMFAST_RUN", "run-1")
    monkeypatch.setenv("GYMFAST_STORE_WAIT_S", "0")
    for step in range(4):
        (tmp_path / f"c{step}").mkdir()
        save_file(weights_at(step), tmp_path / f"c{step}" / "model.safetensors")
    post_write(Namespace(), str(tmp_path / "trainer"), [])
    return tmp_path


def contents_of(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def publish(run: Path, number: int) -> Path:
    old, new = run / f"c{number - 1}", run / f"c{number}"
    path = publish_delta(run / "trainer", number, old, new).path
    post_write(Namespace(), str(path), [])
    return path


def test_an_engine_host_gets_the_directories_that_the_trainer_wrote(run: Path) -> None:
    paths = [publish(run, number) for number in (1, 2)]
    pre_read(str(run / "host"), 2)
    for path in paths:
        assert contents_of(run / "host" / path.name) == contents_of(path)
    pull(str(run / "local"), str(run / "c0"), str(run / "host"), 2)
    assert read_tensors(run / "local") == read_tensors(run / "c2")


def test_all_ranks_of_a_host_may_call_at_once(run: Path) -> None:
    for number in (1, 2, 3):
        publish(run, number)
    threads = [threading.Thread(target=pre_read, args=(str(run / "host"), 3)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    state = read_tensors(run / "c0")
    for number in (1, 2, 3):
        state |= apply_version(run / "host" / f"weight_v{number:06d}", number, state)
    assert state == read_tensors(run / "c3")


def test_R34_directories_of_an_earlier_run_are_not_taken_for_new_ones(run: Path) -> None:
    publish(run, 1)
    pre_read(str(run / "host"), 1)
    before = (run / "host" / "weight_v000001" / "model-00000-of-00001.safetensors").read_bytes()
    post_write(Namespace(), str(run / "other"), [])
    path = publish_delta(run / "other", 1, run / "c0", run / "c3").path
    post_write(Namespace(), str(path), [])
    pre_read(str(run / "host"), 1)
    after = (run / "host" / "weight_v000001" / "model-00000-of-00001.safetensors").read_bytes()
    assert before != after == (path / "model-00000-of-00001.safetensors").read_bytes()


def test_a_version_that_is_not_there_leaves_no_directory(run: Path) -> None:
    publish(run, 1)
    with pytest.raises(NotFoundError, match="weight_v000002"):
        pre_read(str(run / "host"), 2)
    assert not (run / "host" / "weight_v000002").exists()
    publish(run, 2)
    pre_read(str(run / "host"), 2)
    assert (run / "host" / "weight_v000002").is_dir()


@pytest.mark.parametrize("file", ["model-00000-of-00001.safetensors.packed", "contents"])
def test_damage_in_the_store_is_found_before_the_engine_reads(run: Path, file: str) -> None:
    publish(run, 1)
    (path,) = (run / "store").rglob(file)
    blob = bytearray(path.read_bytes())
    blob[len(blob) // 2] ^= 1
    path.write_bytes(blob)
    with pytest.raises(FormatError):
        pre_read(str(run / "host"), 1)
    assert not (run / "host" / "weight_v000001").exists()
    path.unlink()
    post_write(Namespace(), str(run / "trainer" / "weight_v000001"), [])
    pre_read(str(run / "host"), 1)
    assert contents_of(run / "host" / "weight_v000001") == contents_of(
        run / "trainer" / "weight_v000001"
    )


@pytest.mark.parametrize("chain", CHAINS)
def test_versions_that_slime_wrote_keep_their_meaning_and_their_digests(
    run: Path, chain: str
) -> None:
    folder = golden_chain(chain)
    for number in range(1, NUM_VERSIONS + 1):
        post_write(Namespace(), str(version_of(folder, number)), [])
    pre_read(str(run / "host"), NUM_VERSIONS)
    weights = {n: bytearray(t.data) for n, t in read(folder / "base").items()}
    for number in range(1, NUM_VERSIONS + 1):
        fetched = run / "host" / f"weight_v{number:06d}"
        apply_independently(fetched, weights)
        expected = read(expected_of(folder, number))
        assert weights == {n: bytearray(t.data) for n, t in expected.items()}
        with open_version(fetched) as ours, open_version(version_of(folder, number)) as theirs:
            names = {n: t.digest for n, t in theirs.tensors.items()}
            assert {n: t.digest for n, t in ours.tensors.items()} == names
        index = "model.safetensors.index.json"
        assert contents_of(fetched)[index] == contents_of(version_of(folder, number))[index]


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_the_store_holds_fewer_bytes_than_the_directory_and_the_log_says_how_many(
    run: Path, caplog: pytest.LogCaptureFixture, encoding: str
) -> None:
    old = rl_like_weights(1_000_000)
    for name, weights in (("old", old), ("new", rl_like_update(old, 0.01))):
        (run / name).mkdir()
        save_arrays(weights, run / name / "model.safetensors")
    path = publish_delta(run / "trainer", 1, run / "old", run / "new", encoding=encoding).path
    with caplog.at_level(logging.INFO):
        post_write(Namespace(), str(path), [])
        pre_read(str(run / "host"), 1)
    before = sum(len(content) for content in contents_of(path).values())
    after = sum(f.stat().st_size for f in (run / "store").rglob("*.packed"))
    assert after < 0.85 * before
    put, fetched = caplog.messages
    assert f"2 files of {before} bytes put into the store as {after} bytes (0." in put
    assert f"weight_v000001: {before} bytes made of {after} bytes in the store" in fetched
    assert contents_of(run / "host" / path.name) == contents_of(path)


@pytest.mark.parametrize("has_index", [False, True])
def test_a_full_version_comes_with_all_its_files(run: Path, has_index: bool) -> None:
    publish(run, 1)
    checkpoint = run / "c3"
    (checkpoint / "config.json").write_text("{}")
    (checkpoint / "tokenizer.model").write_bytes(bytes(range(256)))
    if has_index:
        names = dict.fromkeys(weights_at(3), "model.safetensors")
        index = {"metadata": {}, "weight_map": names}
        (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    path = publish_full(run / "trainer", 2, checkpoint).path
    post_write(Namespace(), str(path), [])
    pre_read(str(run / "host"), 2)
    assert contents_of(run / "host" / path.name) == contents_of(path)
    pull_ours(run / "local", run / "c0", run / "host", 2)
    assert read_tensors(run / "local") == read_tensors(run / "c3")
    assert (run / "local" / "config.json").read_text() == "{}"


def test_hosts_put_the_files_that_they_see(run: Path) -> None:
    old, new = read(run / "c0"), read(run / "c1")
    path = write_version(run / "all", 1, old, new, num_ranks=3)
    hosts = {
        name: run / f"host-{i}" / path.name for i, name in enumerate(sorted(contents_of(path)))
    }
    for name, host in hosts.items():
        host.mkdir(parents=True)
        shutil.copy(path / name, host / name)
    # The index is the last name here: its host is done before the others have begun.
    for host in reversed(hosts.values()):
        with pytest.raises(NotFoundError):
            pre_read(str(run / "engine"), 1)
        assert not (run / "engine" / path.name).exists()
        post_write(Namespace(), str(host), [])
    post_write(Namespace(), str(run / "host-without-changes" / path.name), [])
    pre_read(str(run / "engine"), 1)
    weights = {n: bytearray(t.data) for n, t in old.items()}
    apply_independently(run / "engine" / path.name, weights)
    assert weights == {n: bytearray(t.data) for n, t in new.items()}


def test_an_engine_host_needs_no_package_beside_gymfast(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = publish(run, 1)
    for package in ("backports", "compression", "zstandard", "xxhash", "blake3", "torch"):
        monkeypatch.setitem(sys.modules, package, None)
    pre_read(str(run / "host"), 1)
    assert contents_of(run / "host" / path.name) == contents_of(path)


class CountingStore(MemoryStore):
    """Notes what is put, and fails when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.puts: list[str] = []
        self.fails_at = -1
        self.num_reads = 0
        self.fails_to_read_at = -1

    def put(self, key: str, data: Blob | Iterable[Blob]) -> None:
        if len(self.puts) == self.fails_at:
            raise StoreError("the bucket is not reachable")
        super().put(key, data)
        self.puts.append(key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.num_reads += 1
        if self.num_reads == self.fails_to_read_at:
            raise StoreError("the line is down")
        return super().get_range(key, start, length)


def test_ranks_of_one_host_do_not_put_a_file_twice(run: Path) -> None:
    store = CountingStore()
    path = write_version(run / "v", 1, read(run / "c0"), read(run / "c1"), num_ranks=3)
    for _ in range(3):
        StoreMirror(store, "run-1").put(path)
    files = [key for key in store.puts if key.endswith(".packed")]
    assert len(files) == len(set(files)) == len(contents_of(path))


def test_a_put_that_failed_anywhere_is_completed_by_the_next_one(run: Path) -> None:
    old, new = read(run / "c0"), read(run / "c1")
    path = write_version(run / "v", 1, old, new, num_ranks=2)
    num_puts = len(contents_of(path)) + 1
    for fails_at in range(1, num_puts + 1):
        store = CountingStore()
        mirror = StoreMirror(store, "run-1")
        mirror.begin()
        store.fails_at = fails_at
        with pytest.raises(StoreError, match="the bucket is not reachable"):
            mirror.put(path)
        host = run / f"host-{fails_at}"
        with pytest.raises(NotFoundError):
            mirror.fetch(host, 1)
        assert not (host / path.name).exists()
        store.fails_at = -1
        mirror.put(path)
        mirror.fetch(host, 1)
        assert contents_of(host / path.name).keys() == contents_of(path).keys()


def test_a_fetch_that_failed_anywhere_is_completed_by_the_next_one(run: Path) -> None:
    store = CountingStore()
    mirror = StoreMirror(store, "run-1", threads=1)
    mirror.begin()
    path = write_version(run / "v", 1, read(run / "c0"), read(run / "c1"), num_ranks=2)
    mirror.put(path)
    store.num_reads = 0
    mirror.fetch(run / "host", 1)
    for fails_at in range(1, store.num_reads + 1):
        host = run / f"host-{fails_at}"
        store.num_reads, store.fails_to_read_at = 0, fails_at
        with pytest.raises(StoreError, match="the line is down"):
            mirror.fetch(host, 1)
        assert not (host / path.name).exists()
        mirror.fetch(host, 1)
        assert contents_of(host / path.name) == contents_of(run / "host" / path.name)


def test_a_version_written_again_under_its_number_takes_the_place_of_the_first(run: Path) -> None:
    store = MemoryStore()
    mirror = StoreMirror(store, "run-1")
    mirror.begin()
    first = publish_delta(run / "first", 1, run / "c0", run / "c2").path
    second = publish_delta(run / "second", 1, run / "c0", run / "c1").path
    mirror.put(first)
    mirror.put(second)
    mirror.fetch(run / "host", 1)
    assert contents_of(run / "host" / second.name) == contents_of(second)


def test_what_a_killed_fetch_left_is_removed(run: Path) -> None:
    path = publish(run, 1)
    partial = run / "host" / ".weight_v000001.partial"
    partial.mkdir(parents=True)
    (partial / "model-00000-of-00001.safetensors").write_bytes(b"half")
    (partial / ".model-00000-of-00001.safetensors.frames").write_bytes(b"half")
    pre_read(str(run / "host"), 1)
    assert contents_of(run / "host" / path.name) == contents_of(path)
    assert not partial.exists()


def test_the_layout_of_an_older_gymfast_is_refused(run: Path) -> None:
    publish(run, 1)
    (run / "store" / "run-1" / "stream").write_bytes(b"0123456789abcdef" * 2)
    with pytest.raises(StoreError, match=r"run run-1: its layout .* install the same one"):
        pre_read(str(run / "host"), 1)


def test_a_file_in_the_place_of_another_is_refused(run: Path) -> None:
    path = publish(run, 1)
    folder = run / "store" / "run-1" / path.name
    index = folder / "model.safetensors.index.json.packed"
    shutil.copy(index, folder / "model-00000-of-00001.safetensors.packed")
    with pytest.raises(StoreError, match=r"holds '.*index.json', expected 'model-0.*'"):
        pre_read(str(run / "host"), 1)


@pytest.mark.parametrize("text", ["{}", "[]", "{", "[" * 2**15, '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_none_is_refused_by_name(run: Path, text: str) -> None:
    path = run / "trainer" / "weight_v000001"
    path.mkdir(parents=True)
    (path / "model.safetensors.index.json").write_text(text)
    post_write(Namespace(), str(path), [])
    with pytest.raises(FormatError, match=r"weight_v000001: .*index.json is no index of a version"):
        pre_read(str(run / "host"), 1)
    assert not (run / "host" / path.name).exists()


class HandClock:
    """Time that only a sleep moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def wall_us(self) -> int:
        return int(self.now_s * 1e6)

    def monotonic_s(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class LateStore(MemoryStore):
    """Shows objects late, in another order than they were put in, and lists nothing for long."""

    def __init__(self, clock: HandClock, delays: dict[str, float]) -> None:
        super().__init__()
        self._clock, self._delays = clock, delays
        self._visible_s: dict[str, float] = {}

    def put(self, key: str, data: Blob | Iterable[Blob]) -> None:
        super().put(key, data)
        delay = next((s for end, s in self._delays.items() if key.endswith(end)), 0.0)
        self._visible_s.setdefault(key, self._clock.now_s + delay)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        self._require(key)
        return super().get(key, max_bytes=max_bytes)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self._require(key)
        return super().get_range(key, start, length)

    def size(self, key: str) -> int:
        self._require(key)
        return super().size(key)

    def list(self, prefix: str) -> Iterator[str]:
        return (k for k in super().list(prefix) if self._visible_s[k] + 60 < self._clock.now_s)

    def _require(self, key: str) -> None:
        if self._visible_s.get(key, 0.0) > self._clock.now_s:
            raise NotFoundError(f"'{key}' is not visible yet")


@pytest.mark.parametrize("is_patient", [False, True])
@pytest.mark.parametrize("late", [".safetensors.packed", ".json.packed", "contents", "stream"])
def test_R44_R45_late_and_reordered_visibility_only_delays(
    run: Path, late: str, is_patient: bool
) -> None:
    clock = HandClock()
    store = LateStore(clock, {late: 5.0})
    mirror = StoreMirror(store, "run-1", patience=Patience(10 if is_patient else 0, clock))
    mirror.begin()
    paths = [publish_delta(run / "v", n, run / f"c{n - 1}", run / f"c{n}").path for n in (1, 2)]
    for path in paths:
        mirror.put(path)
    if not is_patient:
        with pytest.raises(NotFoundError):
            mirror.fetch(run / "host", 2)
        assert not list((run / "host").glob("weight_v*"))
        clock.sleep(6)
    mirror.fetch(run / "host", 2)
    for path in paths:
        assert contents_of(run / "host" / path.name) == contents_of(path)


def test_R45_versions_that_a_late_list_did_not_show_are_not_taken_for_new_ones(run: Path) -> None:
    clock = HandClock()
    mirror = StoreMirror(LateStore(clock, {}), "run-1")
    for target in ("c2", "c1"):
        mirror.begin()
        path = publish_delta(run / target / "v", 1, run / "c0", run / target).path
        mirror.put(path)
        mirror.fetch(run / "host", 1)
        assert contents_of(run / "host" / path.name) == contents_of(path)


@pytest.mark.parametrize("name", ["GYMFAST_STORE_WAIT_S", "GYMFAST_STORE_CARRY"])
def test_a_variable_of_no_use_is_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "soon")
    with pytest.raises(GymfastError, match=f"{name} is 'soon', expected "):
        pre_read(str(run / "host"), 1)


def test_files_are_carried_as_they_are_where_that_was_asked(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GYMFAST_STORE_CARRY", "files")
    path = write_version(run / "v", 1, read(run / "c0"), read(run / "c1"))
    post_write(Namespace(), str(path), [])
    pre_read(str(run / "host"), 1)
    assert contents_of(run / "host" / path.name) == contents_of(path)


@pytest.mark.parametrize("name", ["GYMFAST_STORE", "GYMFAST_RUN"])
def test_a_missing_variable_is_named(run: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv(name)
    with pytest.raises(GymfastError, match=f"{name} is not set"):
        pre_read(str(run / "host"), 1)
    with pytest.raises(GymfastError, match=f"{name} is not set"):
        post_write(Namespace(), str(run / "trainer"), [])
