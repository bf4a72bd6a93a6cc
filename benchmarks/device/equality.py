"""Bytes, digests, apply and rollback of the native module beside those of gymfast._core."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, starmap

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.device.cases import Case
from benchmarks.device.checks import Tally
from benchmarks.device.native import Coded, NativeCodec, Run, changed_parts, runs_of
from gymfast.delta.backends import BlockParams, select
from gymfast.delta.frame import PROFILES
from gymfast.delta.state import num_threads

SECTION_BLOCKS = 2  # of generated cases: several sections in a call, and several calls
CALL_SECTIONS = 2
LARGE_CALL_SECTIONS = 16
NO_ERROR = -1  # all ones


@dataclass(frozen=True)
class Expected:
    """What the CPU makes of a case: digests before and after, and the sections."""

    old_rows: NDArray[np.uint64]
    new_rows: NDArray[np.uint64]
    bodies: list[bytes]
    changed: list[int]


def expect(case: Case, params: BlockParams, section_blocks: int) -> Expected:
    """The step of a case, coded by the CPU, section by section."""
    cpu, geometry, threads = select("cpu"), case.geometry, num_threads(None)
    old_rows = cpu.digest_blocks(case.base, geometry, threads)
    rows = old_rows.copy()
    sections = [
        cpu.encode_blocks(
            *(case.base, case.new, geometry, params, rows, run.first_block, run.num_blocks),
            update=False,
            undo=False,
            threads=threads,
        )
        for run in runs_of(geometry, params, 1, section_blocks)
    ]
    return Expected(old_rows, rows, [s.body for s in sections], [s.num_changed for s in sections])


class Comparison:
    """One case under one profile; `run` compares everything and adds to the tally."""

    def __init__(
        self, codec: NativeCodec, case: Case, profile: int, tally: Tally, *, is_large: bool = False
    ) -> None:
        self._codec, self._case, self._tally = codec, case, tally
        self._device = codec.device
        self._label = f"{case.label}, {PROFILES[profile]}"
        params = case.params(profile)
        blocks = case.geometry.section_blocks() if is_large else SECTION_BLOCKS
        calls = LARGE_CALL_SECTIONS if is_large else CALL_SECTIONS
        self._runs = list(runs_of(case.geometry, params, calls, blocks))
        self._expected = expect(case, params, blocks)
        self._base = self._upload(case.base)
        self._new = self._upload(case.new)

    def run(self) -> None:
        rows = self._digests(self._base)
        self._equal("digests of the base", rows, self._expected.old_rows)
        self._equal("digests of the new state", self._digests(self._new), self._expected.new_rows)
        if not self._case.shift:
            self._encode_only(rows.clone())
        coded = self._encode_and_rollback(rows.clone())
        self._apply(rows.clone(), coded)
        self._tally.num_runs += 1
        self._tally.num_elements += self._case.geometry.num_units

    def _upload(self, data: NDArray[np.uint8]) -> torch.Tensor:
        return self._device.upload(data, self._case.shift)

    def _equal(self, what: str, got: torch.Tensor, expected: NDArray[np.generic]) -> None:
        self._tally.equal(f"{self._label}: {what}", self._device.download(got), expected)

    def _digests(self, data: torch.Tensor) -> torch.Tensor:
        rows = self._device.words(self._case.geometry.num_blocks, 2)
        for run in self._runs:
            self._codec.digest(run, data, rows)
        return rows

    def _encode_only(self, rows: torch.Tensor) -> None:
        """Without update: the base stays, bytes and digests are the same."""
        coded = [self._encode(run, rows, update=False)[0] for run in self._runs]
        self._sections("encode without update", coded)
        self._equal("base after encode without update", self._base, self._case.base)
        self._equal("digests after encode without update", rows, self._expected.new_rows)

    def _encode_and_rollback(self, rows: torch.Tensor) -> list[Coded]:
        coded, undos = [], []
        for run in self._runs:
            made, scratch = self._encode(run, rows, update=True)
            coded.append(made)
            undos.append(self._codec.undo(run, made, scratch))
        self._sections("encode", coded)
        self._equal("snapshot after encode", self._base, self._case.new)
        self._equal("digests after encode", rows, self._expected.new_rows)
        for run, undo in zip(self._runs, undos, strict=True):
            self._codec.rollback(run, self._base, undo)
        self._equal("base after rollback", self._base, self._case.base)
        return coded

    def _encode(self, run: Run, rows: torch.Tensor, *, update: bool) -> tuple[Coded, torch.Tensor]:
        coded, scratch = self._codec.coded(run), self._codec.encode_scratch(run)
        pair = (self._base, self._new)
        self._codec.encode(run, pair, rows, coded, scratch, update=update)
        return coded, scratch

    def _sections(self, what: str, coded: list[Coded]) -> None:
        number = 0
        for made in coded:
            table = made.table().tolist()
            end = max(offset + size for _, _, offset, size, _ in table)
            body = self._device.download(made.body[:end])
            for _, num_blocks, offset, size, changed in table:
                name = f"section {number} of {what}"
                expected = self._expected.bodies[number]
                found = body[offset : offset + size]
                self._tally.equal(
                    f"{self._label}: {name}", found, np.frombuffer(expected, np.uint8)
                )
                if changed != self._expected.changed[number]:
                    self._tally.problem(
                        f"{self._label}: {name}: {changed} units changed, expected "
                        f"{self._expected.changed[number]}"
                    )
                self._tally.count_modes(expected, num_blocks)
                number += 1

    def _apply(self, rows: torch.Tensor, coded: list[Coded]) -> None:
        data, changed = self._upload(self._case.base), 0
        calls = zip(self._runs, coded, strict=True)
        for run, made in chain.from_iterable(starmap(changed_parts, calls)):
            result = self._device.words(2)
            scratch = self._codec.apply_scratch(run)
            self._codec.apply(run, data, rows, made, result, scratch)
            error, num_changed = result.tolist()
            changed += num_changed
            if error != NO_ERROR:
                self._tally.problem(f"{self._label}: apply says error {error & 255}")
        if changed != sum(self._expected.changed):
            self._tally.problem(
                f"{self._label}: apply changed {changed} units, expected "
                f"{sum(self._expected.changed)}"
            )
        self._equal("tensor after apply", data, self._case.new)
        self._equal("digests after apply", rows, self._expected.new_rows)
