"""Installs staged frames into a target, and knows at any time what the target holds."""

from __future__ import annotations

import logging
import time
from typing import Literal

from gymfast.errors import ChainError, ChecksumError, FormatError, GymfastError
from gymfast.sync.chain import Plan, Tip
from gymfast.sync.install_report import InstallReport, InstallSeconds
from gymfast.sync.machine import Event, State, after, is_serving
from gymfast.sync.manifest import FORMAT, PositionRecord
from gymfast.sync.staging import Staged
from gymfast.sync.targets import Installed, Target

_log = logging.getLogger(__name__)
PositionState = Literal["clean", "applying", "inconsistent"]


class Installer:
    """A target and its state.

    `applied` is the place in the log whose state the target exactly holds, None if there is none;
    `held` the newest place it ever held; `root` that of its bytes, None if unknown or absent.
    """

    def __init__(self, target: Target, run: str) -> None:
        """Finds out, from the bytes of the target, what an earlier process left.

        Raises GymfastError if the target cannot be read.
        """
        self._target = target
        self._run = run
        self.state = State.EMPTY
        self.applied: Tip | None = None
        self.held: Tip | None = None
        self.root: str | None = None
        self._open()

    @property
    def is_serving(self) -> bool:
        """True if the target may be used."""
        return is_serving(self.state)

    def adopt(self, tip: Tip) -> None:
        """The bytes of the target turned out to be the state at `tip`."""
        self.state = after(self.state, Event.ADOPT)
        self.applied = self.held = tip

    def move(self, staged: Staged) -> InstallReport:
        """The same state at a later place of the log."""
        if self.applied is None:
            raise ChainError("the target holds no version: an anchor is needed")
        version, self.applied = self.applied.version, staged.plan.end
        self.held = self.applied
        return InstallReport(staged.version, version, "nothing", staged.plan.end.root)

    def install(self, staged: Staged) -> InstallReport:
        """Writes all frames, then reads the target: one install.

        Raises ChainError if they do not fit what is held, and what the target raises. Then the
        state says what is left: the old version, the last whole one of the plan, or nothing.
        """
        plan, before = staged.plan, self.applied
        self._require_fit(plan)
        tips = tuple(step.tip for step in plan.steps)
        self._save("applying", before or self.held, tips)
        event = Event.BEGIN_ANCHOR if plan.starts_with_anchor else Event.BEGIN
        self.state = after(self.state, event)
        start_s = time.perf_counter()
        try:
            installed = self._target.write(staged.frames, is_known=self.held is not None)
            written_s = time.perf_counter()
            self._require_root(plan.end.root)
        except BaseException:
            self._settle(tips)
            raise
        checked_s = time.perf_counter()
        self._verified(plan.end)
        seconds = InstallSeconds(
            staged.fetch_s, staged.verify_s, written_s - start_s, checked_s - written_s
        )
        return _report(staged, before, installed, seconds)

    def close(self) -> None:
        """Gives the target back."""
        self._target.close()

    def _open(self) -> None:
        position = self._target.load()
        if position is not None and position.run != self._run:
            _log.warning("the target followed run '%s' before, now '%s'", position.run, self._run)
            position = None
        is_damaged = False
        try:
            self.root = self._target.root()
        except FormatError as error:
            _log.warning("the target holds no version: %s", error)
            is_damaged = True
        places = [] if position is None else list(position.reached)
        if position is not None and position.tip is not None:
            self.held = Tip.from_record(position.tip)
            places.append(position.tip)
        match = [place for place in places if place.root == self.root]
        if match:
            self.adopt(Tip.from_record(match[-1]))
        elif is_damaged or self.held is not None or (places and self.root is not None):
            self.state = after(self.state, Event.BROKEN)

    def _require_fit(self, plan: Plan) -> None:
        if plan.starts_with_anchor:
            return
        base_root = getattr(plan.steps[0].record, "base_root", "")
        if self.applied is None or self.applied.root != base_root:
            held = "nothing usable" if self.applied is None else f"version {self.applied.version}"
            raise ChainError(
                f"what is staged needs state {base_root[:16]}…, the target holds {held}: fetch it "
                "again"
            )

    def _require_root(self, expected: str) -> None:
        found = self._target.root()
        if found != expected:
            raise ChecksumError(
                f"the target has root {(found or 'none')[:16]}… after the install, the record says "
                f"{expected[:16]}…: it was changed from outside, or its memory is damaged"
            )

    def _verified(self, tip: Tip) -> None:
        self.state = after(self.state, Event.VERIFIED)
        self.applied = self.held = tip
        self.root = tip.root
        self._save_quietly("clean", tip)

    def _settle(self, tips: tuple[Tip, ...]) -> None:
        """After a failure: what is there now, by its bytes."""
        root_before, is_known = self.root, True
        try:
            self.root = self._target.root()
        except GymfastError as error:
            _log.warning("the target is inconsistent: %s", error)
            self.root, is_known = None, False
        match = [tip for tip in tips if tip.root == self.root]
        was_empty = self.state is State.FILLING and is_known
        if self.root == root_before and (self.root is not None or was_empty):
            self.state = after(self.state, Event.UNTOUCHED)
            if self.state is not State.INCONSISTENT:
                self._save_quietly("clean", self.applied)
        elif match:
            self._verified(match[-1])
        else:
            self.state = after(self.state, Event.BROKEN)
            self.applied = None
            self._save_quietly("inconsistent", self.held)

    def _save_quietly(self, state: PositionState, tip: Tip | None) -> None:
        try:
            self._save(state, tip)
        except GymfastError as error:
            _log.warning("the position is not saved, the bytes will tell it: %s", error)

    def _save(self, state: PositionState, tip: Tip | None, reached: tuple[Tip, ...] = ()) -> None:
        record = None if tip is None else tip.to_record()
        steps = tuple(step.to_record() for step in reached)
        self._target.save(PositionRecord(FORMAT, self._run, state, record, steps))


def _report(
    staged: Staged, before: Tip | None, installed: Installed, seconds: InstallSeconds
) -> InstallReport:
    plan = staged.plan
    return InstallReport(
        version=staged.version,
        from_version=before.version if before else None,
        kind="anchor" if plan.starts_with_anchor else "deltas",
        root=plan.end.root,
        num_deltas=sum(step.kind == "delta" for step in plan.steps),
        num_bytes=plan.num_bytes,
        num_changed=installed.num_changed,
        seconds=seconds,
        added=installed.added,
        removed=installed.removed,
        replaced=installed.replaced,
    )
