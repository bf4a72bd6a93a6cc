"""How much of what travels changes from version to version: BF16, INT4, FP8 and adapters.

`python -m benchmarks density`: one row for each form of the same two states, with the bytes of a
delta beside those of a full frame. Nothing is timed.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from gymfast.delta import Tensor, as_tensor, encode
from gymfast.quantised import Fp8Scheme, Int4Scheme, Quantiser, Scheme

SCHEMA = "gymfast-density/1"
SCHEMES: dict[str, Scheme] = {
    "int4 g32": Int4Scheme(32),
    "int4 g32 asymmetric": Int4Scheme(32, is_symmetric=False),
    "int4 g128": Int4Scheme(128),
    "int4 g128 asymmetric": Int4Scheme(128, is_symmetric=False),
    "fp8 128x128": Fp8Scheme(),
}
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Row:
    """One line of the CSV; docs/quantised.md and docs/adapters.md say what the columns mean."""

    data: str
    form: str
    scales: str  # "frozen", "recomputed", or none
    num_elements: int  # of the weights: a nibble each in INT4
    num_changed: int
    changed_ratio: float
    scales_ratio: float  # of the scales and zero points, how many changed
    saturated_ratio: float
    delta_bytes: int
    full_bytes: int
    delta_ratio: float

    @classmethod
    def columns(cls) -> list[str]:
        return [column.name for column in fields(cls)]


def plain(data: str, form: str, old: Weights, new: Weights) -> Row:
    """The row of a pair of states as they are."""
    changed, total = _count(old, new, list(old))
    return _row(data, form, "", (changed, total), (0.0, 0.0), (old, new))


def quantised(data: str, form: str, scales: str, old: Weights, new: Weights) -> Row:
    """The row of a pair of states that a publisher quantises one after the other."""
    scheme = SCHEMES[form.removesuffix(" of masters")]
    quantiser = Quantiser(scheme, scales="frozen" if scales == "frozen" else "recomputed")
    first, second = quantiser.quantise(old), quantiser.quantise(new)
    changed = total = num_scales = scales_changed = 0
    for name in old:
        if not quantiser.selects(name, old[name].shape):
            continue
        one, other = quantiser.parts_of(first, name), quantiser.parts_of(second, name)
        codes, more = scheme.codes(one, name), scheme.codes(other, name)
        changed += int(np.count_nonzero(codes != more))
        total += codes.size
        few, many = _count(one, other, list(scheme.scale_suffixes))
        scales_changed, num_scales = scales_changed + few, num_scales + many
    saturated = quantiser.num_saturated(new) / max(1, total)
    pair = ({n: first[n] for n in first if n not in old or first[n] is not old[n]}, second)
    pair = (pair[0], {n: second[n] for n in pair[0]})  # the quantised part alone
    ratios = (scales_changed / max(1, num_scales), saturated)
    return _row(data, form, scales, (changed, total), ratios, pair)


def _row(
    data: str,
    form: str,
    scales: str,
    counts: tuple[int, int],
    ratios: tuple[float, float],
    pair: tuple[Weights, Weights],
) -> Row:
    delta_bytes, full_bytes = len(encode(*pair)), len(encode(None, pair[1]))
    row = Row(
        data=data,
        form=form,
        scales=scales,
        num_elements=counts[1],
        num_changed=counts[0],
        changed_ratio=counts[0] / max(1, counts[1]),
        scales_ratio=ratios[0],
        saturated_ratio=ratios[1],
        delta_bytes=delta_bytes,
        full_bytes=full_bytes,
        delta_ratio=delta_bytes / full_bytes,
    )
    print(f"{data:<34} {form:<32} {scales:<11} {row.changed_ratio:9.4%}", file=sys.stderr)
    return row


def _count(old: Weights, new: Weights, names: list[str]) -> tuple[int, int]:
    """Elements that differ, and all of them; packed zero points count as words."""
    changed = total = 0
    for name in names:
        size = {"BF16": 2, "F16": 2, "F8_E4M3": 1}.get(old[name].dtype, 4)
        one, other = (side[name].data.view(f"<u{size}") for side in (old, new))
        changed += int(np.count_nonzero(one != other))
        total += one.size
    return changed, total


def matrices(bits: dict[str, np.ndarray]) -> Weights:
    """BF16 tensors of the matrices; one long row becomes rows of 1024."""
    found = {}
    for name, array in bits.items():
        whole = array.reshape(-1, 1024) if array.ndim == 1 and array.size > 1 << 20 else array
        if whole.ndim == 2 and whole.shape[1] % 128 == 0:
            data = np.ascontiguousarray(whole).reshape(-1).view(np.uint8)
            title = name if name.endswith(".weight") else f"{name}.weight"
            found[title] = Tensor("BF16", whole.shape, data)
    return found


def forms(data: str, old: Weights, new: Weights) -> Iterator[Row]:
    """BF16 as it is, then each scheme with frozen and with recomputed scales."""
    quantiser = Quantiser(Int4Scheme())
    names = [name for name in old if quantiser.selects(name, old[name].shape)]
    old, new = {n: old[n] for n in names}, {n: new[n] for n in names}
    yield plain(data, "bf16", old, new)
    for form in SCHEMES:
        for scales in ("frozen", "recomputed"):
            yield quantised(data, form, scales, old, new)


def generated(size_bytes: int) -> Iterator[Row]:
    """RL-like updates of one size and seed."""
    from gymfast.testing.weights import Masters, rl_like_update, rl_like_weights

    old = rl_like_weights(size_bytes, 1)
    cases: list[tuple[Masters, float]] = [("dithered", 0.01), ("dithered", 0.03), ("grid", 0.01)]
    for masters, density in cases:
        new = rl_like_update(old, density, 2, masters=masters)
        yield from forms(f"generator {density:.0%} {masters}", matrices(old), matrices(new))


def stored() -> Iterator[Row]:
    """The real optimizer steps of ../shared/data/rl-pairs, where they are."""
    from safetensors.numpy import load_file

    from benchmarks.data import PAIRS, stored_names

    for name in stored_names():
        pair = load_file(PAIRS / f"{name}.safetensors")
        yield from forms(name, matrices({"w": pair["old"]}), matrices({"w": pair["new"]}))


def trained(*, quick: bool) -> Iterator[Row]:
    """A model and an adapter trained on the spot; needs torch."""
    from benchmarks import density_trained

    for data, old, new in density_trained.model_pairs(quick=quick):
        halves = {n: _bf16(t) for n, t in old.items()}, {n: _bf16(t) for n, t in new.items()}
        yield plain(data, "fp32 masters", old, new)
        yield from forms(data, *halves)
        for form in ("int4 g32", "int4 g128", "fp8 128x128"):
            yield quantised(data, f"{form} of masters", "frozen", old, new)
    for data, old, new in density_trained.adapter_pairs(quick=quick):
        for part in ("lora_A", "lora_B", ""):
            names = [name for name in old if part in name]
            some = {n: _bf16(old[n]) for n in names}, {n: _bf16(new[n]) for n in names}
            yield plain(data, f"bf16 {part or 'adapter'}", *some)


def _bf16(tensor: Tensor) -> Tensor:
    from gymfast.quantised.floats import tensor_of, values_of

    return tensor_of(values_of(tensor, "master"), "BF16")


def run(options: argparse.Namespace) -> int:
    """`python -m benchmarks density`."""
    from benchmarks.environment import environment

    size_bytes = options.size or (16 << 20 if options.quick else 64 << 20)
    rows = [*generated(size_bytes), *stored()]
    if not options.without_training:
        rows += trained(quick=options.quick)
    stamp = environment() | {"command": f"python -m benchmarks {' '.join(sys.argv[1:])}"}
    if options.csv:
        _write_csv(options.csv, rows, stamp)
    if options.json:
        document = {"schema": SCHEMA, "environment": stamp, "rows": [asdict(r) for r in rows]}
        print(json.dumps(document, indent=1))
    else:
        print(table(rows))
    return 0


def table(rows: list[Row]) -> str:
    """The rows in Markdown."""
    lines = [
        "| data | form | scales | weights changed | scales changed | out of range | delta / full |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        has_scales = bool(row.scales)
        lines.append(
            f"| {row.data} | {row.form} | {row.scales} | {row.changed_ratio:.4%} | "
            f"{f'{row.scales_ratio:.3%}' if has_scales else ''} | "
            f"{f'{row.saturated_ratio:.4%}' if has_scales else ''} | {row.delta_ratio:.4f} |"
        )
    return "\n".join(lines)


def _write_csv(path: Path, rows: list[Row], stamp: dict[str, str]) -> None:
    with path.open("w", newline="") as file:
        for key, value in stamp.items():
            file.write(f"# {key}: {value}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Row.columns())
        for row in rows:
            values = asdict(row).values()
            writer.writerow([f"{v:.6g}" if isinstance(v, float) else v for v in values])


def tensors(values: dict[str, object]) -> Weights:
    """Copies of what a trainer holds."""
    return {name: as_tensor(value, name).copy() for name, value in values.items()}
