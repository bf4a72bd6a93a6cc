"""How the readers of a run are doing: what each tells of itself, seen from one place."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gymfast.errors import FormatError
from gymfast.stores.base import Store
from gymfast.sync.clock import Clock, SystemClock
from gymfast.sync.keys import RunKeys
from gymfast.sync.manifest import StatusRecord
from gymfast.sync.reader_status import printable, read_statuses

SKEW_S = 60.0
"""How far the clocks of two machines may differ before a reader counts as silent."""
_NUM_PERIODS = 3


@dataclass(frozen=True)
class ReaderRow:
    """One reader of a fleet; what it cannot tell is None.

    `lag` are the versions that it is behind, `age_s` the seconds since it was heard of, `state`
    "damaged" where its status cannot be read. `is_silent`: it does not write any more.
    """

    reader: str
    state: str
    version: int | None
    lag: int | None
    root: str
    age_s: float | None
    installed_us: int | None
    is_silent: bool
    is_stale: bool
    error: str

    def is_ready(self, version: int | None = None) -> bool:
        """True if it serves that version, or a newer one (None: any), and can be relied on."""
        serves = self.state == "clean" and self.version is not None
        return (
            serves
            and not (self.is_silent or self.is_stale)
            and (version is None or (self.version or 0) >= version)
        )


@dataclass(frozen=True)
class Fleet:
    """All readers of a run that tell of themselves; `newest` is the newest version known."""

    run: str
    newest: int | None
    readers: tuple[ReaderRow, ...]

    def num_ready(self, version: int | None = None) -> int:
        """How many readers are ready."""
        return sum(row.is_ready(version) for row in self.readers)

    def is_ready(self, version: int | None, min_ready: int | None) -> bool:
        """True if `min_ready` readers are ready; None: all that are heard of, at least one."""
        if min_ready is not None:
            return self.num_ready(version) >= min_ready
        heard = [row for row in self.readers if not row.is_silent]
        return bool(heard) and all(row.is_ready(version) for row in heard)


class FleetWatch:
    """Looks at a fleet again and again.

    At the first look, only clocks tell whether a reader lives: it is silent if its last word is
    older than three of its periods, and a minute for clocks that differ. From then on its words
    tell it: one who wrote between two looks lives, whatever its clock says.
    """

    def __init__(self, store: Store, run: str, clock: Clock | None = None) -> None:
        """Nothing is read yet. Raises ValueError for a run that is no name."""
        self._store = store
        self._keys = RunKeys(run)
        self._clock = clock or SystemClock()
        self._heard: dict[str, tuple[int, float]] = {}

    def look(self, newest: int | None) -> Fleet:
        """The readers as they are told now. Raises StoreError."""
        rows: list[ReaderRow] = []
        heard: dict[str, tuple[int, float]] = {}
        found = list(read_statuses(self._store, self._keys))
        for key, status in found:
            if isinstance(status, FormatError):
                rows.append(_damaged(key.removeprefix(self._keys.status_prefix), status))
            else:
                heard[status.reader] = self._hear(status)
                rows.append(self._row(status, heard[status.reader], newest))
        self._heard = heard
        return Fleet(self._keys.run, newest, tuple(rows))

    def _hear(self, status: StatusRecord) -> tuple[int, float]:
        """The time in the status, and when it was seen first, by the monotonic clock."""
        before = self._heard.get(status.reader)
        if before is not None and before[0] == status.updated_us:
            return before
        now_s = self._clock.monotonic_s()
        if before is not None:  # it has just written
            return status.updated_us, now_s
        age_s = (self._clock.wall_us() - status.updated_us) / 1e6
        return status.updated_us, now_s - max(0.0, age_s - SKEW_S)

    def _row(self, status: StatusRecord, heard: tuple[int, float], newest: int | None) -> ReaderRow:
        unheard_s = self._clock.monotonic_s() - heard[1]
        version = status.version if status.version >= 0 else None
        age_s = max(0.0, (self._clock.wall_us() - status.updated_us) / 1e6)
        return ReaderRow(
            reader=status.reader,
            state=status.state,
            version=version,
            lag=None if newest is None or version is None else max(0, newest - version),
            root=status.root,
            age_s=age_s,
            installed_us=status.installed_us,
            is_silent=unheard_s > _NUM_PERIODS * status.period_us / 1e6,
            is_stale=status.is_stale,
            error=status.error,
        )


def _damaged(reader: str, error: FormatError) -> ReaderRow:
    error_text = printable(str(error))  # it may quote what is there
    return ReaderRow(reader, "damaged", None, None, "", None, None, True, False, error_text)


def old_statuses(
    found: Iterable[tuple[str, StatusRecord | FormatError]], now_us: int, old_us: int
) -> list[str]:
    """Keys of what nobody writes any more: damaged, or of a time that far from now.

    A reader that lives writes its own anew.
    """
    return [
        key
        for key, status in found
        if isinstance(status, FormatError) or abs(now_us - status.updated_us) >= old_us
    ]
