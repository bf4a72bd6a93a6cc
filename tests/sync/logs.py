"""Builds logs of records without a store, for tests of the pure parts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import msgspec
from hypothesis import strategies as st

from gymfast.sync.chain import EMPTY_ROOT, Entry, Tip, follow
from gymfast.sync.manifest import (
    AnchorRecord,
    EpochRecord,
    FoldRecord,
    FrameRef,
    LogRecord,
    ObjectRef,
    VersionRecord,
    digest_of,
    encode,
)

RUN = "run-a"
SCHEMA = hashlib.sha256(b"schema").hexdigest()


def hex_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def nonce_of(text: str) -> str:
    return hex_of(text)[:32]


def frame_ref(name: str, num_bytes: int = 10) -> FrameRef:
    return FrameRef(num_bytes, (ObjectRef(hex_of(name), num_bytes),))


@dataclass
class LogBuilder:
    """A log that only ever grows by legal records."""

    run: str = RUN
    entries: list[Entry] = field(default_factory=list)

    @property
    def tip(self) -> Tip:
        return self.entries[-1].tip if self.entries else Tip()

    @property
    def records(self) -> list[LogRecord]:
        return [entry.record for entry in self.entries]

    def common(self, label: str = "", *, new_epoch: bool = False) -> dict[str, object]:
        tip = self.tip
        return {
            "format": 1,
            "run": self.run,
            "seq": tip.seq + 1,
            "epoch": tip.epoch + 1 if new_epoch else tip.epoch,
            "nonce": nonce_of(f"{self.run}-{tip.seq + 1}-{label}"),
            "previous": tip.record,
            "created_us": 1_000_000 * (tip.seq + 1),
        }

    def add(self, record: LogRecord) -> Entry:
        entry = follow(self.tip, record, digest_of(encode(record)), self.run)
        self.entries.append(entry)
        return entry

    def epoch(self, publisher: str = "host:1") -> Entry:
        return self.add(EpochRecord(**self.common(new_epoch=True), publisher=publisher))

    def version_record(
        self,
        kind: str = "delta",
        num_bytes: int = 10,
        root: str | None = None,
        version: int | None = None,
    ) -> VersionRecord:
        tip = self.tip
        if version is None:
            version = 0 if tip.version is None else tip.version + 1
        return VersionRecord(
            **self.common(),
            version=version,
            kind=kind,
            base_version=version - 1 if kind == "delta" else -1,
            base_root=tip.root if kind == "delta" else EMPTY_ROOT,
            root=root or hex_of(f"{self.run} state {version}"),
            schema=SCHEMA,
            num_tensors=1,
            raw_bytes=100,
            num_changed=0 if root == tip.root else 3,
            frame=frame_ref(f"{self.run} {kind} {version}", num_bytes),
        )

    def version(self, kind: str = "delta", num_bytes: int = 10, root: str | None = None) -> Entry:
        return self.add(self.version_record(kind, num_bytes, root))

    def anchor_record(self, num_bytes: int = 80) -> AnchorRecord:
        tip = self.tip
        assert tip.version is not None
        return AnchorRecord(
            **self.common("anchor"),
            version=tip.version,
            root=tip.root,
            schema=SCHEMA,
            num_tensors=1,
            raw_bytes=100,
            frame=frame_ref(f"{self.run} anchor {tip.version}", num_bytes),
        )

    def anchor(self, num_bytes: int = 80) -> Entry:
        return self.add(self.anchor_record(num_bytes))


def changed(record: LogRecord, **fields: object) -> LogRecord:
    return msgspec.structs.replace(record, **fields)


def sample_log(num_versions: int = 5, anchors: tuple[int, ...] = ()) -> LogBuilder:
    """Epoch, anchor version 0, deltas 1.., and an anchor record after each version in `anchors`."""
    log = LogBuilder()
    log.epoch()
    log.version("anchor", 80)
    for version in range(1, num_versions + 1):
        log.version()
        if version in anchors:
            log.anchor()
    return log


@st.composite
def logs(draw) -> LogBuilder:
    """Any legal log that begins with a full state."""
    log = LogBuilder()
    log.epoch()
    log.version("anchor", draw(st.integers(1, 200)))
    for _ in range(draw(st.integers(0, 12))):
        what = draw(st.sampled_from(["delta", "delta", "delta", "anchor", "full", "epoch"]))
        size = draw(st.integers(1, 200))
        if what == "epoch":
            log.epoch()
        elif what == "full":
            log.anchor(size)
        else:
            log.version(what, size)
    return log


def fold_of(
    log: LogBuilder, base: int | None, version: int, num_bytes: int = 10, **fields: object
) -> FoldRecord:
    """A fold between two versions of the log; from nothing if `base` is None."""
    roots = {e.tip.version: e.tip.root for e in log.entries}
    end = next(e.tip for e in log.entries if e.tip.version == version)
    fold = FoldRecord(
        format=1,
        run=log.run,
        created_us=1,
        base_version=-1 if base is None else base,
        base_root=EMPTY_ROOT if base is None else roots[base],
        seq=end.seq,
        record=end.record,
        epoch=end.epoch,
        version=version,
        root=end.root,
        schema=SCHEMA,
        num_tensors=1,
        raw_bytes=100,
        num_changed=3,
        frame=frame_ref(f"{log.run} fold {base} {version}", num_bytes),
    )
    return msgspec.structs.replace(fold, **fields)
