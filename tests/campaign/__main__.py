"""Plays histories of the campaign (docs/reliability.md): `python -m tests.campaign --help`."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from pathlib import Path

from tests.campaign.counts import WHAT, Counts, ViolationError, commit
from tests.campaign.history import CHAOS_S, History, Profile
from tests.campaign.mutants import MUTANTS, broken


def shown(history: History) -> str:
    """The calls and events of a history, one a line: when, who, what, where, how it went."""
    return "\n".join(
        f"{time_s - 1000:9.3f} {who:16} {operation:9} {key} {what}"
        for time_s, who, operation, key, what in history.ground.trace
    )


def failure_of(profile: Profile, counts: Counts) -> tuple[History, ViolationError | None]:
    """A history, played, and what broke in it."""
    history = History(profile, counts)
    try:
        history.play()
    except ViolationError as error:
        return history, error
    return history, None


def shrunk(profile: Profile, error: ViolationError) -> Profile:
    """The same history with fewer features and less time, as long as the same invariant breaks."""
    import dataclasses

    smaller = [profile.without(feature) for feature in sorted(profile.features)]
    smaller += [dataclasses.replace(profile, num_runs=1)]
    smaller += [dataclasses.replace(profile, chaos_s=CHAOS_S * part) for part in (0.2, 0.5)]
    for candidate in smaller:
        if candidate != profile and candidate.chaos_s <= profile.chaos_s:
            found = failure_of(candidate, Counts())[1]
            if found is not None and found.invariant == error.invariant:
                return shrunk(candidate, found)
    return profile


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    logging.disable(logging.CRITICAL)
    if options.mutant:
        with broken(options.mutant) as mutant:
            return _play(options, mutant.profile)
    return _play(options, Profile.drawn)


def _play(options: argparse.Namespace, profile_of) -> int:
    first, _, last = options.seeds.partition(":")
    seeds = range(int(first), int(last))
    if options.seed is not None:
        seeds = range(options.seed, options.seed + 1)
    counts, start_s, played = Counts(), time.perf_counter(), commit()
    failed: dict[int, str] = {}
    for seed in seeds:
        profile = profile_of(seed)
        history, error = failure_of(profile, counts)
        if error is not None:
            failed[seed] = error.invariant
            if options.shrink:
                profile = shrunk(profile, error)
                history, error = failure_of(profile, Counts())
            print(f"seed {seed}: {error}\n  {profile}", flush=True)
        if options.seed is not None:
            print(shown(history))
            print(error or "nothing broke")
    seconds = time.perf_counter() - start_s
    print(f"{len(seeds)} histories in {seconds:.0f} s, broken: {failed or 'none'}")
    if options.json:
        found = {
            "kind": "simulated",
            "command": f"python -m tests.campaign --seeds {options.seeds}",
            "commit": played,
            "seeds": [seeds.start, seeds.stop],
            "seconds": round(seconds),
            "trials": {name: counts[name] for name in {*WHAT, *counts}},
            "violations": failed,
        }
        options.json.write_text(json.dumps(found, indent=1, sort_keys=True))
    return bool(failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign")
    parser.add_argument("--seeds", default="0:100", help="first and one after the last")
    parser.add_argument("--seed", type=int, help="one history, printed call by call")
    parser.add_argument("--shrink", action="store_true", help="leave out what is not needed")
    parser.add_argument("--mutant", choices=MUTANTS, help="with a deliberate bug")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
