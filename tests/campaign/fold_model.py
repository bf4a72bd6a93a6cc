"""What has to be true of the folds of a run: what they lead to, and when they may go."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from gymfast.delta import State, apply, restore
from gymfast.errors import FormatError, GymfastError
from gymfast.sync.chain import EMPTY_ROOT
from gymfast.sync.keys import FoldKeys, Span, folded_of, span_of
from gymfast.sync.manifest import parse_fold
from gymfast.sync.retention import NUM_FULL_FOLDS
from tests.campaign.counts import ViolationError
from tests.sync.harness import copy_of

if TYPE_CHECKING:
    from tests.campaign.model import Model


@dataclass
class FoldModel:
    """The truth about the folds of a run: what was offered, and what may be deleted.

    `is_clean`: bytes come as they are, and no delete comes late.
    """

    model: Model
    is_clean: bool = True

    def __post_init__(self) -> None:
        self._full: set[int] = set()

    def written(self, key: str, new: bytes) -> None:
        """Takes note of a fold or a part of one; ViolationError if it leads anywhere else."""
        model, keys = self.model, self.model.keys
        if folded_of(key, keys.folded_prefix) is not None:
            is_right = hashlib.sha256(new).hexdigest() == key.rpartition("/")[2]
            model.counts.check("I20", is_right, f"'{key}' was written with other bytes")
        span = span_of(key, keys.folds_prefix)
        if span is None:
            return
        if span.is_full:
            self._full.add(span.version)
        if model.is_strict:
            self._offered(span, new)

    def _offered(self, span: Span, new: bytes) -> None:
        model = self.model
        try:
            fold = msgspec.to_builtins(parse_fold(new, f"fold {span}"))
        except FormatError as error:
            raise ViolationError("folds", str(error)) from error
        root, base_root = fold["root"], fold["base_root"]
        is_known = root in model.versions.get(span.version, ())
        bases = {EMPTY_ROOT} if span.is_full else model.versions.get(span.base, ())
        text = f"fold {span} leads from {base_root[:8]} to {root[:8]}"
        model.counts.check("folds", is_known and base_root in bases, text)
        keys = FoldKeys(model.run, span)
        parts = [model.ground.now(keys.object(0, r["digest"])) for r in fold["frame"]["objects"]]
        frame = b"".join(part for part in parts if part is not None)
        if None in parts or len(frame) != fold["frame"]["num_bytes"]:
            is_let_go = not self.is_clean or self.is_passed(span)
            model.counts.check("folds", is_let_go, f"fold {span} was offered without its objects")
            return
        found = {} if span.is_full else copy_of(model.states[base_root])
        try:
            if span.is_full:
                restore(found, frame, allow_new_names=True, threads=1)
            else:
                apply(found, frame, threads=1)
            problem = "" if State.reading(found).root.hex() == root else "leads to other bytes"
        except GymfastError as error:
            problem = str(error)
        model.counts.check("folds", not problem, f"{text}, its frame: {problem}")

    def deleted(self, name: str, key: str) -> None:
        """ViolationError if retention deletes a fold, or a part of one, that is of use."""
        model, keys = self.model, self.model.keys
        span = span_of(key, keys.folds_prefix) or folded_of(key, keys.folded_prefix)
        if span is None or not model.is_strict:
            return
        if "/compactor" in name:
            is_loose = not self.is_clean or self.is_passed(span) or not self._is_named(span, key)
            text = f"{name} deleted '{key}', which the fold needs"
            model.counts.check("folds", is_loose, text)
            return
        text = f"{name} deleted '{key}', the floor is {model.floor()}"
        model.counts.check("I26 folds", self.is_passed(span), text)

    def _is_named(self, span: Span, key: str) -> bool:
        """True for an object of a fold that is offered."""
        blob = self.model.ground.now(self.model.keys.fold(span))
        objects = [] if blob is None else json.loads(blob)["frame"]["objects"]
        return any(key.endswith(ref["digest"]) for ref in objects)

    def is_passed(self, span: Span) -> bool:
        """True if neither a kept version nor a reader with a lease can use the fold."""
        model = self.model
        held = model.held_from() if model.has_leases and not span.is_full else None
        lowest = model.floor() if held is None else min(model.floor(), held)
        if span.start < model.version_at(lowest):
            return True
        later = [v for v in self._full if span.version < v <= model.newest]
        return span.is_full and len(later) >= NUM_FULL_FOLDS
