"""Nothing outside the store root is read or written, and no hostile entry hangs or kills (I83)."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from gymfast.errors import GymfastError, MissingDependencyError, NotFoundError, StoreError
from gymfast.stores import FileStore, MemoryStore, open_store
from gymfast.stores.base import check_key, check_prefix, is_key
from gymfast.testing.conformance import HOSTILE_KEYS

Prepare = Callable[[Path, Path], None]

SECRET = b"secret"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    (folder / "sub").mkdir(parents=True)
    (folder / "file").write_bytes(SECRET)
    (folder / "sub" / "file").write_bytes(SECRET)
    return folder


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    (tmp_path / "root").mkdir()
    return FileStore(tmp_path / "root")


def _is_untouched(outside: Path) -> bool:
    files = sorted(path for path in outside.rglob("*") if path.is_file())
    return files == [outside / "file", outside / "sub" / "file"] and all(
        path.read_bytes() == SECRET for path in files
    )


def _attempts(store: FileStore, key: str) -> list[Callable[[], object]]:
    return [
        lambda: store.get(key, max_bytes=100),
        lambda: store.get_range(key, 0, 1),
        lambda: store.size(key),
        lambda: store.put(key, b"x"),
        lambda: store.create(key, b"x"),
    ]


@pytest.mark.parametrize("target", ["../outside", "../outside/sub", "{outside}", "..", "."])
def test_I83_a_symlink_to_a_folder_is_refused_with_its_name(
    target: str, store: FileStore, outside: Path
) -> None:
    link = Path(store.root) / "link"
    link.symlink_to(target.format(outside=outside))
    for key in ("link/file", "link/sub/file", "link/new"):
        for attempt in _attempts(store, key):
            with pytest.raises(StoreError, match=r"'link' is a symlink.*\[ELOOP\]"):
                attempt()
        with pytest.raises(StoreError, match="symlink"):
            store.delete(key)
    with pytest.raises(StoreError, match="symlink"):
        list(store.list("link/"))
    assert list(store.list("")) == []
    store.sweep_temporaries(0)
    assert _is_untouched(outside)


@pytest.mark.parametrize("target", ["../outside/file", "{outside}/file", "nowhere", "link"])
def test_I83_a_symlink_in_place_of_an_object_is_never_followed(
    target: str, store: FileStore, outside: Path
) -> None:
    link = Path(store.root) / "link"
    link.symlink_to(target.format(outside=outside))
    for attempt in _attempts(store, "link")[:3]:
        with pytest.raises(StoreError, match=r"'link' is a symlink or device"):
            attempt()
    with pytest.raises(StoreError):
        store.create("link", b"x")
    assert link.is_symlink()
    assert list(store.list("")) == []
    store.put("link", b"mine")
    assert (store.get("link", max_bytes=9), link.is_symlink()) == (b"mine", False)
    link.unlink()
    link.symlink_to(target.format(outside=outside))
    store.delete("link")
    assert not link.is_symlink()
    assert _is_untouched(outside)


def test_I83_a_folder_swapped_for_a_symlink_under_a_writer_does_not_lead_outside(
    store: FileStore, outside: Path
) -> None:
    root = Path(store.root)
    store.put("a/b", b"1")

    def swap() -> list[bytes]:
        (root / "a").rename(root / "moved")
        (root / "a").symlink_to(outside)
        return [b"2"]

    def produce():
        yield from swap()

    store.put("a/b", produce())
    assert (root / "moved" / "b").read_bytes() == b"2"
    assert _is_untouched(outside)


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


def _device(path: Path) -> None:
    try:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("needs kernel feature mknod (root)")


@pytest.mark.parametrize("make", [_fifo, _socket, _device])
def test_I83_pipes_sockets_and_devices_are_refused_without_waiting(
    make: Callable[[Path], None], store: FileStore
) -> None:
    make(Path(store.root) / "k")
    for attempt in _attempts(store, "k")[:3]:
        with pytest.raises(StoreError, match="'k' is a symlink or device"):
            attempt()
    assert list(store.list("")) == []


def test_I83_foreign_names_are_not_listed(store: FileStore) -> None:
    root = Path(store.root)
    for name in (".hidden", "with space", "new\nline", "umlaut\u00e4", "a" * 201, "tilde~"):
        (root / name).write_bytes(b"1")
    (root / os.fsdecode(b"bad\xff")).write_bytes(b"1")
    (root / ".dot").mkdir()
    (root / ".dot" / "k").write_bytes(b"1")
    deep = root
    for _ in range(6):
        deep = deep / ("d" * 199)
        deep.mkdir()
    (deep / "k").write_bytes(b"1")
    store.put("good", b"1")
    assert list(store.list("")) == ["good"]


def test_I83_the_root_itself_may_be_reached_through_a_symlink(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    store = FileStore(tmp_path / "link")
    store.put("a/k", b"1")
    assert (tmp_path / "real" / "a" / "k").read_bytes() == b"1"


@pytest.mark.parametrize("root", ["file", "file/below"])
def test_a_root_that_is_a_file_is_a_clear_error(root: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1")
    store = FileStore(tmp_path / root)
    with pytest.raises(StoreError, match=r"put 'k' in file:.*\[(ENOTDIR|EEXIST)\]"):
        store.put("k", b"1")
    with pytest.raises(NotFoundError):
        store.get("k", max_bytes=1)
    assert list(store.list("")) == []
    assert store.free_bytes() > 0


def test_reading_an_absent_store_makes_nothing(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "absent")
    assert list(store.list("")) == []
    store.delete("k")
    assert store.sweep_temporaries(0) == 0
    with pytest.raises(NotFoundError):
        store.size("k")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", ["a", "a/b", "A-b_c.d", "0" * 200, "/".join(["a"] * 512)])
def test_legal_keys_are_accepted(key: str) -> None:
    assert check_key(key) == key
    assert is_key(key)
    assert all(check_prefix(key[:end]) == key[:end] for end in range(len(key) + 1))


@pytest.mark.parametrize("key", HOSTILE_KEYS, ids=ascii)
def test_I83_the_two_ways_to_check_a_key_agree(key: str) -> None:
    assert not is_key(key)
    with pytest.raises(ValueError, match="key"):
        check_key(key)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("file:/tmp/x", "file:/tmp/x"),
        ("file:///tmp/x", "file:/tmp/x"),
        ("file://localhost/tmp/x", "file:/tmp/x"),
        ("FILE:/tmp/x", "file:/tmp/x"),
        ("/tmp/a b%20:c", "file:/tmp/a b%20:c"),
        (Path("/tmp/x"), "file:/tmp/x"),
        ("x", f"file:{Path.cwd()}/x"),
        ("./a:b", f"file:{Path.cwd()}/a:b"),
        ("file:x", f"file:{Path.cwd()}/x"),
        ("memory:n", "memory:n"),
    ],
)
def test_a_store_address_opens_the_store_it_names(url: str, expected: str) -> None:
    assert open_store(url).url == expected
    assert open_store(open_store(url).url).url == expected


@pytest.mark.parametrize(
    ("url", "error", "text"),
    [
        ("modal:volume", ValueError, "unknown scheme 'modal:'.*modal-volume://"),
        ("modal-volume:v", ValueError, "expected modal-volume://NAME/PREFIX"),
        ("relay:host:1", ValueError, "expected relay://HOST:PORT"),
        ("s3://user:pw@bucket/x", ValueError, "credentials come from the environment"),
        ("nfs:host:/x", ValueError, "unknown scheme 'nfs:'; expected memory:NAME, file:/PATH"),
        ("file://host/x", ValueError, r"host name \('host'\)"),
        ("file:", ValueError, "'' is not a path"),
        ("file://", ValueError, "host name"),
        ("", ValueError, "'' is not a path"),
        ("/a\0b", ValueError, "is not a path"),
        (b"/a", TypeError, "bytes"),
        (None, TypeError, "None"),
    ],
)
def test_a_bad_store_address_says_what_is_expected(
    url: object, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        open_store(url)


@pytest.mark.parametrize(
    ("url", "package", "extra"),
    [("s3://bucket/x", "obstore", "store"), ("modal-volume://v", "modal", "modal")],
)
def test_a_store_whose_package_is_missing_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, url: str, package: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        MissingDependencyError, match=rf"{package}: pip install 'gymfast\[{extra}\]'"
    ):
        open_store(url)


def test_memory_stores_are_shared_by_name_within_the_process() -> None:
    assert open_store("memory:shared-by-name") is open_store("memory:shared-by-name")
    assert open_store("memory:") is not open_store("memory:")
    assert isinstance(open_store("memory:"), MemoryStore)


def test_every_error_of_a_store_is_one_printable_line(store: FileStore) -> None:
    (Path(store.root) / "k").mkdir()
    for attempt in _attempts(store, "k"):
        with pytest.raises(GymfastError) as caught:
            attempt()
        assert str(caught.value).isprintable()


def open_files() -> set[tuple[str, str]]:
    """Descriptors of this process and what they are of, but for the one that lists them."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.add((path.name, str(path.readlink())))
    return found


def test_I61_no_operation_leaks_a_descriptor(store: FileStore, outside: Path) -> None:
    (Path(store.root) / "link").symlink_to(outside)
    (Path(store.root) / "folder").mkdir()

    def use_everything() -> None:
        for key in ("a/b/c", "a/b", "link", "link/file", "folder", "folder/x/y", "x"):
            for attempt in (*_attempts(store, key), lambda key=key: store.delete(key)):
                with suppress(StoreError):
                    attempt()
        with suppress(ZeroDivisionError):
            store.put("k", (1 // 0 for _ in "x"))
        next(store.list(""), None)
        store.sweep_temporaries(0)
        store.free_bytes()

    use_everything()
    before = open_files()
    for _ in range(20):
        use_everything()
    # Connections of other tests may end meanwhile; what is new is ours.
    assert open_files() - before == set()
