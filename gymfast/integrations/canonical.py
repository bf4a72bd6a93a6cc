"""The checkpoint of an engine in CPU memory: deltas apply to it, its tensors are loaded.

An engine repacks, fuses and pads what it loads, so a delta cannot be written to its memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize

from gymfast.delta import State, Tensor, apply, as_tensor, inspect, restore
from gymfast.delta.memory import CPU
from gymfast.delta.records import Digest
from gymfast.delta.state import Slot
from gymfast.delta.tensors import like
from gymfast.errors import ChainError, FormatError
from gymfast.stores import open_store
from gymfast.sync import LiveTarget, Subscriber
from gymfast.sync import State as TargetState
from gymfast.sync.chain import EMPTY_ROOT
from gymfast.sync.keys import RunKeys
from gymfast.sync.reader_status import StatusReporter, period_s, reader_name
from gymfast.sync.signatures import Key

_LOOK_EVERY_S = 0.1
_Mark = tuple[str, tuple[int, ...], Digest]


class CanonicalCopy:
    """One state of named tensors in CPU memory, and which of them an engine holds already.

    It follows a run of a store, or takes frames and buckets; not both. Not thread-safe.
    """

    def __init__(self) -> None:
        """A copy of no tensors, for frames and buckets."""
        self._own = State(backend="cpu")
        self._target: LiveTarget | None = None
        self._subscriber: Subscriber | None = None
        self._reporter: StatusReporter | None = None
        self._live: tuple[int | None, str | None] = None, None
        self._waiting: dict[str, Tensor] = {}
        self._before_bucket: dict[str, Slot] | None = None
        self._loaded: dict[str, _Mark] = {}

    @classmethod
    def of_run(
        cls,
        store: str,
        run: str,
        *,
        staging_dir: str | None = None,
        timeout_s: float = 60.0,
        key: Key | None = None,
    ) -> CanonicalCopy:
        """A copy of no tensors that takes versions of a run. Raises what `Subscriber` raises.

        What the engine serves is told in the store from the first version on that it has loaded.
        """
        copy = cls()
        weights: dict[str, Any] = {}
        copy._target = LiveTarget(weights, backend="cpu")
        opened, reader = open_store(store), reader_name()
        copy._subscriber = Subscriber(
            opened,
            run,
            copy._target,
            reader_id=reader,
            staging_dir=staging_dir,
            timeout_s=timeout_s,
            key=key,
        )
        if (every_s := period_s()) is not None:
            copy._reporter = StatusReporter(opened, RunKeys(run), reader, period_s=every_s)
        return copy

    @property
    def num_waiting(self) -> int:
        """Tensors of buckets that wait for the last one."""
        return len(self._waiting)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, in the order of the checkpoint."""
        return tuple(self._state.slots)

    @property
    def root(self) -> str:
        """The root of the state."""
        return self._state.root.hex()

    def pull(self, version: int, *, timeout_s: float = 0.0) -> None:
        """Makes the copy hold exactly that version of the run, waiting so long for it to appear.

        Raises ChainError if no run is followed, and what `Subscriber.pull` and `Subscriber.wait`
        raise.
        """
        subscriber = self._require_subscriber(version)
        if timeout_s > 0:
            report = subscriber.wait(version, timeout_s, interval_s=_LOOK_EVERY_S, is_exact=True)
        else:
            report = subscriber.pull(version)
        if report.version != version:  # ranks of an engine must not differ
            raise ChainError(f"version {version} is asked for, the run gave {report.version}")

    def put_frame(self, frame: bytes) -> None:
        """Applies one frame: an anchor to whatever is held, a delta to its base.

        Raises ChainError if a run is followed or the copy is inconsistent, FormatError if the
        frame is damaged or made for another base.
        """
        self._require_own("a frame")
        self._before_bucket = None
        if inspect(frame).base_root.hex() == EMPTY_ROOT:  # an anchor
            restore(self._own, frame, allow_new_names=True)
        else:
            apply(self._own, frame)

    def put_bucket(self, tensors: Mapping[str, Any], *, is_last: bool) -> None:
        """Keeps whole tensors; with the last bucket they all replace what is held.

        Raises ChainError if a run is followed, TypeError for a value that is no tensor.
        """
        self._require_own("a bucket")
        self._waiting |= {n: as_tensor(v, n).copy(CPU) for n, v in tensors.items()}
        if is_last:
            self._before_bucket = dict(self._own.slots)
            self._own.add_all(self._waiting)
            self._waiting = {}

    def drop_waiting(self) -> None:
        """Forgets the buckets whose last one did not come."""
        self._waiting = {}

    def take_back_bucket(self) -> None:
        """Holds again what it held before the newest buckets, unless these were loaded."""
        if self._before_bucket is not None:
            self._own.slots = self._before_bucket
            self._before_bucket = None

    def changed(self) -> list[str]:
        """Names whose bytes are not those that the engine holds, removed ones too.

        Raises ChainError if the copy is inconsistent.
        """
        self._state.require_consistent()
        marks = self._marks()
        gone = [name for name in self._loaded if name not in marks]
        return [name for name, mark in marks.items() if self._loaded.get(name) != mark] + gone

    def mark_loaded(self) -> None:
        """The engine holds all of it now."""
        self._loaded = self._marks()
        self._before_bucket = None
        if self._subscriber is not None and self._reporter is not None:
            self._live = self._subscriber.version, self._subscriber.root
            self._reporter.tell(self._subscriber.status, self._subscriber.root)

    def fail(self, error: str, *, is_flagged: bool) -> None:
        """The update is over: the engine goes on as before, or holds anything if it is flagged."""
        self.take_back_bucket()
        if self._subscriber is None or self._reporter is None:
            return
        version, root = (None, None) if is_flagged else self._live
        state = TargetState.CLEAN if version is not None else TargetState.EMPTY
        if is_flagged:
            state = TargetState.INCONSISTENT
        status = self._subscriber.status
        self._reporter.tell(replace(status, state=state, version=version, last_error=error), root)

    def tensors(self, names: Iterable[str], sample: Any) -> Iterable[tuple[str, Any]]:
        """Pairs of name and tensor of the sort of `sample`, sharing the memory of the copy."""
        for name in names:
            yield name, like(self._state.slots[name].tensor, sample)

    def batches(
        self, names: Iterable[str], sample: Any, max_bytes: int
    ) -> Iterable[list[tuple[str, Any]]]:
        """These pairs in lists of at most `max_bytes` bytes, or of one tensor."""
        batch: list[tuple[str, Any]] = []
        num_bytes = 0
        for name, tensor in self.tensors(names, sample):
            if batch and num_bytes + tensor.nbytes > max_bytes:
                yield batch
                batch, num_bytes = [], 0
            batch.append((name, tensor))
            num_bytes += tensor.nbytes
        if batch:
            yield batch

    def close(self) -> None:
        """Gives lease, staging and status back."""
        if self._reporter is not None:
            self._reporter.close()
        if self._subscriber is not None:
            self._subscriber.close()

    @property
    def _state(self) -> State:
        return self._own if self._target is None else self._target.state

    def _marks(self) -> dict[str, _Mark]:
        return {name: (*slot.spec, slot.digest) for name, slot in self._state.slots.items()}

    def _require_subscriber(self, version: int) -> Subscriber:
        if self._subscriber is None:
            raise ChainError(
                f"version {version} is asked for, and no run is followed: name 'store' and 'run' "
                "in the init info, or send a frame or buckets"
            )
        return self._subscriber

    def _require_own(self, what: str) -> None:
        if self._subscriber is not None:
            raise ChainError(
                f"{what} was sent to an engine that follows a run of a store: ask for a version, "
                "or leave 'store' and 'run' out of the init info"
            )


def bucket_of(data: bytes) -> dict[str, Tensor]:
    """The tensors of a bucket that came as the bytes of a safetensors file.

    Raises FormatError if they are none.
    """
    try:
        entries: list[tuple[str, Any]] = deserialize(data)  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise FormatError(
            f"a bucket of {len(data)} bytes is no safetensors file: {error}"
        ) from error
    return {
        name: Tensor(entry["dtype"], tuple(entry["shape"]), np.frombuffer(entry["data"], np.uint8))
        for name, entry in entries
    }
