"""Follows a run: fetch, verify, stage, then apply; serves a version only once it is verified.

Source: docs/sync-protocol.md sections 7 and 8.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from gymfast.errors import BudgetError, ChainError, DeadlineError, GymfastError, StoreError
from gymfast.stores import open_store
from gymfast.stores.base import Store
from gymfast.sync.ahead import NoteReader
from gymfast.sync.bandwidth import limited
from gymfast.sync.chain import Costs, Tip
from gymfast.sync.clock import Clock, Deadline, SystemClock
from gymfast.sync.fetcher import Fetcher
from gymfast.sync.install_report import InstallReport, SubscriberStatus
from gymfast.sync.installer import Installer
from gymfast.sync.keys import RunKeys
from gymfast.sync.lease import Lease
from gymfast.sync.log import Log
from gymfast.sync.machine import State
from gymfast.sync.reader_status import StatusReporter, reader_name
from gymfast.sync.signatures import Ed25519Keys, Key, check_key
from gymfast.sync.staging import Advance, Staged, Stager
from gymfast.sync.targets import Target
from gymfast.sync.view import View

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_NO_FAULT_OF_FRAMES = (StoreError, BudgetError, DeadlineError, OSError, MemoryError)
_log = logging.getLogger(__name__)


class Subscriber:
    """One reader of a run and the target it keeps at a version. Not thread-safe."""

    def __init__(
        self,
        store: Store | str,
        run: str,
        target: Target,
        *,
        reader_id: str | None = None,
        staging_dir: Path | str | None = None,
        max_staging_bytes: int | None = None,
        lease_s: float = 600.0,
        timeout_s: float = 60.0,
        freshness_s: float | None = None,
        report_s: float | None = None,
        request_bytes: int = Costs.request_bytes,
        max_bytes_per_s: int | None = None,
        key: Key | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Finds out, from its bytes, what the target holds; reads nothing from the store yet.

        Frames are staged in memory, or in `staging_dir`; more than `max_staging_bytes` (None: what
        there is) is refused. `timeout_s` bounds each wait in which nothing arrives. With
        `freshness_s`, `is_stale` says that the log did not move for longer. With `report_s` the
        reader tells in the store how it is doing (`gymfast sync status`), at each change and that
        often, from a thread of its own. A request counts like `request_bytes` bytes in the choice
        between deltas and anchor. `max_bytes_per_s` bounds what comes from and goes to the store.
        With `key`, a shared key or PEM text with Ed25519 public keys, records that are not signed
        with it are refused.
        Raises ValueError for settings out of range, GymfastError if the target cannot be read.
        """
        self._clock = clock or SystemClock()
        opened = open_store(store) if isinstance(store, str) else store
        self._store = limited(opened, max_bytes_per_s, self._clock)
        self._keys = RunKeys(run)
        key = check_key(key)
        if isinstance(key, Ed25519Keys) and key.can_sign:
            _log.warning(
                "this reader of run '%s' was given a private key; its public half is enough, and "
                "tells a thief nothing",
                run,
            )
        self._log = Log(self._store, self._keys, key)
        self._costs = Costs(request_bytes)
        self._freshness_s = freshness_s
        self._reader_id = reader_id or reader_name()
        folder = None if staging_dir is None else Path(staging_dir)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        stager = Stager(self._store, self._keys, folder, max_staging_bytes)
        lease = Lease(self._store, self._keys, self._reader_id, self._clock, lease_s)
        self._installer = Installer(target, run)
        self._view = View(self._log, self._clock, self._installer.held)
        if self._installer.applied is not None:
            self._view.advance(self._installer.applied)
        self._notes = NoteReader(self._log, stager.begin)
        self._fetcher = Fetcher(self._log, self._view, stager, lease, self._clock, timeout_s)
        self._reporter = None
        if report_s is not None:
            self._reporter = StatusReporter(
                *(self._store, self._keys, self._reader_id), period_s=report_s, clock=self._clock
            )
        self._staged: Staged | None = None
        self._is_searched = False
        self._last_error = ""

    @property
    def state(self) -> State:
        """What may be said about the bytes of the target."""
        return self._installer.state

    @property
    def version(self) -> int | None:
        """The version that the target exactly holds; None if it must not be served."""
        return self._served.version if self._served else None

    @property
    def root(self) -> str | None:
        """The root of the served version; None if there is none."""
        return self._served.root if self._served else None

    @property
    def tip(self) -> Tip | None:
        """The place of the log whose state is served; None if none is."""
        return self._served

    @property
    def is_stale(self) -> bool:
        """True if the log did not move for longer than the freshness limit, or its newest record,
        installed or not, is older than that: the publisher stopped, or somebody shows an old log.
        """
        return self._freshness_s is not None and self._unchanged_s > self._freshness_s

    @property
    def status(self) -> SubscriberStatus:
        """How this subscriber is doing, from what it knows already."""
        return SubscriberStatus(
            run=self._keys.run,
            state=self.state,
            version=self.version,
            newest=self._view.newest,
            is_stale=self.is_stale,
            unchanged_s=self._unchanged_s,
            last_error=self._last_error,
        )

    def serves(self, min_version: int = 0) -> bool:
        """True if the target may be used and holds that version or a newer one."""
        return self.version is not None and self.version >= min_version

    def ready(self, version: int) -> bool:
        """True if that version, or a newer one, is served or staged: no more reads are needed."""
        is_staged = self._staged is not None and self._staged.version >= version
        return is_staged or self.serves(version)

    def poll(self) -> int | None:
        """The newest version that is visible; None if there is none.

        Raises ChainError if the log does not continue what this reader has followed, FormatError
        for signatures of somebody else, StoreError.
        """
        try:
            self._view.refresh()
            self._adopt_if_known()
        except GymfastError as error:
            self._last_error = str(error)
            raise
        finally:
            self._tell()
        return self._view.newest

    def fetch(self, version: int | None = None, *, advance: Advance | None = None) -> Staged:
        """Stages everything that leads to a version, the newest if None; the target is untouched.

        `advance` is told bytes fetched and to fetch.
        Raises ChainError for a version that is older than the one held or cannot be reached,
        NotFoundError for one that is not published, BudgetError, StoreError, DeadlineError.
        """
        with self._expecting():
            self.poll()
            return self._fetch(version, advance)

    def apply(self) -> InstallReport:
        """Installs what is staged, as one: the served version moves once the target is verified.

        Raises ChainError if nothing is staged or it does not fit what is held, and what the target
        raises. Then the old version is still served (its bytes were read again), or, after a
        partial plan, the last whole one; else the state is INCONSISTENT and nothing is served.
        """
        staged = self._staged
        if staged is None:
            raise ChainError("nothing is staged: call fetch() before apply()")
        install = self._installer.install if staged.frames else self._installer.move
        try:
            report = install(staged)
            self._last_error = ""
        except BaseException as error:
            self._last_error = str(error)
            if isinstance(error, Exception) and not isinstance(error, _NO_FAULT_OF_FRAMES):
                self._fetcher.distrust(staged.plan)
            raise
        finally:
            self._view.set_applied(self._installer.applied)
            self._drop_staged()
            self._fetcher.forget()
            self._tell()
        _log.info(
            "'%s' serves run '%s' version %d: %s, %d deltas, %d bytes",
            *(self._reader_id, self._keys.run, report.version, report.kind),
            *(report.num_deltas, report.num_bytes),
        )
        return report

    def pull(self, version: int | None = None, *, advance: Advance | None = None) -> InstallReport:
        """Fetches and applies. Raises what these raise."""
        self.fetch(version, advance=advance)
        return self.apply()

    def wait(
        self,
        min_version: int,
        timeout_s: float,
        *,
        interval_s: float | None = None,
        is_exact: bool = False,
        advance: Advance | None = None,
    ) -> InstallReport:
        """Pulls the newest version as soon as that one is there; the report of the pull.

        With `is_exact` that version itself, though newer ones may be there.
        Raises DeadlineError if it does not appear in time, ValueError for an interval of 0 or less.
        """
        with self._expecting():
            self.wait_until_visible(min_version, timeout_s, interval_s=interval_s)
            self._fetch(min_version if is_exact else None, advance)
        return self.apply()

    def wait_until_visible(
        self, version: int, timeout_s: float, *, interval_s: float | None = None
    ) -> None:
        """Returns once that version, or a newer one, is published.

        Looks come ever later, up to 2 s apart; with `interval_s` as often as that, also while looks
        before are under way, so that a store far away delays nothing.
        Raises DeadlineError if it does not appear in time, ValueError for an interval of 0 or less.
        """
        if interval_s is not None and interval_s <= 0:
            raise ValueError(f"interval_s is {interval_s}, expected more than 0")
        deadline = Deadline(self._clock, timeout_s)
        newest: int | None = None
        pauses = deadline.pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        for _ in pauses if interval_s is None else self._watch(deadline, interval_s):
            newest = self.poll()
            if newest is not None and newest >= version:
                return
        found = "none is published" if newest is None else f"the newest is {newest}"
        deadline.require(f"waiting for version {version} of run '{self._keys.run}' ({found})")

    def close(self) -> None:
        """Gives lease, staging, status and target back."""
        self._drop_staged()
        self._notes.expect(0)
        self._fetcher.close()
        if self._reporter is not None:
            self._reporter.close()
        self._installer.close()

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _unchanged_s(self) -> float:
        since_s = self._clock.monotonic_s() - self._view.moved_s
        created_us = self._view.created_us
        age_s = 0.0 if created_us is None else (self._clock.wall_us() - created_us) / 1e6
        return max(since_s, age_s)

    @property
    def _served(self) -> Tip | None:
        return self._installer.applied if self._installer.is_serving else None

    def _fetch(self, version: int | None, advance: Advance | None) -> Staged:
        """As `fetch`, of what is known of the log."""
        self._drop_staged()
        self._view.ensure_full()
        self._staged = self._fetcher.fetch(
            version, self._costs, is_decoded=self._installer.is_serving, advance=advance
        )
        return self._staged

    @contextmanager
    def _expecting(self) -> Iterator[None]:
        """Within, what leads on from here is fetched as soon as its record is there."""
        self._view.on_next = self._fetcher.expect
        try:
            yield
        except BaseException as error:
            self._last_error = str(error)
            self._fetcher.forget()
            self._tell()
            raise
        finally:
            self._view.on_next = None

    def _watch(self, deadline: Deadline, interval_s: float) -> Iterator[None]:
        """Yields at once, then when there may be something new, until the deadline."""
        for _ in deadline.pauses(interval_s, interval_s):
            yield
            while self._view.can_watch and not deadline.has_passed:
                self._view.watch(interval_s, min(_LONGEST_PAUSE_S, deadline.left_s), self._notes)
                yield

    def _adopt_if_known(self) -> None:
        """Finds the bytes of the target in the log: then no anchor is needed."""
        root = self._installer.root
        if root is None or self._installer.is_serving or not self._view.entries:
            return
        tips = [e.tip for e in self._view.entries if e.tip.root == root]
        tip = tips[-1] if tips else None
        if tip is None and not self._is_searched:
            tip = self._view.find(root)
        self._is_searched = True
        held = self._view.held
        if tip is not None and (held is None or tip.seq >= held.seq):
            self._installer.adopt(tip)
            self._view.adopt(tip)

    def _tell(self) -> None:
        if self._reporter is not None:
            self._reporter.tell(self.status, self.root)

    def _drop_staged(self) -> None:
        if self._staged is not None:
            self._staged.close()
            self._staged = None
