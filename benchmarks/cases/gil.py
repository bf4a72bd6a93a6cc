"""Speed of a second Python thread while the codec works on one thread: at least 80 % (I62).

pytest benchmarks/cases/gil.py -o addopts=--benchmark-columns=min,median,max -s
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from gymfast.delta import Encoder, State, apply, encode

NUM_UNITS = 2**26
ROUNDS = 7


class Counter:
    """A thread that does nothing but count."""

    def __init__(self) -> None:
        self.count = 0
        self._is_done = False
        self._thread = threading.Thread(target=self._work)

    def _work(self) -> None:
        while not self._is_done:
            self.count += 1

    def __enter__(self) -> Counter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_done = True
        self._thread.join()

    def rate_per_s(self, call: Callable[[], object]) -> float:
        start, start_s = self.count, time.perf_counter()
        call()
        return (self.count - start) / (time.perf_counter() - start_s)


def calls() -> dict[str, Callable[[], object]]:
    """Each operation with its frame; every one may be repeated."""
    rng = np.random.default_rng(1)
    old = rng.integers(0, 2**16, NUM_UNITS, np.uint16)
    new = old ^ (rng.random(NUM_UNITS) < 0.01).astype(np.uint16)
    encoder = Encoder(State.copy_of({"w": old}), threads=1)
    there = encode({"w": old}, {"w": new}, threads=1)
    back = encode({"w": new}, {"w": old}, threads=1)
    receiver = State.copy_of({"w": old}, threads=1)

    def encode_and_rollback() -> None:
        for _ in encoder.encode({"w": new}):
            pass
        encoder.rollback()

    def apply_and_back() -> None:
        apply(receiver, there)
        apply(receiver, back)

    return {"encode": encode_and_rollback, "apply": apply_and_back, "verify": receiver.verify}


@pytest.mark.parametrize("op", ["encode", "apply", "verify"])
def test_second_thread(op: str, benchmark: BenchmarkFixture) -> None:
    call = calls()[op]
    call()
    start_s = time.perf_counter()
    call()
    alone_s = time.perf_counter() - start_s
    ratios: list[float] = []
    with Counter() as counter:

        def compare() -> None:
            alone = counter.rate_per_s(lambda: time.sleep(alone_s))
            ratios.append(counter.rate_per_s(call) / alone)

        benchmark.pedantic(compare, rounds=ROUNDS, warmup_rounds=1)
    median, low, high = (float(np.percentile(ratios[1:], q)) for q in (50, 10, 90))
    benchmark.extra_info["speed_ratio"] = median
    print(
        f"{op}: the second thread keeps {median:.0%} of its speed (p10 {low:.0%}, p90 {high:.0%})"
    )
    assert median >= 0.8
