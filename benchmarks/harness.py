"""How a row is measured: warm-up, cold cache, a plain copy beside every sample, medians."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from benchmarks.environment import l3_bytes
from gymfast.testing.weights import Masters

MIN_ROUNDS = 5


@dataclass(frozen=True)
class Settings:
    """What the command line asks for."""

    size_bytes: int = 1 << 30
    densities: tuple[float, ...] = (0.001, 0.01, 0.03, 0.1, 0.4, 1.0)
    threads: tuple[int, ...] = (1, 2)
    rounds: int = 7
    codecs: tuple[str, ...] = ()  # parts of names; empty: all
    data: tuple[str, ...] = ("generator", "pairs")
    masters: Masters = "dithered"
    seed: int = 1
    is_cold: bool = True
    slow_s: float = 2.0  # rows slower than this are timed on a part of the tensors
    slow_bytes: int = 128 << 20

    @classmethod
    def quick(cls) -> Settings:
        """Under a minute: one density, one thread, a state of twice a usual last-level cache."""
        return cls(size_bytes=64 << 20, densities=(0.01,), threads=(1,), rounds=MIN_ROUNDS)


@dataclass(frozen=True)
class Row:
    """One line of the CSV; benchmarks/README.md says what each column means."""

    data: str
    density: float
    num_changed: int
    codec: str
    op: str
    threads: int
    state_bytes: int
    raw_bytes: int = 0
    rounds: int = 0
    wall_s: float = 0.0
    wall_p10_s: float = 0.0
    wall_p90_s: float = 0.0
    cpu_s: float = 0.0
    gbps: float = 0.0
    copy_gbps: float = 0.0
    copy_ratio: float = 0.0
    copy_ratio_cpu: float = 0.0
    frame_bytes: int = 0
    saving: float = 0.0
    bits_per_change: float = 0.0
    limit_bytes: int = 0
    limit_ratio: float = 0.0
    digest: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def columns(cls) -> list[str]:
        return [column.name for column in fields(cls)]

    @classmethod
    def from_text(cls, text: dict[str, str]) -> Row:
        """A row as the CSV holds it."""
        kinds = {"str": str, "int": int, "float": float}
        return cls(**{f.name: kinds[str(f.type)](text[f.name]) for f in fields(cls)})


@dataclass(eq=False)
class Driver:
    """What the command line and the cases share: the settings, and the rows so far."""

    settings: Settings
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        speed = f"{row.gbps:7.2f} GB/s ({row.copy_ratio:.2f} x copy)" if row.gbps else " " * 25
        size = f"{row.frame_bytes:>13,} bytes" if row.frame_bytes else ""
        name = f"{row.data} {100 * row.density:.3g} %  {row.codec} {row.op} x{row.threads}"
        print(f"{name:<64} {speed} {size}", file=sys.stderr, flush=True)


@dataclass
class Samples:
    """Times of one row, in the order taken; all in seconds."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    copy_s: list[float] = field(default_factory=list)
    copy_cpu_s: list[float] = field(default_factory=list)

    def last(self, count: int) -> Samples:
        """The newest ones: those before are the warm-up."""
        return Samples(*(getattr(self, part.name)[-count:] for part in fields(self)))

    def summary(self, raw_bytes: int, copy_bytes: int) -> dict[str, Any]:
        """The timing columns; gbps counts raw bytes of BF16, 1 GB = 10^9 bytes."""
        wall, copy = float(np.median(self.wall_s)), float(np.median(self.copy_s))
        cpu, copy_cpu = float(np.median(self.cpu_s)), float(np.median(self.copy_cpu_s))
        gbps, copy_gbps = raw_bytes / 1e9 / wall, copy_bytes / 1e9 / copy
        return {
            "raw_bytes": raw_bytes,
            "rounds": len(self.wall_s),
            "wall_s": wall,
            "wall_p10_s": float(np.percentile(self.wall_s, 10)),
            "wall_p90_s": float(np.percentile(self.wall_s, 90)),
            "cpu_s": cpu,
            "gbps": gbps,
            "copy_gbps": copy_gbps,
            "copy_ratio": gbps / copy_gbps,
            "copy_ratio_cpu": raw_bytes / max(cpu, 1e-9) * copy_cpu / copy_bytes,
        }


class Timer:
    """Runs one row under pytest-benchmark; beside every sample the same bytes are copied."""

    def __init__(self, benchmark: Any, copy: Callable[[], None], settings: Settings) -> None:
        self._benchmark = benchmark
        self._copy = copy
        self._settings = settings
        self._flush = np.zeros(4 * l3_bytes() if settings.is_cold else 0, np.uint8)

    def measure(self, run: Callable[[], Any], reset: Callable[[], Any]) -> Samples:
        samples = Samples()

        def prepare() -> None:
            reset()
            with _clock(samples.copy_s, samples.copy_cpu_s):
                self._copy()
            self._flush += 1  # evicts what reset and copy left in the caches

        def timed() -> None:
            with _clock(samples.wall_s, samples.cpu_s):
                run()

        rounds = self._settings.rounds
        self._benchmark.pedantic(timed, setup=prepare, rounds=rounds, warmup_rounds=1)
        return samples.last(rounds)


@contextmanager
def _clock(wall_s: list[float], cpu_s: list[float]) -> Iterator[None]:
    """Appends wall time and CPU time (of all threads) of its body."""
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    yield
    wall_s.append(time.perf_counter() - start_s)
    cpu_s.append(time.process_time() - start_cpu_s)


def keep_memory() -> bool:
    """Tells glibc to keep freed memory: rows that make new arrays would else time page faults.

    False on systems without this setting; there such rows are slower.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return False
    m_trim_threshold, m_mmap_max = -1, -4  # of malloc.h
    return bool(library.mallopt(m_mmap_max, 0) and library.mallopt(m_trim_threshold, 2**31 - 1))
