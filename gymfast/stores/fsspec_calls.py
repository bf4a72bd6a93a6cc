"""Calls of fsspec: each connection in a thread of its own, each call with a deadline."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from gymfast.errors import StoreError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_MAX_LEFT = 8  # calls that have not come back
_T = TypeVar("_T")
Make = Callable[[], "AbstractFileSystem"]
Work = Callable[[Any], _T]
ABSENT = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
_ANSWERS = (*ABSENT, FileExistsError, PermissionError)


class CallFailedError(Exception):
    """A call of the file system that raised `error`, a TimeoutError if it took too long."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(type(error).__name__)
        self.error = error

    @property
    def is_answer(self) -> bool:
        """True if the file system was reached and said no: asking again gives the same."""
        return isinstance(self.error, _ANSWERS)


class Connection:
    """A file system that is made by, and only touched in, one thread: many are not thread-safe.

    The thread of a call that never returns is left behind.
    """

    def __init__(self, make: Make, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._tasks: SimpleQueue[tuple[Future[Any], Work[Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=_serve, args=(self._tasks, make), name="gymfast-fsspec", daemon=True
        )
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """True until the thread has ended, which after `close` it does with its last call."""
        return self._thread.is_alive()

    def call(self, work: Work[_T], extra_s: float = 0.0) -> _T:
        """What the work gives for the file system; CallFailedError if it fails or takes too long.

        It may take the time of this connection, and `extra_s`.
        """
        future: Future[_T] = Future()
        self._tasks.put((future, work))
        try:
            return future.result(self._timeout_s + extra_s)
        except TimeoutError as error:
            # An answer of the file system looks the same.
            raise CallFailedError(error) from None
        except Exception as error:  # noqa: BLE001 - of any kind: each file system has its own
            raise CallFailedError(error) from None

    def close(self) -> None:
        """Ends the thread, once it has nothing to do."""
        self._tasks.put(None)


class Connections:
    """Connections that are used again; as many as there are calls at once."""

    def __init__(self, make: Make, timeout_s: float, url: str) -> None:
        self._make = make
        self._timeout_s = timeout_s
        self._url = url
        self._free: list[Connection] = []
        self._left: list[Connection] = []
        self._pid: int | None = None

    @contextmanager
    def lend(self) -> Iterator[Connection]:
        """A connection for this thread; one on which something failed is not used again.

        Raises StoreError in a process that was forked from one that used the store, and while
        many calls have not come back: each keeps a thread.
        """
        if self._pid is None:
            self._pid = os.getpid()
        if self._pid != os.getpid():
            raise StoreError(
                f"store {self._url}: this process was forked from one that had used this store, "
                "and cannot use it: start processes with the method 'spawn'"
            )
        self._left = [each for each in self._left if each.is_alive]
        if len(self._left) >= _MAX_LEFT:
            raise StoreError(
                f"store {self._url}: {len(self._left)} calls have not come back, and no more are "
                "made: check network and server; if they never come back, start this process anew"
            )
        try:
            connection = self._free.pop()
        except IndexError:
            connection = Connection(self._make, self._timeout_s)
        try:
            yield connection
        except CallFailedError as failure:
            if failure.is_answer:
                self._free.append(connection)
            else:
                connection.close()
                if isinstance(failure.error, TimeoutError):
                    self._left.append(connection)
            raise
        except BaseException:
            connection.close()
            raise
        self._free.append(connection)


def _serve(tasks: SimpleQueue[tuple[Future[Any], Work[Any]] | None], make: Make) -> None:
    fs: AbstractFileSystem | None = None
    while (task := tasks.get()) is not None:
        future, work = task
        try:
            if fs is None:
                fs = make()
            result = work(fs)
        except BaseException as error:  # noqa: BLE001 - raised in the thread that asked
            future.set_exception(error)
        else:
            future.set_result(result)
        del task, future, work
