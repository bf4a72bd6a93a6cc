"""Seconds of an update by slime's own updater and by the one of gymfast, over gloo, in turns.

GYMFAST_SLIME_SOURCE=/path/to/slime GYMFAST_SGLANG_SOURCE=/path/with/sglang \\
    PYTHONPATH=tests python -P tests/slime_group_bench.py

`flat` sends everything in flat buckets, `delta` what changed, to engines with our loader; 1 % of
all elements change at each update. The phases are those of the median update.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from slime_group_run import Script, ask, engines, run

LISTS = (  # what, elements of each tensor, bytes of a chunk
    ("768 of 64 KiB (experts), two chunks", [32_768] * 768, 32 << 20),
    ("768 of 64 KiB (experts), seven chunks", [32_768] * 768, 8 << 20),
    ("310 of 8 KiB to 16 MiB", [4096] * 200 + [131_072] * 105 + [2**23] * 5, 32 << 20),
    ("4 of 32 MiB", [2**24] * 4, 32 << 20),
)
WAYS = ("slime", "flat", "delta")
UPDATES, ROUNDS = 6, 3


def main() -> None:
    source = Path(os.environ["GYMFAST_SLIME_SOURCE"])
    receiver = Path(os.environ["GYMFAST_SGLANG_SOURCE"])
    with engines("ab", receiver) as addresses, tempfile.TemporaryDirectory() as folder:
        for number, (what, sizes, buffer_bytes) in enumerate(LISTS):
            notes: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
            for turn in range(ROUNDS):
                for way in WAYS:
                    state = {"is_reset": True, "keeps": False, "has_loader": way == "delta"}
                    for address in addresses.values():
                        ask(address, "test", state)
                    steps: list[tuple[Any, ...]] = [("connect", "ab"), ("sync",)]
                    for update in range(1, UPDATES):
                        steps += [("change", 0.01, update), ("sync",)]
                    place = Path(folder) / f"{number}-{turn}-{way}"
                    script = Script(place, source, way != "slime", steps, addresses)
                    script.sizes, script.buffer_bytes = sizes, buffer_bytes
                    found = run(script)[0]
                    assert [note["error"] for note in found] == [None] * UPDATES
                    notes[way] += found[1:]
            tell(f"{what}, {2 * sum(sizes) / 1e6:.0f} MB", notes)


def tell(what: str, notes: dict[str, list[dict[str, Any]]]) -> None:
    stock_s = median(note["seconds"] for note in notes["slime"])
    print(f"{what}: slime {stock_s:.3f} s", flush=True)
    for way in ("flat", "delta"):
        ours_s = median(note["seconds"] for note in notes[way])
        metrics = {
            name.removeprefix("perf/update_weights_"): median(
                n["metrics"][name] for n in notes[way]
            )
            for name in notes[way][0]["metrics"]
        }
        phases = ", ".join(
            f"{name.removesuffix('_time')} {seconds * 1e3:.0f}"
            for name, seconds in metrics.items()
            if name.endswith("_time")
        )
        print(
            f"  {way} {ours_s:.3f} s, {stock_s / ours_s:.1f}x, {metrics['wire_bytes'] / 1e6:.2f} MB"
            f" in {metrics['num_broadcasts']:.0f} broadcasts; ms: {phases}",
            flush=True,
        )


if __name__ == "__main__":
    main()
