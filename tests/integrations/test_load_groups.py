"""Groups of tensors that an engine loads together."""

from __future__ import annotations

import pytest

from gymfast.errors import CoverageError
from gymfast.integrations.load_groups import LoadGroup, first_groups, merge, touched


def group(names: str, *parameters: str) -> LoadGroup:
    return LoadGroup(tuple(names.split()), frozenset(parameters))


def test_the_outermost_number_makes_the_group_and_names_without_one_stay_together() -> None:
    names = ["embed.w", "m.0.moe.3.w", "m.1.q", "m.0.moe.12.w", "norm.w", "visual.0.w"]
    assert [g.names for g in first_groups(names)] == [
        ("embed.w", "norm.w"),
        ("m.0.moe.3.w", "m.0.moe.12.w"),
        ("m.1.q",),
        ("visual.0.w",),
    ]


def test_groups_that_fill_one_module_become_one_also_through_a_third() -> None:
    merged = merge(
        [group("a", "x.w"), group("b", "y.w"), group("c", "z.w"), group("d", "x.b", "y.b")]
    )
    assert {frozenset(g.names) for g in merged} == {frozenset("abd"), frozenset("c")}
    assert touched(merged, ["b"]) == [g for g in merged if "a" in g.names]


def test_a_loader_that_does_not_tell_makes_one_group() -> None:
    (merged,) = merge([group("a", "x.w"), LoadGroup(("b",))])
    assert merged == LoadGroup(("a", "b"))


def test_a_group_that_fills_something_else_is_refused() -> None:
    assert LoadGroup(("a",)).filled({"x.w"}) == group("a", "x.w")
    assert group("a", "x.w").filled(["x.w"]) == group("a", "x.w")
    for found in ({"x.w", "y.w"}, None):
        with pytest.raises(CoverageError, match="other parameters"):
            group("a", "x.w").filled(found)
