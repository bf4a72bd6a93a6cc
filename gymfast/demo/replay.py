"""The store once more, from the first version to the last, on a quiet machine: sizes and speeds.

A reader that joins at the end holds every version in turn; each pair is sent again in every way.
All encoders and receivers are resident and use one thread.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gymfast.delta import Encoder, State, Tensor, apply
from gymfast.demo.limit import Limit, LimitCounter
from gymfast.demo.peers import U8, XorZstd, Zstd, copy_all
from gymfast.demo.result import Speed

ProfileName = Literal["fast", "small"]
Held = dict[str, Tensor]


@dataclass(frozen=True)
class Timing:
    """Bytes sent and seconds of one way to send one version."""

    size_bytes: int
    encode_s: float
    apply_s: float
    is_exact: bool


@dataclass(frozen=True)
class PairResult:
    """One version against the one before, sent in every way; `xor_zstd1` is None without zstd."""

    version: int
    limit: Limit
    memcpy_s: float
    fast: Timing
    small: Timing
    xor_zstd1: Timing | None


class GymfastWay:
    """A resident publisher and a resident receiver with one profile."""

    def __init__(self, profile: ProfileName, state: Held) -> None:
        self._encoder = Encoder(State.copy_of(state, threads=1), profile=profile)
        self._receiver = State.copy_of(state, threads=1)

    def send(self, new: Held) -> Timing:
        """Encode against the version before, apply, compare every byte."""
        start_s = time.perf_counter()
        frame = b"".join(self._encoder.encode(new))
        encode_s = time.perf_counter() - start_s
        self._encoder.commit()
        start_s = time.perf_counter()
        apply(self._receiver, frame, threads=1)
        apply_s = time.perf_counter() - start_s
        held = self._receiver.tensors
        exact = all(np.array_equal(held[name].data, tensor.data) for name, tensor in new.items())
        return Timing(len(frame), encode_s, apply_s, exact)


class Replay:
    """Sends versions again; `add` each version in order, then ask for `pairs`."""

    def __init__(self, zstd: Zstd | None) -> None:
        self.pairs: list[PairResult] = []
        self._zstd = zstd
        self._old: Held = {}
        self._ways: dict[ProfileName, GymfastWay] = {}
        self._peer: XorZstd | None = None
        self._copy: dict[str, U8] = {}

    def add(self, version: int, state: Held) -> None:
        """The next version; the first one only prepares the encoders and receivers."""
        new = {name: tensor.copy() for name, tensor in _distinct(state).items()}
        if self._old:
            self.pairs.append(self._measure(version, new))
        else:
            self._prepare(new)
        self._old = new

    def _prepare(self, state: Held) -> None:
        self._ways = {"fast": GymfastWay("fast", state), "small": GymfastWay("small", state)}
        flat = _bytes_of(state)
        self._peer = XorZstd(self._zstd, flat) if self._zstd else None
        self._copy = {name: np.ones_like(data) for name, data in flat.items()}

    def _measure(self, version: int, new: Held) -> PairResult:
        flat = _bytes_of(new)
        start_s = time.perf_counter()
        copy_all(flat, self._copy)
        memcpy_s = time.perf_counter() - start_s
        counter = LimitCounter()
        for name, tensor in new.items():
            counter.add(self._old[name].data.view(np.uint16), tensor.data.view(np.uint16))
        return PairResult(
            version=version,
            limit=counter.limit(),
            memcpy_s=memcpy_s,
            fast=self._ways["fast"].send(new),
            small=self._ways["small"].send(new),
            xor_zstd1=_send_xor(self._peer, flat) if self._peer else None,
        )


def _send_xor(peer: XorZstd, new: dict[str, U8]) -> Timing:
    start_s = time.perf_counter()
    frames = peer.encode(new)
    encode_s = time.perf_counter() - start_s
    peer.promote(new)
    start_s = time.perf_counter()
    peer.apply(frames)
    apply_s = time.perf_counter() - start_s
    return Timing(sum(map(len, frames)), encode_s, apply_s, peer.holds(new))


def speed(size_bytes: int, seconds: list[float]) -> Speed:
    """GB/s of a state of this size over all samples."""
    rates = size_bytes / np.asarray(seconds) / 1e9
    return Speed(
        median_gbps=float(np.median(rates)),
        p10_gbps=float(np.quantile(rates, 0.1)),
        p90_gbps=float(np.quantile(rates, 0.9)),
        num_samples=len(seconds),
    )


def _distinct(state: Held) -> Held:
    """One name for each piece of memory: tied tensors are sent once, by every way."""
    seen: dict[int, str] = {}
    for name, tensor in state.items():
        seen.setdefault(tensor.address, name)
    return {name: state[name] for name in seen.values()}


def _bytes_of(state: Held) -> dict[str, U8]:
    return {name: tensor.data for name, tensor in state.items()}
