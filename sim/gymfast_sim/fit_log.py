"""Logs of phases of sandboxes: JSONL, or CSV with durations; see docs/sim-fit.md.

A log that is truncated, mixes units, runs backwards or holds no numbers is refused with the line.
"""

from __future__ import annotations

import csv
import difflib
import io
import json
import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

import msgspec

UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
OUTCOMES = ("ok", "failed", "timeout")
LABELS = ("provider", "mode", "image", "region", "run", "day", "sandbox")
NUMBERS = ("step", "rollout", "attempt")
_LONGEST_S = 1e11
"""Seconds since 1970 are below it for 3,000 years; milliseconds have been above it since 1973."""
_EPOCH_S = 1e8


class LogError(ValueError):
    """A log that cannot be read; says file, line, what was found, what was expected, what to do."""


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """One phase of one sandbox: `outcome` timeout means that it took longer than `seconds`."""

    line: int
    phase: str
    seconds: float
    outcome: str
    start_s: float | None
    labels: dict[str, str]
    numbers: dict[str, int]

    @property
    def day(self) -> str:
        """The block that it belongs to: its day, else its run; "" if the log says neither."""
        if "day" in self.labels:
            return self.labels["day"][:10]
        if self.start_s is not None and self.start_s > _EPOCH_S:
            return datetime.fromtimestamp(self.start_s, UTC).date().isoformat()
        return self.labels.get("run", "")


def read_log(path: Path) -> list[Span]:
    """The phases in a log, in its order. Raises LogError; OSError if it cannot be opened."""
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise LogError(f"{path}: byte {error.start} is no UTF-8: this is no text log") from error
    if not text.strip():
        raise LogError(f"{path}: the log is empty, expected one phase a line")
    if not text.endswith("\n"):
        last = text.count("\n") + 1
        raise LogError(
            f"{path}:{last}: the last line has no end, so the log is truncated: "
            "copy it again, or delete that line"
        )
    first = next(line for line in text.splitlines() if line.strip())
    reader = _Jsonl(path) if first.lstrip().startswith("{") else _Csv(path)
    spans = list(reader.spans(text))
    if not spans:
        raise LogError(f"{path}: no phase in the log, expected at least one")
    _check_order(path, spans)
    return spans


class _Reader:
    """What both formats check."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.line = 0
        self._unit = ""

    def fail(self, text: str) -> NoReturn:
        raise LogError(f"{self.path}:{self.line}: {text}")

    def unit_of(self, names: Iterable[str], what: str) -> str:
        """The unit in the names of times; the same in the whole log."""
        units = {name.rpartition("_")[2] for name in names}
        unknown = sorted(units - set(UNITS))
        if unknown:
            self.fail(f"{what} has no unit, expected a name that ends in _s, _ms, _us or _ns")
        units |= {self._unit} if self._unit else set()
        if len(units) > 1:
            self.fail(f"mixed units, {' and '.join(sorted(units))}: write all times in one unit")
        self._unit = units.pop()
        return self._unit

    def number(self, name: str, found: object) -> float:
        """A finite number."""
        if isinstance(found, bool) or not isinstance(found, int | float | str):
            self.fail(f"{name} is {found!r}, expected a number")
        try:
            value = float(found)
        except ValueError:
            self.fail(f"{name} is {found!r}, expected a number")
        if not math.isfinite(value):
            self.fail(f"{name} is {found}, expected a finite number: leave out what is not known")
        return value

    def span(self, fields: Mapping[str, object], default_phase: str) -> Span:
        """One phase, from its fields."""
        times = [name for name in fields if name.rpartition("_")[0] in ("t0", "t1", "took")]
        times += [name for name in fields if name in ("t0", "t1", "took", "duration")]
        if not times:
            self.fail("no times, expected t0_s and t1_s (or _ms, _us, _ns), or took_s")
        scale = UNITS[self.unit_of(times, times[0])]
        start_s, seconds = self._times(fields, times, scale)
        known = ("phase", "outcome", *LABELS, *NUMBERS, *times)
        for name in fields:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1, 0.5)
                hint = f"did you mean {near[0]!r}?" if near else f"expected one of {known}"
                self.fail(f"key {name!r} is not known, {hint}")
        outcome = str(fields.get("outcome", "ok"))
        if outcome not in OUTCOMES:
            self.fail(f"outcome is {outcome!r}, expected one of {', '.join(OUTCOMES)}")
        if start_s is not None and start_s >= _LONGEST_S:
            self.fail(f"t0 is {start_s:g} s, after the year 5000: are these milliseconds?")
        return Span(
            line=self.line,
            phase=str(fields.get("phase", default_phase)),
            seconds=seconds,
            outcome=outcome,
            start_s=start_s,
            labels={name: str(fields[name]) for name in LABELS if name in fields},
            numbers={n: int(self.number(n, fields[n])) for n in NUMBERS if n in fields},
        )

    def _times(
        self, fields: Mapping[str, object], times: list[str], scale: float
    ) -> tuple[float | None, float]:
        found = {name.split("_")[0]: self.number(name, fields[name]) for name in times}
        if set(found) == {"took"}:
            if found["took"] < 0:
                self.fail(f"{times[0]} is {found['took']:g}, expected 0 or more")
            return None, found["took"] * scale
        if set(found) != {"t0", "t1"}:
            self.fail(f"times are {', '.join(times)}, expected t0 and t1, or took")
        if found["t1"] < found["t0"]:
            self.fail(
                f"t1 is {found['t0'] - found['t1']:g} before t0, so the clock went backwards: "
                "log a monotonic clock, or delete the line"
            )
        return found["t0"] * scale, (found["t1"] - found["t0"]) * scale


class _Jsonl(_Reader):
    """One object a line."""

    def spans(self, text: str) -> Iterable[Span]:
        for self.line, line in enumerate(text.splitlines(), 1):
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
            except json.JSONDecodeError as error:
                self.fail(f"this is no JSON: {error.msg} at column {error.colno}; is it truncated?")
            if not isinstance(fields, dict):
                self.fail(f"found {type(fields).__name__}, expected an object with one phase")
            if "phase" not in fields:
                self.fail("no phase, expected a name such as api, boot, setup or exec")
            yield self.span(fields, "")


class _Csv(_Reader):
    """A header, then one line a phase; `PHASE_ms` is a duration; # begins a remark."""

    def spans(self, text: str) -> Iterable[Span]:
        rows = enumerate(csv.reader(io.StringIO(text)), 1)
        kept = ((n, row) for n, row in rows if row and not row[0].startswith("#"))
        self.line, header = next(kept, (1, []))
        durations = [
            name
            for name in header
            if name not in LABELS and name.rpartition("_")[2] in UNITS and name[:3] not in _ENDS
        ]
        if len(durations) > 1:
            self.unit_of(durations, durations[0])
            self.fail(f"{' and '.join(durations)} are durations, expected one: split the log")
        for self.line, row in kept:
            if len(row) != len(header):
                self.fail(
                    f"{len(row)} columns, expected {len(header)} as in the header: "
                    "the log is truncated or damaged"
                )
            fields: dict[str, object] = dict(zip(header, row, strict=True))
            phase = ""
            if durations:
                phase, _, unit = durations[0].rpartition("_")
                fields[f"took_{unit}"] = fields.pop(durations[0])
            yield self.span(fields, phase)


_ENDS = ("t0_", "t1_")


def _check_order(path: Path, spans: list[Span]) -> None:
    """Phases of one sandbox are logged in their order, by one clock."""
    last: dict[tuple[str, str], Span] = {}
    for span in spans:
        if span.start_s is None or "sandbox" not in span.labels:
            continue
        key = (span.labels.get("run", ""), span.labels["sandbox"])
        before = last.get(key)
        if before is not None and before.start_s is not None and span.start_s < before.start_s:
            raise LogError(
                f"{path}:{span.line}: phase {span.phase} of sandbox {key[1]} begins "
                f"{before.start_s - span.start_s:g} s before that of line {before.line}: the clock "
                "went backwards, or lines are out of order; sort the log by t0"
            )
        last[key] = span
