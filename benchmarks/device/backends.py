"""Back ends of gymfast.delta on tensors of the device, beside the CPU back end."""

from __future__ import annotations

import numpy as np

from benchmarks.device.cases import Case
from benchmarks.device.checks import Tally
from benchmarks.device.memory import Device
from benchmarks.device.native import Run, runs_of
from gymfast.delta.backends import Backend, EncodedBlocks, select
from gymfast.delta.frame import PROFILES


def compare_backend(name: str, device: Device, case: Case, profile: int, tally: Tally) -> None:
    """Encode with undo, rollback and apply of one section of a case, through `Backend`."""
    backend, cpu, geometry = select(name), select("cpu"), case.geometry
    label = f"select({name!r}), {case.label}, {PROFILES[profile]}"
    params = case.params(profile)
    run = next(runs_of(geometry, params, 1))
    base, new = (device.upload(data, case.shift) for data in (case.base, case.new))
    expected_rows = cpu.digest_blocks(case.base, geometry, 1)
    rows = backend.digest_blocks(base, geometry, 1)
    tally.equal(f"{label}: digests of the base", rows, expected_rows)
    found = backend.class_params(base, geometry.unit_bytes)
    expected_params = cpu.class_params(case.base, geometry.unit_bytes)
    if found != expected_params:
        tally.problem(f"{label}: class parameters {found}, expected {expected_params}")
    on_cpu = case.base.copy()
    expected = _encode(cpu, run, on_cpu, case.new, expected_rows)
    encoded = _encode(backend, run, base, new, rows)
    tally.equal(f"{label}: body", *_as_arrays(encoded.body, expected.body))
    tally.equal(f"{label}: digests", rows, expected_rows)
    tally.equal(f"{label}: snapshot", device.download(base), on_cpu)
    if encoded.undo:
        backend.rollback_blocks(base, encoded.undo, geometry)
        tally.equal(f"{label}: base after rollback", device.download(base), case.base)
        if expected.body:
            rows = cpu.digest_blocks(case.base, geometry, 1)
            backend.apply_blocks(
                *(base, expected.body, geometry, params, rows),
                *(run.first_block, run.num_blocks, 1),
            )
            tally.equal(f"{label}: tensor after apply", device.download(base), on_cpu)
            tally.equal(f"{label}: digests after apply", rows, expected_rows)
    elif expected.num_changed:
        tally.problem(f"{label}: no undo log for {expected.num_changed} changes")
    tally.num_runs += 1
    tally.num_elements += geometry.num_units


def _encode(
    backend: Backend, run: Run, base: object, new: object, rows: np.ndarray
) -> EncodedBlocks:
    return backend.encode_blocks(
        *(base, new, run.geometry, run.params, rows, run.first_block, run.num_blocks),
        update=True,
        undo=True,
        threads=1,
    )


def _as_arrays(*parts: bytes) -> list[np.ndarray]:
    return [np.frombuffer(part, np.uint8) for part in parts]
