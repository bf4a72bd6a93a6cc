"""The targets of the delta codec, each with the figure that this run measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.harness import Row

XOR_ZSTD = "xor+zstd-1+xxh3"
MIN_BYTES = 250_000_000
AT = 0.01  # density of the speed targets


@dataclass(frozen=True)
class Target:
    """A bound and what was measured; `is_met` follows from both."""

    what: str
    wanted: str
    measured: float
    is_met: bool


def check_targets(rows: list[Row]) -> list[Target]:
    """Those targets that the rows can answer; speed and size of small states say nothing."""
    rows = [row for row in rows if row.op == "size" or row.state_bytes >= MIN_BYTES]
    return [
        *_speed(rows),
        *_size(rows),
        *_against_xor_zstd(rows),
        *_two_cores(rows),
        *_auto(rows),
        *_hf_delta(rows),
    ]


class _Table:
    """Rows of the generator at one density by codec, operation and threads."""

    def __init__(self, rows: list[Row], density: float) -> None:
        self._rows = {
            (row.codec, row.op, row.threads): row
            for row in rows
            if row.data.startswith("generator") and abs(row.density / density - 1) < 0.15
        }

    def get(self, codec: str, op: str, threads: int = 1) -> Row | None:
        return self._rows.get((codec, op, threads))

    def best_peer(self, op: str) -> Row | None:
        peers = [r for (c, o, t), r in self._rows.items() if _is_peer(c) and o == op and t == 1]
        return max(peers, key=lambda row: row.gbps, default=None)

    def smallest_peer(self) -> Row | None:
        peers = [r for (c, o, _), r in self._rows.items() if _is_peer(c) and o == "encode"]
        return min(peers, key=lambda row: row.frame_bytes, default=None)


def _is_peer(codec: str) -> bool:
    return codec != "bound" and not codec.startswith("gymfast")


def _at_least(what: str, bound: float, measured: float) -> Target:
    return Target(what, f">= {bound:g}", measured, measured >= bound)


def _at_most(what: str, bound: float, measured: float) -> Target:
    return Target(what, f"<= {bound:g}", measured, measured <= bound)


def _speed(rows: list[Row]) -> Iterator[Target]:
    table = _Table(rows, AT)
    for codec, op, bound in (
        ("gymfast fast", "encode", 0.8),
        ("gymfast fast", "apply", 1.0),
        ("gymfast small", "encode", 0.5),
        ("gymfast small", "apply", 0.4),
    ):
        if row := table.get(codec, op):
            yield _at_least(f"{codec}, {op}, 1 %: x libc memcpy", bound, row.copy_ratio)
    fused, compare = table.get("gymfast fast", "fused pass"), table.get("bound", "compare")
    if fused and compare:
        relative = fused.copy_ratio / compare.copy_ratio
        what = "fused compare, list, snapshot and digests, 1 %: x two-stream compare"
        yield _at_least(what, 0.9, relative)


def _size(rows: list[Row]) -> Iterator[Target]:
    for row in rows:
        if row.codec == "gymfast small" and row.op in ("encode", "size") and row.threads == 1:
            what = f"gymfast small, {row.data} {100 * row.density:.2g} %: x limit"
            if 0.0038 <= row.density < 0.0098:
                yield _at_most(what, 1.10, row.limit_ratio)
            elif 0.0098 <= row.density <= 0.042:
                yield _at_most(what, 1.05, row.limit_ratio)


def _against_xor_zstd(rows: list[Row]) -> Iterator[Target]:
    table = _Table(rows, AT)
    encode, apply = table.get(XOR_ZSTD, "encode"), table.get(XOR_ZSTD, "apply")
    if not encode or not apply:
        return
    for codec, smaller, faster, apply_faster in (
        ("gymfast small", 3.0, 4.0, 1.4),
        ("gymfast fast", 2.0, 6.0, 4.0),
    ):
        what = f"{codec} against {XOR_ZSTD}, 1 %"
        if row := table.get(codec, "encode"):
            yield _at_least(f"{what}: x smaller", smaller, encode.frame_bytes / row.frame_bytes)
            yield _at_least(f"{what}: x faster encode", faster, row.copy_ratio / encode.copy_ratio)
        if row := table.get(codec, "apply"):
            ratio = row.copy_ratio / apply.copy_ratio
            yield _at_least(f"{what}: x faster apply", apply_faster, ratio)


def _two_cores(rows: list[Row]) -> Iterator[Target]:
    table = _Table(rows, AT)
    copies = table.get("bound", "memcpy", 2)
    for codec in ("gymfast fast", "gymfast small"):
        for op in ("encode", "apply"):
            one, two = table.get(codec, op, 1), table.get(codec, op, 2)
            if one and two and copies:
                scaling = two.gbps / one.gbps
                bound = 1.8 if two.gbps < 0.9 * copies.gbps else 1.0  # memory-bound
                note = "" if bound > 1 else " (memory-bound)"
                yield _at_least(f"{codec}, {op}, 1 %: two cores x one{note}", bound, scaling)


def _auto(rows: list[Row]) -> Iterator[Target]:
    densities = sorted({round(r.density, 9) for r in rows if r.data.startswith("generator")})
    for density in densities:
        table = _Table(rows, density)
        for op in ("encode", "apply"):
            row, peer = table.get("gymfast auto", op), table.best_peer(op)
            if row and peer:
                what = f"gymfast auto, {op}, {100 * density:.2g} %: x fastest peer ({peer.codec})"
                yield _at_least(what, 0.7, row.copy_ratio / peer.copy_ratio)
        row, peer = table.get("gymfast auto", "encode"), table.smallest_peer()
        if row and peer:
            what = f"gymfast auto, size, {100 * density:.2g} %: x smallest peer ({peer.codec})"
            yield _at_most(what, 1.1, row.frame_bytes / peer.frame_bytes)


def _hf_delta(rows: list[Row]) -> Iterator[Target]:
    table = _Table(rows, AT)
    ours, theirs = table.get("gymfast xor", "encode"), table.get("xor, zstd level 1", "encode")
    if ours and theirs:
        what = "gymfast xor frames against zstd level 1, xxh3-128 in both, 1 %"
        yield _at_least(f"{what}: x faster encode", 4.0, ours.copy_ratio / theirs.copy_ratio)
        yield _at_most(f"{what}: x size", 0.75, ours.frame_bytes / theirs.frame_bytes)
