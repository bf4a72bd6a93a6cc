"""A trainer's stream of tensors becomes versions of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gymfast.delta import as_tensor
from gymfast.errors import CoverageError
from gymfast.integrations.run_stream import RunStream
from gymfast.sync import LiveTarget, Publisher, Subscriber


@pytest.fixture
def weights() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {n: rng.integers(0, 2**16, (64, 32), dtype=np.uint16) for n in ("a", "b", "c")}


@pytest.fixture
def stream(tmp_path: Path) -> RunStream:
    return RunStream(Publisher(f"file://{tmp_path}", "run"))


def pulled(tmp_path: Path) -> dict[str, Any]:
    replica: dict[str, Any] = {}
    Subscriber(f"file://{tmp_path}", "run", LiveTarget(replica)).pull()
    return replica


def test_a_trainer_may_reuse_the_memory_of_what_it_yields(
    tmp_path: Path, stream: RunStream, weights: dict[str, Any]
) -> None:
    scratch = np.empty((64, 32), np.uint16)

    def one_buffer() -> Iterator[tuple[str, Any]]:
        for name, value in weights.items():
            scratch[:] = value
            yield name, scratch

    stream.publish(one_buffer())
    weights["b"][3] ^= 1
    report = stream.publish(one_buffer())
    assert (report.kind, report.num_changed) == ("delta", 32)
    replica = pulled(tmp_path)
    assert all(as_tensor(replica[n]).data.tobytes() == weights[n].tobytes() for n in weights)


@pytest.mark.parametrize("bad", ["object", "contradiction"])
def test_a_stream_is_read_to_its_end_also_when_it_fails(
    stream: RunStream, weights: dict[str, Any], bad: str
) -> None:
    read = []

    def source() -> Iterator[tuple[str, Any]]:
        for name, value in [*weights.items(), *weights.items()][:5]:
            read.append(name)
            is_bad = len(read) == (2 if bad == "object" else 4)
            yield name, ("text" if bad == "object" else value ^ 1) if is_bad else value

    with pytest.raises(TypeError if bad == "object" else CoverageError, match=r"'[ab]'"):
        stream.publish(source())
    assert read == ["a", "b", "c", "a", "b"]
    assert stream.publisher.version is None
    assert stream.publish(weights.items()).version == 0


def test_a_tensor_that_does_not_come_is_an_error_and_not_a_removal(
    tmp_path: Path, stream: RunStream, weights: dict[str, Any]
) -> None:
    stream.publish(weights.items())
    with pytest.raises(CoverageError, match="1 of 3 tensors did not come: \\['c'\\]"):
        stream.publish([item for item in weights.items() if item[0] != "c"])
    assert stream.publisher.version == 0
    assert set(pulled(tmp_path)) == {"a", "b", "c"}


def test_a_tensor_of_a_step_that_failed_is_not_demanded_of_the_next_one(
    tmp_path: Path, stream: RunStream, weights: dict[str, Any]
) -> None:
    stream.publish(weights.items())
    with pytest.raises(TypeError, match="'bad'"):
        stream.publish([*weights.items(), ("new", weights["a"]), ("bad", "text")])
    assert stream.publish(weights.items()).num_tensors == 3
    assert set(pulled(tmp_path)) == {"a", "b", "c"}


def test_equal_copies_of_a_tensor_are_one(stream: RunStream, weights: dict[str, Any]) -> None:
    assert stream.publish([*weights.items(), ("a", weights["a"].copy())]).num_tensors == 3
