"""`gymfast sync status --prometheus`: what a strict reader of the text format 0.0.4 takes."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from cli_commands import Gymfast, tell

from gymfast.stores import FileStore
from gymfast.sync.keys import RunKeys

RUN = ("--run", "demo")
KEYS = RunKeys("demo")
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*"'
_SAMPLE = re.compile(
    rf"([a-zA-Z_:][a-zA-Z0-9_:]*)\{{({_LABEL}(?:,{_LABEL})*)\}} "
    r"(-?[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)"
)
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parsed(text: str) -> Samples:
    """Samples by name and labels; each metric has its help and its type before all its samples."""
    found: Samples = {}
    current, seen = "", set()
    lines = text.split("\n")
    assert lines.pop() == "", "the last line ends too"
    for line in lines:
        if helped := re.fullmatch(r"# HELP ([a-z_]+) (\S.*)", line):
            current = helped[1]
            assert current not in seen
            seen.add(current)
        elif line.startswith("# TYPE"):
            assert line == f"# TYPE {current} gauge"
        else:
            sample = _SAMPLE.fullmatch(line)
            assert sample, line
            assert sample[1] == current
            labels = re.findall(r'([a-z_]+)="((?:[^"\\]|\\.)*)"', sample[2])
            whole = tuple(sorted((k, re.sub(r"\\(.)", _unescape, v)) for k, v in labels))
            assert (current, whole) not in found
            found[current, whole] = float(sample[3])
    return found


def _unescape(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]


def by_prometheus(text: str) -> Samples | None:
    """The same by its own client, where it is installed."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        return None
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_say_what_status_says(files: Path, gymfast: Gymfast) -> None:
    assert gymfast("sync", "publish", "store", "old.safetensors", *RUN).code == 0
    assert gymfast("sync", "publish", "store", "new.safetensors", *RUN).code == 0
    store = FileStore(Path("store").absolute())
    error = 'get "a\\b" failed, {x="1"} # no comment'
    tell(store, "engine-0", 1)
    tell(store, "engine-1", 0, error=error, is_stale=True)
    tell(store, "engine-2", -1, state="inconsistent", root="", updated_us=0)
    store.put(KEYS.status("engine-3"), b"?")
    done = gymfast("sync", "status", "store", *RUN, "--prometheus")
    assert done.code == 0
    found = parsed(done.out)
    assert by_prometheus(done.out) in (None, found)

    def value(name: str, **labels: str) -> float | None:
        labels["run"] = "demo"
        return found.get((f"gymfast_{name}", tuple(sorted(labels.items()))))

    assert (value("newest_version"), value("publisher_epoch")) == (1.0, 2.0)
    assert value("newest_created_timestamp_seconds") == pytest.approx(time.time(), abs=600)
    readers = [f"engine-{i}" for i in range(4)]
    assert [value("reader_version", reader=r) for r in readers] == [1.0, 0.0, None, None]
    assert [value("reader_lag_versions", reader=r) for r in readers] == [0.0, 1.0, None, None]
    assert [value("reader_ready", reader=r) for r in readers] == [1.0, 0.0, 0.0, 0.0]
    assert [value("reader_stale", reader=r) for r in readers] == [0.0, 1.0, 0.0, 0.0]
    assert [value("reader_silent", reader=r) for r in readers] == [0.0, 0.0, 1.0, 1.0]
    assert value("reader_state", reader="engine-2", state="inconsistent") == 1.0
    assert value("reader_last_error", reader="engine-1", error=error) == 1.0
    assert value("reader_last_error", reader="engine-0", error="") is None


def test_metrics_are_one_look(files: Path, gymfast: Gymfast) -> None:
    for more in (["--json"], ["--watch"], ["--min-ready", "1"]):
        done = gymfast("sync", "status", "store", *RUN, "--prometheus", *more)
        assert done.code == 2 and "--prometheus is one look" in done.err
    assert gymfast("sync", "status", "store", *RUN, "--prometheus").code == 5
