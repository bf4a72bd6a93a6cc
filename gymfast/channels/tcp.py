"""The channel over TCP: stars, chains and trees of ranks that pass on what they receive."""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from gymfast.channels.agreement import Terms, agree
from gymfast.channels.base import DEFAULT_DEPTH, DEFAULT_TIMEOUT_S, Channel, Slot
from gymfast.channels.control import Control
from gymfast.channels.door import HANDSHAKE_S, Door, is_wildcard, listen
from gymfast.channels.handshake import (
    Caller,
    NotYetError,
    Peer,
    check_key,
    fingerprint,
    introduce,
)
from gymfast.channels.tcp_pipe import InPipe, OutPipe
from gymfast.channels.tcp_rounds import Action, Answer, Line, Place, Put, Rounds
from gymfast.errors import ChannelError

_GRACE_S = 2.0  # for a rank whose line broke to come back
_RETRY_S = 0.02
_SILENCE = 1 / 8  # of the time of a round: then a line is made anew
_LEAST_SILENCE_S, _MOST_SILENCE_S = 0.5, 10.0
_MAX_REFUSALS = 3  # one may be due to a damaged byte
_CALL = 1 / 4  # of the time of a round: for a call to be taken
_SECOND_CHANCE = 0.25  # of the time of a round
_LEAVE_S = 1.0  # for the other side to hang up first
_MAX_STREAMS = 64
_log = logging.getLogger(__name__)


class TcpChannel(Channel):
    """One rank of a group that is connected by TCP. See `open_tcp`."""

    survives_loss = True
    takes_many_slots = True

    def __init__(
        self,
        rank: int,
        addresses: Sequence[tuple[str, int]],
        listener: socket.socket,
        *,
        fanout: int,
        streams: int = 1,
        group: str = "weights",
        key: bytes | None = None,
        depth: int = DEFAULT_DEPTH,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """A channel that listens at `listener`, which it closes; all ranks get equal settings.

        Raises ValueError for settings out of range.
        """
        super().__init__(rank, len(addresses), depth=depth, timeout_s=timeout_s)
        if streams > _MAX_STREAMS:
            raise ValueError(f"streams is {streams}, expected at most {_MAX_STREAMS}")
        self._rounds = Rounds(rank, self.num_ranks, fanout, streams)
        self._addresses = addresses
        self._streams, self._group, self._key = streams, group, key
        self._changed = threading.Condition()
        self._deadlines: deque[float] = deque()  # of the rounds under way
        self._here = (-1, 0.0)  # a round, the last that waits for ranks behind, and since when
        self._failure: ChannelError | None = None
        self._is_closed = False
        self._outs: dict[Line, OutPipe] = {}
        self._ins: dict[tuple[int, int], InPipe] = {}  # by root and stream
        self._senders: dict[tuple[int, int], int] = {}  # the rank at the other end of each
        self._calls: set[socket.socket] = set()  # that nobody has taken yet
        self._roots: set[int] = set()  # whose bytes are received here
        self._dry: dict[int, str] = {}  # those of which nothing more comes, and why
        self._doubts: dict[int, str] = {}  # those whose line broke last, and why
        self._threads: list[threading.Thread] = []
        self._silence_s = min(max(_SILENCE * timeout_s, _LEAST_SILENCE_S), _MOST_SILENCE_S)
        self._door = Door(listener, group, key, self._let_in)
        self._door.open()

    @property
    def lost(self) -> Mapping[int, str]:
        """Ranks that are out of reach from here, and why."""
        with self._changed:
            return dict(self._rounds.lost)

    def begin(self, slots: Sequence[Slot]) -> None:
        self.finish(self.depth - 1)
        with self._changed:
            for slot in slots:
                self._receive_from(slot.root)
            actions = self._rounds.begin(slots)
            self._deadlines.append(time.monotonic() + self.timeout_s)
            self._changed.notify_all()
        self._do(actions)

    def finish(self, num_left: int = 0) -> None:
        with self._changed:
            while True:
                while len(self._deadlines) > self._rounds.num_left:
                    self._deadlines.popleft()
                if self._failure is not None:
                    raise ChannelError(str(self._failure), self._failure.ranks)
                if len(self._deadlines) <= num_left:
                    return
                if dry := self._rounds.wanted() & self._dry.keys():
                    root = min(dry)
                    words = f"nothing more comes of rank {root}: {self._dry[root]}"
                    self._fail(ChannelError(words, (root,)))
                    continue
                left_s = self._give_up_s() - time.monotonic()
                if left_s > 0:
                    self._changed.wait(left_s)
                    continue
                self._end_overdue()

    def abort(self, reason: str) -> None:
        self._fail(ChannelError(f"aborted on rank {self.rank}: {reason}"))

    def close(self) -> None:
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
        self._fail(ChannelError(f"rank {self.rank} closed its channel"))
        deadline_s = time.monotonic() + _LEAVE_S
        for thread in self._threads:
            thread.join(max(deadline_s - time.monotonic(), 0))
        for pipe in self._ins.values():
            pipe.close()
        for thread in self._threads:
            thread.join()
        self._door.join()
        for out in self._outs.values():
            out.join()

    def _do(self, actions: Iterable[Action]) -> None:
        """Carries out what the rounds ask for; holds no lock, since lines may be slow."""
        for action in actions:
            if isinstance(action, Put):
                self._out(action.line).put(action.place, action.memory)
            elif isinstance(action, Answer):
                with self._changed:
                    pipe = self._ins.get((action.root, action.stream))
                if pipe is not None:
                    pipe.answer(action.place)

    def _out(self, line: Line) -> OutPipe:
        with self._changed:
            if line not in self._outs:
                answered = functools.partial(self._answered, line)
                lost = functools.partial(self.lose, line.rank)
                times = {"grace_s": _GRACE_S, "silence_s": self._silence_s}
                self._outs[line] = OutPipe(answered, lost, **times)
                if self._failure is not None:
                    self._outs[line].close()
            return self._outs[line]

    def _answered(self, line: Line, place: Place) -> None:
        with self._changed:
            actions = self._rounds.answered(line, place)
            self._changed.notify_all()
        self._do(actions)

    def lose(self, rank: int, why: str) -> None:
        with self._changed:
            if self._failure is not None or rank in self._rounds.lost:
                return
            actions = self._rounds.lose(rank, why)
            gone = [out for line, out in self._outs.items() if line.rank == rank]
            gone_in = [pipe for place, pipe in self._ins.items() if self._senders[place] == rank]
            # Whoever has all that was sent may leave.
            level = logging.WARNING if any(out.is_waiting for out in gone) else logging.DEBUG
            self._changed.notify_all()
        _log.log(level, "rank %d is lost to rank %d: %s", rank, self.rank, why)
        for out in gone:
            out.close()
        for pipe in gone_in:
            pipe.close()
        self._do(actions)

    def _give_up_s(self) -> float:
        """When ranks that the oldest round waits for are given up.

        Those behind are not blamed for bytes that came late to this one: they have at least half
        of the time that the rank before this one gives to both.
        """
        own, before = self._rounds.patience()
        begin_s = self._deadlines[0] - self.timeout_s
        if own == 1:
            return self._deadlines[0]
        number, here_s = self._here
        if number != self._rounds.oldest:
            number, here_s = self._here = self._rounds.oldest, time.monotonic()
        least_s = (here_s + begin_s + before * self.timeout_s) / 2
        return max(begin_s + own * self.timeout_s, least_s)

    def _end_overdue(self) -> None:
        """The oldest round is over its deadline: an error, or ranks that are left behind."""
        roots, slow = self._rounds.overdue()
        what = f"a round was not complete within {self.timeout_s:g} s"
        others = set(range(self.num_ranks)) - {self.rank} - self._rounds.lost.keys()
        if roots:
            words = f"{what}: nothing more came of rank {min(roots)}"
            if min(roots) in self._doubts:
                words += f": {self._doubts[min(roots)]}"
            self._fail(ChannelError(words, tuple(sorted(roots))))
        elif slow >= others:
            words = f"{what}: no other rank took it: {sorted(slow)}"
            self._fail(ChannelError(words, tuple(sorted(slow))))
        for rank in slow:
            self.lose(rank, what)
        # Those behind a slow rank have had no chance yet.
        own, _ = self._rounds.patience()
        least_s = time.monotonic() + (1 + _SECOND_CHANCE - own) * self.timeout_s
        self._deadlines = deque(max(one, least_s) for one in self._deadlines)

    def _fail(self, error: ChannelError) -> None:
        """Ends everything here, and all lines, so that the other side of each knows at once."""
        with self._changed:
            self._failure = self._failure or error  # the first is the cause of the others
            self._changed.notify_all()
            ins, outs = list(self._ins.values()), list(self._outs.values())
            for sock in self._calls:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        self._door.shut()
        for pipe in ins:
            pipe.leave()
        for out in outs:
            out.close()

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="gymfast-tcp", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _let_in(self, caller: Caller, deadline_s: float) -> None:
        """Takes the line of a rank that gets bytes from here."""
        peer, sock = caller.peer, caller.sock
        root, stream = divmod(peer.line, _MAX_STREAMS)
        is_known = max(peer.rank, root) < self.num_ranks and stream < self._streams
        if not is_known or peer.rank in (self.rank, root, *self.lost):
            words = f"says that it is rank {peer.rank}, for stream {stream} of rank {root}"
            raise caller.refuse(f"{words}: nobody waits for it here", deadline_s)
        caller.welcome(deadline_s)
        _tune(sock)
        with self._changed:
            actions = self._rounds.adopt(root, peer.rank)
        self._do(actions)
        self._out(Line(root, peer.rank, stream)).attach(sock, deadline_s)

    def _receive_from(self, root: int) -> None:
        """The first time a root sends, lines to the rank before this one are opened."""
        if root != self.rank and root not in self._roots:
            self._roots.add(root)
            for stream in range(self._streams):
                self._start(functools.partial(self._receive, root, stream))

    def _receive(self, root: int, stream: int) -> None:
        """Receives the stripes of a root, from the rank before this one, or the one before that."""
        sources = deque(self._rounds.sources(root))
        sink = _Sink(self, root, stream)
        good_s, num_refused, why = time.monotonic(), 0, ""
        silence_s = self._silence_s
        while sources and self._failure is None:
            if sources[0] in self.lost:
                why = f"rank {sources[0]} is lost: {self.lost[sources.popleft()]}"
                continue
            begin_s, pipe, is_patient = time.monotonic(), None, False
            try:
                with contextlib.closing(self._call(sources[0], root, stream)) as sock:
                    deadline_s = time.monotonic() + HANDSHAKE_S
                    pipe = InPipe(sock, self._oldest(), deadline_s, silence_s)
                    self._use(root, stream, pipe, sources[0])
                    with contextlib.ExitStack() as stack:
                        stack.callback(self._part, pipe)
                        pipe.run(sink)
            except (NotYetError, TimeoutError) as error:
                why = f"rank {sources[0]} does not answer: {error}"
                is_patient = len(sources) == 1
            except ChannelError as error:
                why = f"rank {sources[0]}: {error}"
                num_refused += pipe is None
            except (OSError, EOFError) as error:
                why = f"rank {sources[0]} is gone: {str(error) or 'it closed the line'}"
            now_s = time.monotonic()
            if pipe is not None:
                num_refused = 0
                # A busy host may be silent: each silence without an item is borne for longer.
                silence_s = self._silence_s if pipe.has_received else 2 * silence_s
                silence_s = min(silence_s, max(self.timeout_s / 2, self._silence_s))
                if pipe.has_received or now_s - begin_s > self._silence_s:
                    good_s = now_s
            is_over = now_s - good_s > _GRACE_S or num_refused == _MAX_REFUSALS
            if is_over and not is_patient:
                sources.popleft()
                good_s, num_refused = now_s, 0
            self._doubts[root] = why
            time.sleep(_RETRY_S)
        with self._changed:
            self._dry.setdefault(root, why)
            self._changed.notify_all()

    def _part(self, pipe: InPipe) -> None:
        """Ends a line; if it ends because of this rank, the other side hangs up first."""
        if self._failure is not None:
            pipe.drain(time.monotonic() + _LEAVE_S)

    def _use(self, root: int, stream: int, pipe: InPipe, sender: int) -> None:
        with self._changed:
            self._ins[root, stream], self._senders[root, stream] = pipe, sender
            answers = self._rounds.complete(root, stream)
            is_over, is_lost = self._failure is not None, sender in self._rounds.lost
        if is_over:
            pipe.leave()
        elif is_lost:
            pipe.close()
        for answer in answers:
            pipe.answer(answer.place)

    def _oldest(self) -> int:
        with self._changed:
            return self._rounds.oldest

    def _call(self, rank: int, root: int, stream: int) -> socket.socket:
        """A line to a rank. Raises OSError or ChannelError if it cannot be had."""
        wait_s = min(HANDSHAKE_S, _CALL * self.timeout_s)
        sock = socket.create_connection(self._addresses[rank], wait_s)
        try:
            with self._changed:
                self._calls.add(sock)
                if self._failure is not None:
                    raise ChannelError(str(self._failure))
            _tune(sock)
            peer = Peer(self.rank, root * _MAX_STREAMS + stream)
            introduce(sock, self._group, self._key, peer, time.monotonic() + wait_s)
        except BaseException:
            sock.close()
            raise
        finally:
            with self._changed:
                self._calls.discard(sock)
        return sock


class _Sink:
    """Where an InPipe puts what it receives."""

    def __init__(self, channel: TcpChannel, root: int, stream: int) -> None:
        self._channel, self._root, self._stream = channel, root, stream
        self.num_received = 0

    def memory_for(self, place: Place, num_bytes: int) -> memoryview | None:
        channel = self._channel
        with channel._changed:
            while channel._failure is None:
                try:
                    memory = channel._rounds.memory_for(place, self._stream)
                except KeyError:
                    channel._changed.wait()  # the round has not begun here
                    continue
                except IndexError as error:
                    words = f"round {place[0]} brings more slots than are expected: {error}"
                else:
                    if memory is None or len(memory) == num_bytes:
                        return memory
                    words = f"round {place[0]} brings {num_bytes} bytes, {len(memory)} are expected"
                channel._fail(ChannelError(f"{words}: the ranks have different plans"))
        raise EOFError("the channel is over")

    def received(self, place: Place) -> None:
        channel = self._channel
        self.num_received += 1
        with channel._changed:
            actions = channel._rounds.received(self._root, self._stream, place)
            channel._changed.notify_all()
        channel._do(actions)


def open_tcp(
    control: Control,
    *,
    host: str = "127.0.0.1",
    advertise: str | None = None,
    fanout: int | None = None,
    streams: int = 1,
    group: str = "weights",
    key: bytes | None = None,
    depth: int = DEFAULT_DEPTH,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> TcpChannel:
    """A channel over TCP between the ranks of a formation; called by all of them.

    Each rank listens at `host`, at a port of its own, and tells the others `advertise`, or `host`.
    A rank passes on to `fanout` others: 1 makes a chain, None a star. `streams` connections carry
    each bucket. `depth` should exceed the hops of a chain. Key, depth, fanout and streams have to
    be equal on all ranks.
    Raises ValueError for settings out of range or an address that nobody can call, ChannelError if
    a rank is lost or has other settings: on all ranks, whoever's fault it is.
    """
    listener: socket.socket | None = None
    problem: ValueError | ChannelError | None = None
    num_ranks = len(control.ranks)
    settings = {"fanout": str(fanout or max(num_ranks - 1, 1)), "streams": str(streams)}
    settings |= {"key": fingerprint(key), "address": "good"}
    try:
        listener = _listen(host, advertise, key)
    except (ValueError, ChannelError) as error:
        problem = error  # the others hear of it instead of waiting
        settings["address"] = str(error)
    try:
        _agree(control, Terms({}, depth, settings), problem, timeout_s)
        assert listener is not None
        token = secrets.token_hex(8)  # so that a line of another channel is never taken for ours
        found = control.gather([advertise or host, listener.getsockname()[1]], timeout_s)
        places = [found.get(rank) for rank in control.ranks]
        token, places = control.share([token, places], timeout_s)
        if missing := [rank for rank, p in zip(control.ranks, places, strict=True) if p is None]:
            raise ChannelError(f"ranks {missing} gave no address", tuple(missing))
        return TcpChannel(
            control.ranks.index(control.rank),
            [(str(name), int(port)) for name, port in places],
            listener,
            fanout=fanout or max(num_ranks - 1, 1),
            streams=streams,
            group=f"{group} {token}",
            key=key,
            depth=depth,
            timeout_s=timeout_s,
        )
    except BaseException:
        if listener is not None:
            listener.close()
        raise


def _listen(host: str, advertise: str | None, key: bytes | None) -> socket.socket:
    check_key(key, host)
    if is_wildcard(advertise or host):
        raise ValueError(
            f"{advertise or host} is every address of this host and none to connect to: give "
            "the name of this host as advertise"
        )
    return listen(host, 0)


def _agree(
    control: Control, terms: Terms, problem: ValueError | ChannelError | None, timeout_s: float
) -> None:
    """As agreement does; a rank with a problem of its own tells it and raises it."""
    try:
        agree(control, terms, timeout_s)
    except ChannelError as error:
        raise problem or error from None
    if problem is not None:  # that of all ranks
        raise problem


def _tune(sock: socket.socket) -> None:
    """Sets what suits large items; BBR, the default of some hosts, paces a loopback to a third."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sock.getpeername()[0] in ("127.0.0.1", "::1"):
        with contextlib.suppress(OSError, AttributeError):  # not there: then it stays as it is
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
