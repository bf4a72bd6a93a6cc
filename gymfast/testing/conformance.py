"""Contracts as importable tests: what a new store must pass.

Use it in two lines and a fixture:

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self, tmp_path): return MyStore(tmp_path)
"""

# ruff: noqa: N802, S311 - test names start with the id of their invariant; random data for tests

from __future__ import annotations

import multiprocessing
import random
import signal
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import pytest

from gymfast.errors import ConflictError, NotFoundError, StoreError
from gymfast.stores import check_create_only, open_store
from gymfast.stores.base import Blob, Store
from gymfast.testing import store_workers

HOSTILE_KEYS = [
    "", "/", "a/", "/a", "a//b", ".", "..", "../a", "a/..", "a/../../b", "a/./b", ".a", "a/.b",
    "a\0b", "\0", "a\nb", "a\n", "a b", "a\\b", "..\\a", "C:a", "~", "~/a", "a:b", "a%2fb", "a?b",
    "a*", "$HOME", "\x7f", "\x1b[2J", "\u00e9", "\u0661", "\uff0e\uff0e", "\u2215a", "\udcff",
    "\U0001f600", "a" * 201, "/".join(["ab"] * 400), "file:///etc/passwd",
]  # fmt: skip

NOT_TEXT = [b"a", bytearray(b"a"), None, 1, ("a",), b"\xff\x00"]

MIB = 1 << 20


class StoreContract:
    """Every store passes these; a subclass says what its store can do and how hard to try."""

    is_shared = False  # other processes reach the store by open_store(store.url)
    is_streaming = False  # put holds no more than a chunk or two in memory
    num_thread_rounds = 100
    num_process_rounds = 50
    num_kills = 10
    num_big_chunks = 32  # of 1 MiB

    @pytest.fixture
    def store(self) -> Store:
        """An empty store."""
        raise NotImplementedError("a store contract needs a fixture `store`")

    def test_it_fulfils_the_protocol(self, store: Store) -> None:
        assert isinstance(store, Store)
        assert store.url.isprintable()
        free_bytes = store.free_bytes()
        assert free_bytes is None or free_bytes >= 0
        assert list(store.list("")) == []

    @pytest.mark.parametrize("size", [0, 1, 2, 4095, 4096, 4097, MIB + 1])
    def test_bytes_come_back_exactly(self, store: Store, size: int) -> None:
        blob = random.Random(size).randbytes(size)
        store.put("a/b", blob)
        store.create("a/c", blob)
        for key in ("a/b", "a/c"):
            assert store.size(key) == size
            assert store.get(key, max_bytes=size) == blob
            assert type(store.get(key, max_bytes=size)) is bytes

    def test_every_kind_of_buffer_and_iterable_can_be_put(self, store: Store) -> None:
        blob = bytes(range(256))
        half = len(blob) // 2
        every_kind: list[Blob | Iterable[Blob]] = [
            blob,
            bytearray(blob),
            memoryview(blob),
            [blob[:half], b"", bytearray(blob[half:])],
            iter([memoryview(blob)[:half], memoryview(blob)[half:]]),
            (bytes([value]) for value in blob),
        ]
        for data in every_kind:
            store.put("k", data)
            assert store.get("k", max_bytes=1000) == blob
        store.put("k", [])
        assert store.get("k", max_bytes=0) == b""

    @pytest.mark.parametrize("data", ["text", ["text"], 5, [5], None])
    def test_text_and_numbers_are_refused_as_data(self, store: Store, data: object) -> None:
        with pytest.raises(TypeError):
            store.put("k", data)  # type: ignore[arg-type]
        assert list(store.list("")) == []

    def test_put_replaces_and_create_does_not(self, store: Store) -> None:
        store.put("k", b"a longer first")
        store.put("k", b"second")
        with pytest.raises(ConflictError, match="'k'"):
            store.create("k", b"third")
        assert store.get("k", max_bytes=100) == b"second"
        store.create("c", b"first")
        with pytest.raises(ConflictError):
            store.create("c", b"first")
        store.put("c", b"second")
        assert store.get("c", max_bytes=100) == b"second"

    def test_a_producer_may_reuse_its_buffer(self, store: Store) -> None:
        def produce() -> Iterator[memoryview]:
            buffer = bytearray(3)
            for value in range(5):
                buffer[:] = bytes([value]) * 3
                yield memoryview(buffer)

        store.put("k", produce())
        assert store.get("k", max_bytes=100) == bytes(v for v in range(5) for _ in range(3))

    @pytest.mark.parametrize("error", [ZeroDivisionError, OSError, StoreError, KeyboardInterrupt])
    def test_an_error_of_the_producer_passes_through_and_leaves_the_old_object(
        self, store: Store, error: type[BaseException]
    ) -> None:
        def produce() -> Iterator[bytes]:
            yield b"half of the new"
            raise error("mine")

        store.put("k", b"old")
        with pytest.raises(error, match=r"^mine$"):
            store.put("k", produce())
        with pytest.raises(error, match=r"^mine$"):
            store.put("other", produce())
        assert store.get("k", max_bytes=100) == b"old"
        assert list(store.list("")) == ["k"]

    def test_a_big_object_streams(self, store: Store) -> None:
        def produce() -> Iterator[bytes]:
            for index in range(self.num_big_chunks):
                yield bytes([index]) * MIB

        tracemalloc.start()
        try:
            store.put("big", produce())
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak_bytes < 4 * MIB or not self.is_streaming
        assert store.size("big") == self.num_big_chunks * MIB
        for index in range(self.num_big_chunks):
            start = max(0, index * MIB - 1)
            piece = store.get_range("big", start, 2)
            assert piece == bytes([index - 1, index] if index else [0, 0])

    def test_ranges_are_exact_or_refused(self, store: Store) -> None:
        store.put("k", b"0123456789")
        for start in range(11):
            for length in range(11 - start):
                piece = b"0123456789"[start : start + length]
                assert store.get_range("k", start, length) == piece
        for start, length in ((0, 11), (10, 1), (11, 0), (5, 6), (1 << 62, 1), (0, 1 << 62)):
            with pytest.raises(StoreError, match="10 bytes"):
                store.get_range("k", start, length)
        for start, length in ((-1, 1), (0, -1), (-1, -1)):
            with pytest.raises(ValueError, match="0 or more"):
                store.get_range("k", start, length)

    def test_an_object_over_max_bytes_is_refused_with_both_numbers(self, store: Store) -> None:
        store.put("k", b"12345")
        assert store.get("k", max_bytes=5) == b"12345"
        with pytest.raises(StoreError, match="5 bytes, over the limit of 4"):
            store.get("k", max_bytes=4)

    def test_an_absent_object_is_not_found(self, store: Store) -> None:
        store.put("a/b", b"1")
        for key in ("a", "a/c", "b", "a/b/c", "x/y/z"):
            for read in _reads(store, key):
                with pytest.raises(NotFoundError, match=f"'{key}'"):
                    read()

    def test_delete_is_idempotent_and_frees_the_name(self, store: Store) -> None:
        for key in ("never", "never/there"):
            store.delete(key)
        store.create("a/b", b"1")
        store.create("a/c", b"2")
        store.delete("a")
        store.delete("a/b")
        store.delete("a/b")
        assert list(store.list("")) == ["a/c"]
        with pytest.raises(NotFoundError):
            store.get("a/b", max_bytes=9)
        store.create("a/b", b"3")
        assert store.get("a/b", max_bytes=9) == b"3"

    def test_list_is_sorted_and_keeps_to_the_prefix(self, store: Store) -> None:
        keys = ["a-b", "a.b", "a/b", "a/b-c", "a/c/d/e", "a0", "aa/b", "A/b", "b", "z/1", "z/10"]
        for key in random.Random(1).sample(keys, len(keys)):
            store.put(key, b"")
        assert list(store.list("")) == sorted(keys)
        prefixes = [key[:end] for key in keys for end in range(len(key) + 1)] + ["q", "a/q", "q/"]
        for prefix in prefixes:
            expected = sorted(key for key in keys if key.startswith(prefix))
            assert list(store.list(prefix)) == expected, prefix

    @pytest.mark.parametrize("key", HOSTILE_KEYS, ids=ascii)
    def test_I83_hostile_keys_are_refused_by_every_method(self, store: Store, key: str) -> None:
        self._refuses(store, key, ValueError)

    @pytest.mark.parametrize("key", NOT_TEXT, ids=repr)
    def test_I83_keys_that_are_no_text_are_refused(self, store: Store, key: object) -> None:
        self._refuses(store, key, TypeError)

    def _refuses(self, store: Store, key: object, error: type[Exception]) -> None:
        assert not isinstance(key, str) or error is ValueError
        calls: list[Callable[[], object]] = [
            lambda: store.put(key, b""),  # type: ignore[arg-type]
            lambda: store.create(key, b""),  # type: ignore[arg-type]
            lambda: store.delete(key),  # type: ignore[arg-type]
            *_reads(store, key),  # type: ignore[arg-type]
        ]
        for call in calls:
            with pytest.raises(error) as caught:
                call()
            assert str(caught.value).isprintable()
            assert len(str(caught.value)) < 400
        assert list(store.list("")) == []

    @pytest.mark.parametrize(
        "prefix", ["/", "//", "..", "../", "a//", "a/../", ".a", "a b", "a\0", "\u00e9", b"a", None]
    )
    def test_I83_hostile_prefixes_are_refused(self, store: Store, prefix: str) -> None:
        with pytest.raises((ValueError, TypeError)):
            list(store.list(prefix))

    def test_I24_create_only_is_honoured_or_disclaimed(self, store: Store) -> None:
        if store.has_create_only:
            check_create_only(store)
        else:
            with pytest.raises(StoreError, match="no create-only"):
                check_create_only(store)
        assert list(store.list("")) == []

    def test_I22_one_of_8_racing_threads_creates_the_object(self, store: Store) -> None:
        if not store.has_create_only:
            return
        barrier = threading.Barrier(8)

        def run(writer: int) -> list[int]:
            return store_workers.race(store, writer, self.num_thread_rounds, barrier.wait)

        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(run, range(8)))
        _check_winners(store, won, self.num_thread_rounds)

    def test_I22_one_of_8_racing_processes_creates_the_object(self, store: Store) -> None:
        if not (self.is_shared and store.has_create_only):
            return
        spawn = multiprocessing.get_context("spawn")
        barrier = spawn.Barrier(8, timeout=120)
        queues = [spawn.SimpleQueue() for _ in range(8)]
        processes = [
            spawn.Process(
                target=store_workers.race_process,
                args=(store.url, writer, self.num_process_rounds, barrier, queues[writer]),
                daemon=True,
            )
            for writer in range(8)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(180)
        assert [process.exitcode for process in processes] == [0] * 8
        _check_winners(store, [queue.get() for queue in queues], self.num_process_rounds)

    def test_I20_readers_beside_writers_see_whole_objects(self, store: Store) -> None:
        store.put("k", store_workers.stamped(0, 100_000))

        def write(writer: int) -> None:
            for index in range(25):
                blob = store_workers.stamped(writer * 1000 + index, 100_000 + writer * 5000)
                store.put("k", iter([blob[:50_000], blob[50_000:]]))

        with ThreadPoolExecutor(2) as pool:
            writers = [pool.submit(write, writer) for writer in range(2)]
            while not all(writer.done() for writer in writers):
                store_workers.check_stamp(store.get("k", max_bytes=MIB))
        for writer in writers:
            writer.result()

    def test_I20_a_reader_never_sees_a_torn_object_while_the_writer_is_killed(
        self, store: Store
    ) -> None:
        if not self.is_shared:
            return
        size_bytes = 256 * 1024
        command = [sys.executable, "-m", store_workers.__name__, store.url, "k", str(size_bytes)]
        chance = random.Random(20)
        for _ in range(self.num_kills):
            with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
                assert writer.stdout is not None
                assert writer.stdout.readline() == b"ready\n"
                for _ in range(chance.randrange(40)):
                    store_workers.check_stamp(store.get("k", max_bytes=MIB))
                writer.kill()
            assert writer.returncode == -signal.SIGKILL
            store_workers.check_stamp(store.get("k", max_bytes=MIB))
            assert list(store.list("")) == ["k"]

    def test_another_handle_sees_the_same_objects(self, store: Store) -> None:
        if not self.is_shared:
            return
        store.put("a/b", b"1")
        other = open_store(store.url)
        assert other.url == store.url
        assert other.get("a/b", max_bytes=1) == b"1"
        with pytest.raises(ConflictError):
            other.create("a/b", b"2")
        other.delete("a/b")
        assert list(store.list("")) == []


def _reads(store: Store, key: str) -> list[Callable[[], object]]:
    return [
        lambda: store.get(key, max_bytes=1),
        lambda: store.get_range(key, 0, 0),
        lambda: store.size(key),
    ]


def _check_winners(store: Store, won: list[list[int]], num_rounds: int) -> None:
    """Exactly one winner a round, and the object is what the winner wrote."""
    assert sorted(chain.from_iterable(won)) == list(range(num_rounds))
    for writer, rounds in enumerate(won):
        for index in rounds:
            assert store.get(store_workers.race_key(index), max_bytes=64) == b"writer %d" % writer
