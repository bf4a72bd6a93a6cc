"""CSV, tables, README markers and targets, from made-up rows."""

from __future__ import annotations

import pytest

from benchmarks.harness import Row, Samples
from benchmarks.report import insert, read_csv, tables, write_csv
from benchmarks.targets import check_targets

GIB = 1 << 30
STAMP = {"cpu": "Some CPU", "commit": "0123abc", "command": "python -m benchmarks delta"}


def row(codec: str, op: str, *, threads: int = 1, **columns) -> Row:
    values = {
        "data": "generator", "density": 0.01, "num_changed": 5_000_000, "state_bytes": GIB,
        "raw_bytes": GIB, "rounds": 7, "wall_s": 0.1, "gbps": 10.7, "copy_gbps": 10.7,
        "copy_ratio": 1.0, "frame_bytes": 5_000_000, "limit_ratio": 1.02, "saving": 0.995,
        "bits_per_change": 8.0,
    }  # fmt: skip
    return Row(codec=codec, op=op, threads=threads, **(values | columns))


ROWS = [
    row("bound", "memcpy", frame_bytes=0),
    row("bound", "memcpy", threads=2, frame_bytes=0, gbps=19.0),
    row("bound", "compare", frame_bytes=0, copy_ratio=1.1),
    row("gymfast fast", "encode", copy_ratio=0.9),
    row("gymfast fast", "encode", threads=2, gbps=18.5),
    row("gymfast fast", "apply", copy_ratio=1.2),
    row("gymfast small", "encode", copy_ratio=0.45, frame_bytes=3_000_000),
    row("gymfast auto", "encode", frame_bytes=4_000_000),
    row("xor+zstd-1+xxh3", "encode", copy_ratio=0.11, frame_bytes=10_000_000),
    row("xor+zstd-1+xxh3", "apply", copy_ratio=0.25, frame_bytes=10_000_000),
    row("gymfast fast", "verify", frame_bytes=0),
]


def test_csv_keeps_every_row_and_the_stamp(tmp_path):
    path = tmp_path / "run.csv"
    write_csv(path, ROWS, STAMP)
    rows, stamp = read_csv(path)
    assert stamp == STAMP
    assert rows == ROWS


def test_tables_go_between_the_markers_and_nowhere_else(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- benchmark:begin -->\nstale text\n<!-- benchmark:end -->\nb\n")
    for _ in range(2):
        insert(readme, tables(ROWS, STAMP, check_targets(ROWS)))
    text = readme.read_text()
    assert text.startswith(
        "a\n<!-- benchmark:begin -->\n`python -m benchmarks delta` on cpu Some CPU"
    )
    assert text.endswith("\n<!-- benchmark:end -->\nb\n")
    assert "stale text" not in text
    assert text.count("| gymfast small |") == 1
    assert "10.70 (0.45)" in text
    readme.write_text("no markers")
    with pytest.raises(ValueError, match="benchmark:begin"):
        insert(readme, "x")


def test_targets_say_which_are_met_and_which_are_not():
    found = {target.what: target for target in check_targets(ROWS)}
    assert found["gymfast fast, encode, 1 %: x libc memcpy"].is_met
    assert not found["gymfast small, encode, 1 %: x libc memcpy"].is_met
    smaller = found["gymfast small against xor+zstd-1+xxh3, 1 %: x smaller"]
    assert smaller.measured == pytest.approx(10 / 3)
    assert smaller.is_met
    assert found["gymfast fast, encode, 1 %: two cores x one (memory-bound)"].is_met
    assert found["gymfast auto, size, 1 %: x smallest peer (xor+zstd-1+xxh3)"].measured == 0.4


def test_small_states_answer_no_target():
    small = [row("gymfast fast", "encode", state_bytes=1 << 20)]
    assert check_targets(small) == []


def test_summary_is_medians_and_ratios_of_the_samples():
    samples = Samples([9.0, 1.0, 2.0, 3.0], [8.0, 2.0, 2.0, 2.0], [5.0, 1.0, 1.0, 1.0], [1.0] * 4)
    found = samples.last(3).summary(4_000_000_000, 4_000_000_000)
    assert found["rounds"] == 3
    assert found["wall_s"] == 2.0
    assert (found["gbps"], found["copy_gbps"], found["copy_ratio"]) == (2.0, 4.0, 0.5)
    assert found["copy_ratio_cpu"] == 0.5
