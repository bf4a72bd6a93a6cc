"""Everything that gymfast._cuda refuses, with its sentence, and before anything was launched."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from cuda_backend import InterfaceOnly
from cuda_calls import (
    ARRAYS,
    CALLS,
    GEOMETRY,
    Call,
    apply_call,
    digest_call,
    encode_call,
    memory,
    rollback_call,
    sample_call,
)
from cuda_module import DEVICE, LAUNCH_FAILURE, MANAGED, PINNED, UNREGISTERED, Controls

from gymfast.errors import FormatError

EACH_ARRAY = [(name, array) for name, arrays in ARRAYS.items() for array in arrays]
MAY_BE_PINNED = {("digest", "data"), ("encode", "base"), ("rollback", "data"), ("sample", "data")}
READ_ONLY = {
    *(("digest", "data"), ("encode", "new"), ("sample", "data"), ("apply", "body")),
    *(("apply", "sections"), ("rollback", "counts"), ("rollback", "index")),
    ("rollback", "before"),
    ("move", "table"),
}
ALIGNMENT = {
    ("digest", "data"): 2,
    ("encode", "base"): 2,
    ("encode", "new"): 2,
    ("apply", "data"): 2,
    ("rollback", "data"): 2,
    ("rollback", "before"): 2,
    ("sample", "data"): 2,
    ("digest", "digests"): 8,
    ("encode", "digests"): 8,
    ("apply", "digests"): 8,
    ("encode", "sections"): 8,
    ("apply", "sections"): 8,
    ("apply", "result"): 8,
    ("rollback", "counts"): 4,
    ("rollback", "index"): 4,
    ("encode", "body"): 16,
    ("encode", "scratch"): 256,
    ("gather", "scratch"): 256,
    ("apply", "scratch"): 256,
    ("move", "table"): 8,
    ("move", "digest"): 8,
}
ANY_SIZE = {("apply", "body"), ("move", "bucket")}
LARGER_IS_FINE = {
    *(("encode", "body"), ("encode", "scratch"), ("gather", "scratch"), ("apply", "scratch")),
    *(("sample", "out"), ("apply", "body")),
}


@pytest.fixture(autouse=True)
def _forget(controls: Controls) -> None:
    """No test sees the memory of another."""


@pytest.fixture(params=CALLS)
def call(request: pytest.FixtureRequest, cuda_module: ModuleType) -> Call:
    return CALLS[request.param](cuda_module)


@pytest.fixture
def refused(controls: Controls):
    """Checks the error of a call, that nothing was launched, and that nothing was written."""

    def check(call: Call, error: type[Exception], match: str) -> Exception:
        before = {name: array.copy() for name, array in call.arrays().items()}
        launches = controls.num_launches()
        with pytest.raises(error, match=match) as caught:
            call()
        assert controls.num_launches() == launches
        assert controls.current_device() == 0
        for name, array in call.arrays().items():
            assert np.array_equal(array, before[name])
        return caught.value

    return check


def test_the_calls_are_taken_as_they_are(call: Call, controls: Controls) -> None:
    launches = controls.num_launches()
    if call.function.__name__ != "gather_undo":  # its scratch is garbage
        call()
        assert controls.num_launches() > launches


@pytest.mark.parametrize(
    "bad", [[1, 2], 7, b"bytes", object()], ids=["list", "int", "bytes", "object"]
)
@pytest.mark.parametrize(("name", "array"), EACH_ARRAY)
def test_what_is_no_array(cuda_module, refused, name, array, bad) -> None:
    call = CALLS[name](cuda_module)
    call.arguments[array] = bad
    refused(
        call, TypeError, rf"^{array} is {type(bad).__name__}, expected an array with __dlpack__"
    )


@pytest.mark.parametrize(("name", "array"), EACH_ARRAY)
def test_arrays_with_gaps(cuda_module, refused, name, array) -> None:
    call = CALLS[name](cuda_module)
    size = call.arguments[array].size
    call.arguments[array] = memory(2 * size)[::2]
    refused(call, ValueError, rf"^{array} has gaps .* pass a contiguous copy$")


def test_arrays_in_another_order(cuda_module, refused) -> None:
    call = digest_call(cuda_module)
    call.arguments["data"] = memory(2000).reshape(20, 100).T
    refused(call, ValueError, r"^data has gaps or another order")
    interface = InterfaceOnly(memory(2000).reshape(20, 100))
    interface.__cuda_array_interface__["strides"] = (1, 20)
    call.arguments["data"] = interface
    refused(call, ValueError, r"^data has gaps or another order")


def test_strides_that_say_nothing_new_are_fine(cuda_module) -> None:
    call = digest_call(cuda_module)
    interface = InterfaceOnly(memory(2000).reshape(20, 1, 100))
    interface.__cuda_array_interface__["strides"] = (100, 7, 1)
    call.arguments["data"] = interface
    call()


@pytest.mark.parametrize("difference", [-1, 1])
@pytest.mark.parametrize(("name", "array"), EACH_ARRAY)
def test_arrays_of_another_size(cuda_module, refused, name, array, difference) -> None:
    call = CALLS[name](cuda_module)
    size = call.arguments[array].size
    if (name, array) in ANY_SIZE:
        return
    call.arguments[array] = memory(size + difference)
    if difference > 0 and (name, array) in LARGER_IS_FINE:
        if name != "gather":
            call()
        return
    found = refused(call, ValueError, rf"^{array} has {size + difference} bytes, expected .*: .+")
    least = (name, array) in LARGER_IS_FINE
    assert f"expected {'at least ' if least else ''}{size}" in str(found) or array in {
        "index",
        "sections",
        "table",
    }


def test_before_has_a_unit_for_each_index(cuda_module, refused) -> None:
    call = rollback_call(cuda_module)
    call.arguments["index"] = memory(24)
    refused(call, ValueError, r"^before has 10 bytes, expected 12: pass one unit for each")


def test_apply_needs_a_section(cuda_module, refused) -> None:
    call = apply_call(cuda_module)
    call.arguments["sections"] = memory(0)
    refused(call, ValueError, r"^sections is empty, expected at least one row")


@pytest.mark.parametrize(("place", "alignment"), ALIGNMENT.items(), ids=str)
def test_arrays_off_their_alignment(cuda_module, refused, place, alignment) -> None:
    name, array = place
    call = CALLS[name](cuda_module)
    old = call.arguments[array]
    call.arguments[array] = memory(old.size + alignment)[alignment // 2 :][: old.size]
    refused(
        call,
        ValueError,
        rf"^{array} begins {alignment // 2} bytes behind a multiple of {alignment}, ",
    )


def test_every_array_with_an_alignment_is_tried() -> None:
    assert set(EACH_ARRAY) - set(ALIGNMENT) == {("sample", "out"), *ANY_SIZE}


@pytest.mark.parametrize(("name", "array"), EACH_ARRAY)
def test_read_only_arrays(cuda_module, refused, name, array) -> None:
    call = CALLS[name](cuda_module)
    call.arguments[array].flags.writeable = False
    if (name, array) not in READ_ONLY:
        refused(call, ValueError, rf"^{array} is read-only, and the call writes it")
        interface = InterfaceOnly(call.arguments[array])
        interface.__cuda_array_interface__["data"] = (call.arguments[array].ctypes.data, True)
        call.arguments[array] = interface
        refused(call, ValueError, rf"^{array} is read-only, and the call writes it")
    else:
        call()


def test_a_base_that_is_not_updated_may_be_read_only(cuda_module) -> None:
    call = encode_call(cuda_module)
    call.arguments["base"].flags.writeable = False
    call.arguments["update"] = False
    call()


def place(controls: Controls, array: np.ndarray, kind: int, device: int = 0) -> None:
    controls.set_memory(array.ctypes.data, array.size, kind, device)


@pytest.mark.parametrize(("name", "array"), EACH_ARRAY)
def test_pageable_memory(cuda_module, controls, refused, name, array) -> None:
    call = CALLS[name](cuda_module)
    place(controls, call.arguments[array], UNREGISTERED)
    expected = "CUDA memory or pinned host memory" if (name, array) in MAY_BE_PINNED else "CUDA mem"
    refused(call, ValueError, rf"^{array} is CPU memory that no GPU reaches, expected {expected}")


@pytest.mark.parametrize(("name", "array"), EACH_ARRAY)
def test_pinned_memory(cuda_module, controls, refused, name, array) -> None:
    call = CALLS[name](cuda_module)
    # Where pinned memory was registered says nothing about where the call runs.
    place(controls, call.arguments[array], PINNED, device=1)
    if (name, array) in MAY_BE_PINNED:
        call()
    else:
        refused(call, ValueError, rf"^{array} is pinned host memory, expected CUDA memory: copy")


@pytest.mark.parametrize(("name", "array"), [p for p in EACH_ARRAY if p[0] != "gather"])
def test_two_devices(cuda_module, controls, refused, name, array) -> None:
    call = CALLS[name](cuda_module)
    place(controls, call.arguments[array], DEVICE, device=1)
    refused(call, ValueError, r"^\w+ is on CUDA device [01], \w+ on [01], expected one device")


def test_managed_memory_is_that_of_its_device(cuda_module, controls, refused) -> None:
    call = encode_call(cuda_module)
    place(controls, call.arguments["base"], MANAGED, device=0)
    call()
    place(controls, call.arguments["base"], MANAGED, device=1)
    refused(call, ValueError, r"^base is on CUDA device 1, new on 0")


def test_a_call_runs_on_the_device_of_its_arrays_and_leaves_the_current_one(
    call: Call, controls: Controls, cuda_module, refused
) -> None:
    if call.function.__name__ == "gather_undo":
        call = sample_call(cuda_module)
    for array in call.arrays().values():
        place(controls, array, DEVICE, device=1)
    controls.set_stream_device(0x10, 1)
    call.arguments["stream"] = 0x10
    call()
    assert controls.current_device() == 0
    controls.set_stream_device(0x20, 0)
    call.arguments["stream"] = 0x20
    refused(call, ValueError, r"^stream is of CUDA device 0, the arrays are on 1: pass a stream")


PAIRS = [
    (name, first, second)
    for name, arrays in ARRAYS.items()
    for i, first in enumerate(arrays)
    for second in arrays[i + 1 :]
]


@pytest.mark.parametrize(("name", "first", "second"), PAIRS)
def test_arrays_that_overlap(cuda_module, controls, refused, name, first, second) -> None:
    call = CALLS[name](cuda_module)
    sizes = [call.arguments[array].size for array in (first, second)]
    # The second begins within the first, at any alignment, or the other way round.
    both = memory(sum(sizes) + 1024)
    call.arguments[first] = both[: sizes[0]]
    start = (sizes[0] - 1) // 256 * 256
    call.arguments[second] = both[start : start + sizes[1]]
    refused(call, ValueError, rf"^({first} and {second}|{second} and {first}) overlap, ")
    call.arguments[second] = both[start + 256 : start + 256 + sizes[1]]
    call()


def test_a_snapshot_in_pinned_memory_is_used_where_it_is(cuda_module, controls) -> None:
    call = encode_call(cuda_module)
    rng = np.random.default_rng(0)
    call.arguments["new"][:] = rng.integers(0, 256, 2000)
    place(controls, call.arguments["base"], PINNED)
    call()
    assert np.array_equal(call.arguments["base"], call.arguments["new"])


@pytest.mark.parametrize(("first_block", "num_blocks"), [(0, 5), (4, 1), (5, 0), (2**63, 2**63)])
@pytest.mark.parametrize("name", ["digest", "encode", "rollback", "apply"])
def test_blocks_that_the_tensor_does_not_have(
    cuda_module, refused, name, first_block, num_blocks
) -> None:
    call = CALLS[name](cuda_module)
    call.arguments |= {"first_block": first_block, "num_blocks": num_blocks}
    match = rf"^{num_blocks} blocks from {first_block}, the tensor has 4 \(error 50\)$"
    assert refused(call, FormatError, match).number == 50


def test_apply_needs_a_block(cuda_module, refused) -> None:
    call = apply_call(cuda_module)
    call.arguments["num_blocks"] = 0
    assert refused(call, FormatError, r"\(error 50\)").number == 50


BAD_GEOMETRIES = {
    "unit of 3 bytes": ({"unit_bytes": 3}, 42),
    "no columns": ({"cols": 0}, 43),
    "rows that do not fit": ({"cols": 999}, 43),
    "empty tiles": ({"tile_cols": 0}, 43),
    "tiles wider than the tensor": ({"tile_cols": 1001}, 43),
    "tiles for nothing": ({"num_units": 0}, 43),
    "too many units": ({"num_units": 2**62}, 30),
    "too large blocks": ({"num_units": 2**21, "cols": 2**21, "tile_cols": 2**21}, 30),
}


@pytest.mark.parametrize(("change", "number"), BAD_GEOMETRIES.values(), ids=BAD_GEOMETRIES)
def test_geometries_that_the_format_does_not_know(call: Call, refused, change, number) -> None:
    if call.function.__name__ == "sample_classes" and not {"unit_bytes"} & set(change):
        return  # it knows no blocks
    if call.function.__name__ == "move_pieces":
        return
    call.arguments |= change
    error = refused(call, FormatError, rf"\(error {number}\)$")
    assert error.number == number


@pytest.mark.parametrize(("change", "number"), BAD_GEOMETRIES.values(), ids=BAD_GEOMETRIES)
def test_sizes_are_not_told_of_such_geometries(cuda_module, change, number) -> None:
    geometry = GEOMETRY | change
    for size in (
        lambda: cuda_module.encode_body_capacity(**geometry, num_blocks=1),
        lambda: cuda_module.encode_scratch_bytes(**geometry, profile=0, num_blocks=1),
        lambda: cuda_module.apply_scratch_bytes(**geometry, num_blocks=1),
        lambda: cuda_module.undo_offsets(**geometry, profile=0, num_blocks=1),
    ):
        with pytest.raises(FormatError) as caught:
            size()
        assert caught.value.number == number


def test_too_many_units_to_sample(cuda_module, refused) -> None:
    call = sample_call(cuda_module)
    call.arguments["num_units"] = 2**63
    assert refused(call, FormatError, r"\(error 30\)").number == 30


@pytest.mark.parametrize(
    ("argument", "value", "last"),
    [
        ("profile", 3, 2),
        ("profile", -1, 2),
        ("class_shift", 8, 7),
        ("class_shift", -1, 7),
        ("class_base", 256, 255),
        ("class_base", -1, 255),
    ],
)
def test_parameters_out_of_range(call: Call, refused, argument, value, last) -> None:
    if argument in call.arguments:
        call.arguments[argument] = value
        refused(call, ValueError, rf"^{argument} is {value}, expected 0..{last}: ")


def test_a_section_has_blocks(cuda_module, refused) -> None:
    call = encode_call(cuda_module)
    call.arguments["blocks_per_section"] = 0
    refused(call, ValueError, r"^blocks_per_section is 0, expected at least 1")


def test_a_launch_that_cuda_refuses_is_a_runtime_error(call: Call, controls, refused) -> None:
    controls.set_launch_error(LAUNCH_FAILURE)
    refused(call, RuntimeError, r"^CUDA refused a launch: unspecified launch failure$")
