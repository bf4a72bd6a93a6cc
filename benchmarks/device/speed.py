"""Times of encode, apply and digest beside a copy of the same bytes, each result checked first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.device.memory import HOST_CLOCK, U8, Device
from benchmarks.device.native import NativeCodec, Run, runs_of
from benchmarks.device.results import Report, Row, Subject, row_of
from gymfast.delta.backends import BlockParams, select
from gymfast.delta.frame import PROFILES
from gymfast.delta.geometry import Geometry, plan_geometry
from gymfast.testing.weights import rl_like_update, rl_like_weights

WARM_UP = 2
_PIECE_UNITS = 1 << 29
_SAMPLE_BYTES = 1 << 28  # generated on the CPU; a larger state repeats it


@dataclass(frozen=True)
class Settings:
    """What the command line says about the rows."""

    num_units: int
    call_sections: int  # of one native call, each of 2^23 units
    rounds: int
    seed: int


@dataclass
class States:
    """Old and new BF16 weights on the device, a live copy, and memory to copy to."""

    device: Device
    settings: Settings
    sample: U8  # generated old weights; the state repeats them
    old: torch.Tensor
    new: torch.Tensor
    live: torch.Tensor
    copy_target: torch.Tensor
    density: float = 0.0

    @classmethod
    def of(cls, device: Device, settings: Settings, sample: U8) -> States:
        """Old weights everywhere."""
        tensors = [device.bytes(2 * settings.num_units) for _ in range(4)]
        states = cls(device, settings, sample, *tensors)
        states._repeat(sample, states.old)
        return states

    def update(self, sample: U8, density: float) -> None:
        """Makes `new` these weights, repeated as the old ones are."""
        self._repeat(sample, self.new)
        self.density = density

    @property
    def num_changed(self) -> int:
        """Units that differ between old and new."""
        pieces = zip(pieces_of(self.old), pieces_of(self.new), strict=True)
        return sum(int(torch.count_nonzero(old != new)) for old, new in pieces)

    @property
    def geometry(self) -> Geometry:
        return plan_geometry("BF16", (self.old.numel() // 2,))

    def params(self, profile: int) -> BlockParams:
        """Class parameters of the sample, which are good for all of its repetitions."""
        found = (0, 0)
        if PROFILES[profile] != "fast":
            found = select("cpu").class_params(self.sample, 2)
        return BlockParams(profile, *found, has_base=True)

    def copy(self) -> None:
        """The bound: the bytes of the state from device memory to device memory."""
        self.copy_target.copy_(self.new)

    def reset(self) -> None:
        self.live.copy_(self.old)

    def require_new(self, what: str, tensor: torch.Tensor) -> None:
        """Raises AssertionError if a tensor is not the new state."""
        if not torch.equal(tensor.to(self.device.name), self.new):
            raise AssertionError(f"{what}: the tensor is not the new one: not lossless, not timed")

    def _repeat(self, sample: U8, state: torch.Tensor) -> None:
        piece = torch.from_numpy(sample).to(self.device.name)
        for part in state.split(piece.numel()):
            part.copy_(piece[: part.numel()])


def pieces_of(state: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Its units in pieces of a size that all functions of torch take."""
    return state.view(torch.int16).split(_PIECE_UNITS)


class Updates:
    """Generated weights of at most 2^27 units, and steps from them, both on the CPU."""

    def __init__(self, settings: Settings) -> None:
        self._seed = settings.seed
        size = min(_SAMPLE_BYTES, 2 * settings.num_units)
        self._weights = rl_like_weights(size, settings.seed)

    def old(self) -> U8:
        return _joined(self._weights)

    def new(self, density: float) -> U8:
        """The weights after a step that changes about this share."""
        return _joined(rl_like_update(self._weights, density, self._seed + 1))


def _joined(weights: dict[str, np.ndarray]) -> U8:
    return np.concatenate([array.reshape(-1) for array in weights.values()]).view(np.uint8)


class Timer:
    """Measures operations on states and adds their rows to a report."""

    def __init__(self, states: States, report: Report) -> None:
        self.states, self._report = states, report

    def measure(
        self,
        what: tuple[str, str],
        run: Callable[[], object],
        reset: Callable[[], object],
        *,
        body_bytes: int = 0,
        waits: bool = False,
    ) -> Row:
        """The row of (codec, operation); `waits` if it waits for the device inside."""
        states, device = self.states, self.states.device
        clock = device.wall_seconds if waits else device.seconds
        wall_s, copy_s = [], []
        for _ in range(WARM_UP + states.settings.rounds):
            reset()
            copy_s.append(device.seconds(states.copy))
            wall_s.append(clock(run))
        name = HOST_CLOCK if waits else device.clock
        size = states.old.numel()
        subject = Subject(*what, states.density, states.num_changed, size, name)
        row = row_of(subject, wall_s[WARM_UP:], copy_s[WARM_UP:], body_bytes)
        self._report.add(row)
        return row


class NativeTimes:
    """Encode and apply of one profile over a whole state, some calls one behind the other.

    `snapshot` is what encode compares with and updates: the live state, or other memory that the
    device reaches.
    """

    def __init__(
        self, codec: NativeCodec, timer: Timer, profile: int, snapshot: torch.Tensor | None = None
    ) -> None:
        self._codec, self._timer, self._states = codec, timer, timer.states
        self._snapshot = self._states.live if snapshot is None else snapshot
        states = self._states
        calls = states.settings.call_sections
        self._runs = list(runs_of(states.geometry, states.params(profile), calls))
        self._rows = codec.device.words(states.geometry.num_blocks, 2)
        self._digest(states.old)
        self._old_rows = self._rows.clone()
        self._coded = [codec.coded(run) for run in self._runs]
        self.body_bytes = 0

    def encode(self, what: tuple[str, str]) -> None:
        """Checks and times encode with update; its bodies stay for apply."""
        scratch = self._codec.encode_scratch(max(self._runs, key=_num_blocks))

        def run() -> None:
            pair = (self._snapshot, self._states.new)
            for part, coded in zip(self._runs, self._coded, strict=True):
                self._codec.encode(part, pair, self._rows, coded, scratch)

        self._reset()
        run()
        self._check(what, self._snapshot)
        self.body_bytes = sum(int(coded.table()[:, 3].sum()) for coded in self._coded)
        self._timer.measure(what, run, self._reset, body_bytes=self.body_bytes)

    def apply(self, what: tuple[str, str]) -> None:
        """Checks and times apply of what encode made, into the live state."""
        scratch = self._codec.apply_scratch(max(self._runs, key=_num_blocks))
        results = self._codec.device.words(len(self._runs), 2)

        def run() -> None:
            live = self._states.live
            for part, coded, result in zip(self._runs, self._coded, results, strict=True):
                self._codec.apply(part, live, self._rows, coded, result, scratch)

        self._reset()
        run()
        self._check(what, self._states.live)
        if not bool((results[:, 0] == -1).all()):
            raise AssertionError(f"{' '.join(what)}: errors {results[:, 0].tolist()}")
        self._timer.measure(what, run, self._reset, body_bytes=self.body_bytes)

    def digest(self, what: tuple[str, str]) -> None:
        self._timer.measure(what, lambda: self._digest(self._states.new), lambda: None)

    def _digest(self, data: torch.Tensor) -> None:
        for part in self._runs:
            self._codec.digest(part, data, self._rows)

    def _reset(self) -> None:
        self._snapshot.copy_(self._states.old)
        self._states.reset()
        self._rows.copy_(self._old_rows)

    def _check(self, what: tuple[str, str], got: torch.Tensor) -> None:
        name, rows = " ".join(what), self._rows.clone()
        self._states.require_new(name, got)
        self._digest(self._states.new)
        if not torch.equal(rows, self._rows):
            raise AssertionError(f"{name}: the digests are not those of the new state")


def _num_blocks(run: Run) -> int:
    return run.num_blocks
