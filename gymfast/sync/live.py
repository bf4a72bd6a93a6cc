"""Versions over live connections: a delta to all receivers at once, or everything.

All ranks of a formation take part: rank 0 publishes, the others receive. What a receiver holds is
learned from it before each version, by its root; who does not hold the snapshot makes the next
version a full one for all. See docs/transfer.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np

from gymfast.buckets import BucketTensor
from gymfast.channels.base import Channel
from gymfast.channels.control import Control
from gymfast.channels.stream import receive_stream, send_stream
from gymfast.channels.transfer import BucketTransfer
from gymfast.channels.troubles import heeding
from gymfast.delta import Encoder, State, Tensor, apply
from gymfast.delta.encode import Profile
from gymfast.delta.memory import CPU
from gymfast.delta.read_back import ReadBack
from gymfast.delta.state import gather, num_threads
from gymfast.delta.tensors import Weights
from gymfast.errors import ChannelError, ChecksumError, CoverageError
from gymfast.sync.density import sampled_density

Kind = Literal["delta", "full"]
DEFAULT_MAX_DENSITY = 0.25
DEFAULT_DELTA_BUCKET_BYTES = 1 << 18
_Work = Callable[[], int]


@dataclass(frozen=True)
class LiveReport:
    """One version: what went over the channel, and what became of it at each rank."""

    version: int
    kind: Kind
    root: str
    raw_bytes: int
    sent_bytes: int
    failed: dict[int, str]
    seconds: dict[str, float] = field(compare=False)

    def require_all(self) -> None:
        """Raises ChannelError, naming all of them, if a rank failed."""
        if self.failed:
            words = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(self.failed.items()))
            raise ChannelError(f"version {self.version}: {words}", tuple(sorted(self.failed)))


class _Side:
    """What both sides of a version do."""

    def __init__(
        self, control: Control, channel: Channel, bucket_bytes: int, timeout_s: float
    ) -> None:
        self._control, self._channel = control, channel
        self._bucket_bytes, self._timeout_s = bucket_bytes, timeout_s
        self._seconds: dict[str, float] = {}
        self._begin_s = 0.0
        self._is_through = False  # with the channel, in this version

    def rejoin(self, control: Control, channel: Channel) -> None:
        """Goes on in a new formation, with a channel of its own."""
        self._control, self._channel = control, channel

    def _start(self) -> None:
        self._seconds, self._begin_s = {}, time.perf_counter()

    def _lap(self, name: str) -> None:
        now_s = time.perf_counter()
        self._seconds[name] = now_s - self._begin_s
        self._begin_s = now_s

    def _try(self, work: _Work) -> tuple[int, Exception | None]:
        """Runs this rank's part; a failure before it is through ends its rounds and is told."""
        control, self._is_through = self._control, False
        try:
            with heeding(control, self._channel, (0,)):
                return work(), None
        except Exception as error:  # noqa: BLE001 - raised when all ranks know of it
            if not self._is_through:
                words = f"{type(error).__name__}: {error}"
                self._channel.abort(words)
                control.trouble(words)
            return 0, error

    def _acknowledge(self, root: str, failure: Exception | None) -> dict[int, str]:
        """Who does not hold the version of rank 0, and why."""
        control = self._control
        words = "" if failure is None else f"{type(failure).__name__}: {failure}"
        answers = control.gather([words, root], self._timeout_s)
        failed = {rank: why for rank, why in control.lost.items() if rank in control.ranks}
        for rank, (text, theirs) in answers.items():
            if text:
                failed[rank] = text
            elif theirs != answers[0][1]:
                failed[rank] = f"its weights have the root {theirs[:16]}, not {root[:16]}"
        shared = control.share(sorted(failed.items()), self._timeout_s)
        return {int(rank): str(text) for rank, text in shared}


class LivePublisher(_Side):
    """The rank 0 of a formation: publishes versions to all others. Not thread-safe.

    Keeps a snapshot, which is what receivers hold that answered for the last version.
    """

    def __init__(
        self,
        control: Control,
        channel: Channel,
        *,
        profile: Profile = "auto",
        backend: str = "auto",
        threads: int | None = None,
        max_density: float = DEFAULT_MAX_DENSITY,
        bucket_bytes: int | None = None,
        delta_bucket_bytes: int = DEFAULT_DELTA_BUCKET_BYTES,
        timeout_s: float = 60.0,
    ) -> None:
        """A publisher that holds nothing: its first version is a full one.

        Buckets of a delta are sent whole, however little the last one holds, and leave when they
        are full: small ones end sooner. Over a long round trip see docs/transfer.md. Those of a
        full version have by default the size that suits the channel.
        More than `max_density` of changed units, by a sample, make a full version.
        Raises ValueError on another rank than 0, or for a density out of range.
        """
        if control.rank != 0:
            raise ValueError(f"rank {control.rank} cannot publish, rank 0 does")
        if not 0 <= max_density <= 1:
            raise ValueError(f"max_density is {max_density}, expected 0 to 1")
        if bucket_bytes is None:
            bucket_bytes = channel.good_bucket_bytes
        super().__init__(control, channel, bucket_bytes, timeout_s)
        self._profile, self._backend, self._threads = profile, backend, threads
        self._max_density = max_density
        self._delta_bucket_bytes = min(bucket_bytes, delta_bucket_bytes)
        self._encoder: Encoder | None = None
        self.version = -1
        """The newest version that a receiver holds."""

    def publish(self, weights: Weights) -> LiveReport:
        """Brings all receivers to the weights, which must not change meanwhile.

        A receiver that fails is named in the report, and the others go on if the channel can.
        Raises ChannelError if no receiver has the version; the snapshot is then as before. Raises
        TypeError and ValueError for weights that no frame can carry.
        """
        control, version = self._control, self.version + 1
        self._start()
        tensors = gather(weights)
        held = control.gather("", self._timeout_s)
        kind = self._kind(weights, [root for rank, root in held.items() if rank != 0])
        specs = [[n, t.dtype, list(t.shape), t.num_bytes] for n, t in tensors.items()]
        bucket_bytes = self._bucket_bytes if kind == "full" else self._delta_bucket_bytes
        offer = [kind, version, bucket_bytes, specs if kind == "full" else []]
        control.share(offer, self._timeout_s)
        self._lap("ask")
        sent_bytes, failure = self._try(
            lambda: self._send_delta(weights) if kind == "delta" else self._send_full(tensors)
        )
        self._lap("send")
        root = "" if failure else self._state.root.hex()
        failed = self._acknowledge(root, failure)
        self._lap("acknowledge")
        receivers = set(control.ranks) - {0}
        if failure is not None or (receivers and receivers <= failed.keys()):
            self._take_back()
            if failure is not None:
                raise failure
            LiveReport(version, kind, root, 0, sent_bytes, failed, {}).require_all()
        if kind == "delta":
            self._require_encoder().commit()
        self.version = version
        raw_bytes = sum(tensor.num_bytes for tensor in tensors.values())
        return LiveReport(version, kind, root, raw_bytes, sent_bytes, failed, self._seconds)

    @property
    def _state(self) -> State:
        return self._require_encoder().state

    def _require_encoder(self) -> Encoder:
        assert self._encoder is not None, "there is no snapshot"
        return self._encoder

    def _kind(self, weights: Weights, held: list[str]) -> Kind:
        if self._encoder is None or any(root != self._state.root.hex() for root in held):
            return "full"
        if self._state.slots.keys() != weights.keys():
            return "full"
        return "full" if sampled_density(self._state, weights) > self._max_density else "delta"

    def _send_delta(self, weights: Weights) -> int:
        sections = self._require_encoder().encode(weights)
        with self._channel.agreed():  # all ranks have the size of a bucket from the offer
            return send_stream(self._channel, sections, self._delta_bucket_bytes)

    def _send_full(self, tensors: Mapping[str, Tensor]) -> int:
        """Sends all bytes from where they are, and makes the snapshot of them meanwhile."""
        share = [BucketTensor(n, t.dtype, t.shape, t.num_bytes) for n, t in tensors.items()]
        transfer = BucketTransfer(
            self._control, self._channel, {0: share}, self._bucket_bytes, timeout_s=self._timeout_s
        )
        on_host = {n: t if t.place == CPU else t.copy(CPU) for n, t in tensors.items()}
        copy = partial(State.copy_of, tensors, backend=self._backend, threads=self._threads)
        is_on_host = all(tensor.place == CPU for tensor in tensors.values())
        with ThreadPoolExecutor(1, "gymfast-snapshot") as pool:
            # Only the calling thread has the stream on which tensors of a GPU are ready.
            copying = pool.submit(copy) if is_on_host else None
            transfer.run(self.version + 1, {n: t.data for n, t in on_host.items()})
            self._is_through = True
        state = copying.result(0) if copying else copy()
        self._encoder = Encoder(state, profile=self._profile)
        return transfer.num_bytes

    def _take_back(self) -> None:
        """The snapshot is again what receivers held; none, if that is not known."""
        if self._encoder is not None:
            self._encoder.rollback()
            if self.version < 0:
                self._encoder = None


class LiveSubscriber(_Side):
    """Any other rank: takes versions into tensors in CPU memory, in place. Not thread-safe.

    A delta is complete and checked before the first write. A full version needs as much memory
    again while it comes.
    """

    def __init__(
        self,
        control: Control,
        channel: Channel,
        weights: MutableMapping[str, Any],
        *,
        backend: str = "auto",
        threads: int | None = None,
        verify_all: bool = True,
        timeout_s: float = 60.0,
    ) -> None:
        """A receiver into `weights`; one pass computes their digests. May be empty at first.

        `verify_all` reads all bytes again before a version counts: blocks that it changes right
        after they were written, the others at the end.
        Raises ValueError on rank 0, or for tensors that cannot be written in place.
        """
        if control.rank == 0:
            raise ValueError("rank 0 publishes, it does not receive")
        super().__init__(control, channel, 0, timeout_s)
        self._weights, self._verify_all = weights, verify_all
        self._options: dict[str, Any] = {"backend": backend, "threads": threads}
        self._state: State | None = State.attach(weights, **self._options)
        self.version = -1

    def receive(self, *, timeout_s: float | None = None) -> LiveReport:
        """The next version, once rank 0 publishes it; `timeout_s` bounds the wait for that.

        Raises ChannelError if it does not come (it may be called again) or rank 0 fails,
        FormatError (ChecksumError, CoverageError) for what does not fit. The weights are then as
        before, unless the error says otherwise; the next version heals them.
        """
        control = self._control
        self._start()
        with control.repeatable():
            control.gather(self._held(), self._timeout_s)
            offer = control.share(None, timeout_s or self._timeout_s)
        kind, version, self._bucket_bytes, specs = offer
        self._lap("ask")
        num_bytes, failure = self._try(
            lambda: self._take_delta() if kind == "delta" else self._take_full(version, specs)
        )
        root = self._held() if failure is None else ""
        failed = self._acknowledge(root, failure)
        self._lap("acknowledge")
        if failure is not None:
            raise failure
        if control.rank in failed or 0 in failed:
            rank = control.rank if control.rank in failed else 0
            raise ChecksumError(f"version {version} is not what rank {rank} has: {failed[rank]}")
        self.version = version
        raw_bytes = sum(slot.tensor.num_bytes for slot in self._slots().values())
        return LiveReport(version, kind, root, raw_bytes, num_bytes, failed, self._seconds)

    def _held(self) -> str:
        """The root of what is here; empty if it is not known."""
        if self._state is None or not self._state.is_consistent:
            return ""
        return self._state.root.hex()

    def _slots(self) -> Mapping[str, Any]:
        return {} if self._state is None else self._state.slots

    def _take_delta(self) -> int:
        frame = bytearray()
        with self._channel.agreed():
            for part in receive_stream(self._channel, 0, self._bucket_bytes):
                frame += part
        self._is_through = True
        self._lap("receive")
        assert self._state is not None, "a delta needs a base"
        done = ReadBack() if self._verify_all else None
        apply(self._state, frame, done=done)
        self._lap("apply")
        if self._verify_all:
            self._state.verify(done)
            self._lap("verify")
        return len(frame)

    def _take_full(self, version: int, specs: list[Any]) -> int:
        """Receives everything beside the weights, then copies it over them."""
        share = [BucketTensor(n, d, tuple(s), size) for n, d, s, size in specs]
        refusal = self._refusal(share)
        staged = {t.name: np.empty(t.num_bytes, np.uint8) for t in share if refusal is None}
        transfer = BucketTransfer(
            self._control, self._channel, {0: share}, self._bucket_bytes, timeout_s=self._timeout_s
        )
        transfer.run(version, staged, refusal=refusal)
        self._is_through = True
        self._lap("receive")
        if not self._weights:
            self._weights.update({t.name: Tensor(t.dtype, t.shape, staged[t.name]) for t in share})
        else:
            self._state = None  # from here on the weights may be anything
            targets = gather(self._weights)
            with ThreadPoolExecutor(num_threads(self._options["threads"])) as pool:
                # Consumed, so that an error in a thread is raised here.
                list(pool.map(lambda name: np.copyto(targets[name].data, staged[name]), targets))
        self._state = State.attach(self._weights, **self._options)
        self._lap("apply")
        return transfer.num_bytes

    def _refusal(self, share: list[BucketTensor]) -> CoverageError | None:
        """Why these tensors cannot be taken; None if they can."""
        if not self._weights:
            return None
        ours = {name: (t.dtype, t.shape) for name, t in gather(self._weights).items()}
        theirs = {tensor.name: (tensor.dtype, tensor.shape) for tensor in share}
        odd = sorted(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n))
        if not odd:
            return None
        here, there = ours.get(odd[0], "not"), theirs.get(odd[0], "not")
        return CoverageError(
            f"{len(odd)} tensors differ: {odd[0]!r} is {here} here and {there} there; nothing was "
            "written"
        )
