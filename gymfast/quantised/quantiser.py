"""A state of weights as the quantised checkpoint that an engine loads, version after version."""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from gymfast.delta.state import num_threads
from gymfast.delta.tensors import Tensor, Weights, as_tensor
from gymfast.errors import CoverageError
from gymfast.quantised.fp8 import Fp8Scheme
from gymfast.quantised.int4 import Int4Scheme
from gymfast.quantised.strips import quantise_in_strips

Scheme = Int4Scheme | Fp8Scheme
Scales = Literal["frozen", "recomputed"]
_SUFFIX = ".weight"
DEFAULT_IGNORE = (r"(^|\.)embed_tokens$", r"(^|\.)lm_head$", r"\.(gate|router)$", r"norm$")


class Quantiser:
    """Replaces matrices by their quantised parts, each a tensor of its own; the rest stays.

    With scales "frozen" those of the first version stay, so that a delta holds only weights that
    moved by a step; "recomputed" takes those of each version, and a group whose largest weight
    moved changes as a whole. Not thread-safe.
    """

    def __init__(
        self,
        scheme: Scheme,
        *,
        targets: str = "",
        ignore: tuple[str, ...] = DEFAULT_IGNORE,
        scales: Scales = "frozen",
        threads: int | None = None,
    ) -> None:
        """Quantises the matrices "NAME.weight" whose NAME the regular expression finds.

        Not those that one of `ignore` finds. For the routed experts alone, as of Kimi-K2, the
        expression is "[.]experts[.]". `threads` work side by side, as many as there are cores if
        None.
        """
        if scales not in ("frozen", "recomputed"):
            raise ValueError(f"scales is {scales!r}, expected 'frozen' or 'recomputed'")
        self.scheme = scheme
        self._targets = re.compile(targets)
        self._ignore = [re.compile(pattern) for pattern in ignore]
        self._threads = num_threads(threads)
        self._is_frozen = scales == "frozen"
        self._scales: dict[str, dict[str, Tensor]] = {}

    def selects(self, name: str, shape: tuple[int, ...]) -> bool:
        """True if a tensor of that name and shape is quantised."""
        if not name.endswith(_SUFFIX) or len(shape) != 2:
            return False
        module = name.removesuffix(_SUFFIX)
        is_target = self._targets.search(module) is not None
        return is_target and not any(pattern.search(module) for pattern in self._ignore)

    def quantise(self, weights: Weights) -> dict[str, Tensor]:
        """The tensors of the quantised checkpoint, in CPU memory; those that stay are no copies.

        Raises ValueError and TypeError, with the name, for weights that cannot be quantised.
        """
        out: dict[str, Tensor] = {}
        with ThreadPoolExecutor(self._threads) as pool:
            for name, value in weights.items():
                tensor = as_tensor(value, name)
                if not self.selects(name, tensor.shape):
                    out[name] = tensor
                    continue
                scales = self._scales.get(name)
                parts = quantise_in_strips(self.scheme, tensor, name, scales, pool)
                if self._is_frozen:
                    suffixes = self.scheme.scale_suffixes
                    self._scales.setdefault(name, {s: parts[s] for s in suffixes})
                out |= {name + suffix: part for suffix, part in parts.items()}
        return out

    def adopt(self, quantised: Weights) -> int:
        """Freezes the scales of a published version, and says of how many matrices.

        For a trainer that starts again: with scales of its own the next version would differ from
        the newest one everywhere. Raises CoverageError if it holds no scale at all, ValueError if
        scales are recomputed anyway.
        """
        if not self._is_frozen:
            raise ValueError("scales are recomputed for each version: there is nothing to adopt")
        for name in quantised:
            base = name.removesuffix(self.scheme.scale_suffixes[0])
            if base == name or not base.endswith(_SUFFIX):
                continue
            missing = [s for s in self.scheme.scale_suffixes if base + s not in quantised]
            if missing:
                raise CoverageError(f"{name!r} is there without {base + missing[0]!r}")
            found = {
                s: as_tensor(quantised[base + s], base + s) for s in self.scheme.scale_suffixes
            }
            self._scales[base] = {suffix: part.copy() for suffix, part in found.items()}
        if not self._scales:
            raise CoverageError(
                f"none of {len(quantised)} tensors is a scale of {self.scheme}: adopt the "
                "quantised version, not the weights that it was made of"
            )
        return len(self._scales)

    def num_saturated(self, weights: Weights) -> int:
        """How many weights the frozen scales cannot reach, so that they are cut to the range."""
        return sum(
            self.scheme.num_saturated(as_tensor(weights[name], name), name, scales)
            for name, scales in self._scales.items()
            if name in weights
        )

    def parts_of(self, quantised: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
        """The parts of one matrix by suffix. Raises CoverageError if it is not among them."""
        known = ("", "_packed", "_scale", "_zero_point", "_shape", "_scale_inv")
        parts = {s: quantised[name + s] for s in known if name + s in quantised}
        if not set(self.scheme.scale_suffixes) <= parts.keys():
            raise CoverageError(f"{name!r} is not quantised here: found {sorted(parts)}")
        return parts
