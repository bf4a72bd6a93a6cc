"""Scenarios: TOML in and out, keys that are not known, settings that contradict each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from gymfast.cost.plan import plan, sync_job
from gymfast.sandbox.policies import Elastic, Lead
from gymfast_sim.engine_simpy import simulate
from gymfast_sim.laws import Constant, Lognormal
from gymfast_sim.reading import ScenarioError
from gymfast_sim.scenario import Limits, Retries, Rollouts, Sandboxes, Scenario, Sync, Training

WHOLE = """
name = "an agent"
seed = 7

[rollouts]
prompts = 64
group_size = 8
turns = 20
hold = "action"
timeout_s = 60.0
fail_ratio = 0.02
work = { law = "lognormal", median_s = 0.5, sigma = 1.0, cap_s = 60.0 }
think = { law = "exponential", mean_s = 4.0 }

[rollouts.retries]
max_retries = 3
initial_delay_s = 1.0
jitter_ratio = 0.5

[policy]
policy = "lead"
max_size = 256
lead_s = 20.0

[sandboxes]
classes = 64
lifetime_s = 3600.0
start_fail_ratio = 0.01
setup = { law = "quantiles", probabilities = [0.1, 0.9], values_s = [5.0, 60.0] }

[sandboxes.boot]
law = "mixture"
components = [
  { weight = 0.9, of = { law = "lognormal", median_s = 2.0, sigma = 0.2 } },
  { weight = 0.1, of = { law = "lognormal", median_s = 6.0, sigma = 0.6 } },
]

[limits]
rate_per_s = 30.0
burst = 2000
max_live = 1000

[training]
steps = 3
train = { law = "constant", value_s = 60.0 }

[training.sync]
model = "Qwen3-32B"
train = "1x8:H100"
engines = "1x8:H100"
saved_ratio = 0.98

[prices]
gpus = 16
gpu_per_s = 0.0011
cores = 1.0
core_per_s = 0.00003942
gib = 1.0
gib_per_s = 0.00000672
source = "a list"
date = "2026-03"
"""
SMALL = """
name = "small"
[rollouts]
prompts = 100
work = { law = "constant", value_s = 10.0 }
[policy]
policy = "elastic"
max_size = 10
"""


def test_a_scenario_survives_toml() -> None:
    whole = Scenario.from_toml(WHOLE)
    assert Scenario.from_toml(whole.to_toml()) == whole
    assert whole.to_toml() == Scenario.from_toml(whole.to_toml()).to_toml()
    assert whole.policy == Lead(max_size=256, lead_s=20.0)
    assert whole.rollouts.num_rollouts == 512


def test_what_has_its_default_is_not_written() -> None:
    assert Scenario.from_toml(SMALL).to_toml() == (
        'name = "small"\n\n[rollouts]\nprompts = 100\n\n[rollouts.work]\nlaw = "constant"\n'
        'value_s = 10.0\n\n[policy]\npolicy = "elastic"\nmax_size = 10\n'
    )


def test_the_weight_sync_takes_what_the_cost_model_says() -> None:
    whole = Scenario.from_toml(WHOLE)
    job = sync_job("Qwen3-32B", "1x8:H100", "1x8:H100", saved_ratio=0.98)
    assert whole.training.sync.total_s == plan(job).total_s > 0


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("prompts", "promts", "rollouts.promts: key 'promts' is not known, did you mean 'prompts'"),
        ("max_size", "size", "policy.size: key 'size' is not known, did you mean 'max_size'"),
        ('"elastic"', '"elastik"', "policy 'elastik' is not known, did you mean 'elastic'"),
        ("[policy]", "[polcy]", "polcy: key 'polcy' is not known, did you mean 'policy'"),
        ("prompts = 100", "prompts = 0", "prompts is 0, expected 1 to"),
        ("max_size = 10", "max_size = 0", "max_size is 0, expected 1 or more"),
        ("prompts = 100", 'prompts = "many"', "rollouts.prompts: Expected `int`, got `str`"),
        ("prompts = 100", "prompts = 100\nhold = 'turn'", "rollouts.hold: Invalid enum value"),
        ("10.0 }", "nan }", "rollouts.work: value_s is nan, expected 0 or more"),
        ('"constant", value_s', '"crowded", value_s', "law 'crowded' is not known"),
        ("[policy]", "[policy", "this is no TOML: .*line"),
    ],
)
def test_a_mistake_is_refused_where_it_stands(old: str, new: str, text: str) -> None:
    assert old in SMALL
    with pytest.raises(ScenarioError, match=text):
        Scenario.from_toml(SMALL.replace(old, new))


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ("[limits]\nmax_live = 5", "a pool of 10 is over the quota, limits.max_live 5"),
        ("[sandboxes]\nprewarmed = 11", "prewarmed is 11, more than the pool, 10"),
        ("[sandboxes]\nclasses = 101", "classes is 101, more than rollouts.prompts, 100"),
        ("[sandboxes]\nlifetime_s = 9.0", "lifetime_s is 9.0, less than a start and the work"),
        ("[sandboxes]\nstart_fail_ratio = 1.0", "with 1 no sandbox ever starts"),
        ("[limits]\nburst = 5", "burst is 5 but there is no rate_per_s"),
        ("[limits]\nrate_per_s = 0.0", "rate_per_s is 0.0, expected 1e-6 to 1e9"),
        ("[limits]\nrate_per_s = nan", "rate_per_s is nan"),
        ("[training]\nsteps = 0", "steps is 0"),
        ("[training.sync]\nmodel = 'Qwen3-32B'", "model, train and engines are needed"),
        (
            "[training.sync]\nmodel = 'no'\ntrain = '1x8:H100'\nengines = '1x8:H100'",
            "training.sync: .*no",
        ),
        ("[prices]\ngpus = 8", "missing required field"),
    ],
)
def test_a_contradiction_is_refused(extra: str, text: str) -> None:
    with pytest.raises(ScenarioError, match=text):
        Scenario.from_toml(SMALL + extra)


def test_a_contradiction_is_refused_in_python_too() -> None:
    work = Rollouts(prompts=4, work=Constant(value_s=1.0), fail_ratio=1.0)
    with pytest.raises(ValueError, match="fail_ratio is 1: no rollout is ever done"):
        Scenario(name="x", rollouts=work, policy=Elastic(max_size=4))
    late = Rollouts(prompts=4, work=Constant(value_s=1.0), timeout_s=20.0)
    with pytest.raises(ValueError, match=r"timeout_s is 20\.0, more than sandboxes\.lifetime_s"):
        Scenario(name="x", rollouts=late, policy=Elastic(max_size=4),
                 sandboxes=Sandboxes(lifetime_s=10.0))  # fmt: skip


def test_a_lifetime_is_compared_with_the_whole_episode() -> None:
    work = Lognormal(median_s=1.0, sigma=0.5)
    boxes = Sandboxes(lifetime_s=60.0)
    episode = Rollouts(prompts=4, work=work, think=Constant(value_s=5.0), turns=20)
    with pytest.raises(ValueError, match="less than a start and the work of one rollout, 117"):
        Scenario(name="x", rollouts=episode, policy=Elastic(max_size=4), sandboxes=boxes)
    action = Rollouts(prompts=4, work=work, think=Constant(value_s=5.0), turns=20, hold="action")
    Scenario(name="x", rollouts=action, policy=Elastic(max_size=4), sandboxes=boxes)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_retries": -1}, "max_retries is -1"),
        ({"initial_delay_s": 61.0}, "more than max_delay_s"),
        ({"backoff_coefficient": 0.5}, "backoff_coefficient is 0.5, expected 1 to"),
        ({"jitter_ratio": 1.5}, "jitter_ratio is 1.5, expected 0 to 1"),
    ],
)
def test_retries_that_make_no_sense_are_refused(settings: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Retries(**settings)  # type: ignore[arg-type]


def test_a_file_is_named_in_its_errors(tmp_path: Path) -> None:
    path = tmp_path / "one.toml"
    path.write_text(SMALL)
    assert Scenario.from_file(path).name == "small"
    path.write_bytes(b"name = '\xff'")
    with pytest.raises(ScenarioError, match=r"one\.toml: .*utf-8"):
        Scenario.from_file(path)
    path.write_text(SMALL.replace("prompts", "prompt"))
    with pytest.raises(ScenarioError, match=r"one\.toml: rollouts\.prompt"):
        Scenario.from_file(path)


def test_an_interval_is_never_shorter_than_the_rate_allows() -> None:
    for rate in (3.0, 30.0, 1e3, 0.07, 7e8):
        interval = Limits(rate_per_s=rate).interval_ns
        assert interval is not None and interval * rate >= 1e9 * (1 - 1e-15)


def test_a_time_of_seconds_needs_no_model() -> None:
    assert Training(sync=Sync(seconds=2.0)).sync.total_s == 2.0
    with pytest.raises(ValueError, match="either seconds, or model"):
        Sync(seconds=2.0, model="Qwen3-32B")


SHIPPED = sorted((Path(__file__).parents[2] / "sim/scenarios").glob("*.toml"))


@pytest.mark.ci
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_scenario_that_ships_runs(path: Path) -> None:
    scenario = Scenario.from_file(path)
    assert scenario.name == path.stem
    record = simulate(scenario)
    assert len(record.steps) == scenario.training.steps
    for step in record.steps:
        assert step.num_done + step.num_dropped == scenario.rollouts.num_rollouts
