"""Frames in files, looked into and verified in bounded memory, however large they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gymfast.delta.apply_plan import Step, check_new_root, unplanned
from gymfast.delta.authentication import authentication_of_source
from gymfast.delta.checkpoint_stream import Codec
from gymfast.delta.frame import FrameInfo, Kind, ParsedFrame, frame_info
from gymfast.delta.frame_parser import parse_source
from gymfast.delta.memory import U8
from gymfast.delta.parse import open_source
from gymfast.delta.source import Source
from gymfast.delta.state import zero_rows
from gymfast.delta.window import Window


def inspect_file(path: Path | str) -> FrameInfo:
    """What gymfast.delta.inspect says, of a frame in a file: one section is in memory at a time.

    Raises FormatError with the number of the broken rule, GymfastError for what the system says.
    """
    with open_source(path) as (source, check64):
        return _info(parse_source(source, check64), source)


def verify_file(
    path: Path | str,
    *,
    backend: str = "auto",
    threads: int | None = None,
    key: bytes | None = None,
) -> FrameInfo:
    """What gymfast.delta.verify says, of a frame in a file: tensors pass through a window.

    Raises FormatError with the number of the broken rule, BudgetError if a tensor is larger than
    the address space, GymfastError for what the system says.
    """
    codec = Codec.of(backend, threads)
    with open_source(path, backend, key) as (source, check64):
        parsed = parse_source(source, check64)
        check_new_root(parsed)
        steps = [s for s in unplanned(parsed) if s.record.kind in (Kind.ADDED, Kind.REPLACED)]
        window = Window(max((step.record.num_bytes for step in steps), default=0))
        for step in steps:
            _decode(step, codec, window)
        return _info(parsed, source)


def _decode(step: Step, codec: Codec, window: Window) -> None:
    rows = zero_rows(step.name, step.record.geometry)
    window.begin(step.record.num_bytes, None)
    codec.apply(window, step, rows, _forget)


def _forget(start: int, data: U8) -> None:
    """Takes bytes of a tensor that nobody wants."""


def _info(parsed: ParsedFrame, source: Source) -> FrameInfo:
    return replace(frame_info(parsed), authentication=authentication_of_source(source))
