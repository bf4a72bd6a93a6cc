"""Policies of pools: pure functions of a view, each with its rule."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymfast.sandbox.policies import (
    AnyPolicy,
    ClaimBackfill,
    Elastic,
    FixedPool,
    Hedged,
    KeepWarm,
    Lead,
    OnePerRollout,
    Reactive,
    TickRefill,
)
from gymfast.sandbox.policy import (
    NOBODY,
    Abort,
    Cancel,
    ClassView,
    Create,
    Decision,
    Drain,
    Memory,
    Policy,
    Terminate,
    View,
)
from gymfast.sandbox.sharing import shares

SECOND = 10**9


def _view(*classes: ClassView, changed: tuple[int, ...] | None = None, now_s: float = 0,
          is_rolling: bool = True, next_step_s: int | None = None) -> View:  # fmt: skip
    return View(
        now_ns=round(now_s * SECOND),
        step=0,
        is_rolling=is_rolling,
        next_step_ns=None if next_step_s is None else next_step_s * SECOND,
        classes=classes,
        changed=tuple(range(len(classes))) if changed is None else changed,
        alive=sum(c.alive for c in classes),
        unfinished=sum(c.unfinished for c in classes),
        queued=sum(c.queued for c in classes),
        starting=sum(c.starting + c.pending for c in classes),
    )


POLICIES: list[AnyPolicy] = [
    OnePerRollout(max_size=7),
    FixedPool(size=7),
    FixedPool(size=7, max_uses=1),
    Elastic(max_size=7),
    KeepWarm(warm=3, max_size=7),
    Lead(max_size=7, lead_s=10.0),
    Hedged(max_size=7, extra_ratio=0.5),
    ClaimBackfill(size=3, max_size=7),
    TickRefill(size=7),
    Reactive(max_size=7),
]


@st.composite
def views(draw: st.DrawFn) -> View:
    """Any view of up to 4 classes."""
    small = st.integers(0, 9)
    classes = []
    for i in range(draw(st.integers(1, 4))):
        queued, busy = draw(small), draw(small)
        classes.append(
            ClassView(
                queued=queued,
                oldest_ticket=draw(st.integers(0, 100)) * 4 + i if queued else NOBODY,
                unfinished=queued + draw(small),
                next_step=draw(small),
                pending=draw(small),
                starting=draw(small),
                idle=draw(small),
                busy=busy,
                draining=draw(st.integers(0, busy)),
                stopping=draw(small),
                new_queued=draw(st.integers(0, queued)),
            )
        )
    is_rolling = draw(st.booleans())
    expected = None if is_rolling else draw(st.sampled_from([None, 5, 30]))
    now_s = draw(st.sampled_from([0, 4, 25]))
    return _view(*classes, now_s=now_s, is_rolling=is_rolling, next_step_s=expected)


def _after(view: View, decision: Decision) -> View:
    """The view once a decision has been carried out; refuses one that cannot be."""
    classes = list(view.classes)
    for action in decision.actions:
        one, count = classes[action.sandbox_class], action.count
        assert count >= (not isinstance(action, Drain))
        if isinstance(action, Create):
            queued = one.queued - count * action.is_bound
            assert queued >= 0
            changes = {"pending": one.pending + count, "queued": queued}
        elif isinstance(action, Cancel):
            assert count <= one.pending
            changes = {"pending": one.pending - count}
        elif isinstance(action, Abort):
            assert count <= one.starting
            changes = {"starting": one.starting - count, "stopping": one.stopping + count}
        elif isinstance(action, Drain):
            assert count <= one.busy
            changes = {"draining": count}
        else:
            assert isinstance(action, Terminate) and count <= one.idle
            changes = {"idle": one.idle - count, "stopping": one.stopping + count}
        classes[action.sandbox_class] = msgspec.structs.replace(one, **changes)
    classes = [msgspec.structs.replace(one, new_queued=0) for one in classes]
    step = None if view.next_step_ns is None else view.next_step_ns // SECOND
    return _view(*classes, now_s=view.now_ns // SECOND, is_rolling=view.is_rolling,
                 next_step_s=step)  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@settings(max_examples=100, deadline=None)
@given(view=views())
def test_a_policy_settles_within_its_size(policy: AnyPolicy, view: View) -> None:
    assert isinstance(policy, Policy)
    decision, memory = policy.decide(view, ())
    assert (decision, memory) == policy.decide(view, ()), "the same view gives the same decision"
    assert all(isinstance(number, int) for number in memory)
    after = _after(view, decision)
    assert after.alive <= max(view.alive, policy.max_size)
    again, _ = policy.decide(after, memory)
    assert not again.actions, "nothing is left to do"
    assert decision.wake_ns is None or decision.wake_ns > view.now_ns


@settings(max_examples=200, deadline=None)
@given(view=views(), data=st.data())
def test_only_classes_that_changed_have_to_be_looked_at(view: View, data: st.DataObject) -> None:
    """From a settled view, any change of one class: the same actions as if all had changed."""
    for policy in (Elastic(max_size=30), KeepWarm(warm=4, max_size=30), FixedPool(size=20)):
        first, memory = policy.decide(view, ())
        settled = list(_after(view, first).classes)
        i = data.draw(st.integers(0, len(settled) - 1))
        settled[i] = data.draw(views()).classes[0]
        some, kept = policy.decide(_view(*settled, changed=(i,)), memory)
        every, all_kept = policy.decide(_view(*settled), memory)
        assert (some, kept) == (every, all_kept)


def _decide(policy: AnyPolicy, *classes: ClassView) -> tuple[object, ...]:
    return policy.decide(_view(*classes), ())[0].actions


def test_elastic_makes_one_for_each_unfinished_rollout() -> None:
    one = ClassView(queued=5, oldest_ticket=0, unfinished=9, pending=1, starting=1, busy=2)
    assert _decide(Elastic(max_size=100), one) == (Create(0, 5),)
    assert _decide(Elastic(max_size=6), one) == (Create(0, 2),)


def test_elastic_takes_back_before_it_ends() -> None:
    one = ClassView(unfinished=2, pending=3, idle=2, busy=2)
    assert _decide(Elastic(max_size=9), one) == (Cancel(0, 3), Terminate(0, 2))


def test_room_is_shared_evenly_and_what_is_left_goes_to_who_waits_longest() -> None:
    late = ClassView(queued=3, oldest_ticket=50, unfinished=3)
    soon = ClassView(queued=3, oldest_ticket=7, unfinished=3)
    assert _decide(Elastic(max_size=4), late, soon) == (Create(1, 2), Create(0, 2))
    assert _decide(Elastic(max_size=5), late, soon) == (Create(1, 3), Create(0, 2))
    assert _decide(Elastic(max_size=1), late, soon) == (Create(1, 1),)
    found = _decide(OnePerRollout(max_size=4), late, soon)
    assert found == (Create(1, 3, is_bound=True), Create(0, 1, is_bound=True))


def test_a_class_over_its_share_drains_while_others_wait() -> None:
    full = ClassView(queued=9, oldest_ticket=1, unfinished=13, busy=4)
    new = ClassView(queued=9, oldest_ticket=5, unfinished=9)
    assert _decide(Elastic(max_size=4), full, new) == (Drain(0, 2),)
    alone = msgspec.structs.replace(full, draining=2)
    assert _decide(Elastic(max_size=4), alone, ClassView()) == (Drain(0, 0),)


@given(
    wanted=st.lists(st.integers(0, 20), min_size=1, max_size=8),
    room=st.integers(0, 60),
    tickets=st.permutations(range(8)),
)
def test_shares_are_as_even_as_can_be(wanted: list[int], room: int, tickets: list[int]) -> None:
    classes = [ClassView(oldest_ticket=t) for t in tickets[: len(wanted)]]
    found = shares(wanted, room, classes, [0] * len(wanted))
    assert sum(found) == min(room, sum(wanted))
    for i, one in enumerate(found):
        assert 0 <= one <= wanted[i]
        if one < wanted[i]:
            assert max(found) <= one + 1, "nobody has two more than one who wants more"


def test_what_one_class_gives_up_another_may_use() -> None:
    full = ClassView(unfinished=0, idle=4)
    waits = ClassView(queued=4, oldest_ticket=1, unfinished=4)
    assert _decide(Elastic(max_size=4), full, waits) == (Terminate(0, 4), Create(1, 4))


def test_a_fixed_pool_is_shared_evenly() -> None:
    found = _decide(FixedPool(size=7), ClassView(), ClassView(), ClassView())
    assert found == (Create(0, 3), Create(1, 2), Create(2, 2))


def test_a_warm_pool_stays_while_the_trainer_works() -> None:
    view = _view(ClassView(idle=5), is_rolling=False, next_step_s=1)
    found, _ = KeepWarm(warm=3, max_size=5).decide(view, ())
    assert found.actions == (Terminate(0, 2),)


def test_a_lead_wakes_up_and_then_acts_as_if_the_step_had_begun() -> None:
    policy = Lead(max_size=8, lead_s=20.0)
    one = ClassView(next_step=6)
    early = _view(one, is_rolling=False, next_step_s=60)
    assert policy.decide(early, ())[0] == Decision(wake_ns=40 * SECOND)
    later = _view(one, changed=(), now_s=40, is_rolling=False, next_step_s=60)
    assert policy.decide(later, ())[0] == Decision((Create(0, 6),))


def test_a_hedge_gives_up_what_is_not_needed() -> None:
    policy = Hedged(max_size=20, extra_ratio=0.25)
    waiting = ClassView(queued=8, oldest_ticket=0, unfinished=8)
    assert _decide(policy, waiting) == (Create(0, 10),)
    served = ClassView(unfinished=8, busy=8, starting=2)
    assert _decide(policy, served) == (Abort(0, 2),)


def test_claims_are_backfilled_and_the_pool_is_topped_up() -> None:
    policy = ClaimBackfill(size=3, max_size=20, top_up_s=60.0)
    first, memory = policy.decide(_view(ClassView()), ())
    assert first == Decision((Create(0, 3),), 60 * SECOND)
    burst = ClassView(queued=5, oldest_ticket=0, unfinished=5, starting=3, new_queued=5)
    second, memory = policy.decide(_view(burst, now_s=1), memory)
    assert second == Decision((Create(0, 5),), 60 * SECOND)
    third, memory = policy.decide(_view(ClassView(idle=1), now_s=60, changed=()), memory)
    assert (third, memory) == (Decision((Create(0, 2),), 120 * SECOND), (120 * SECOND,))


def test_a_tick_awaits_its_creations_then_pauses() -> None:
    policy, memory = TickRefill(size=9, batch=4, tick_s=1.0), ()
    seen = []
    for now_s, one in (
        (0, ClassView()),
        (2, ClassView(starting=1, idle=3)),
        (3, ClassView(idle=4)),
        (3.5, ClassView(idle=3, busy=1)),
        (4, ClassView(idle=4)),
    ):
        decision, memory = policy.decide(_view(one, now_s=now_s), memory)
        seen.append(decision)
    wake = Decision(wake_ns=4 * SECOND)
    assert seen == [Decision((Create(0, 4),)), Decision(), wake, wake, Decision((Create(0, 4),))]


def test_a_reactive_pool_follows_the_mean_and_panics_at_bursts() -> None:
    policy = Reactive(max_size=100, tick_s=1.0, stable_ticks=4, panic_ticks=1)
    memory: Memory = ()
    sizes, alive = [], 0
    for now_s, wanted in enumerate((10, 10, 10, 10, 0, 0, 0, 0, 0, 0)):
        one = ClassView(queued=wanted, oldest_ticket=1, unfinished=wanted, idle=alive)
        decision, memory = policy.decide(_view(one, now_s=now_s), memory)
        assert decision.wake_ns == (now_s + 1) * SECOND
        for action in decision.actions:
            alive += action.count if isinstance(action, Create) else -action.count
        sizes.append(alive)
    assert sizes[:4] == [10] * 4 and sizes[4] == 0, "nobody waits, so nothing idles"
    late = ClassView(queued=40, oldest_ticket=1, unfinished=40, idle=10)
    calm, _ = policy.decide(_view(late, now_s=20), (0, 0, 10, 10, 10, 10, 10))
    assert calm.actions == (Create(0, 30),), "40 is more than twice 10: a panic"
    slow = msgspec.structs.replace(late, unfinished=18)
    calm, _ = policy.decide(_view(slow, now_s=20), (0, 0, 10, 10, 10, 10, 10))
    assert calm.actions == (Create(0, 2),), "the mean of 10, 10, 10, 18 is 12"


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
