"""Compactors in a history, and readers to whom their folds are shown in every condition."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gymfast.errors import GymfastError
from gymfast.sync import Compactor
from gymfast.sync.keys import Span, folded_of, span_of
from tests.campaign.parties import RETRIED, Scene
from tests.campaign.simulation import Process

Contents = dict[str, bytes]
Follow = Callable[[Span, Contents, Contents], bool]


@dataclass
class Folding:
    """Makes folds beside the publishers; somebody starts it again where it was killed."""

    scene: Scene
    folder: Path
    every: int
    levels: int
    anchor_every: int | None
    object_bytes: int
    process: Process | None = None
    compactor: Compactor | None = None

    def work(self, process: Process) -> None:
        scene, rng = self.scene, self.scene.simulation.rng
        self.process, self.compactor = process, None
        if rng.random() < 0.2:
            shutil.rmtree(self.folder, ignore_errors=True)  # another machine
        while not scene.is_over:
            compactor = Compactor(
                scene.way(process),
                scene.model.run,
                self.folder,
                every=self.every,
                levels=self.levels,
                anchor_every=self.anchor_every,
                threads=1,
                object_bytes=self.object_bytes,
                timeout_s=scene.options["timeout_s"],
                key=scene.key,
                clock=process,
            )
            self.compactor = compactor
            try:
                self._follow(process, compactor)
                compactor.close()
            finally:
                for replica in compactor._replicas:  # as the end of a process does
                    replica._installer.close()
            if not scene.is_over:
                process.sleep(rng.expovariate(1 / 4))

    def _follow(self, process: Process, compactor: Compactor) -> None:
        scene, rng = self.scene, self.scene.simulation.rng
        while not scene.is_over:
            try:
                for report in compactor.work():
                    what = f"{report.base_version} to {report.version}"
                    scene.note(process, f"offers a fold from {what}")
            except RETRIED as error:
                scene.note(process, "failed", error)
                if rng.random() < 0.2:
                    return
            process.sleep(rng.expovariate(1 / 3))

    @property
    def told(self) -> str:
        """Who it is, and how far it came."""
        name = self.process.name if self.process else "a compactor"
        version = self.compactor.version if self.compactor else None
        return f"{name}, at version {version},"

    @property
    def is_done(self) -> bool:
        """True if it has folded as far as versions are published."""
        if self.compactor is None:
            return False
        version = self.compactor.version
        return version is not None and version + self.every > self.scene.model.newest


def show_folds(scene: Scene, follow: Follow) -> None:
    """Readers that stand where a fold begins, to whom folds are shown in every condition.

    `follow(span, first, then)` has a reader pull where the fold begins from `first`, then where it
    ends from `then`, and says whether it got there exactly.
    """
    model, rng, before = scene.model, scene.simulation.rng, scene.ground.contents()
    records = [k for k in before if span_of(k, model.keys.folds_prefix)]
    parts = [k for k in before if folded_of(k, model.keys.folded_prefix)]
    oldest = model.version_at(model.floor())
    spans = [span for k in records if (span := span_of(k, model.keys.folds_prefix))]
    spans = [span for span in spans if not span.is_full and max(0, oldest) <= span.base]
    if not spans:
        return
    longest = max(spans, key=lambda span: (span.version - span.base, span.version))
    without = {k: v for k, v in before.items() if k not in {*records, *parts}}
    gone = set(rng.sample(parts, (len(parts) + 1) // 2))
    rotten = {k: before[k][:-1] + bytes([before[k][-1] ^ 1]) for k in (*records[::2], *parts[::2])}
    shown = {
        "whole": before,
        "none": without,
        "swapped": {**before, **_swapped(before, records)},
        "parts swapped": {**before, **_swapped(before, parts)},
        "no parts": {k: v for k, v in before.items() if k not in parts},
        "some parts": {k: v for k, v in before.items() if k not in gone},
        "damaged": {**before, **rotten},
    }
    for what, contents in shown.items():
        try:
            found = "" if follow(longest, without, contents) else "not exact"
        except GymfastError as error:
            found = str(error)
        scene.counts.check("I32 folds", not found, f"{what}, from {longest}: {found}")
    scene.ground.restore(before)


def _swapped(contents: Contents, keys: list[str]) -> Contents:
    return dict(zip(keys, [contents[key] for key in reversed(keys)], strict=True))
