"""Names that gymfast gives to nothing, among folds and objects: named, ignored, never deleted."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from sync.folding import KEYS, compact, published, pulled
from sync.harness import RUN

from gymfast.stores import MemoryStore
from gymfast.sync import collect
from gymfast.sync.fsck import fsck
from gymfast.sync.keys import Span

pytestmark = pytest.mark.usefixtures("quick_disk")


def test_rubbish_among_folds_is_warned_of_and_never_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    states = published(store, 9, anchor_every=5)
    compact(store, tmp_path / "c")
    span = Span(0, 4)
    rubbish = {
        f"{KEYS.folds_prefix}readme",
        f"{KEYS.folds_prefix}{span}.bak",
        f"{KEYS.folded_prefix}readme",
        f"{KEYS.folded_prefix}{span}/readme",
        f"{KEYS.folded_prefix}{span}/{'0' * 63}",
        f"{KEYS.objects_prefix}{1:020d}/readme",
    }
    for key in rubbish:
        store.put(key, b"of somebody else")
    findings = {finding.key: finding for finding in fsck(store, RUN).findings}
    assert rubbish <= findings.keys()
    assert all("by hand" in findings[key].repair for key in rubbish), findings
    with caplog.at_level(logging.WARNING):
        pulled(store, states)
    assert "2 names that no fold has are ignored" in caplog.text
    published(store, 9, keep=1, anchor_every=2)  # a publisher, whose retention owns the epochs
    collect(store, RUN, keep=1)
    assert not any(str(span) in key for key in set(store.list("")) - rubbish), "it has passed"
    assert rubbish <= set(store.list(""))
