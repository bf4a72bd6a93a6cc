"""Buckets of the channel over NCCL lie in memory that is registered once with each communicator."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from channel_group import Controls, in_threads
from nccl_doubles import Double

from gymfast.buckets import BucketTensor
from gymfast.channels import BucketTransfer, connect
from gymfast.channels.device_memory import DeviceMemory
from gymfast.channels.host_memory import HostMemory
from gymfast.channels.nccl import NcclChannel, open_nccl
from gymfast.channels.nccl_library import registrations_of
from gymfast.testing.channel_contract import noise

pytest.importorskip("torch")

BUCKET, DEPTH = 4096, 3
ARENA = 2 * DEPTH * BUCKET  # two roots
SIZES = [700, 5000, 0, 256, 31, 9000]


@pytest.fixture
def controls() -> Iterator[Controls]:
    group = Controls(3)
    yield group
    group.close()


def opened(
    controls: Controls, double: Double, old: list[NcclChannel | None] | None = None, **options: Any
) -> list[Any]:
    options = {"path": double.path, "cuda_path": double.path, "arena_bytes": ARENA} | options
    options = {"timeout_s": 10, "depth": DEPTH} | options
    works = [
        partial(open_nccl, control, replaces=one, **options)
        for control, one in zip(controls.all, old or [None] * len(controls.all), strict=True)
    ]
    return in_threads(*works)


def exchange(
    controls: Controls,
    channels: list[NcclChannel],
    seed: int,
    memory: Any = DeviceMemory,
    bucket: int = BUCKET,
) -> None:
    """Two versions of tensors from two roots, right on all ranks."""
    import torch

    roots = [0, controls.all[-1].rank]
    sent = {f"r{r}.{i}": noise(seed + 10 * r + i, n) for r in roots for i, n in enumerate(SIZES)}
    shares = {
        root: [
            BucketTensor(n, "U8", (len(t),), len(t)) for n, t in sent.items() if n[1] == str(root)
        ]
        for root in roots
    }

    def work(control: Any, channel: NcclChannel) -> None:
        used = DeviceMemory("cpu") if memory is DeviceMemory else memory()
        transfer = BucketTransfer(
            control, channel, shares, bucket, environment=channel.environment, memory=used
        )
        transfer.agree()
        for _ in range(2):
            own = {
                n: t.copy() if n[1] == str(control.rank) else np.zeros_like(t)
                for n, t in sent.items()
            }
            as_torch = {n: torch.from_numpy(t) for n, t in own.items()}
            transfer.run(1, as_torch if memory is DeviceMemory else own).require_all()
            assert all((own[n] == sent[n]).all() for n in sent)

    works = [partial(work, c, ch) for c, ch in zip(controls.all, channels, strict=True)]
    assert in_threads(*works) == [None] * len(channels)


def close(*channels: NcclChannel) -> None:
    in_threads(*(channel.close for channel in channels))


def without_rounds(calls: list[str]) -> list[str]:
    return [call for call in calls if not call.startswith("group")]


def of_ranks(double: Double) -> tuple[dict[int, list[str]], list[str]]:
    """Calls of each rank without its rounds, and those of memory."""
    calls = double.calls()
    by_rank = {r: [c[3:] for c in calls if c.startswith(f"r{r} ")] for r in range(3)}
    rest = [call for call in calls if not call.startswith("r")]
    return {r: without_rounds(own) for r, own in by_rank.items()}, rest


def test_a_window_is_made_once_by_all_ranks_and_goes_before_its_communicator(
    controls: Controls, double: Double
) -> None:
    channels = opened(controls, double)
    assert [channel.registration for channel in channels] == ["window"] * 3
    for seed in (0, 100):  # transfers share the memory
        exchange(controls, channels, seed)
    close(*channels)
    assert [channel.arena for channel in channels] == [None] * 3
    del channels
    by_rank, memory = of_ranks(double)
    whole = ["init 3", f"window {ARENA}", "window_deregister", "finalize", "destroy"]
    assert by_rank == dict.fromkeys(range(3), whole)
    assert memory == ["unique_id", *[f"alloc {ARENA}"] * 3, *["free"] * 3]


def test_rounds_lie_in_the_arena_at_the_same_places(controls: Controls, double: Double) -> None:
    """The double compares the places in registered memory, and who has none."""
    channels = opened(controls, double)
    arenas = [DeviceMemory("cpu").of_arena(channel.arena) for channel in channels]
    for arena in arenas:
        arena.zero_()
    exchange(controls, channels, 0)
    assert all((arena == arenas[0]).all() and arena.any() for arena in arenas)
    exchange(controls, channels, 1, bucket=2 * BUCKET)  # too large for it: other memory
    assert all((arena == arenas[0]).all() for arena in arenas)
    close(*channels)
    double.calls()


def test_memory_of_an_arena_outlives_the_channel_that_a_transfer_still_has(
    controls: Controls, double: Double
) -> None:
    channels = opened(controls, double)
    view = HostMemory().of_arena(channels[0].arena)
    assert view is not None
    view[:] = 7
    close(*channels)
    channels.clear()
    _, memory = of_ranks(double)
    assert memory.count("free") == 2
    assert (view == 7).all()
    del view
    assert of_ranks(double)[1] == ["free"]


def test_memory_that_the_cpu_does_not_reach_is_not_touched_by_it() -> None:
    from gymfast.channels.base import Arena

    arena = Arena(64, 4096, is_managed=False, owner=None)
    assert HostMemory().of_arena(arena) is None
    assert DeviceMemory("cpu").of_arena(arena) is None
    assert arena.__cuda_array_interface__["data"] == (64, False)


@pytest.mark.parametrize("reason", ["NCCL_WIN_ENABLE", "skips_windows"])
def test_buffers_are_registered_where_there_are_no_windows(
    controls: Controls, double: Double, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "skips_windows":
        double.set(reason, 1)
    else:
        monkeypatch.setenv(reason, "0")
    channels = opened(controls, double)
    assert [channel.registration for channel in channels] == ["buffer"] * 3
    exchange(controls, channels, 0)
    close(*channels)
    by_rank, _ = of_ranks(double)
    whole = ["init 3", f"register {ARENA}", "deregister", "finalize", "destroy"]
    assert by_rank == dict.fromkeys(range(3), whole)


@pytest.mark.parametrize("reason", ["NCCL_CUMEM_ENABLE", "skips"])
def test_without_any_registration_transfers_go_on(
    controls: Controls, double: Double, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "skips":
        double.set("skips_windows", 1)
        double.set("skips_registration", 1)
    else:
        monkeypatch.setenv(reason, "0")
    channels = opened(controls, double)
    assert {(c.registration, c.arena, c.num_failed_registrations) for c in channels} == {
        ("none", None, 0)
    }
    exchange(controls, channels, 0)
    close(*channels)
    assert of_ranks(double)[0] == {r: ["init 3", "finalize", "destroy"] for r in range(3)}


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        ("alloc_error", "ncclMemAlloc of 24576 bytes: unhandled cuda error"),
        (
            "register_error",
            "rank 1: ncclCommRegister: unhandled cuda error (result 1): an injected",
        ),
        ("window_error", "rank 1: ncclCommWindowRegister: unhandled cuda error (result 1)"),
    ],
)
def test_R91_a_registration_that_fails_on_a_rank_is_a_warning_and_a_count_on_all(
    controls: Controls,
    double: Double,
    fails: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if fails == "register_error":
        monkeypatch.setenv("NCCL_WIN_ENABLE", "0")
    double.set(fails, 1, rank=1)
    channels = opened(controls, double, timeout_s=100)  # nobody waits for a rank that failed
    assert [channel.num_failed_registrations for channel in channels] == [1] * 3
    warnings = [r.message for r in caplog.records if "not registered with NCCL" in r.message]
    assert len(warnings) == 3
    assert all(words in text for text in warnings), warnings
    assert {(channel.registration, channel.arena) for channel in channels} == {("none", None)}
    exchange(controls, channels, 0)
    close(*channels)
    by_rank, memory = of_ranks(double)
    if fails == "window_error":  # NCCL does not come back from it: another communicator
        assert all(calls.count("init 3") == 2 and "abort" in calls for calls in by_rank.values())
    else:
        assert all(calls.count("init 3") == 1 for calls in by_rank.values())
    assert memory.count("free") == memory.count(f"alloc {ARENA}")


def test_a_rank_that_is_lost_before_its_window_is_an_error_on_all_others(
    controls: Controls, double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    register = NcclChannel.register_arena

    def register_or_die(channel: NcclChannel, how: str) -> bool:
        if channel.rank == 2:
            controls.all[2].close()
            raise DiedError
        return register(channel, how)

    monkeypatch.setattr(NcclChannel, "register_arena", register_or_die)
    results = opened(controls, double, timeout_s=30)
    assert all("rank 2 is lost" in str(error) for error in results[:2]), results
    assert of_ranks(double)[1].count("free") == 3


class DiedError(Exception):
    """What a rank of a test ends with."""


def test_arenas_of_other_sizes_are_found_before_nccl_is_asked(
    controls: Controls, double: Double
) -> None:
    works = [
        partial(open_nccl, c, path=double.path, cuda_path=double.path, arena_bytes=n, timeout_s=5)
        for c, n in zip(controls.all, (0, 4096, 0), strict=True)
    ]
    errors = in_threads(*works)
    assert all("arena_bytes is '4096' there and '0' on rank 0" in str(e) for e in errors), errors
    assert double.calls() == []


def test_a_communicator_that_shrank_or_grew_registers_the_same_memory_again(
    controls: Controls, double: Double
) -> None:
    channels = opened(controls, double)
    exchange(controls, channels, 0)
    addresses = [channel.arena.address for channel in channels]
    controls.all.pop(1).close()
    channels.pop(1).discard()
    for channel in channels:
        channel.abort("a rank is lost")
    while controls.form() != [(0, 2)] * 2:
        pass  # the loss is not known yet
    double.calls()
    two = opened(controls, double, [*channels])
    assert [getattr(c, "registration", c) for c in two] == ["window"] * 2
    assert [channel.arena.address for channel in two] == [addresses[0], addresses[2]]
    exchange(controls, two, 1)
    by_rank, memory = of_ranks(double)
    # An abort takes the old registration along; NCCL's rank 1 is the one that was rank 2.
    assert by_rank[0] == ["shrink 1", "abort", f"window {ARENA}"]
    assert by_rank[2] == ["shrink 1", "abort"]
    assert by_rank[1] == [f"window {ARENA}"]
    assert memory == []
    controls.all.append(connect(controls.hub.address, 1))
    controls.hub.control.wait_for(3, 5)
    assert in_threads(*(partial(c.form, 10) for c in controls.all)) == [(0, 1, 2)] * 3
    three = opened(controls, double, [*two, None])
    assert [getattr(c, "registration", c) for c in three] == ["window"] * 3
    assert [channel.arena.address for channel in three[:2]] == [addresses[0], addresses[2]]
    by_rank, memory = of_ranks(double)
    old, new = ["window_deregister", "finalize", "destroy"], f"window {ARENA}"
    assert by_rank[0] == ["grow_id", "grow 3", *old, new]
    assert by_rank[1] == ["grow 3", *old, new]
    assert by_rank[2] == ["grow_into 3", new]
    assert memory == [f"alloc {ARENA}"]
    controls.all.sort(key=lambda control: control.rank)
    exchange(controls, sorted(three, key=lambda channel: channel.rank), 2)
    close(*three)


def test_memory_that_an_nccl_that_hangs_may_still_write_to_is_not_used_again(
    controls: Controls, double: Double
) -> None:
    old = opened(controls, double, timeout_s=2)
    addresses = [channel.arena.address for channel in old]
    double.set("abort_hangs", 1, rank=1)
    for channel in old:
        channel.abort("a test")
    double.calls()
    new = opened(controls, double, [*old], timeout_s=2)
    assert [channel.registration for channel in new] == ["window"] * 3
    same = [
        channel.arena.address == address for channel, address in zip(new, addresses, strict=True)
    ]
    assert same == [True, False, True]
    assert of_ranks(double)[1].count(f"alloc {ARENA}") == 1
    exchange(controls, new, 0)
    double.reset()
    close(*new)


ALL = ["memory", "registration", "windows"]


@pytest.mark.parametrize(
    ("features", "driver", "environment", "ways"),
    [
        (ALL, 12020, {}, ("window", "buffer")),
        (ALL, 12020, {"NCCL_WIN_ENABLE": "0"}, ("buffer",)),
        (ALL, 12020, {"NCCL_LOCAL_REGISTER": "0"}, ("window",)),
        (ALL, 12020, {"NCCL_CUMEM_ENABLE": "0"}, ()),
        (ALL, 11080, {}, ()),
        (["memory", "registration"], 13000, {}, ("buffer",)),
        (["registration", "windows"], 13000, {}, ()),
        ([], 13000, {}, ()),
    ],
)
def test_the_ways_to_register_are_those_of_library_driver_and_settings(
    features: list[str],
    driver: int,
    environment: dict[str, str],
    ways: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    library: Any = SimpleNamespace(features=features, driver_version=lambda: driver)
    assert registrations_of(library) == ways
