"""Presets say where they come from, and give the quantiles that were measured."""

from __future__ import annotations

import pytest

from gymfast_sim import presets
from gymfast_sim.reading import ScenarioError, to_toml
from gymfast_sim.scenario import Scenario


@pytest.mark.parametrize("name", presets.providers())
def test_a_provider_says_where_its_figures_come_from(name: str) -> None:
    found = presets.provider(name)
    assert found.name == name
    for source in (found.start, found.account):
        assert source.source and source.date.startswith("2026") and source.licence
    assert (found.start.num_samples > 1000) == ("measured" in name)
    assert found.limits.rate_per_s is not None


# docs/simulator.md section 11: quantiles of the samples themselves, not of the fit.
MEASURED = {
    "modal-measured-2026": {0.5: 2.14, 0.9: 2.94, 0.95: 3.38, 0.99: 8.37, 0.999: 25.0},
    "modal-measured-2026-sequential": {0.5: 1.81, 0.9: 2.56, 0.95: 3.10, 0.99: 9.03, 0.999: 27.0},
    "e2b-measured-2026": {0.5: 0.68, 0.9: 1.00, 0.95: 1.16, 0.99: 1.89},
    "daytona-measured-2026": {0.5: 0.31, 0.9: 0.56, 0.95: 0.75, 0.99: 1.49},
}


@pytest.mark.parametrize("name", MEASURED)
def test_a_fit_is_near_the_quantiles_measured(name: str) -> None:
    """Within 7 % in the body and 25 % in the tail, which is what three components can do."""
    law = presets.provider(name).sandboxes.boot
    for p, seconds in MEASURED[name].items():
        assert law.quantile(p) == pytest.approx(seconds, rel=0.07 if p < 0.96 else 0.25)


def test_a_preset_is_part_of_a_scenario() -> None:
    found = presets.provider("modal-measured-2026")
    text = (
        'name = "x"\n[policy]\npolicy = "elastic"\nmax_size = 100\n[rollouts]\nprompts = 100\n'
        'work = { law = "constant", value_s = 10.0 }\n'
    )
    plain = Scenario.from_toml(text)
    whole = Scenario(
        name="x",
        rollouts=plain.rollouts,
        policy=plain.policy,
        sandboxes=found.sandboxes,
        limits=found.limits,
        prices=presets.prices("modal-2026-03", gpus=8, gpu_per_s=0.0011, cores=1, gib=1),
    )
    assert Scenario.from_toml(to_toml(whole)) == whole


def test_prices_are_multiplied_for_a_region() -> None:
    found = presets.prices(
        "modal-2026-03", gpus=8, gpu_per_s=3.95 / 3600, cores=1, gib=1, region_factor=1.25
    )
    assert found.sandbox_per_s == pytest.approx(1.25 * 4.614e-5)
    assert found.source and found.date == "2026-03"


def test_a_name_that_is_not_known_is_refused_with_those_that_are() -> None:
    with pytest.raises(ScenarioError, match=r"expected one of daytona-.*modal-claimed"):
        presets.provider("modal")
    with pytest.raises(ScenarioError, match="modal-2026-03"):
        presets.prices("modal", gpus=1, gpu_per_s=1, cores=1, gib=1)
