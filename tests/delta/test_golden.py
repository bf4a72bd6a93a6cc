"""The frames of tests/golden: written once, read and refused alike by every later version."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
from golden_invalid import INVALID
from golden_valid import VALID, Valid

from gymfast.delta import State, Tensor, apply, encode
from gymfast.delta.backends import Backend
from gymfast.errors import FormatError

GOLDEN = Path(__file__).parents[1] / "golden"
RULES = tomllib.loads((GOLDEN / "invalid" / "rules.toml").read_text())
LISTING_LINE = re.compile(r"^[0-9a-f]{8}  ((?:[0-9a-f]{2} )*[0-9a-f]{2})(?:  |$)", re.MULTILINE)
IN_PAYLOADS = {"v1_R4_position_group", "v1_R4_value_group", "v1_R4_dense"}
STRUCTURAL = [n for n, rule in RULES.items() if rule["number"] < 50 and n not in IN_PAYLOADS]


def frame_of(folder: str, name: str) -> bytes:
    return (GOLDEN / folder / f"{name}.gfd").read_bytes()


def bytes_of(state: dict[str, Tensor]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (t.dtype, t.shape, t.data.tobytes()) for name, t in state.items()}


def state_of(name: str, backend: Backend) -> State:
    """The state that a valid golden frame leads to, by way of its base."""
    state = State.empty(backend=backend.name)
    if name:
        base = VALID[name].base
        state = state_of(base, backend) if base else state
        apply(state, frame_of("valid", f"v1_{name}"), backend=backend.name, threads=1)
    return state


def test_every_file_is_listed_and_every_case_has_its_file() -> None:
    for folder, cases in (("valid", VALID), ("invalid", INVALID)):
        files = {path.stem for path in (GOLDEN / folder).glob("*.gfd")}
        assert files == {f"v1_{name}" for name in cases}
    assert set(RULES) == {f"v1_{name}" for name in INVALID}
    for name, broken in INVALID.items():
        assert RULES[f"v1_{name}"]["number"] == broken.number
    assert {rule["rule"] for rule in RULES.values()} == {f"R{i}" for i in range(1, 31)}


@pytest.mark.parametrize("name", VALID)
def test_a_valid_frame_leads_to_its_state(backend, parse, name: str) -> None:
    parse(frame_of("valid", f"v1_{name}"))
    case = VALID[name]
    before = state_of(case.base, backend)
    assert bytes_of(before.tensors) == bytes_of(case.old)
    assert bytes_of(state_of(name, backend).tensors) == bytes_of(case.new)


def encoded(case: Valid, backend: str) -> bytes:
    options = {"block_units": case.block_units, "tiled": case.tiled, "backend": backend}
    old = State.copy_of(case.old, **options) if case.old else State.empty(**options)
    return encode(old, case.new, profile=case.profile, backend=backend, threads=2, key=case.key)


@pytest.mark.parametrize("name", [name for name, case in VALID.items() if not case.by_hand])
def test_the_encoder_still_writes_the_same_bytes(backend, name: str) -> None:
    assert encoded(VALID[name], backend.name) == frame_of("valid", f"v1_{name}")


@pytest.mark.parametrize("name", RULES)
def test_an_invalid_frame_is_refused_with_its_number(backend, name: str) -> None:
    rule = RULES[name]
    state = state_of(rule.get("base", "").removeprefix("v1_"), backend)
    before = bytes_of(state.tensors)
    with pytest.raises(FormatError) as caught:
        apply(state, frame_of("invalid", name), backend=backend.name, threads=1)
    assert caught.value.number == rule["number"], str(caught.value)
    if rule["rule"] != "R28":
        assert bytes_of(state.tensors) == before


@pytest.mark.parametrize("name", STRUCTURAL)
def test_the_parsers_alone_refuse_what_breaks_the_structure(parse, name: str) -> None:
    with pytest.raises(FormatError) as caught:
        parse(frame_of("invalid", name))
    assert caught.value.number == RULES[name]["number"], str(caught.value)


def test_the_worked_example_of_the_specification_is_the_golden_frame() -> None:
    text = (GOLDEN.parents[1] / "docs" / "wire-format.md").read_text()
    listing = text.partition("## 11. Worked example")[2].partition("## 12.")[0]
    assert bytes.fromhex("".join(LISTING_LINE.findall(listing))) == frame_of("valid", "v1_example")


def test_golden_weights_use_every_exponent_class() -> None:
    units = VALID["model"].new["layer.BF16"].data.view("<u2")
    assert np.unique(units >> 7 & 255).size > 8
