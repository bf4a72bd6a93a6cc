"""Stores in file systems of fsspec pass the contract where they can, and say where they cannot."""

from __future__ import annotations

import ftplib
import io
import logging
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from sync.harness import RUN, assert_same, history, reader, zeros_like

from gymfast.cli import main
from gymfast.errors import ConflictError, MissingDependencyError, NotFoundError, StoreError
from gymfast.stores import Store, check_create_only, open_store
from gymfast.stores.fsspec_store import FsspecStore
from gymfast.sync import Publisher
from gymfast.testing.conformance import StoreContract

fsspec = pytest.importorskip("fsspec", reason="needs fsspec")
MemoryFileSystem = fsspec.get_filesystem_class("memory")
SECRET = "hunter2-not-for-eyes"


def fresh_url() -> str:
    return f"fsspec+memory://{secrets.token_hex(8)}/runs"


class TestMemory(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return open_store(fresh_url())


class TestLocal(StoreContract):
    is_shared = True
    is_streaming = True
    num_kills = 3

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_store(f"fsspec+local://{tmp_path}/not/yet")


def register(monkeypatch: pytest.MonkeyPatch, protocol: str, found: type) -> None:
    """The class becomes that of the protocol, until the end of the test."""
    from fsspec.registry import _registry

    monkeypatch.setitem(_registry, protocol, found)


class Files(MemoryFileSystem):
    """Files that are written in pieces and renamed, as on a server; `trouble` is called before."""

    protocol = "files"
    store: dict[str, Any] = {}
    pseudo_dirs: list[str] = [""]
    trouble: Callable[[str, str], None] = staticmethod(lambda call, path: None)
    num_connections = 0

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        type(self).num_connections += 1

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("files://"))

    def info(self, path: str, **kwargs: object) -> dict[str, Any]:
        self.trouble("info", path)
        return super().info(path, **kwargs)

    def ls(self, path: str, detail: bool = True, **kwargs: object) -> list[Any]:
        self.trouble("ls", path)
        if path not in self.dircache:
            found = super().ls(path, detail=True, **kwargs)
            self.dircache[path] = found
            return found
        return self.dircache[path]

    def invalidate_cache(self, path: str | None = None) -> None:
        """Nothing, like many: only the setting keeps listings from being remembered."""

    def _open(self, path: str, mode: str = "rb", **kwargs: object) -> Any:
        if mode == "rb":
            return io.BytesIO(self.cat_file(path))
        self.trouble("open", path)
        return super()._open(path, mode, **kwargs)

    def mv(self, path1: str, path2: str, **kwargs: object) -> None:
        self.trouble("mv", path2)
        self.store[path2] = self.store.pop(path1)


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> type[Files]:
    """The class behind fsspec+files://, empty."""
    found = type("Files", (Files,), {"store": {}, "pseudo_dirs": [""]})
    register(monkeypatch, "files", found)
    return found


@pytest.fixture
def store(files: type[Files]) -> FsspecStore:
    return FsspecStore("fsspec+files://server/runs", timeout_s=20.0)


class TestFiles(StoreContract):
    @pytest.fixture
    def store(self, files: type[Files]) -> Store:
        return open_store("fsspec+files://server:22/runs")


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("fsspec+sftp://me:hunter2-not-for-eyes@host/a", "no user or secret"),
        ("fsspec+memory://a/b?key=hunter2-not-for-eyes", "no query"),
        ("fsspec+memory://a#hunter2-not-for-eyes", "no query"),
        ("fsspec+memory:a/b", "expected fsspec"),
        ("fsspec+://a/b", "expected fsspec"),
        ("fsspec+memory://a/../b", "each part of the path"),
        ("fsspec+memory://a//b", "each part of the path"),
        ("fsspec+memory://a/b::memory://c", "each part of the path"),
        ("fsspec+memory://a b/c", "is followed by a server"),
        ("fsspec+nonsense://a/b", "knows no protocol 'nonsense'"),
        ("fsspec+filecache://a/b", "a cache would hide new versions"),
        ("fsspec+blockcache://a/b", "a cache would hide new versions"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_unasked(url: str, text: str) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        open_store(url)
    assert SECRET not in str(caught.value)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.registry import known_implementations

    known = {"class": "no_such_package.FS", "err": "Install no-such-package"}
    monkeypatch.setitem(known_implementations, "nowhere", known)
    with pytest.raises(MissingDependencyError, match="Install no-such-package"):
        open_store("fsspec+nowhere://a/b")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'gymfast\[fsspec\]'"):
        open_store("fsspec+memory://a/b")


def test_nothing_is_asked_before_the_first_call(files: type[Files]) -> None:
    store = open_store("fsspec+files://server/runs")
    assert (files.num_connections, repr(store)) == (0, f"FsspecStore({store.url!r})")


def test_R45_a_remembered_listing_hides_no_new_object(store: FsspecStore) -> None:
    follower = open_store(store.url)
    assert list(follower.list("")) == []
    for number in range(3):
        store.put(f"log/{number}", b"x" * number)
        assert list(follower.list("log/")) == [f"log/{n}" for n in range(number + 1)]
        assert follower.size(f"log/{number}") == number


@pytest.mark.parametrize("call", ["open", "mv", "info"])
def test_a_put_that_fails_leaves_the_old_object_and_no_temporary(
    store: FsspecStore, files: type[Files], call: str
) -> None:
    store.put("a/k", b"old")

    def fail(called: str, path: str) -> None:
        if called == call:
            raise OSError(28, "no room on hunter2-not-for-eyes")

    files.trouble = staticmethod(fail)
    with pytest.raises(StoreError, match=r"put 'a/k' in fsspec\+files.*ENOSPC.*free space"):
        store.put("a/k", b"the new one")
    del files.trouble
    assert store.get("a/k", max_bytes=9) == b"old"
    assert list(files.store) == ["/server/runs/a/k"]


def test_an_upload_that_lost_bytes_is_no_object(store: FsspecStore, files: type[Files]) -> None:
    def cut(called: str, path: str) -> None:
        if called == "info" and ".tmp-" in path:
            file = files.store[path]
            file.seek(file.size - 1)
            file.truncate()

    files.trouble = staticmethod(cut)
    with pytest.raises(StoreError, match=r"put 'k' in .*EOFError"):
        store.put("k", b"0123456789")
    assert list(files.store) == []


def test_temporaries_of_the_dead_are_swept_a_day_later(
    store: FsspecStore, files: type[Files]
) -> None:
    def left(age_s: float) -> str:
        path = f"/server/runs/a/.tmp-{int((time.time() - age_s) * 1e6):016x}-beef"
        files().pipe_file(path, b"half")
        return path

    old, young = left(90_000), left(60)
    store.put("a/k", b"1")
    assert old not in files.store
    assert young in files.store
    assert list(store.list("")) == ["a/k"]


def test_a_connection_that_was_lost_is_made_anew(store: FsspecStore, files: type[Files]) -> None:
    store.put("k", b"1")
    lost: list[str] = []

    def lose(called: str, path: str) -> None:
        if not lost:
            lost.append(called)
            raise ConnectionResetError("idle for too long")

    before = files.num_connections
    files.trouble = staticmethod(lose)
    assert store.get("k", max_bytes=1) == b"1"
    assert lost
    assert files.num_connections == before + 1


def test_a_call_that_never_returns_ends_by_its_deadline(files: type[Files]) -> None:
    store = FsspecStore("fsspec+files://server/runs", timeout_s=0.3)
    store.put("k", b"1")
    is_over = threading.Event()
    files.trouble = staticmethod(lambda called, path: is_over.wait(30))
    for ask in (
        lambda: store.get("k", max_bytes=1),
        lambda: store.size("k"),
        lambda: list(store.list("")),
        lambda: store.put("k", b"2"),
        lambda: store.delete("k"),
    ):
        with pytest.raises(StoreError, match=r"'k?' in .*TimeoutError; no answer in time"):
            ask()
    is_over.set()
    del files.trouble
    assert store.get("k", max_bytes=1) in (b"1", b"2")


def test_calls_that_never_return_leave_a_bounded_number_of_threads(files: type[Files]) -> None:
    store = FsspecStore("fsspec+files://server/runs", timeout_s=0.02)
    is_over = threading.Event()
    files.trouble = staticmethod(lambda called, path: is_over.wait(60))
    before = threading.active_count()
    errors = []
    for _ in range(20):
        with pytest.raises(StoreError) as caught:
            store.size("k")
        errors.append(str(caught.value))
    assert threading.active_count() <= before + 8
    assert "no answer in time" in errors[7]
    assert "8 calls have not come back" in errors[8]
    assert "start this process anew" in errors[-1]
    is_over.set()
    del files.trouble
    again = FsspecStore("fsspec+files://server/runs", timeout_s=20.0)
    again.put("k", b"12")
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        with suppress(StoreError):
            store.size("k")
            break
    assert store.size("k") == 2, "it goes on once the calls have come back"


def test_a_missing_package_is_no_trouble_of_the_network(files: type[Files]) -> None:
    def fail(called: str, path: str) -> None:
        raise ModuleNotFoundError("No module named 'pyarrow'")

    files.trouble = staticmethod(fail)
    store = FsspecStore("fsspec+files://server/runs", timeout_s=20.0)
    with pytest.raises(StoreError, match="a package that it needs is not installed") as caught:
        store.size("k")
    assert "network" not in str(caught.value)


@pytest.mark.parametrize("protocol", ["file", "local"])
def test_local_files_have_no_host(
    protocol: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"write fsspec\+{protocol}:///PATH"):
        open_store(f"fsspec+{protocol}://host/fs")
    open_store(f"fsspec+{protocol}://{tmp_path}/fs").put("k", b"1")
    assert (tmp_path / "fs" / "k").read_bytes() == b"1"


def test_an_endless_object_is_refused(store: FsspecStore, files: type[Files]) -> None:
    class Endless(io.RawIOBase):
        """Says that it is empty, and never ends."""

        num_read = 0

        def seek(self, *args: int) -> int:
            return 0

        def read(self, length: int = -1) -> bytes:
            Endless.num_read += length
            return bytes(length)

    store.put("k", b"")
    files._open = lambda self, path, mode="rb", **kwargs: Endless()
    with pytest.raises(StoreError, match=r"get 'k' from .*expected 0 bytes, 1001 came"):
        store.get("k", max_bytes=1000)
    assert Endless.num_read < 10_000


@pytest.mark.parametrize(
    ("cause", "is_absent", "hint"),
    [
        (ftplib.error_perm("550 no such file"), True, ""),
        (ftplib.error_perm("501 no such folder"), True, ""),
        (ftplib.error_temp("425 no data connection"), False, "try again"),
        (ftplib.error_perm("530 hunter2-not-for-eyes"), False, "credentials"),
        (ftplib.error_temp("452 no room"), False, "free space"),
        (EOFError(), False, "try again"),
        (ConnectionRefusedError(), False, "cannot be reached"),
    ],
    ids=repr,
)
def test_a_failure_that_fsspec_calls_an_absent_file_is_an_error(
    store: FsspecStore, files: type[Files], cause: Exception, is_absent: bool, hint: str
) -> None:
    """The FTP of fsspec does so; an empty log that is none would be overwritten."""

    def fail(called: str, path: str) -> None:
        raise FileNotFoundError(path) from cause

    files.trouble = staticmethod(fail)
    for ask in (lambda: store.size("k"), lambda: list(store.list("k"))):
        if is_absent:
            with suppress(NotFoundError):
                assert ask() == []
            continue
        with pytest.raises(StoreError, match=hint) as caught:
            ask()
        assert not isinstance(caught.value, NotFoundError)
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (PermissionError(13, "hunter2-not-for-eyes"), "credentials are not accepted"),
        (type("AuthenticationException", (Exception,), {})(SECRET), "credentials are not accepted"),
        (type("HostKeyNotVerifiable", (Exception,), {})(SECRET), "the key of the server"),
        (TimeoutError(SECRET), "no answer in time"),
        (ConnectionRefusedError(SECRET), "cannot be reached"),
        (type("ConnectionLost", (Exception,), {})(SECRET), "cannot be reached"),
        (OSError(28, SECRET), "free space"),
        (NotImplementedError(SECRET), "does not do that"),
        (TypeError(SECRET), "settings are unusable"),
        (RuntimeError(SECRET), "failed: try again"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_I84_an_error_says_what_to_do_and_not_what_the_server_said(
    store: FsspecStore,
    files: type[Files],
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    hint: str,
) -> None:
    caplog.set_level(logging.DEBUG)

    def fail(called: str, path: str) -> None:
        raise error

    files.trouble = staticmethod(fail)
    calls: dict[str, Callable[[], object]] = {
        "put": lambda: store.put("k", b"1"),
        "create": lambda: store.create("k", b"1"),
        "get": lambda: store.get("k", max_bytes=1),
        "size": lambda: store.size("k"),
        "delete": lambda: store.delete("k"),
        "list": lambda: list(store.list("k")),
    }
    for operation, call in calls.items():
        with pytest.raises(
            StoreError, match=f"{operation} 'k' in {store.url}".replace("+", r"\+")
        ) as c:
            call()
        shown = "".join(traceback.format_exception(c.value))
        assert hint in str(c.value)
        assert SECRET not in shown + caplog.text


def test_what_cannot_be_written_in_one_step_is_only_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Copies(MemoryFileSystem):
        """Its rename is that of fsspec: a copy and a deletion."""

        protocol = "copies"

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return super()._strip_protocol(path.removeprefix("copies://"))

    register(monkeypatch, "copies", Copies)
    place = secrets.token_hex(8)
    open_store(f"fsspec+memory://{place}").put("k", b"1")
    store = open_store(f"fsspec+copies://{place}")
    assert (store.get("k", max_bytes=1), list(store.list(""))) == (b"1", ["k"])
    with pytest.raises(StoreError, match=r"put 'x' in .*cannot replace a file in one step"):
        store.put("x", b"1")


def test_I24_files_that_are_renamed_are_for_one_publisher(store: FsspecStore) -> None:
    with pytest.raises(StoreError, match="says that it has no create-only writes"):
        Publisher(store, RUN, threads=1)
    assert list(store.list("")) == []
    states = history(2)
    source = Publisher(store, RUN, threads=1, single_writer=True)
    live = zeros_like(states[0])
    follower = reader(open_store(store.url), live)
    for version, weights in enumerate(states):
        source.publish(weights)
        assert follower.pull().version == version
        assert_same(live, weights)


def test_I24_a_package_that_ignores_its_condition_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ignores(MemoryFileSystem):
        """Takes `mode` and does not look at it, as older packages do."""

        protocol = "ignores"

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return super()._strip_protocol(path.removeprefix("ignores://"))

        def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: object) -> None:
            super().pipe_file(path, value)

    Ignores.__module__ = "s3fs.core"
    register(monkeypatch, "ignores", Ignores)
    store = open_store("fsspec+ignores://bucket/a")
    assert store.has_create_only
    with pytest.raises(StoreError, match=r"created 'probe/.*' twice: two publishers could"):
        check_create_only(store)


def test_I23_publishers_in_the_memory_of_fsspec_fence_each_other() -> None:
    store = open_store(fresh_url())
    states = history(2)
    old = Publisher(store, RUN, threads=1)
    old.publish(states[0])
    new = Publisher(store, RUN, threads=1)
    with pytest.raises(ConflictError, match="fenced"):
        old.publish(states[1])
    new.publish(states[2])
    live = zeros_like(states[0])
    reader(store, live).pull()
    assert_same(live, states[2])


def test_a_forked_process_is_told(store: FsspecStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("k", b"1")
    monkeypatch.setattr("gymfast.stores.fsspec_calls.os.getpid", lambda: -1)
    with pytest.raises(StoreError, match="was forked"):
        store.size("k")


def test_the_command_line_is_told_that_it_is_the_only_publisher(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    weights = tmp_path / "w.safetensors"
    save_file({"w": np.arange(100, dtype=np.uint16)}, weights)
    place = f"fsspec+local://{tmp_path}/runs"
    words = ["sync", "publish", place, str(weights), "--run", "demo"]
    assert main(words) == 1
    assert "--single-writer" in capfd.readouterr().err
    assert main([*words, "--single-writer"]) == 0
    copy = tmp_path / "copy.safetensors"
    assert main(["sync", "pull", place, str(copy), "--run", "demo"]) == 0
    assert np.array_equal(load_file(copy)["w"], load_file(weights)["w"])
