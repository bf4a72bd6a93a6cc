"""`run_demo`: the whole demo, from the first process to the numbers."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from gymfast.demo.narrator import Narrator
from gymfast.demo.options import RUN, DemoOptions
from gymfast.demo.processes import Children, Clock
from gymfast.demo.transformer import MISSING_TORCH
from gymfast.errors import GymfastError, MissingDependencyError

if TYPE_CHECKING:
    from rich.console import Console

    from gymfast.demo.replay import PairResult
    from gymfast.demo.result import DemoResult

LIMIT_S = 240.0
"""Something hangs if a run takes longer; with two free cores it takes about 70 s."""


def run_demo(options: DemoOptions, console: Console) -> DemoResult:
    """The numbers of one run; progress goes to `console`.

    Raises MissingDependencyError without torch, GymfastError if a process fails or the folder to
    keep is not empty, DeadlineError if it hangs. All processes are ended in every case.
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError(MISSING_TORCH)
    from gymfast.demo.director import Director
    from gymfast.demo.outcome import build_result
    from gymfast.demo.peers import load_zstd

    clock = Clock(LIMIT_S)
    narrator = Narrator(console, clock.elapsed_s)
    with _folder(options.keep) as folder:
        with Children(folder / "logs") as children:
            log = Director(options, folder, children, clock, narrator).run()
        narrator.say(
            "demo", "all processes ended; the store is replayed to measure sizes and speed"
        )
        zstd = load_zstd()
        pairs = _replay(folder / "store", max(log.audit.published), clock)
    return build_result(
        options,
        log,
        pairs,
        zstd=zstd.name if zstd else None,
        start_s=clock.start_s,
        total_s=clock.elapsed_s(),
    )


def _replay(store_path: Path, last_version: int, clock: Clock) -> list[PairResult]:
    """Every version once more, in order, by a reader that joins late."""
    from gymfast.demo.peers import load_zstd
    from gymfast.demo.replay import Held, Replay
    from gymfast.sync import LiveTarget, Subscriber

    replay = Replay(load_zstd())
    state: Held = {}
    reader = Subscriber(str(store_path), RUN, LiveTarget(state), reader_id="replay")
    for version in range(last_version + 1):
        clock.check()
        reader.pull(version)
        replay.add(version, state)
    return replay.pairs


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """The folder of the run: the caller's, which stays, or a temporary one.

    Raises GymfastError if the caller's holds anything.
    """
    if keep is not None:
        (keep / "logs").mkdir(parents=True, exist_ok=True)
        strangers = [path.name for path in keep.iterdir() if path.name != "logs"]
        if strangers:
            raise GymfastError(f"{keep} holds {strangers[0]!r}: --keep needs an empty folder")
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="gymfast-demo-") as name:
        (Path(name) / "logs").mkdir()
        yield Path(name)
