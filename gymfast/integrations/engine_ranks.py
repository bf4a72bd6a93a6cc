"""What the ranks of an engine tell each other: an error of one is known to all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

_log = logging.getLogger(__name__)


def error_of(work: Callable[[], None]) -> Exception | None:
    """The error that the work ended with, once it is logged; None if it did not fail."""
    try:
        work()
    except Exception as error:  # noqa: BLE001 - all ranks have to hear of it, and the server must live
        _log.exception("an update failed")
        return error
    return None


def text_of(error: Exception | None) -> str:
    """Kind and message of an error; empty if there is none."""
    return "" if error is None else f"{type(error).__name__}: {error}"


def texts_of_all(text: str, groups: Sequence[Any]) -> list[str]:
    """The texts of all ranks, in their order; each gives its own, at the same point.

    `groups` are the engine's groups that this rank is in, neighbours first: each has a world_size
    and a cpu_group.
    """
    import torch

    texts = [text]
    for group in groups:
        if group.world_size > 1:
            parts: list[Any] = [None] * group.world_size
            torch.distributed.all_gather_object(parts, texts, group=group.cpu_group)
            texts = [text for part in parts for text in part]
    return texts


def first_of(texts: Sequence[str]) -> str:
    """The text of the first rank that has one, with its number; empty if none has."""
    return next((f"rank {rank}: {text}" for rank, text in enumerate(texts) if text), "")
