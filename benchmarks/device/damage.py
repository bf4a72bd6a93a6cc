"""Damaged bodies: the native module has to end as the CPU does, with the same error number."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.device.cases import Case
from benchmarks.device.checks import Tally
from benchmarks.device.equality import NO_ERROR, expect
from benchmarks.device.native import Coded, NativeCodec, Run
from gymfast.delta.backends import BlockParams, select
from gymfast.delta.frame import PROFILES
from gymfast.errors import FormatError

_CUTS = (1, 2, 7)  # bytes off the end
# A symbol out of range and a stream too short: "a reader that finds several rules broken reports
# one of them" (docs/wire-format.md section 8), and the kernels count before they compare.
_EITHER = {54, 55}


def compare_damaged(
    codec: NativeCodec, case: Case, profile: int, num_flips: int, tally: Tally
) -> None:
    """Bodies with one byte changed or an end cut off, all blocks of a case in one section."""
    params = case.params(profile)
    expected = expect(case, params, case.geometry.num_blocks)
    rng = np.random.default_rng(profile)
    for what, body in _damaged(expected.bodies[0], num_flips, rng):
        text = f"{case.label}, {PROFILES[profile]}, {what}"
        number, data, rows = _on_cpu(case, params, expected.old_rows, body)
        found, left, digests = _on_device(codec, case, params, expected.old_rows, body)
        if {found, number} == _EITHER:
            tally.num_other_numbers += 1
        elif found != number:
            tally.problem(f"{text}: error {found}, expected {number}")
        tally.equal(f"{text}: tensor", left, data)
        tally.equal(f"{text}: digests", digests, rows)
        tally.num_damaged += 1


def _damaged(body: bytes, num_flips: int, rng: np.random.Generator) -> Iterator[tuple[str, bytes]]:
    for _ in range(num_flips if body else 0):
        at = int(rng.integers(0, len(body)))
        changed = bytearray(body)
        changed[at] ^= int(rng.integers(1, 256))
        yield f"byte {at} changed", bytes(changed)
    for cut in _CUTS:
        if cut < len(body):
            yield f"{cut} bytes cut off", body[:-cut]


Outcome = tuple[int, np.ndarray, np.ndarray]


def _on_cpu(case: Case, params: BlockParams, rows: np.ndarray, body: bytes) -> Outcome:
    data, digests, number = case.base.copy(), rows.copy(), 0
    geometry = case.geometry
    try:
        select("cpu").apply_blocks(data, body, geometry, params, digests, 0, geometry.num_blocks, 1)
    except FormatError as error:
        number = error.number
    return number, data, digests


def _on_device(
    codec: NativeCodec, case: Case, params: BlockParams, rows: np.ndarray, body: bytes
) -> Outcome:
    device, geometry = codec.device, case.geometry
    run = Run(geometry, params, 0, geometry.num_blocks, geometry.num_blocks)
    section = np.array([[0, geometry.num_blocks, 0, len(body), 0]], np.int64)
    sections = device.words(1, 5).copy_(torch.from_numpy(section))
    digests = device.words(*rows.shape).copy_(torch.from_numpy(rows.view(np.int64)))
    data, result = device.upload(case.base, case.shift), device.words(2)
    coded = Coded(device.upload(np.frombuffer(body, np.uint8).copy()), sections)
    codec.apply(run, data, digests, coded, result, codec.apply_scratch(run))
    error = int(result[0])
    number = 0 if error == NO_ERROR else error & 255
    return number, device.download(data), device.download(digests)
