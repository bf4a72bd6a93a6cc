"""The file store at every crash point: killed, EIO and ENOSPC at each system call (strace)."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gymfast.errors import ConflictError, NotFoundError, StoreError
from gymfast.stores import FileStore, posix
from gymfast.testing.syscalls import Fault, Outcome, Syscall, SyscallFaults

WORK = Path(__file__).parent / "crash_work.py"
KEY, OLD, NEW = "run/log/k", b"old" * 100, b"new!" * 1000

needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")

FAULTS: dict[str, Callable[[Syscall], Fault]] = {
    "killed": Syscall.killed,
    "EIO once": lambda call: call.failed("EIO"),
    "ENOSPC once": lambda call: call.failed("ENOSPC"),
    "EIO from here": lambda call: call.failed_from_here("EIO"),
    "ENOSPC from here": lambda call: call.failed_from_here("ENOSPC"),
}
MORE_FAULTS = {
    f"{error} {how}": (lambda call, error=error, how=how: getattr(call, how)(error))
    for error in ("EACCES", "EROFS", "EDQUOT", "ESTALE", "ENOMEM", "EMFILE", "ETIMEDOUT", "EPERM")
    for how in ("failed", "failed_from_here")
}
# function, is there an old object, what may be there afterwards
SCENARIOS: list[tuple[str, bytes | None, set[bytes | None]]] = [
    ("put", None, {None, NEW}),
    ("put", OLD, {OLD, NEW}),
    ("create", None, {None, NEW}),
    ("delete", OLD, {OLD, None}),
]


def _content(store: FileStore) -> bytes | None:
    try:
        return store.get(KEY, max_bytes=1 << 20)
    except NotFoundError:
        return None


def _violations(function: str, outcome: Outcome, store: FileStore, allowed: set) -> Iterator[str]:
    """What is wrong after a run; leaves a store that works again."""
    found = _content(store)
    done = None if function == "delete" else NEW
    if found not in allowed:
        yield f"torn: {found!r}"
    if not outcome.was_killed and outcome.error is None and found != done:
        yield "success without effect"
    if outcome.error is not None:
        kind, text = outcome.error
        if kind != "StoreError" or not re.match(f"{function} '{KEY}' in file:/.* \\[E", text):
            yield f"unclear error {kind}: {text}"
    if list(store.list("")) != ([] if found is None else [KEY]):
        yield f"list shows {list(store.list(''))}"
    store.put("run/log/next", b"1")
    if found is None:
        store.create(KEY, NEW)
    elif function == "create":
        with pytest.raises(ConflictError):
            store.create(KEY, NEW)
    store.put(KEY, OLD)
    store.sweep_temporaries(0)
    names = {path.name for path in Path(store.root).rglob("*") if path.is_file()}
    if names != {"k", "next"} or _content(store) != OLD:
        yield f"not usable afterwards: {names}"


def _enumerate(
    function: str, old: bytes | None, allowed: set, make: Callable[[Syscall], Fault], folder: Path
) -> tuple[int, list[str]]:
    def fresh(name: str) -> FileStore:
        store = FileStore(folder / name / "root")
        if old is not None:
            store.put(KEY, old)
        return store

    wrong: list[str] = []
    with SyscallFaults(WORK, function) as faults:
        points = faults.trace(str(fresh("traced").root))
        for index, call in enumerate(points):
            store = fresh(str(index))
            fault = make(call)
            outcome = faults.run(str(store.root), fault=fault)
            wrong += [f"{fault.name}: {v}" for v in _violations(function, outcome, store, allowed)]
    return len(points), wrong


@needs_strace
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("function", "old", "allowed"), SCENARIOS)
def test_I20_I21_I25_R40_R43_no_crash_point_tears_an_object(
    function: str, old: bytes | None, allowed: set, fault: str, tmp_path: Path
) -> None:
    num_points, wrong = _enumerate(function, old, allowed, FAULTS[fault], tmp_path)
    assert wrong == []
    assert num_points >= (5 if function == "delete" else 20)


@needs_strace
def test_I20_a_store_that_writes_in_place_is_caught_by_the_enumeration(tmp_path: Path) -> None:
    _, wrong = _enumerate("put_in_place", OLD, {OLD, NEW}, Syscall.killed, tmp_path)
    assert sum("torn" in violation for violation in wrong) == 3


@pytest.mark.long
@needs_strace
@pytest.mark.parametrize("fault", MORE_FAULTS)
@pytest.mark.parametrize(("function", "old", "allowed"), SCENARIOS)
def test_I21_no_other_error_tears_an_object(
    function: str, old: bytes | None, allowed: set, fault: str, tmp_path: Path
) -> None:
    _, wrong = _enumerate(function, old, allowed, MORE_FAULTS[fault], tmp_path)
    assert wrong == []


def _calls_of(function: str, root: Path) -> list[str]:
    """The calls that matter for durability, as "name target"; a temporary is called TEMPORARY."""
    wanted = {"fsync", "write", "renameat", "renameat2", "linkat", "unlinkat", "mkdirat", "mkdir"}
    with SyscallFaults(WORK, function) as faults:
        calls = [call for call in faults.trace(str(root)) if call.name in wanted]
    shown = []
    for call in calls:
        names = re.findall(r"<([^>]*)>|\"([^\"]*)\"", call.arguments)
        place = names[0][0] or names[0][1]
        target = "" if call.name in ("fsync", "write") else f" {names[-1][1]}"
        line = f"{call.name} {os.path.relpath(place, root.parent)}{target}"
        shown.append(
            re.sub(r"\.tmp-[-0-9a-f]+", "TEMPORARY", line).replace("renameat2", "renameat")
        )
    return shown


@needs_strace
def test_I28_put_syncs_folders_file_and_name_in_this_order(tmp_path: Path) -> None:
    assert _calls_of("put", tmp_path / "root") == [
        "mkdirat . root",
        "fsync .",
        "mkdirat root run",
        "fsync root",
        "mkdirat root/run log",
        "fsync root/run",
        *["write root/run/log/TEMPORARY"] * 3,
        "fsync root/run/log/TEMPORARY",
        "renameat root/run/log k",
        "fsync root/run/log",
    ]


@needs_strace
def test_I28_create_syncs_folders_file_and_name_in_this_order(tmp_path: Path) -> None:
    FileStore(tmp_path / "root").put("run/log/other", b"")
    expected = [
        "fsync root",
        "fsync root/run",
        "write root/run/log/TEMPORARY",
        "fsync root/run/log/TEMPORARY",
        "linkat root/run/log k",
        "unlinkat root/run/log TEMPORARY",
        "fsync root/run/log",
    ]
    assert _calls_of("create", tmp_path / "root") == expected


@needs_strace
def test_I28_delete_is_synced(tmp_path: Path) -> None:
    FileStore(tmp_path / "root").put(KEY, b"")
    assert _calls_of("delete", tmp_path / "root") == [
        "unlinkat root/run/log k",
        "fsync root/run/log",
    ]


def test_I28_the_loser_of_a_create_syncs_the_folder_before_it_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path)
    store.create("k", b"winner")
    synced: list[str] = []
    fsync = os.fsync
    monkeypatch.setattr(
        os,
        "fsync",
        lambda fd: (synced.append(str(Path(f"/proc/self/fd/{fd}").readlink())), fsync(fd)),
    )
    with pytest.raises(ConflictError):
        store.create("k", b"loser")
    assert synced[-1] == str(tmp_path)


def _with_lost_reply(real: Callable[..., None], error: int) -> Callable[..., None]:
    def call(*arguments: object, **named: object) -> None:
        real(*arguments, **named)
        raise OSError(error, os.strerror(error))

    return call


@pytest.mark.parametrize("error", [errno.EEXIST, errno.EIO, errno.ETIMEDOUT, errno.ESTALE])
def test_I22_a_lost_reply_to_the_link_is_a_success_not_a_conflict(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", _with_lost_reply(os.link, error))
        store.create("k", b"mine")
    assert store.get("k", max_bytes=9) == b"mine"
    assert [path.name for path in tmp_path.iterdir()] == ["k"]
    with pytest.raises(ConflictError):
        store.create("k", b"mine")


def test_I22_a_failed_sync_after_the_link_is_an_error_and_the_object_can_be_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path)
    store.put("other", b"")
    fsync = os.fsync

    def fail_on_folders(fd: int) -> None:
        if Path(f"/proc/self/fd/{fd}").is_dir():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail_on_folders)
        with pytest.raises(StoreError, match=r"create 'k' .*\[EIO\]") as caught:
            store.create("k", b"nonce")
        assert not isinstance(caught.value, ConflictError)
    assert store.get("k", max_bytes=9) == b"nonce"


def test_R45_a_file_that_is_shorter_than_what_was_written_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path)
    monkeypatch.setattr(os, "write", lambda fd, data: len(data))
    with pytest.raises(StoreError, match="wrote 5 bytes, the file holds 0"):
        store.put("k", b"12345")
    assert list(tmp_path.iterdir()) == []


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path)
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[: max(1, len(data) // 2)]))
    store.put("k", b"0123456789")
    assert store.get("k", max_bytes=10) == b"0123456789"


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path)
    store.put("k", b"0123456789")
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, at: pread(fd, min(size, 3), at))
    assert store.get("k", max_bytes=10) == b"0123456789"
    assert store.get_range("k", 1, 8) == b"12345678"


@pytest.mark.parametrize("size", [0, 1, 8, 4096, 4097, 50_000, 99_999])
def test_R48_R49_an_object_truncated_while_it_is_read_is_a_clear_error(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path)
    store.put("k", bytes(100_000))
    read_exactly = posix.read_exactly

    def truncate_first(fd: int, start: int, length: int) -> bytes:
        os.truncate(tmp_path / "k", size)
        return read_exactly(fd, start, length)

    monkeypatch.setattr(posix, "read_exactly", truncate_first)
    with pytest.raises(StoreError, match=rf"'k' .*expected 100000 .*after {size} .*truncated"):
        store.get("k", max_bytes=100_000)


@pytest.mark.parametrize("size", [0, 1, 8, 50_000, 99_999])
def test_R49_a_range_past_the_end_of_a_truncated_object_names_both_sizes(
    size: int, tmp_path: Path
) -> None:
    store = FileStore(tmp_path)
    store.put("k", bytes(100_000))
    os.truncate(tmp_path / "k", size)
    with pytest.raises(StoreError, match=rf"expected 8 bytes at 99992.* {size} bytes"):
        store.get_range("k", 99_992, 8)


def test_an_object_that_grows_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path)
    store.put("k", b"12345")
    read_exactly = posix.read_exactly

    def grow_after(fd: int, start: int, length: int) -> bytes:
        blob = read_exactly(fd, start, length)
        os.truncate(tmp_path / "k", 6)
        return blob

    monkeypatch.setattr(posix, "read_exactly", grow_after)
    with pytest.raises(StoreError, match="5 bytes became 6"):
        store.get("k", max_bytes=100)


def test_R47_an_object_replaced_with_the_same_size_and_time_is_read_anew(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    for blob in (b"11", b"22"):
        store.put("k", blob)
        os.utime(tmp_path / "k", (0, 0))
        assert store.get("k", max_bytes=2) == blob


def test_temporaries_of_dead_writers_are_invisible_and_swept_by_age(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put("a/b/k", b"1")
    young, old = (tmp_path / "a" / "b" / f".tmp-1-{name}" for name in ("young", "old"))
    for path in (young, old):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    assert list(store.list("")) == ["a/b/k"]
    store.put("a/b/k", b"2")
    assert old.exists(), "a handle sweeps a folder once, at its first write"
    FileStore(tmp_path).put("a/b/k", b"3")
    assert young.exists()
    assert not old.exists()
    assert store.sweep_temporaries() == 0
    assert store.sweep_temporaries(0) == 1
    assert list(store.list("")) == ["a/b/k"]


def test_a_writer_whose_temporary_was_swept_fails_and_leaves_the_old_object(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put("k", b"old")

    def produce() -> Iterator[bytes]:
        yield b"new"
        store.sweep_temporaries(0)

    with pytest.raises(StoreError, match=r"put 'k' .*\[ENOENT\]"):
        store.put("k", produce())
    assert store.get("k", max_bytes=9) == b"old"
