"""Plays histories: `python -m tests.campaign --seeds 0:1000`; `--seed 17` prints one."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import traceback

from tests.campaign.counts import Counts
from tests.campaign.history import History, Profile, play


def shown(history: History) -> str:
    """The calls and events of a history, one a line."""
    return "\n".join(
        f"{time_s - 1000:9.3f} {who:16} {operation:9} {key} {what}"
        for time_s, who, operation, key, what in history.ground.trace
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", default="0:100")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--without", default="")
    options = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    first, _, last = options.seeds.partition(":")
    seeds = [options.seed] if options.seed is not None else range(int(first), int(last))
    counts, failed, start_s = Counts(), [], time.perf_counter()
    for seed in seeds:
        profile = Profile.drawn(seed).without(*options.without.split(","))
        history = History(profile, counts)
        try:
            history.play()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            failed.append(seed)
            print(f"seed {seed}: {type(error).__name__} {error}\n  {profile}", flush=True)
            if options.seed is not None:
                traceback.print_exc()
        if options.seed is not None:
            print(shown(history))
    print(f"{time.perf_counter() - start_s:.1f} s, failed: {failed}")
    print(json.dumps(counts, indent=1, sort_keys=True))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
