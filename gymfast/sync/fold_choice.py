"""Which folds the plans of a reader may use."""

from __future__ import annotations

import logging

from gymfast.errors import StoreError
from gymfast.sync.chain import Plan
from gymfast.sync.folds import newest_version, read_useful
from gymfast.sync.keys import Span, span_of_fold
from gymfast.sync.log import Log
from gymfast.sync.manifest import COUNT_MAX, FoldRecord
from gymfast.sync.view import View

_FROM_FRAMES = 3
"""Frames of a plan from which on a look for folds is worth its round trips."""
_MAX_BAD = 3  # in one fetch; then it goes on without folds
_log = logging.getLogger(__name__)


class FoldChoice:
    """Looks for folds once in a fetch, where they may help, and leaves out those that fail."""

    def __init__(self, log: Log, view: View) -> None:
        """None yet; those chosen are in `view.folds`."""
        self._log = log
        self._view = view
        self._num_bad = 0
        self._has_looked = False
        self._distrusted: set[Span] = set()

    def begin(self) -> None:
        """A fetch begins: without folds."""
        self._num_bad, self._has_looked = 0, False
        self._view.folds = ()

    def look_if_useful(self, plan: Plan | None, target: int | None) -> bool:
        """True if there are folds now that may make a plan cheaper, or possible (plan None)."""
        if self._has_looked or (plan is not None and len(plan.steps) < _FROM_FRAMES):
            return False
        self._has_looked = True
        view, last = self._view, self._last(plan) if target is None else target
        known = view.applied or (view.entries[0].tip if view.entries else None)
        first = 0 if known is None or known.version is None else known.version
        view.folds = read_useful(self._log, first, last, self._distrusted)
        return bool(view.folds)

    def _last(self, plan: Plan | None) -> int:
        """The newest version of the log, or more; folds beyond it are rubbish."""
        if plan is not None:
            return COUNT_MAX if plan.end.version is None else plan.end.version
        try:
            return newest_version(self._log)
        except StoreError:
            return COUNT_MAX  # whatever it is, it is no reason to go on without folds

    def drop(self, fold: FoldRecord, what: str) -> None:
        """The fold cannot be fetched; after a few such ones the fetch goes on without folds."""
        _log.warning("run '%s' goes on without a fold: %s", self._log.keys.run, what)
        self._num_bad += 1
        is_enough = self._num_bad >= _MAX_BAD
        self._view.folds = () if is_enough else tuple(f for f in self._view.folds if f != fold)

    def distrust(self, plan: Plan) -> None:
        """Folds of a plan that could not be installed are not used again."""
        records = [step.record for step in plan.steps]
        self._distrusted.update(span_of_fold(r) for r in records if isinstance(r, FoldRecord))
