"""Loading tensors of a checkpoint into a live model of SGLang, through the model's own loader."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from gymfast.errors import ChainError, CoverageError, GymfastError
from gymfast.integrations.canonical import CanonicalCopy
from gymfast.integrations.engine_ranks import texts_of_all
from gymfast.integrations.live_model import Sample, moved, sample_of
from gymfast.integrations.sglang_parts import PartsCopy

# Methods whose live bytes are those of the checkpoint. Others may pack modules when an update ends,
# also those that it did not load.
_PLAIN_METHODS = {"NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """Numbers of tensors: all of the checkpoint, those that differed, those given to the loader."""

    num_tensors: int = 0
    num_changed: int = 0
    num_loaded: int = 0


class Source(Protocol):
    """Where the tensors of a checkpoint come from: a copy in memory, or files."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors."""

    @property
    def root(self) -> str:
        """Which state it holds, for people."""

    def changed(self) -> list[str]:
        """Names of tensors that are not those that the model holds."""

    def tensors(self, names: Iterable[str], sample: Any) -> Iterable[tuple[str, Any]]:
        """Pairs of name and tensor of the sort of `sample`."""

    def mark_loaded(self) -> None:
        """The model holds all of it now."""


class LiveModel:
    """The live model of one rank. Not thread-safe.

    `failure` says why it may hold anything; it then refuses to run, until all of it is loaded.
    """

    def __init__(self, model: Any) -> None:
        """A model of which it is not known what it holds: the first load is a full one."""
        self.failure = ""
        self._model = model
        self._names: tuple[str, ...] = ()
        self._sample: Sample = {}
        self._own_forward: Any = None

    @property
    def packing(self) -> str:
        """The name of what may pack weights; empty if all lie there as they are loaded."""
        for module in self._model.modules():
            method = type(getattr(module, "quant_method", None)).__name__
            if method not in _PLAIN_METHODS:
                return method
            if getattr(module, "use_intel_amx_backend", False):
                return "use_intel_amx_backend"
        return ""

    def load(self, source: Source, *, is_full: bool) -> Loaded:
        """Loads what changed of the source, with all that is fused with it, or everything.

        Raises what the model raises, CoverageError for parameters that got no tensor, GymfastError
        for parameters that moved. Then the model may hold anything.
        """
        import torch

        names, changed, before = source.names, source.changed(), sample_of(self._model)
        is_plain = not self.packing
        is_known = is_plain and names == self._names and before == self._sample and not self.failure
        chosen = fused_names(names, changed) if is_known and not is_full else list(names)
        if chosen:
            with torch.no_grad():
                filled = self._model.load_weights(self._tensors(source, chosen))
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()  # errors of copies belong to this update
            if is_plain and len(chosen) == len(names):
                self._require_all(filled)
        self._sample, self._names = sample_of(self._model), names
        if lost := moved(before, self._sample):
            raise GymfastError(f"SGLang moved {len(lost)} parameters to other memory: {lost[:3]}")
        source.mark_loaded()
        _log.info("state %s is live: %d tensors loaded", source.root[:16], len(chosen))
        return Loaded(len(names), len(changed), len(chosen))

    def adopt(self, source: Source) -> Loaded:
        """The tensors of this source were loaded by SGLang itself, all of them."""
        self._sample, self._names = sample_of(self._model), source.names
        source.mark_loaded()
        _log.info("state %s is live, loaded as it came", source.root[:16])
        return Loaded(len(self._names), len(self._names), len(self._names))

    def flag(self, failure: str) -> None:
        """From here on the model refuses to run."""
        if not self.failure:
            self._own_forward = vars(self._model).get("forward")  # such as a compiled one
        self.failure = failure

        def refuse(*_arguments: Any, **_options: Any) -> None:
            raise ChainError(f"the weights are not to be used, update them again: {failure}")

        self._model.forward = refuse  # SGLang calls it by this name: hooks of torch do not see it

    def unflag(self) -> None:
        """The model may run again."""
        if self.failure:
            self.failure = ""
            del self._model.forward
            if self._own_forward is not None:
                self._model.forward = self._own_forward

    def _tensors(self, source: Source, names: Iterable[str]) -> Iterable[tuple[str, Any]]:
        import torch

        is_cpu = next(self._model.parameters()).device.type == "cpu"
        may_change = is_cpu and isinstance(source, CanonicalCopy | PartsCopy)
        for name, tensor in source.tensors(names, torch.empty(0)):
            yield name, tensor.clone() if may_change else tensor  # a loader may keep what it gets

    def _require_all(self, filled: Collection[str] | None) -> None:
        if filled is None:
            return  # this loader does not tell
        expected = {name for name, _ in self._model.named_parameters()}
        if missing := sorted(expected - set(filled)):
            raise CoverageError(
                f"{len(missing)} parameters got no tensor: {missing[:3]}; send all tensors of the "
                "checkpoint"
            )


def of_all_ranks(error: str) -> list[str]:
    """The errors of all ranks that share the model; each gives its own, at the same point."""
    try:
        from sglang.srt.distributed import get_tp_group
    except ImportError as missing:
        return [f"this SGLang is not known, gymfast knows 0.5.12 to 0.5.23: {missing}"]
    return texts_of_all(error, [get_tp_group()])


def fused_names(names: Iterable[str], changed: Iterable[str]) -> list[str]:
    """Of all names, the changed ones and those that may be parts of the same parameters.

    Fused are children of one module of a layer (q, k and v; gate and up; experts and the shared
    one). Names without a number (embedding, norm, head) go together: they may be tied.
    """
    wanted = {_module_of(name) for name in changed}
    return [name for name in names if _module_of(name) in wanted]


def _module_of(name: str) -> tuple[str, ...]:
    parts = name.split(".")
    place = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return () if place is None else tuple(parts[: place + 2])
