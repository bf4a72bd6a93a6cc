"""Policies of pools: pure functions of a view, each with its rule."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymfast.sandbox.policy import (
    NOBODY,
    AnyPolicy,
    Cancel,
    ClassView,
    Create,
    Decision,
    Elastic,
    FixedPool,
    KeepWarm,
    Lead,
    OnePerRollout,
    Policy,
    Terminate,
    View,
)


def _view(*classes: ClassView, **settings: object) -> View:
    plain = {"now_ns": 0, "step": 0, "is_rolling": True, "next_step_ns": None} | settings
    return View(classes=classes, **plain)  # type: ignore[arg-type]


POLICIES: list[AnyPolicy] = [
    OnePerRollout(max_size=7),
    FixedPool(size=7),
    FixedPool(size=7, max_uses=1),
    Elastic(max_size=7),
    KeepWarm(warm=3, max_size=7),
    Lead(max_size=7, lead_s=10.0),
]


@st.composite
def views(draw: st.DrawFn) -> View:
    """Any view of up to 4 classes."""
    small = st.integers(0, 9)
    classes = []
    for i in range(draw(st.integers(1, 4))):
        queued = draw(small)
        classes.append(
            ClassView(
                queued=queued,
                oldest_ticket=draw(st.integers(0, 100)) * 4 + i if queued else NOBODY,
                unfinished=queued + draw(small),
                next_step=draw(small),
                pending=draw(small),
                starting=draw(small),
                idle=draw(small),
                busy=draw(small),
                stopping=draw(small),
            )
        )
    is_rolling = draw(st.booleans())
    expected = None if is_rolling else draw(st.sampled_from([None, 5 * 10**9, 30 * 10**9]))
    return _view(*classes, now_ns=draw(st.sampled_from([0, 4 * 10**9, 25 * 10**9])),
                 is_rolling=is_rolling, next_step_ns=expected)  # fmt: skip


def _after(view: View, decision: Decision) -> list[ClassView]:
    """The classes once a decision has been carried out; refuses one that cannot be."""
    classes = list(view.classes)
    for action in decision.actions:
        one, count = classes[action.sandbox_class], action.count
        assert count >= 1
        if isinstance(action, Create):
            queued = one.queued - count * action.is_bound
            assert queued >= 0
            changes = {"pending": one.pending + count, "queued": queued}
        elif isinstance(action, Cancel):
            assert count <= one.pending
            changes = {"pending": one.pending - count}
        else:
            assert count <= one.idle
            changes = {"idle": one.idle - count, "stopping": one.stopping + count}
        classes[action.sandbox_class] = msgspec.structs.replace(one, **changes)
    return classes


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@settings(max_examples=150, deadline=None)
@given(view=views())
def test_a_policy_settles_within_its_size(policy: AnyPolicy, view: View) -> None:
    assert isinstance(policy, Policy)
    decision = policy.decide(view)
    assert decision == policy.decide(view), "the same view gives the same decision"
    after = _after(view, decision)
    before, now = (sum(c.planned for c in classes) for classes in (view.classes, after))
    size = policy.size if isinstance(policy, FixedPool) else policy.max_size
    assert now <= max(before, size)
    again = policy.decide(msgspec.structs.replace(view, classes=tuple(after)))
    assert not again.actions, "nothing is left to do"
    assert decision.wake_ns is None or decision.wake_ns > view.now_ns


def test_elastic_makes_one_for_each_unfinished_rollout() -> None:
    view = _view(ClassView(queued=5, oldest_ticket=0, unfinished=9, pending=1, starting=1, busy=2))
    assert Elastic(max_size=100).decide(view).actions == (Create(0, 5),)
    assert Elastic(max_size=6).decide(view).actions == (Create(0, 2),)


def test_elastic_takes_back_before_it_ends() -> None:
    view = _view(ClassView(unfinished=2, pending=3, idle=2, busy=2))
    assert Elastic(max_size=9).decide(view).actions == (Cancel(0, 3), Terminate(0, 2))


def test_classes_come_in_the_order_in_which_their_rollouts_wait() -> None:
    late = ClassView(queued=3, oldest_ticket=50, unfinished=3)
    soon = ClassView(queued=3, oldest_ticket=7, unfinished=3)
    assert Elastic(max_size=4).decide(_view(late, soon)).actions == (Create(1, 3), Create(0, 1))
    found = OnePerRollout(max_size=4).decide(_view(late, soon)).actions
    assert found == (Create(1, 3, is_bound=True), Create(0, 1, is_bound=True))


def test_what_one_class_gives_up_another_may_use() -> None:
    full = ClassView(unfinished=0, idle=4)
    view = _view(full, ClassView(queued=4, oldest_ticket=1, unfinished=4))
    assert Elastic(max_size=4).decide(view).actions == (Terminate(0, 4), Create(1, 4))


def test_a_fixed_pool_is_shared_evenly() -> None:
    found = FixedPool(size=7).decide(_view(ClassView(), ClassView(), ClassView()))
    assert found.actions == (Create(0, 3), Create(1, 2), Create(2, 2))


def test_a_warm_pool_stays_while_the_trainer_works() -> None:
    view = _view(ClassView(idle=5), is_rolling=False, next_step_ns=10**9)
    assert KeepWarm(warm=3, max_size=5).decide(view).actions == (Terminate(0, 2),)


def test_a_lead_wakes_up_and_then_acts_as_if_the_step_had_begun() -> None:
    policy = Lead(max_size=8, lead_s=20.0)
    view = _view(ClassView(next_step=6), is_rolling=False, next_step_ns=60 * 10**9)
    assert policy.decide(view) == Decision(wake_ns=40 * 10**9)
    later = msgspec.structs.replace(view, now_ns=40 * 10**9)
    assert policy.decide(later) == Decision((Create(0, 6),))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"policy": "fixed", "size": 0}, "size is 0, expected 1 or more"),
        ({"policy": "elastic", "max_size": 4, "max_uses": 0}, "max_uses is 0"),
        ({"policy": "keep-warm", "warm": 5, "max_size": 4}, "warm is 5, expected at most max_size"),
        ({"policy": "lead", "max_size": 4, "lead_s": -1}, "lead_s is -1.0"),
        ({"policy": "lead", "max_size": 4, "lead_s": float("nan")}, "lead_s is nan"),
        ({"policy": "elastic", "max_size": 4, "size": 4}, "unknown field `size`"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, object], text: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=text):
        msgspec.convert(settings, AnyPolicy)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_settings_survive_json(policy: AnyPolicy) -> None:
    assert msgspec.json.decode(msgspec.json.encode(policy), type=AnyPolicy) == policy
