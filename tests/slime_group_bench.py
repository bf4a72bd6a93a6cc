"""Seconds of an update by slime's own updater and by the one of gymfast, over gloo, in turns.

GYMFAST_SLIME_SOURCE=/path/to/slime GYMFAST_SGLANG_SOURCE=/path/with/sglang \\
    PYTHONPATH=tests python -P tests/slime_group_bench.py
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from statistics import median

from slime_group_run import Script, ask, engines, run

LISTS = {
    "310 tensors, 8 KiB to 16 MiB, mean 260 KiB": [4096] * 200 + [131_072] * 105 + [2**23] * 5,
    "768 tensors of 64 KiB (experts)": [32_768] * 768,
    "4 tensors of 32 MiB": [2**24] * 4,
}
UPDATES, ROUNDS, BUFFER_BYTES = 6, 3, 32 * 2**20


def main() -> None:
    source = Path(os.environ["GYMFAST_SLIME_SOURCE"])
    receiver = Path(os.environ["GYMFAST_SGLANG_SOURCE"])
    with engines("ab", receiver) as addresses, tempfile.TemporaryDirectory() as folder:
        for number, (what, sizes) in enumerate(LISTS.items()):
            seconds: dict[bool, list[float]] = {False: [], True: []}
            calls = {}
            for turn in range(ROUNDS):
                for is_ours in (False, True):
                    for address in addresses.values():
                        ask(address, "test", {"is_reset": True, "keeps": False})
                    place = Path(folder) / f"{number}-{turn}-{is_ours:d}"
                    steps = [("connect", "ab"), *[("sync",)] * UPDATES]
                    script = Script(place, source, is_ours, steps, addresses)
                    script.sizes, script.buffer_bytes = sizes, BUFFER_BYTES
                    notes = run(script)[0]
                    assert [note["error"] for note in notes] == [None] * UPDATES
                    seconds[is_ours] += [note["seconds"] for note in notes[1:]]
                    calls[is_ours] = len(notes[-1]["engines"]["a"]["loads"])
            stock, ours = median(seconds[False]), median(seconds[True])
            broadcasts = int(notes[-1]["metrics"]["perf/update_weights_num_broadcasts"])
            print(
                f"{what}: {2 * sum(sizes) / 1e6:.0f} MB; slime {stock:.3f} s, {calls[False]} calls,"
                f" {len(sizes)} broadcasts; gymfast {ours:.3f} s, {calls[True]} calls,"
                f" {broadcasts} broadcasts; {stock / ours:.2f}x",
                flush=True,
            )


if __name__ == "__main__":
    main()
