"""What has to be true of a run, seen by somebody who sees every effect on its store at once."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field

from gymfast.stores.base import check_key
from gymfast.sync.keys import RunKeys, number_of, object_of
from tests.campaign.counts import Counts, ViolationError
from tests.campaign.fold_model import FoldModel
from tests.campaign.ground import Ground
from tests.campaign.simulation import Process
from tests.sync.harness import Weights

LEASE_GRACE_US = 60_000_000


@dataclass
class Guard:
    """What is known of a lease: `is_let_through` once its reader looked at the floor and reads."""

    seq: int
    expires_us: int
    has_looked: bool = False
    is_let_through: bool = False


@dataclass
class Model:
    """The truth about one run. `states` are all weights that anybody tried to publish, by root.

    `is_strict`: nobody damages or forges, so the log is contiguous and nothing is ever lost;
    `has_leases`: clocks differ by less than the grace of leases, and leases are read as written.
    """

    run: str
    keep: int
    counts: Counts
    ground: Ground
    is_strict: bool = True
    has_leases: bool = True
    states: dict[str, Weights] = field(default_factory=dict)
    records: dict[int, dict] = field(default_factory=dict)
    versions: dict[int, set[str]] = field(default_factory=dict)
    claims: dict[int, Process | None] = field(default_factory=dict)
    honest: dict[str, bytes] = field(default_factory=dict)
    guards: dict[str, Guard] = field(default_factory=dict)
    readers: dict[str, str] = field(default_factory=dict)
    outsiders: set[str] = field(default_factory=set)
    newest: int = -1
    last: dict | None = None
    last_digest: str = ""

    def __post_init__(self) -> None:
        self.keys = RunKeys(self.run)
        self.folds = FoldModel(self)

    def watch(
        self, who: Process | None, operation: str, key: str, old: bytes | None, new: bytes | None
    ) -> None:
        """Takes note of an effect or a look; ViolationError if it may not be."""
        name = who.name if who else ""
        if name in self.outsiders:
            return
        self.counts.check("I27", key.startswith(f"{self.run}/"), f"{name}: {operation} '{key}'")
        if operation in ("put", "create", "delete"):
            self.counts.check("I83", check_key(key) == key, f"{name}: {operation} '{key}'")
            self.counts.check(
                "I27", self._may(name, operation, key), f"{name}: {operation} '{key}'"
            )
        if operation in ("put", "create"):
            assert new is not None
            self._written(who, operation, key, old, new)
        elif operation == "delete":
            self._deleted(name, key, old)
        elif operation == "exists":
            self.counts["I22 races"] += number_of(key, self.keys.log_prefix) is not None
        else:
            self._looked(name, operation, key)

    def _may(self, name: str, operation: str, key: str) -> bool:
        """True if that is of those who play this part: nobody deletes or writes what is not his."""
        keys, part = self.keys, name.partition("/")[2].rstrip("0123456789")
        if part == "reader":
            return key == keys.reader(name.replace("/", "."))
        if part == "relay":
            return key.startswith(keys.readers_prefix)
        is_of_folds = key.startswith((keys.folds_prefix, keys.folded_prefix))
        if part == "compactor":
            return is_of_folds or key.startswith(f"{keys.readers_prefix}compactor")
        if part == "gc":
            return operation == "delete" or key.startswith(keys.floors_prefix)
        return operation == "delete" or not is_of_folds

    def _written(
        self, who: Process | None, operation: str, key: str, old: bytes | None, new: bytes
    ) -> None:
        seq = number_of(key, self.keys.log_prefix)
        place = object_of(key, self.keys.objects_prefix)
        if seq is not None:
            self.counts.check("I22", operation == "create" and old is None, f"'{key}' replaced")
            self._committed(who, seq, new)
        elif place is not None:
            is_right = hashlib.sha256(new).hexdigest() == place[1]
            self.counts.check("I20", is_right, f"'{key}' was written with other bytes")
        elif key.startswith(self.keys.readers_prefix):
            self._leased(key, json.loads(new))
        else:
            self.folds.written(key, new)
        self.honest[key] = new

    def _committed(self, who: Process | None, seq: int, blob: bytes) -> None:
        record = json.loads(blob)
        last, kind = self.last, record["type"]
        if last is not None and seq <= last["seq"]:
            if seq < self.floor_mark():
                return  # a place that retention emptied: nobody follows it
            if self.is_strict:
                raise ViolationError("I22", f"record {seq} was written a second time")
        if self.is_strict:
            expected = (1, "") if last is None else (last["seq"] + 1, self.last_digest)
            self.counts.check(
                "I22", (seq, record["previous"]) == expected, f"record {seq} breaks the chain"
            )
        if kind == "epoch":
            self.claims[record["epoch"]] = who
        else:
            newest_epoch = max(self.claims, default=0)
            is_in_charge = record["epoch"] == newest_epoch and self.claims.get(newest_epoch) is who
            self.counts.check(
                "I23",
                is_in_charge,
                f"record {seq} of epoch {record['epoch']} came after epoch {newest_epoch}",
            )
            self._check_objects(record)
        if kind == "version":
            version, root = record["version"], record["root"]
            is_next = self.newest < 0 or version == self.newest + 1 or not self.is_strict
            self.counts.check("I22", is_next, f"version {version} follows {self.newest}")
            self.counts.check("I04", root in self.states, f"version {version} was never published")
            self.versions.setdefault(version, set()).add(root)
            self.newest = max(self.newest, version)
        self.records[seq] = record
        self.last, self.last_digest = record, hashlib.sha256(blob).hexdigest()

    def _check_objects(self, record: dict) -> None:
        if self.is_strict:
            for key, num_bytes in self.objects_of(record):
                found = self.ground.now(key)
                is_there = found is not None and len(found) == num_bytes
                text = f"record {record['seq']} is visible without '{key}'"
                self.counts.check("I20", is_there, text)

    def objects_of(self, record: dict) -> list[tuple[str, int]]:
        """Keys and sizes of what a record names."""
        refs = record.get("frame", {}).get("objects", [])
        return [(self.keys.object(record["epoch"], r["digest"]), r["num_bytes"]) for r in refs]

    # Retention

    def floor_mark(self) -> int:
        """The newest floor mark that is really there."""
        keys = self.ground.keys(self.keys.floors_prefix, self.ground.now)
        return max((number_of(key, self.keys.floors_prefix) or 0 for key in keys), default=0)

    def floor(self) -> int:
        """The first record that has to stay, by our own reckoning."""
        full = [
            r["seq"]
            for r in self.records.values()
            if (r["type"] == "anchor" or r.get("kind") == "anchor")
            and r["version"] <= self.newest - self.keep + 1
        ]
        return max(full, default=0)

    def version_at(self, seq: int) -> int:
        """The version that holds at a place of the log; -1 if none does."""
        states = [r for s, r in self.records.items() if s <= seq and "version" in r]
        return max((r["version"] for r in states), default=-1)

    def _leased(self, key: str, lease: dict) -> None:
        before = self.guards.get(key)
        guard = Guard(lease["seq"], lease["expires_us"])
        now_us = int((self.ground.simulation.now_s + 1.7e9) * 1e6)
        if before and before.seq == guard.seq and before.expires_us > now_us:
            guard.has_looked, guard.is_let_through = before.has_looked, before.is_let_through
        self.guards[key] = guard

    def _looked(self, name: str, operation: str, key: str) -> None:
        guard = self.guards.get(self.readers.get(name, ""))
        if guard is None:
            return
        if operation == "list" and key == self.keys.floors_prefix:
            guard.has_looked = self.floor_mark() <= guard.seq
        elif key.startswith((self.keys.objects_prefix, self.keys.folded_prefix)):
            guard.is_let_through |= guard.has_looked

    def _deleted(self, name: str, key: str, old: bytes | None) -> None:
        self.honest.pop(key, None)
        if key.startswith(self.keys.readers_prefix):
            self.guards.pop(key, None)
        seq = number_of(key, self.keys.log_prefix)
        place = object_of(key, self.keys.objects_prefix)
        if old is not None:
            self.folds.deleted(name, key)
        if old is None or (seq is None and place is None) or not self.is_strict:
            return
        held = self.held_from() if self.has_leases else None
        floor = self.floor()
        if seq is not None:
            is_loose = seq < floor and self.records.get(seq, {}).get("type") != "epoch"
            self.counts.check("I26", is_loose, f"{name} deleted record {seq}, the floor is {floor}")
            if held is not None:
                self.counts.check("I26 leases", seq < held, f"{name} deleted {seq} under a lease")
            self.records.pop(seq, None)
            return
        lowest = floor if held is None else min(floor, held)
        needing = [
            r["seq"]
            for r in self.records.values()
            if r["seq"] >= lowest and any(k == key for k, _ in self.objects_of(r))
        ]
        is_loose = not [s for s in needing if s >= floor]
        text = f"{name} deleted '{key}', which records {needing} need, the floor is {floor}"
        self.counts.check("I26", is_loose, text)
        if held is not None:
            self.counts.check("I26 leases", not needing, f"{text}, a lease holds {held}")

    def held_from(self) -> int | None:
        """The oldest record that a reader with a lease relies on; None if none does."""
        now_us = int((self.ground.simulation.now_s + 1.7e9) * 1e6)
        return min(
            (g.seq for g in self.guards.values() if g.is_let_through and g.expires_us > now_us),
            default=None,
        )
