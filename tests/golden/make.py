"""Writes the golden frames that are missing: `python tests/golden/make.py`.

A file that exists is never touched: golden frames are written once per format version, and every
later reader has to take or refuse them as the first one did. A new case is a new entry here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from golden_invalid import INVALID
from golden_valid import VALID, Valid

from gymfast.delta import State, Tensor, encode

HERE = Path(__file__).parent
Weights = dict[str, Tensor]


def encoded(case: Valid, *, backend: str = "reference") -> bytes:
    """The frame of a case as an encoder writes it today."""
    options = {"block_units": case.block_units, "tiled": case.tiled, "backend": backend}
    old = State.copy_of(case.old, **options) if case.old else State.empty(**options)
    return encode(old, case.new, profile=case.profile, backend=backend, threads=1, key=case.key)


def frames() -> Iterator[tuple[Path, Callable[[], bytes]]]:
    """Path and maker of every golden frame."""
    for name, case in VALID.items():
        maker = case.by_hand or (lambda case=case: encoded(case))
        yield HERE / "valid" / f"v1_{name}.gfd", maker
    for name, broken in INVALID.items():
        yield HERE / "invalid" / f"v1_{name}.gfd", broken.frame


def rules() -> str:
    """The text of invalid/rules.toml: which rule each frame breaks and what a reader says."""
    lines = ["# Which rule of docs/wire-format.md each frame breaks; written by make.py.", ""]
    for name, broken in INVALID.items():
        lines += [f"[v1_{name}]", f'rule = "{broken.rule}"', f"number = {broken.number}"]
        lines += [f'base = "v1_{broken.base}"'] if broken.base else []
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    for path, maker in frames():
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            path.write_bytes(maker())
            print(f"wrote {path.relative_to(HERE)}")
    (HERE / "invalid" / "rules.toml").write_text(rules())


if __name__ == "__main__":
    main()
