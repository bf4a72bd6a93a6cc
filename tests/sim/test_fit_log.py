"""Logs: both formats give the same phases; a bad one is refused with file, line and what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gymfast_sim.fit_log import LogError, read_log

DAY = 1_780_000_000.0


def _jsonl(**changes: object) -> str:
    fields = {"phase": "boot", "t0_s": DAY, "t1_s": DAY + 2.5, **changes}
    return json.dumps({key: value for key, value in fields.items() if value is not None}) + "\n"


def _read(tmp_path: Path, text: str | bytes) -> list[tuple[str, float, str, str]]:
    path = tmp_path / "a.log"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return [(s.phase, s.seconds, s.outcome, s.day) for s in read_log(path)]


def test_jsonl_and_csv_hold_the_same(tmp_path: Path) -> None:
    rows = [("boot", DAY, DAY + 2.5, "ok"), ("exec", DAY + 3, DAY + 13.25, "timeout")]
    lines = "".join(_jsonl(phase=p, t0_s=a, t1_s=b, outcome=o) for p, a, b, o in rows)
    table = "# remark\nphase,t0_ms,t1_ms,outcome\n"
    table += "".join(f"{p},{a * 1000},{b * 1000},{o}\n" for p, a, b, o in rows)
    expected = [("boot", 2.5, "ok", "2026-05-28"), ("exec", 10.25, "timeout", "2026-05-28")]
    assert _read(tmp_path, lines) == expected
    assert _read(tmp_path, table) == [(p, pytest.approx(s), o, day) for p, s, o, day in expected]


def test_a_column_with_a_unit_is_a_duration_of_that_phase(tmp_path: Path) -> None:
    text = "provider,mode,day,tti_ms\nmodal,burst,2026-03-08T00-45-28-374Z,453.5\n"
    assert _read(tmp_path, text) == [("tti", 0.4535, "ok", "2026-03-08")]


def test_a_run_is_a_block_where_there_is_no_day(tmp_path: Path) -> None:
    text = _jsonl(t0_s=1.0, t1_s=2.0, run="r7") + _jsonl(t0_s=None, t1_s=None, took_s=2)
    assert _read(tmp_path, text) == [("boot", 1.0, "ok", "r7"), ("boot", 2.0, "ok", "")]


BAD: list[tuple[str | bytes, str]] = [
    ("", "the log is empty"),
    ("\n\n", "the log is empty"),
    (b"\xff\xfe\x00\n", "no UTF-8"),
    (_jsonl() + _jsonl()[:-1], r":2: the last line has no end, so the log is truncated"),
    (_jsonl() + _jsonl()[:20] + "\n", r":2: this is no JSON.*truncated"),
    (_jsonl() + "[1]\n", r":2: found list, expected an object"),
    (_jsonl(phase=None), ":1: no phase, expected a name"),
    (_jsonl() + _jsonl(t0_s=None, t1_s=None, t0_ms=1, t1_ms=2), ":2: mixed units, ms and s"),
    (_jsonl(t1_s=None, t1_ms=1), ":1: mixed units, ms and s"),
    (_jsonl(t0_s=DAY * 1e3, t1_s=DAY * 1e3 + 1), ":1: t0 is 1.78e[+]12 s.*milliseconds"),
    (_jsonl(t0_s=None, t1_s=None, t0=1, t1=2), ":1: t0 has no unit"),
    (_jsonl(t0_s=None, t1_s=None), ":1: no times, expected t0_s and t1_s"),
    (_jsonl(t1_s=None), ":1: times are t0_s, expected t0 and t1"),
    (_jsonl() + _jsonl(t1_s=DAY - 4), ":2: t1 is 4 before t0, so the clock went backwards"),
    (_jsonl(t0_s=float("nan")), ":1: t0_s is nan, expected a finite number"),
    (_jsonl(t1_s=float("inf")), ":1: t1_s is inf, expected a finite number"),
    (_jsonl(t1_s="soon"), ":1: t1_s is 'soon', expected a number"),
    (_jsonl(t1_s=True), ":1: t1_s is True, expected a number"),
    (_jsonl(outcome="lost"), ":1: outcome is 'lost', expected one of ok, failed, timeout"),
    (_jsonl(sandbax="a"), ":1: key 'sandbax' is not known, did you mean 'sandbox'"),
    (
        _jsonl(sandbox="a") + _jsonl(sandbox="b", t0_s=DAY - 9) + _jsonl(sandbox="a", t0_s=DAY - 1),
        ":3: phase boot of sandbox a begins 1 s before that of line 1: the clock",
    ),
    ("day,tti_ms\n", "no phase in the log"),
    ("day,tti_ms\nx,1\ny\n", ":3: 1 columns, expected 2 as in the header"),
    ("day,tti_ms\nx,-1\n", ":2: took_ms is -1, expected 0 or more"),
    ("day,tti_ms\nx,nan\n", ":2: took_ms is nan"),
    ("day,api_ms,boot_s\nx,1,2\n", ":1: mixed units, ms and s"),
    ("day,api_ms,boot_ms\nx,1,2\n", ":1: api_ms and boot_ms are durations, expected one"),
    ("day,tti\nx,1\n", ":2: no times"),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_a_bad_log_is_refused_with_the_line(
    text: str | bytes, message: str, tmp_path: Path
) -> None:
    with pytest.raises(LogError, match=message) as refusal:
        _read(tmp_path, text)
    assert str(refusal.value).startswith(f"{tmp_path / 'a.log'}:")


@pytest.mark.parametrize("keep", range(1, 60))
def test_every_prefix_is_whole_or_refused(keep: int, tmp_path: Path) -> None:
    """A log that was cut somewhere never reads as a shorter phase."""
    whole = _jsonl(sandbox="a") + _jsonl(sandbox="b")
    text = whole[: len(whole) * keep // 60]
    if text == _jsonl(sandbox="a"):
        assert len(_read(tmp_path, text)) == 1
    else:
        with pytest.raises(LogError):
            _read(tmp_path, text)
