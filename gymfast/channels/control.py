"""The control plane of a group: small messages between rank 0 and all others, beside the payload.

Lines of their own, so that a large transfer delays neither a message nor a sign of life; every
wait has a deadline and names the ranks that it waited for.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gymfast.channels.line import Line, Message, flush, pack
from gymfast.errors import ChannelError

HEARTBEAT_S = 1.0
SILENCE_S = 10.0
_LEAVE_S = 0.1
_MAX_TROUBLES = 1000
_MAX_REFUSALS = 3
_log = logging.getLogger(__name__)

Trouble = Callable[[int, str], None]


class Control:
    """One rank's end of the control plane. Rank 0 reaches all others, these reach rank 0.

    The ranks that take part are those of the newest formation. Collective calls are made by all of
    them in the same order, from one thread; only `trouble` may be called from any.
    """

    def __init__(self, rank: int) -> None:
        """An end without lines: see Hub and connect."""
        self.rank = rank
        self.ranks: tuple[int, ...] = ()
        """Who takes part, in ascending order; empty before the first formation."""
        self.on_trouble: Trouble | None = None
        """Told of each rank that is lost or in trouble, at once, from another thread."""
        self._lines: dict[int, Line] = {}
        self._changed = threading.Condition()
        self._values: dict[tuple[int, int, int], Any] = {}
        self._troubles: deque[tuple[tuple[int, int], int, str]] = deque(maxlen=_MAX_TROUBLES)
        self._formed: tuple[int, tuple[int, ...]] = (0, ())
        self._lost: dict[int, str] = {}
        self._refusals: deque[str] = deque(maxlen=_MAX_REFUSALS)
        self._last_words = ""  # of rank 0, since it said who takes part
        self._formation = self._number = 0
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="gymfast-control", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> dict[int, str]:
        """Ranks that are out of reach, and why."""
        return dict(self._lost)

    def form(self, timeout_s: float) -> tuple[int, ...]:
        """Who takes part from here on: on rank 0 all that can be reached, elsewhere as it says.

        Ranks that came since the last formation are in, those that were lost are out.
        Raises ChannelError if rank 0 is lost or says nothing until the deadline.
        """
        self._number = 0
        if self.rank == 0:
            self._formation += 1
            with self._changed:
                self._values.clear()
                alive = [peer for peer in self._lines if peer not in self._lost]
            self.ranks = (0, *sorted(alive))
            self._send(alive, Message("formed", self._formation, 0, self.ranks), timeout_s)
            return self.ranks
        with self._changed:
            wait_s = 1.5 * timeout_s
            self._changed.wait_for(
                lambda: self._formed[0] > self._formation or 0 in self._lost, timeout=wait_s
            )
            if self._formed[0] <= self._formation:
                raise self._no_answer(wait_s)
            self._formation, self.ranks = self._formed
            return self.ranks

    def gather(self, value: Any, timeout_s: float) -> dict[int, Any]:
        """On rank 0 what each rank passed, without those that are lost; elsewhere {}.

        A rank that says nothing until the deadline is lost from then on.
        Raises ChannelError on other ranks if rank 0 is lost.
        """
        self._number += 1
        if self.rank != 0:
            self._send([0], Message("value", self._formation, self._number, value), timeout_s)
            if 0 in self._lost:
                raise ChannelError(f"rank 0 is lost: {self._lost[0]}", (0,))
            return {}
        keys = {peer: (peer, self._formation, self._number) for peer in self.ranks[1:]}

        def waiting() -> list[int]:
            return [p for p, key in keys.items() if key not in self._values and p not in self._lost]

        with self._changed:
            self._changed.wait_for(lambda: not waiting(), timeout=timeout_s)
            silent = waiting()
            found = {p: self._values.pop(k) for p, k in keys.items() if k in self._values}
        for peer in silent:
            self._lose(peer, f"it did not answer within {timeout_s:g} s")
        return {0: value, **found}

    def share(self, value: Any, timeout_s: float) -> Any:
        """What rank 0 passed, on all ranks.

        The others wait half as long again: rank 0 may first wait for some of them.
        Raises ChannelError if rank 0 is lost or says nothing until the deadline.
        """
        self._number += 1
        key = (0, self._formation, self._number)
        if self.rank == 0:
            self._send(self.ranks[1:], Message("value", *key[1:], value), timeout_s)
            return value
        with self._changed:
            wait_s = 1.5 * timeout_s
            self._changed.wait_for(lambda: key in self._values or 0 in self._lost, timeout=wait_s)
            if key in self._values:
                return self._values.pop(key)
            raise self._no_answer(wait_s)

    @contextlib.contextmanager
    def repeatable(self) -> Iterator[None]:
        """Collective calls in the block count as not made if one fails: they may be made again.

        For a wait that ends before rank 0 has anything to say.
        """
        number = self._number
        try:
            yield
        except ChannelError:
            self._number = number
            raise

    def trouble(self, text: str, *, of: int | None = None) -> None:
        """Tells rank 0 that something went wrong here; from rank 0, tells all others.

        Rank 0 may speak for another rank, which only it knows to be lost.
        """
        value = [self.rank if of is None else of, text]
        message = Message("trouble", self._formation, self._number, value)
        self._send(list(self._lines), message, HEARTBEAT_S, is_vital=False)

    @contextlib.contextmanager
    def watching(self, on_trouble: Trouble) -> Iterator[None]:
        """Has `on_trouble` told of ranks that are lost or in trouble, while the block runs.

        Those since the last collective call are told too: a rank may be in trouble before this
        one has come here.
        """
        with self._changed:
            now = (self._formation, self._number)
            early = [(rank, text) for place, rank, text in self._troubles if place == now]
            self._troubles.clear()
            self.on_trouble = on_trouble
        try:
            for rank, text in early:
                on_trouble(rank, text)
            yield
        finally:
            self.on_trouble = None

    def add(self, peer: int, sock: socket.socket) -> bool:
        """Takes a line to a rank; it takes part from the next formation on.

        False if it has one already, or this end is closed.
        """
        with self._changed:
            if self._is_closed.is_set() or self.has(peer):
                return False
            self._lines[peer] = Line(sock)
            self._lost.pop(peer, None)
            self._changed.notify_all()
        return True

    def has(self, peer: int) -> bool:
        """Whether there is a line to a rank."""
        return peer in self._lines and peer not in self._lost

    def note_refusal(self, words: str) -> None:
        """Keeps what was wrong with a caller, for the error that its rank did not come."""
        self._refusals.append(words)

    def wait_for(self, num_ranks: int, timeout_s: float) -> None:
        """Returns once ranks 1 to num_ranks - 1 have lines.

        Raises ChannelError, naming those that are missing, after the deadline; those that are there
        hear of it too.
        """

        def missing() -> list[int]:
            return [rank for rank in range(1, num_ranks) if not self.has(rank)]

        with self._changed:
            self._changed.wait_for(lambda: not missing(), timeout=timeout_s)
            names = missing()
        if names:
            words = (
                f"{len(names)} of {num_ranks} ranks did not come within {timeout_s:g} s: "
                f"{', '.join(map(str, names))}"
            )
            if self._refusals:
                words += f"; refused: {'; '.join(dict.fromkeys(self._refusals))}"
            self.trouble(words)
            raise ChannelError(words, tuple(names))

    def close(self) -> None:
        """Says that this rank leaves, and closes the lines; may be called twice."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        self._thread.join()
        for peer, line in self._lines.items():
            if peer not in self._lost:
                line.leave(time.monotonic() + _LEAVE_S)
            line.sock.close()

    def _no_answer(self, timeout_s: float) -> ChannelError:
        why = (
            f"is lost: {self._lost[0]}" if 0 in self._lost else f"said nothing for {timeout_s:g} s"
        )
        said = f"; it said before: {self._last_words}" if self._last_words else ""
        return ChannelError(f"rank 0 {why}{said}", (0,))

    def _send(
        self, peers: Iterable[int], message: Message, timeout_s: float, *, is_vital: bool = True
    ) -> None:
        """Tells all of them; those that cannot be told are lost from then on.

        A rank that takes a message late is not lost if the message is not vital.
        """
        data, deadline_s = pack(message), time.monotonic() + timeout_s
        lines = {peer: self._lines[peer] for peer in peers if peer not in self._lost}
        failed: dict[int, OSError] = {}
        for peer, line in lines.items():
            try:
                line.post(data)
            except OSError as error:
                failed[peer] = error
        failed |= flush({p: line for p, line in lines.items() if p not in failed}, deadline_s)
        for peer, why in failed.items():
            is_late = isinstance(why, TimeoutError)
            if self._lines[peer] is lines[peer] and (is_vital or not is_late):
                self._lose(peer, str(why))

    def _listen(self) -> None:
        """Reads all lines, and tells and watches signs of life."""
        next_s = 0.0
        with selectors.DefaultSelector() as selector:
            while not self._is_closed.is_set():
                self._watch_lines(selector)
                for key, _ in selector.select(0.05):
                    self._read(*key.data)
                if time.monotonic() >= next_s:
                    next_s = time.monotonic() + HEARTBEAT_S
                    self._beat()

    def _watch_lines(self, selector: selectors.BaseSelector) -> None:
        """Has the selector watch the lines of ranks that are not lost, and no others."""
        with self._changed:
            wanted = {
                line.sock: (p, line) for p, line in self._lines.items() if p not in self._lost
            }
        watched = {key.data[1].sock for key in selector.get_map().values()}
        for sock in watched - wanted.keys():
            selector.unregister(sock)
            sock.close()
        for sock in wanted.keys() - watched:
            selector.register(sock, selectors.EVENT_READ, wanted[sock])

    def _beat(self) -> None:
        for peer, line in list(self._lines.items()):
            silent_s = time.monotonic() - line.heard_s
            if peer in self._lost:
                continue
            try:
                line.beat()
                if silent_s > SILENCE_S:
                    raise TimeoutError(f"it gave no sign of life for {silent_s:.0f} s")
            except OSError as error:
                if self._lines.get(peer) is line:
                    self._lose(peer, str(error))

    def _read(self, peer: int, line: Line) -> None:
        try:
            for message in line.messages():
                self._take(peer, message)
        except BlockingIOError:
            return
        except (OSError, ValueError, TypeError) as error:  # msgspec's errors are ValueErrors
            if self._lines.get(peer) is line:
                self._lose(peer, str(error))

    def _take(self, peer: int, message: Message) -> None:
        with self._changed:
            if message.kind == "value":
                self._values[peer, message.formation, message.number] = message.value
            elif message.kind == "formed":
                self._formed = (message.formation, tuple(message.value))
                self._last_words = ""
            elif message.kind == "trouble":
                of, text = message.value
                rank = int(of) if peer == 0 else peer
                if peer == 0:
                    self._last_words = str(text) if rank == 0 else f"rank {rank}: {text}"
            self._changed.notify_all()
        if message.kind == "left":
            self._lose(peer, "it left", is_orderly=True)
        elif message.kind == "trouble":
            self._tell(rank, str(text), (message.formation, message.number))

    def _lose(self, peer: int, why: str, *, is_orderly: bool = False) -> None:
        with self._changed:
            if peer in self._lost or self._is_closed.is_set():
                return
            self._lost[peer] = why
            self._changed.notify_all()
        _log.log(logging.DEBUG if is_orderly else logging.WARNING, "rank %d is lost: %s", peer, why)
        self._tell(peer, why, (self._formation, self._number))

    def _tell(self, peer: int, text: str, place: tuple[int, int]) -> None:
        with self._changed:
            self._troubles.append((place, peer, text))
            on_trouble = self.on_trouble
        if on_trouble is not None:
            on_trouble(peer, text)
