"""Versions over live connections: all receivers end with the publisher's bytes, or are named."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from channel_group import Controls, in_threads

from gymfast.channels import Loopback
from gymfast.channels.tcp import open_tcp
from gymfast.delta import State, as_tensor
from gymfast.errors import ChannelError, CoverageError
from gymfast.sync.density import sampled_density
from gymfast.sync.live import LivePublisher, LiveSubscriber

Weights = dict[str, Any]


def make_weights(seed: int = 0) -> Weights:
    rng = np.random.default_rng(seed)
    return {
        "embed": rng.integers(0, 2**16, (300, 64), dtype=np.uint16),
        "norm": rng.standard_normal(64).astype(np.float32),
        "scalar": np.array(3, np.int64),
        "none": np.zeros((0, 4), np.float16),
    }


def step(weights: Weights, seed: int, ratio: float = 0.01) -> None:
    rng = np.random.default_rng(seed)
    flat = weights["embed"].reshape(-1)
    flat[rng.choice(flat.size, int(flat.size * ratio), replace=False)] ^= 1


def same(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(
        as_tensor(one[n]).data.tobytes() == as_tensor(other[n]).data.tobytes() for n in one
    )


class Live:
    """A publisher and receivers in threads."""

    def __init__(self, num_receivers: int, kind: str) -> None:
        self.kind = kind
        self.controls = Controls(num_receivers + 1)
        self.weights = make_weights()
        self.replicas: list[Weights] = [{} for _ in range(num_receivers)]
        channels = self.channels()
        self.publisher = LivePublisher(
            self.controls.all[0], channels[0], bucket_bytes=4096, timeout_s=5
        )
        self.receivers = [
            LiveSubscriber(control, channel, replica, timeout_s=5)
            for control, channel, replica in zip(
                self.controls.all[1:], channels[1:], self.replicas, strict=True
            )
        ]

    def channels(self) -> list[Any]:
        if self.kind == "loopback":
            group = Loopback(len(self.controls.all))
            return [group.channel(i, timeout_s=5) for i in range(group.num_ranks)]
        if self.kind in ("shm", "gloo"):
            module = importlib.import_module(f"gymfast.channels.{self.kind}")
            open_channel = getattr(module, f"open_{self.kind}")
            return in_threads(*(partial(open_channel, c, timeout_s=5) for c in self.controls.all))
        options = {"fanout": 1 if self.kind == "chain" else None, "timeout_s": 5.0}
        return in_threads(*(partial(open_tcp, c, **options) for c in self.controls.all))

    def sync(self) -> list[Any]:
        return in_threads(
            partial(self.publisher.publish, self.weights), *(r.receive for r in self.receivers)
        )

    def rejoin(self) -> None:
        self.controls.form()
        for side, control, channel in zip(
            [self.publisher, *self.receivers], self.controls.all, self.channels(), strict=True
        ):
            side.rejoin(control, channel)

    def close(self) -> None:
        in_threads(*(s._channel.close for s in [self.publisher, *self.receivers]))
        self.controls.close()


@pytest.fixture(params=["loopback", "star", "chain"])
def live(request: pytest.FixtureRequest) -> Iterator[Live]:
    group = Live(2, request.param)
    yield group
    group.close()


def test_deltas_follow_a_full_version(live: Live) -> None:
    kinds = []
    for version in range(5):
        reports = live.sync()
        assert [report.version for report in reports] == [version] * 3
        assert {report.root for report in reports} == {reports[0].root}
        assert reports[0].failed == {}
        assert all(same(live.weights, replica) for replica in live.replicas)
        kinds.append(reports[0].kind)
        assert version == 0 or reports[0].sent_bytes < 0.1 * reports[0].raw_bytes
        step(live.weights, version)
    assert kinds == ["full", "delta", "delta", "delta", "delta"]


@pytest.mark.parametrize("kind", ["shm", "gloo"])
def test_versions_follow_each_other_over_every_channel(kind: str) -> None:
    if kind == "gloo":
        pytest.importorskip("torch.distributed")
    group = Live(2, kind)
    test_deltas_follow_a_full_version(group)
    group.close()


def test_full_versions_come_in_buckets_that_suit_the_channel() -> None:
    group = Live(1, "loopback")
    channel = group.publisher._channel
    channel.good_bucket_bytes = 8192
    group.publisher = LivePublisher(group.controls.all[0], channel, timeout_s=5)
    group.sync()
    assert group.receivers[0]._bucket_bytes == 8192
    assert same(group.weights, group.replicas[0])
    group.close()


def test_dense_changes_are_sent_in_full(live: Live) -> None:
    live.sync()
    step(live.weights, 1, ratio=0.6)
    reports = live.sync()
    assert [report.kind for report in reports] == ["full"] * 3
    assert all(same(live.weights, replica) for replica in live.replicas)
    step(live.weights, 2)
    assert live.sync()[0].kind == "delta"


def test_a_receiver_that_holds_something_else_is_healed_by_a_full_version(live: Live) -> None:
    live.sync()
    changed = as_tensor(live.replicas[1]["embed"])
    changed.data[3] ^= 1
    live.receivers[1]._state = State.attach(live.replicas[1])
    step(live.weights, 1)
    assert live.sync()[0].kind == "full"
    assert all(same(live.weights, replica) for replica in live.replicas)


def test_R25_a_receiver_that_fails_is_named_and_gets_everything_next_time(live: Live) -> None:
    live.sync()
    step(live.weights, 1)
    receiver = live.receivers[1]
    verify = receiver._state.verify
    receiver._state.verify = lambda done: (_ for _ in ()).throw(OSError("a broken memory bank"))
    results = live.sync()
    assert results[0].failed == {2: "OSError: a broken memory bank"}
    assert isinstance(results[2], OSError)
    assert same(live.weights, live.replicas[0])
    receiver._state.verify = verify
    receiver._state.is_consistent = False
    step(live.weights, 2)
    reports = live.sync()
    assert (reports[0].kind, reports[0].failed) == ("full", {})
    assert all(same(live.weights, replica) for replica in live.replicas)


def test_all_receivers_failing_leaves_the_publisher_where_it_was(live: Live) -> None:
    live.sync()
    before = live.publisher._state.root
    step(live.weights, 1)
    for receiver in live.receivers:
        receiver._take_delta = lambda: (_ for _ in ()).throw(MemoryError("no room"))
    results = live.sync()
    assert isinstance(results[0], ChannelError)
    assert live.publisher._state.root == before
    assert live.publisher.version == 0
    for receiver in live.receivers:
        del receiver._take_delta
    live.rejoin()
    reports = live.sync()
    assert (reports[0].version, reports[0].kind) == (1, "delta")
    assert all(same(live.weights, replica) for replica in live.replicas)


def test_a_lost_receiver_is_left_behind_and_joins_again(live: Live) -> None:
    live.sync()
    live.controls.all[2].close()
    step(live.weights, 1)
    results = in_threads(
        partial(live.publisher.publish, live.weights),
        live.receivers[0].receive,
        live.receivers[1]._channel.close,
    )
    assert list(results[0].failed) == [2]
    assert same(live.weights, live.replicas[0])
    from gymfast.channels import connect

    live.controls.all[2] = connect(live.controls.hub.address, 2)
    live.controls.hub.control.wait_for(3, 5)
    live.rejoin()
    step(live.weights, 2)
    reports = live.sync()
    assert (reports[0].kind, reports[0].failed) == ("full", {})
    assert all(same(live.weights, replica) for replica in live.replicas)


def test_other_names_are_refused_before_anything_is_written(live: Live) -> None:
    replica = make_weights(7)
    replica["extra"] = replica.pop("norm")
    before = {name: value.copy() for name, value in replica.items()}
    live.receivers[0] = LiveSubscriber(
        live.controls.all[1], live.receivers[0]._channel, replica, timeout_s=5
    )
    results = live.sync()
    assert isinstance(results[1], CoverageError)
    assert "2 tensors differ: 'extra' is ('F32', (64,)) here and not there" in str(results[1])
    assert same(replica, before)


def test_a_receiver_that_waited_in_vain_takes_the_next_version(live: Live) -> None:
    live.sync()
    for receiver in live.receivers:
        with pytest.raises(ChannelError, match=r"rank 0 said nothing for 0\.15 s"):
            receiver.receive(timeout_s=0.1)
    step(live.weights, 1)
    reports = live.sync()
    assert (reports[0].kind, reports[0].failed) == ("delta", {})
    assert all(same(live.weights, replica) for replica in live.replicas)


def test_weights_that_cannot_be_sent_leave_all_where_they_were(live: Live) -> None:
    live.sync()
    with pytest.raises(TypeError):
        live.publisher.publish({**live.weights, "norm": "text"})
    step(live.weights, 1)
    assert live.sync()[0].failed == {}
    assert all(same(live.weights, replica) for replica in live.replicas)


def test_memory_of_a_receiver_stays_where_it_is(live: Live) -> None:
    live.sync()
    before = {n: as_tensor(t).address for n, t in live.replicas[0].items()}
    step(live.weights, 1)
    live.sync()
    step(live.weights, 2, ratio=0.9)
    live.sync()
    assert {n: as_tensor(t).address for n, t in live.replicas[0].items()} == before


@pytest.mark.parametrize("ratio", [0, 0.01, 0.1, 0.5, 1])
def test_the_sampled_density_is_about_that_of_all(ratio: float) -> None:
    rng = np.random.default_rng(0)
    old = {"a": rng.integers(0, 2**16, 3_000_000, dtype=np.uint16), "b": np.zeros(5, np.float32)}
    new = {name: value.copy() for name, value in old.items()}
    new["a"][rng.random(len(new["a"])) < ratio] ^= 1
    found = sampled_density(State.reading(old), new)
    assert found == pytest.approx(ratio, rel=0.05, abs=1e-9)
