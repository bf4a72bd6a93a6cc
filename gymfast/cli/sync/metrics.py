"""A run and its readers in the text format of Prometheus.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/ (text format 0.0.4).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gymfast.sync.fleet import Fleet, ReaderRow
    from gymfast.sync.status import RunStatus

_HELP = {
    "newest_version": "The newest version that is published.",
    "newest_created_timestamp_seconds": "When it was made, by the clock of its publisher.",
    "publisher_epoch": "Publishers that have taken the run over.",
    "stored_bytes": "Bytes of all frames in the store.",
    "reader_version": "The version that a reader serves; absent if it serves none.",
    "reader_lag_versions": "Versions that it is behind the newest.",
    "reader_age_seconds": "Seconds since the reader was heard of.",
    "reader_ready": "1 if it serves a version, and is neither silent nor stale.",
    "reader_stale": "1 if the publisher has stopped, as far as the reader can see.",
    "reader_silent": "1 if the reader does not write any more.",
    "reader_state": "1, with the state in a label.",
    "reader_last_error": "1, with the last error in a label; absent if there is none.",
}
_Labels = Mapping[str, str]
_Sample = tuple[str, _Labels, float | None]


def metrics_of(status: RunStatus, fleet: Fleet) -> list[str]:
    """Lines with all metrics, all gauges; what is not known is absent."""
    found: dict[str, list[str]] = {name: [] for name in _HELP}
    for name, labels, value in (*_of_run(status), *_of_readers(fleet)):
        if value is not None:
            found[name].append(_line(name, {"run": status.run, **labels}, value))
    lines = []
    for name, samples in found.items():
        if samples:
            head = (f"# HELP gymfast_{name} {_HELP[name]}", f"# TYPE gymfast_{name} gauge")
            lines += [*head, *samples]
    return lines


def _of_run(status: RunStatus) -> Iterator[_Sample]:
    if (newest := status.newest) is not None:
        yield "newest_version", {}, newest.version
        yield "newest_created_timestamp_seconds", {}, newest.created_us / 1e6
    yield "publisher_epoch", {}, status.epoch
    yield "stored_bytes", {}, status.stored_bytes


def _of_readers(fleet: Fleet) -> Iterator[_Sample]:
    for row in fleet.readers:
        for name, value in _values(row):
            yield name, {"reader": row.reader}, value
        yield "reader_state", {"reader": row.reader, "state": row.state}, 1
        if row.error:
            yield "reader_last_error", {"reader": row.reader, "error": row.error}, 1


def _values(row: ReaderRow) -> Iterator[tuple[str, float | None]]:
    yield "reader_version", row.version
    yield "reader_lag_versions", row.lag
    yield "reader_age_seconds", row.age_s
    yield "reader_ready", row.is_ready()
    yield "reader_stale", row.is_stale
    yield "reader_silent", row.is_silent


def _line(name: str, labels: _Labels, value: float) -> str:
    pairs = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    return f"gymfast_{name}{{{pairs}}} {value:.6f}".rstrip("0").rstrip(".")


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
