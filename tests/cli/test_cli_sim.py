"""`gymfast sim fit` and `backtest`: what they print and write, and what they refuse."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from cli_commands import Gymfast

from gymfast_sim.draws import Draws
from gymfast_sim.laws import Lognormal
from gymfast_sim.scenario import Scenario

RUN = """
name = "run"
[policy]
policy = "fixed"
size = 1
[rollouts]
prompts = 2
work = { law = "constant", value_s = 1.0 }
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """400 starts on 20 days, some of them cut or failed."""
    law, draws = Lognormal(median_s=2.0, sigma=0.4), Draws(1)
    lines = []
    for i in range(400):
        begin_s = 1_780_000_000 + 86_400 * (i % 20) + i
        took_s = law.at(*draws(i, 0, 0))
        outcome = "failed" if i % 100 == 0 else "timeout" if took_s > 4 else "ok"
        times = {"t0_s": begin_s, "t1_s": begin_s + min(took_s, 4.0)}
        lines.append({"phase": "boot", "provider": "p", "outcome": outcome, **times})
    path = tmp_path / "pool.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_best_law_is_printed_as_a_table_of_a_scenario(gymfast: Gymfast, log: Path) -> None:
    found = gymfast("sim", "fit", log, "--law", "lognormal", "--law", "exponential")
    lines = found.out.splitlines()
    assert lines[0].endswith("4 failed; 20 days") and "cut by a time-out" in lines[0]
    toml = found.out[found.out.index("[sandboxes.boot]") :]
    boot = Scenario.from_toml(RUN + toml).sandboxes.boot
    assert boot.quantile(0.5) == pytest.approx(2.0, rel=0.06)
    assert boot.quantile(0.9) == pytest.approx(2.0 * math.exp(0.4 * 1.2816), rel=0.08)


def test_json_and_files_hold_the_same_law(gymfast: Gymfast, log: Path, tmp_path: Path) -> None:
    law, svg = tmp_path / "boot.toml", tmp_path / "boot.svg"
    where = ("--where", "provider=p", "--phase", "boot", "--resamples", "20")
    found = gymfast("sim", "fit", log, *where, "-o", law, "--plot", svg, "--json")
    fields = json.loads(found.out)
    assert fields["schema"] == "gymfast.sim.fit/1" and fields["num_failed"] == 4
    assert fields["toml"] == law.read_text() and svg.read_text().startswith("<svg")
    assert fields["best"] == fields["fits"][0]["name"] and fields["intervals"][1]["what"] == "p50"
    assert gymfast("sim", "fit", log, "-o", law).code == 1  # it exists
    assert gymfast("sim", "fit", log, *where, "-o", law, "--force").code == 0


@pytest.mark.parametrize(
    ("args", "text", "code"),
    [
        (["--where", "provider"], "expected KEY=VALUE", 2),
        (["--where", "provider=q"], "no line has provider=q: provider is one of p", 1),
        (["--phase", "exec"], "no phase 'exec', expected one of boot", 1),
        (["--law", "normal"], "law 'normal' is not known", 1),
    ],
)
def test_a_wrong_question_is_refused(
    args: list[str], text: str, code: int, gymfast: Gymfast, log: Path
) -> None:
    found = gymfast("sim", "fit", log, *args)
    assert found.code == code and text in " ".join(found.err.split())


def test_a_truncated_log_is_refused_with_its_line(gymfast: Gymfast, log: Path) -> None:
    log.write_bytes(log.read_bytes()[:-9])
    found = gymfast("sim", "fit", log)
    assert found.code == 1 and "pool.jsonl:400: the last line has no end" in found.err


def test_a_replay_is_told_with_its_error(gymfast: Gymfast, tmp_path: Path) -> None:
    lines = []
    for step in range(2):
        for rollout in range(2):
            submitted_s = 50.0 * step
            begin_s = submitted_s + 3.0 * rollout
            names = {"step": step, "rollout": rollout, "sandbox": "a"}
            wait = {"phase": "wait", "t0_s": submitted_s, "t1_s": begin_s}
            act = {"phase": "exec", "t0_s": begin_s, "t1_s": begin_s + 3}
            lines += [(submitted_s, {**wait, **names}), (begin_s, {**act, **names})]
    lines.sort(key=lambda pair: pair[0])
    log, scenario = tmp_path / "run.jsonl", tmp_path / "run.toml"
    log.write_text("".join(json.dumps(line) + "\n" for _, line in lines))
    scenario.write_text(RUN)
    found = gymfast("sim", "backtest", log, "--scenario", scenario)
    assert found.code == 0 and "error of the step time: +0.00 %" in found.out
    fields = json.loads(gymfast("sim", "backtest", log, "--scenario", scenario, "--json").out)
    assert [row["simulated_s"] for row in fields["steps"]] == [6.0, 6.0]
    assert fields["schema"] == "gymfast.sim.backtest/1"
