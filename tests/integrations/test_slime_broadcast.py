"""slime's distributed updater and the one of gymfast in its place, through the same scripted runs.

With slime's own source (GYMFAST_SLIME_SOURCE) its updater, its gather code and its groups run over
gloo, with stubs for ray and megatron; engines are processes, with SGLang's own receiving code where
GYMFAST_SGLANG_SOURCE is given (0.5.15.post1, which slime pins, or 0.5.21 and later).
"""

from __future__ import annotations

import importlib.util
import os
import sys
from argparse import Namespace
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import slime_stubs
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from integrations.sglang_real import BUCKET, parameters_of, path_of
from integrations.test_slime import SOURCE
from slime_group_run import FIRST, LAST, TENSORS, Handle, Script, ask, engines, run, truth

from gymfast.integrations.flat_bucket import flat_bucket
from gymfast.integrations.slime import EXPECTED_DISTRIBUTED, install

GIVEN = os.environ.get("GYMFAST_SGLANG_SOURCE")
SGLANG = Path(GIVEN) if GIVEN else None
STAGES = [list(FIRST), list(LAST)]
SEND = "update_weights_from_distributed"
WAYS = [pytest.param(True, id="gymfast")]
if SOURCE is not None:
    WAYS.append(pytest.param(False, id="slime"))
BOTH = pytest.mark.parametrize("is_gymfast", WAYS)


@pytest.fixture
def lasting(group_engines: dict[str, str]) -> dict[str, str]:
    """Engines that outlive a test, as after a restart."""
    for address in group_engines.values():
        ask(address, "test", {"is_reset": True})
    return group_engines


def sync_of(step: int) -> list[tuple[Any, ...]]:
    return [("train", step), ("sync",)]


def errors(notes: list[dict[str, Any]]) -> list[str | None]:
    return [note["error"] for note in notes]


@BOTH
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_engines_have_the_bytes_that_were_trained(
    is_gymfast: bool, num_ranks: int, lasting: dict[str, str], tmp_path: Path
) -> None:
    steps = [("connect", "ab"), ("sync",), *sync_of(1), ("connect", "abc"), *sync_of(2)]
    stages = [list(TENSORS)] if num_ranks == 1 else STAGES
    ranks = run(Script(tmp_path, SOURCE, is_gymfast, steps, lasting, stages, num_ranks))
    assert [errors(notes) for notes in ranks] == [[None] * 3] * num_ranks
    for number, note in enumerate(ranks[0]):
        version = str(number + 1)
        assert list(note["engines"]) == ["a", "b", "c"][: 3 if number == 2 else 2]
        for engine in note["engines"].values():
            assert engine["digests"] == truth(number)
            assert engine["version"] == version
            assert not engine["is_paused"]
            calls = [c for c in engine["calls"] if "group" not in c]
            assert calls[:2] == ["pause_generation", "flush_cache"]
            assert calls[-1] == "continue_generation"
            marks = [c.removeprefix(SEND) for c in calls[2:-1]]
            if is_gymfast:  # engines get the number with the last bucket of all stages
                assert marks == [*[""] * (len(marks) - 1), f":{version}"]
            else:
                assert marks == [f":{version}"] * len(marks)
            assert sorted(chain(*engine["loads"])) == sorted(TENSORS)
    if is_gymfast:
        check_metrics(ranks[-1][-1]["metrics"], ranks[0][-1]["engines"]["a"])


def check_metrics(metrics: dict[str, float], engine: dict[str, Any]) -> None:
    sizes = {n: torch.empty(shape, dtype=dtype).nbytes for n, (dtype, shape) in TENSORS.items()}
    buckets = len(engine["loads"])
    assert metrics.pop("perf/update_weights_wire_bytes") == sum(sizes.values())
    assert metrics.pop("perf/update_weights_num_buckets") == buckets
    assert metrics.pop("perf/update_weights_num_broadcasts") == buckets < len(TENSORS)
    assert metrics.pop("perf/update_weights_num_frames") == 0
    phases = ("pause", "gather", "pack", "wait", "lock", "send", "load")
    assert set(metrics) == {f"perf/update_weights_{phase}_time" for phase in phases}
    assert all(0 <= seconds < 60 for seconds in metrics.values())


@BOTH
@pytest.mark.parametrize(
    "stages",
    [
        pytest.param([[], list(TENSORS)], id="first"),
        pytest.param([list(TENSORS), []], id="last", marks=pytest.mark.long),
        pytest.param([[], []], id="all", marks=pytest.mark.long),
    ],
)
def test_R74_stages_without_tensors_take_part(
    is_gymfast: bool, stages: list[list[str]], lasting: dict[str, str], tmp_path: Path
) -> None:
    steps = [("connect", "ab"), ("sync",), *sync_of(1)]
    ranks = run(Script(tmp_path, SOURCE, is_gymfast, steps, lasting, stages, 2))
    assert [errors(notes) for notes in ranks] == [[None, None]] * 2
    for engine in ranks[0][-1]["engines"].values():
        assert engine["digests"] == (truth(1) if any(stages) else {})
        assert engine["version"] == ("2" if any(stages) else "default")


@pytest.mark.parametrize("num_ranks", [1, pytest.param(3, marks=pytest.mark.long)])
def test_an_engine_that_refuses_or_dies_is_named_on_all_ranks(
    num_ranks: int, tmp_path: Path
) -> None:
    stages = [list(TENSORS)] if num_ranks == 1 else STAGES
    steps = [
        *(("connect", "ab"), ("sync",)),
        *(("fail", "b", SEND, "refuse", 1), *sync_of(1), *sync_of(2)),
        *(("fail", "b", SEND, "die", 1), *sync_of(3), ("sync",), ("connect", "ac"), *sync_of(4)),
    ]
    with engines("abc", SGLANG) as addresses:
        script = Script(tmp_path, SOURCE, True, steps, addresses, stages, num_ranks)
        script.options = {"gymfast_timeout_s": 2}
        ranks = run(script)
    for notes in ranks:
        assert [note["version"] for note in notes] == [1, 1, 2, 2, 2, 3]
        refused, died, gone = (notes[n]["error"] for n in (1, 3, 4))
        assert "engine 1 of 2 failed at update_weights_from_distributed: HTTPError" in refused
        assert "this engine has no room" in refused
        assert "engine 1 of 2 failed at update_weights_from_distributed: " in died
        assert "engine 1 of 2 failed at init_weights_update_group: " in gone
        assert all(note["seconds"] < 20 for note in notes)
        assert [note["error"] for note in (notes[0], notes[2], notes[5])] == [None] * 3
    for number in (1, 3):  # the others generate again, under the version that they had
        engine = ranks[0][number]["engines"]["a"]
        assert (engine["is_paused"], engine["version"]) == (False, str((number + 1) // 2))
    for name, engine in ranks[0][5]["engines"].items():
        assert name in "ac"
        assert engine["digests"] == truth(4)
        assert engine["version"] == "3"


@pytest.mark.long
def test_I51_an_engine_that_is_silent_is_named_by_the_deadline(tmp_path: Path) -> None:
    steps = [("connect", "ab"), ("sync",), ("fail", "b", SEND, "silent", 1), *sync_of(1)]
    steps += [("connect", "a"), *sync_of(2)]
    with engines("ab", SGLANG) as addresses:
        script = Script(tmp_path, SOURCE, True, steps, addresses, STAGES, 3)
        script.options = {"gymfast_timeout_s": 1.5}
        ranks = run(script)
    for notes in ranks:
        assert (
            "engine 1 of 2 failed at update_weights_from_distributed: no answer within 1.5 s"
            in (notes[1]["error"])
        )
        assert notes[1]["seconds"] < 20
        assert notes[2]["error"] is None
    assert ranks[0][1]["engines"]["a"]["is_paused"] is False
    assert ranks[0][2]["engines"]["a"]["digests"] == truth(2)


@pytest.mark.long
def test_an_engine_that_refuses_the_group_is_named(lasting: dict[str, str], tmp_path: Path) -> None:
    refuse = ("fail", "b", "init_weights_update_group", "refuse", 0)
    steps = [refuse, ("connect", "ab"), ("connect", "ab"), ("sync",)]
    script = Script(tmp_path, SOURCE, True, steps, lasting)
    script.options = {"gymfast_timeout_s": 2}
    notes = run(script)[0]
    assert "engine 1 of 2 failed at init_weights_update_group: HTTPError" in notes[0]["error"]
    assert notes[1]["error"] is None
    assert notes[1]["engines"]["b"]["digests"] == truth(0)


@pytest.mark.long
def test_a_rank_that_cannot_gather_is_an_error_on_all(
    lasting: dict[str, str], tmp_path: Path
) -> None:
    steps = [("connect", "ab"), ("break_gathering", 1), *sync_of(1), *sync_of(2)]
    ranks = run(Script(tmp_path, SOURCE, True, steps, lasting, STAGES, 3))
    for rank, notes in enumerate(ranks):
        where = "" if rank == 1 else "sending the weights failed on rank 1: "
        assert f"{where}MemoryError: no room for a chunk" in notes[0]["error"]
        assert notes[1]["error"] is None
    assert ranks[0][0]["engines"]["a"]["is_paused"] is False
    assert ranks[0][1]["engines"]["a"]["digests"] == truth(2)


@pytest.mark.long
@pytest.mark.parametrize(
    ("version", "options", "is_flat"),
    [
        ("0.5.9", {}, False),
        ("0.5.15.post1", {}, True),
        ("unknown", {}, False),
        ("unknown", {"gymfast_flat_buckets": True}, True),
        ("0.5.23", {"gymfast_flat_buckets": False}, False),
    ],
)
def test_engines_that_do_not_read_flat_buckets_get_single_tensors(
    version: str,
    options: dict[str, Any],
    is_flat: bool,
    lasting: dict[str, str],
    tmp_path: Path,
) -> None:
    steps = [("tell", "b", version), ("connect", "ab"), *sync_of(1)]
    script = Script(tmp_path, SOURCE, True, steps, lasting)
    script.options |= options
    note = run(script)[0][0]
    assert note["error"] is None
    buckets = len(note["engines"]["a"]["loads"])
    broadcasts = buckets if is_flat else len(TENSORS)
    assert note["metrics"]["perf/update_weights_num_broadcasts"] == broadcasts
    assert note["engines"]["a"]["digests"] == note["engines"]["b"]["digests"] == truth(1)


@BOTH
def test_packed_weights_are_unpacked_before_and_packed_after(
    is_gymfast: bool, lasting: dict[str, str], tmp_path: Path
) -> None:
    script = Script(tmp_path, SOURCE, is_gymfast, [("connect", "ab"), ("sync",)], lasting)
    script.quantization = {"quant_method": "compressed-tensors"}
    calls = run(script)[0][0]["engines"]["b"]["calls"]
    assert calls[:3] == ["pause_generation", "flush_cache", "post_process_weights:10"]
    assert calls[-2:] == ["post_process_weights:01", "continue_generation"]


DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.bool)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), min_size=1
    )
)
def test_tensors_of_any_type_and_shape_lie_where_sglang_views_them(kinds: list[Any]) -> None:
    named = [
        (str(number), torch.randint(0, 2, shape).to(dtype))
        for number, (dtype, shape) in enumerate(kinds)
    ]
    bucket = flat_bucket(named)
    (flat,) = bucket.buffers
    assert flat.dtype == torch.uint8
    begin, found = 0, {}
    for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        end = begin + dtype.itemsize * shape.numel()
        found[name] = flat[begin:end].view(dtype).reshape(shape)  # as SGLang: no copy, no padding
        begin = end
    assert begin == flat.numel() == bucket.size_bytes
    assert found.keys() == dict(named).keys()
    for name, tensor in named:
        assert torch.equal(found[name], tensor)


@pytest.mark.ci
def test_the_real_bucket_of_sglang_reads_them(sglang_source: Path) -> None:
    spec = importlib.util.spec_from_file_location("bucket", path_of(sglang_source, BUCKET))
    module = importlib.util.module_from_spec(spec)
    sys.modules["bucket"] = module
    spec.loader.exec_module(module)
    named = [
        (name, torch.ones(shape).to(dtype).contiguous()) for name, (dtype, shape) in TENSORS.items()
    ]
    bucket = flat_bucket(named)
    of = module.FlattenedTensorBucket
    if hasattr(of, "empty"):
        received = of.empty(bucket.names, bucket.dtypes, bucket.shapes, "cpu")
    else:  # before 0.5.21
        told = zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True)
        received = of(named_tensors=[(n, torch.empty(s, dtype=d)) for n, d, s in told])
    received.get_flattened_tensor().copy_(bucket.buffers[0])
    found = dict(received.reconstruct_tensors())
    assert all(torch.equal(found[name], tensor) for name, tensor in named)


UPDATERS = Path("slime", "backends", "megatron_utils", "update_weight")


@pytest.mark.parametrize("source", [slime_stubs.STAND_IN, *([SOURCE] if SOURCE else [])])
def test_the_source_has_the_signatures_that_install_expects(source: Path) -> None:
    file = source / UPDATERS / "update_weight_from_distributed.py"
    for method, names in EXPECTED_DISTRIBUTED.items():
        found = parameters_of(file, "UpdateWeightFromDistributed", method)
        assert found == ["self", *names], method


def test_the_handle_of_these_tests_has_the_signatures_of_the_one_of_slime() -> None:
    if SOURCE is None:
        pytest.skip("needs GYMFAST_SLIME_SOURCE")
    file = SOURCE / "slime" / "backends" / "sglang_utils" / "sglang_engine.py"
    mine = Path(__file__).parents[1] / "slime_group_run.py"
    for method in (name for name in vars(Handle) if not name.startswith("_")):
        assert parameters_of(mine, "Handle", method) == parameters_of(file, "SGLangEngine", method)


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    name = "slime.backends.megatron_utils.actor"
    for package in ("slime", "slime.backends", "slime.backends.megatron_utils"):
        module = ModuleType(package)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, package, module)
    module = ModuleType(name)
    module.UpdateWeightFromDistributed = type("UpdateWeightFromDistributed", (), {})
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.mark.parametrize(
    ("transport", "colocate", "reason"),
    [
        ("disk", False, "--update-weight-transport is disk"),
        ("nccl", True, "--colocate is set"),
    ],
)
def test_other_updaters_are_left_with_one_line(
    transport: str,
    colocate: bool,
    reason: str,
    actor: ModuleType,
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = actor.UpdateWeightFromDistributed
    install(arguments(update_weight_transport=transport, colocate=colocate))
    assert actor.UpdateWeightFromDistributed is before
    (record,) = caplog.records
    assert record.message.startswith(f"gymfast leaves slime's updater as it is: {reason}; ")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"gymfast_threads": 2}, "option gymfast_threads is unknown, expected one of gymfast_time"),
        ({"gymfast_timeout_s": 0}, "gymfast_timeout_s is 0, expected seconds above 0"),
        ({"gymfast_timeout_s": "5"}, "gymfast_timeout_s is '5', expected seconds above 0"),
        ({"gymfast_flat_buckets": "no"}, "gymfast_flat_buckets is 'no', expected true or false"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        install(arguments(**options))


def arguments(**changes: Any) -> Namespace:
    flags = {"update_weight_mode": "full", "update_weight_transport": "nccl", "colocate": False}
    return Namespace(**{**flags, "distributed_timeout_minutes": 10, **changes})
