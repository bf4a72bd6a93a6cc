"""Delta codec: encode and apply of gymfast and of its peers, beside plain copies and compares."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import xxhash

from benchmarks import bounds
from benchmarks.cases.conftest import driver_of
from benchmarks.codec import Buffers, Codec
from benchmarks.data import Pair, generated, stored, stored_names
from benchmarks.harness import Driver, Row, Settings, Timer
from benchmarks.limit import Limit, limit
from benchmarks.ours import OURS, Fast, Gymfast
from benchmarks.peers import PEERS

BOUNDS = ("memcpy", "stream copy", "compare", "read", "xxh3-128")
NATIVE = ("encode blocks", "apply blocks")
FUSED = "fused pass"
RECEIVER = ("attach", "verify", "first apply")  # after all others: they leave the State stale


@dataclass(frozen=True)
class Source:
    """Where a pair comes from."""

    kind: str
    name: str
    density: float = math.nan

    def load(self, settings: Settings) -> Pair:
        if self.kind == "generator":
            return generated(settings.size_bytes, settings.seed, settings.masters, self.density)
        if self.kind == "trained":
            from benchmarks.trained import trained

            return trained(settings.size_bytes, settings.seed)
        return stored(self.name)


@dataclass(frozen=True)
class Case:
    """One row to measure: a codec, or a bound if there is none."""

    source: Source
    codec: type[Codec] | None
    op: str
    threads: int

    def __str__(self) -> str:
        name = self.codec.name if self.codec else "bound"
        return f"{self.source.name}, {name}, {self.op}, threads {self.threads}"


@dataclass(frozen=True)
class Subject:
    """A pair with its buffers and its limit."""

    pair: Pair
    buffers: Buffers
    limit: Limit

    def row(self, case: Case, **columns: Any) -> Row:
        return Row(
            data=self.pair.label,
            density=self.pair.density,
            num_changed=self.pair.num_changed,
            codec=case.codec.name if case.codec else "bound",
            op=case.op,
            threads=case.threads,
            state_bytes=self.pair.num_bytes,
            digest=case.codec.digest if case.codec else "",
            **columns,
        )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = list(plan(driver_of(metafunc.config).settings))
        metafunc.parametrize("case", cases, ids=[str(case) for case in cases])


def plan(settings: Settings) -> Iterator[Case]:
    """All rows, so ordered that each pair and each codec is made once."""
    for source in sources(settings):
        is_for_speed = source.kind != "pairs"
        if is_for_speed:
            for threads in settings.threads:
                yield from (Case(source, None, op, threads) for op in BOUNDS)
        for codec in (*OURS, *PEERS):
            if settings.codecs and not any(part in codec.name for part in settings.codecs):
                continue
            if not is_for_speed:
                yield Case(source, codec, "size", 1)
                continue
            for threads in settings.threads if issubclass(codec, Gymfast) else (1,):
                yield Case(source, codec, "encode", threads)
                yield Case(source, codec, "apply", threads)
                if issubclass(codec, Gymfast):
                    yield from (Case(source, codec, op, threads) for op in NATIVE)
                if codec is Fast and threads == 1:
                    yield Case(source, codec, FUSED, threads)
                if codec is Fast:
                    yield from (Case(source, codec, op, threads) for op in RECEIVER)


def sources(settings: Settings) -> Iterator[Source]:
    if "generator" in settings.data:
        for density in settings.densities:
            yield Source("generator", f"generator {100 * density:g} %", density)
    if "trained" in settings.data:
        yield Source("trained", "trained")
    if "pairs" in settings.data:
        yield from (Source("pairs", name) for name in stored_names())


@lru_cache(maxsize=1)
def subject_of(source: Source, settings: Settings) -> Subject:
    pair = source.load(settings)
    return Subject(pair, Buffers(pair), limit(pair.old, pair.new))


@dataclass(frozen=True)
class Coded:
    """A codec whose result was checked on the whole pair; `timed` works on a part if it is slow."""

    frame_bytes: int
    timed: Codec


@lru_cache(maxsize=1)
def coded_of(codec: type[Codec], threads: int, source: Source, settings: Settings) -> Coded:
    subject = subject_of(source, settings)
    whole = codec(subject.pair, subject.buffers, threads)
    seconds = max(whole.check())
    frame_bytes = whole.frame_bytes
    if seconds <= settings.slow_s or subject.pair.num_bytes <= settings.slow_bytes:
        return Coded(frame_bytes, whole)
    part = codec(subject.pair.head(settings.slow_bytes), subject.buffers, threads)
    part.check()
    return Coded(frame_bytes, part)


@pytest.fixture(scope="session", autouse=True)
def _release() -> Iterator[None]:
    yield
    coded_of.cache_clear()
    subject_of.cache_clear()


def test_delta(benchmark: Any, driver: Driver, case: Case) -> None:
    subject = subject_of(case.source, driver.settings)
    benchmark.group = case.source.name
    if case.codec is None:
        row = time_bound(benchmark, driver.settings, subject, case)
    else:
        row = time_codec(benchmark, driver.settings, subject, case)
    if row:
        benchmark.extra_info.update(row.as_dict())
        driver.add(row)


def time_bound(benchmark: Any, settings: Settings, subject: Subject, case: Case) -> Row | None:
    pair, threads = subject.pair, case.threads
    to, new, old = subject.buffers.work_flat, pair.new_flat, pair.old_flat
    runs: dict[str, Callable[[], Any]] = {
        "memcpy": lambda: bounds.memcpy(to, new, threads),
        "stream copy": lambda: bounds.stream_copy(to, new, threads),
        "compare": lambda: bounds.compare(old, new, threads),
        "read": lambda: bounds.read(new, threads),
        "xxh3-128": lambda: xxhash.xxh3_128_digest(new),
    }
    if case.op == "xxh3-128" and threads > 1:
        benchmark.pedantic(lambda: None)
        return None  # one stream by definition
    samples = _timer(benchmark, settings, subject, pair, threads).measure(
        runs[case.op], lambda: None
    )
    return subject.row(case, **samples.summary(new.nbytes, new.nbytes))


def time_codec(benchmark: Any, settings: Settings, subject: Subject, case: Case) -> Row:
    assert case.codec is not None
    coded = coded_of(case.codec, case.threads, case.source, settings)
    columns: dict[str, Any] = {}
    if case.op == "size":
        benchmark.pedantic(lambda: None)
    else:
        codec = coded.timed
        timer = _timer(benchmark, settings, subject, codec.pair, case.threads)
        samples = timer.measure(*_steps(codec, case.op))
        columns = samples.summary(codec.pair.num_bytes, codec.pair.new_flat.nbytes)
    if case.op not in (*NATIVE, FUSED, *RECEIVER):
        columns |= {
            "frame_bytes": coded.frame_bytes,
            "saving": 1 - coded.frame_bytes / subject.pair.num_bytes,
            "bits_per_change": 8 * coded.frame_bytes / max(1, subject.pair.num_changed),
            "limit_bytes": round(subject.limit.num_bytes),
            "limit_ratio": coded.frame_bytes / subject.limit.num_bytes,
        }
    return subject.row(case, **columns)


def _steps(codec: Codec, op: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """What is timed, and what puts things back before it."""
    if op == "encode":
        return codec.encode, codec.reset_encode
    if op == "apply":
        return codec.apply, codec.reset_apply
    assert isinstance(codec, Gymfast)
    return {
        "encode blocks": (codec.encode_blocks, codec.reset_blocks),
        "apply blocks": (codec.apply_blocks, codec.reset_blocks),
        FUSED: (codec.fused_pass, codec.reset_blocks),
        "attach": (codec.attach, codec.reset_blocks),
        "verify": (codec.verify, codec.reset_blocks),
        "first apply": (codec.first_apply, codec.reset_first_apply),
    }[op]


def _timer(benchmark: Any, settings: Settings, subject: Subject, pair: Pair, threads: int) -> Timer:
    to, source = subject.buffers.scratch_flat, pair.new_flat
    to = to[to.size - source.size :]
    return Timer(benchmark, lambda: bounds.memcpy(to, source, threads), settings)
