"""Loading tensors of a checkpoint into a live vLLM model, through vLLM's layerwise reload.

The reload fills, packs and fuses fresh tensors, then copies them to the memory of the live ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gymfast.errors import ChainError, CoverageError
from gymfast.integrations.load_groups import LoadGroup

TensorsOf = Callable[[Iterable[str], Any], Iterable[tuple[str, Any]]]


class LayerwiseReload:
    """The live model of one worker. Not thread-safe."""

    def __init__(self, model: Any, model_config: Any) -> None:
        """`model_config` needs `dtype`; unless it has a `quantization`, all names are checked."""
        self._model, self._config = model, model_config
        self._device = next(model.parameters()).device
        self._is_cpu = self._device.type == "cpu"

    def require_awake(self) -> None:
        """Raises ChainError while a sleep of vLLM has the weights: their memory is not there."""
        from vllm.device_allocator.cumem import CuMemAllocator

        held = {} if CuMemAllocator.instance is None else CuMemAllocator.instance.pointer_to_data
        if any(data.tag == "weights" and _is_asleep(data) for data in held.values()):
            raise ChainError(
                "the engine is asleep, its weights have no memory: wake it (POST /wake_up, or tags "
                "with 'weights'), then repeat the update"
            )

    def load(
        self, groups: Sequence[LoadGroup], tensors_of: TensorsOf, *, is_all: bool
    ) -> list[LoadGroup]:
        """The groups, with what each filled. `is_all`: they are the whole checkpoint.

        Raises CoverageError for a parameter or a part of a module that got no tensor, and what
        vLLM raises. Then the model may hold anything; `close` gives it its memory back.
        """
        import torch
        from vllm.model_executor.model_loader import reload

        # Tied parameters that share their memory are one here, no longer so while they reload.
        expected = {name for name, _ in self._model.named_parameters()}
        with torch.no_grad(), torch.device(self._device), self._packing_experts():
            reload.initialize_layerwise_reload(self._model)
            loaded = [group.filled(self._load_group(group, tensors_of)) for group in groups]
            if is_all and getattr(self._config, "quantization", None) is None:
                _require_all(expected, loaded)
            self._require_whole_modules()
            reload.finalize_layerwise_reload(self._model, self._config)
            self._pack_tied_again()
        return loaded

    def close(self) -> None:
        """Puts the live tensors back if a reload was begun, here or by vLLM 0.24, and not ended."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        begun = [info for _, info in self._infos() if info.can_load()]
        for info in begun:
            info.load_numel, info.loaded_weights = 0, []
        if begun:
            finalize_layerwise_reload(self._model, self._config)

    def _load_group(self, group: LoadGroup, tensors_of: TensorsOf) -> set[str] | None:
        import torch

        pairs = tensors_of(group.names, torch.empty(0))
        if self._is_cpu:  # a loader may keep the tensor that it is given
            pairs = ((name, tensor.clone()) for name, tensor in pairs)
        filled: set[str] | None = self._model.load_weights(pairs)
        return filled

    def _infos(self) -> list[tuple[str, Any]]:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        return [(name, get_layerwise_info(module)) for name, module in self._model.named_modules()]

    def _require_whole_modules(self) -> None:
        for name, info in self._infos():
            if not info.can_load() or not 0 < info.load_numel < info.load_numel_total:
                continue
            module = self._model.get_submodule(name)
            # Padded vocabularies and scales of attention are never filled to the last element.
            if hasattr(module, "num_embeddings_padded") or hasattr(
                module, "process_weights_after_loading"
            ):
                continue
            raise CoverageError(
                f"module {name!r} got {info.load_numel} of {info.load_numel_total} elements: a "
                "tensor of a fused layer is missing; send all tensors of the checkpoint"
            )

    @contextmanager
    def _packing_experts(self) -> Iterator[None]:
        """The CPU build packs experts only while they have no kernel, so at the first load.

        Found with vLLM 0.32: its own reload leaves them unpacked, and they are read as packed.
        """
        methods = [getattr(module, "quant_method", None) for module in self._model.modules()]
        kernels = [(m, m.moe_kernel) for m in methods if m and getattr(m, "moe_kernel", None)]
        for method, _ in kernels if self._is_cpu else ():
            method.moe_kernel = None
        try:
            yield
        finally:
            for method, kernel in kernels:  # experts that were not loaded keep theirs
                method.moe_kernel = method.moe_kernel or kernel

    def _pack_tied_again(self) -> None:
        """The CPU build packs a tied head apart; its own reload does not reach it (vLLM 0.32)."""
        if not self._is_cpu:
            return
        owners: dict[int, Any] = {}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            owner = self._model.get_submodule(name.rpartition(".")[0])
            if owners.setdefault(id(parameter), owner) is not owner:
                owner.quant_method.process_weights_after_loading(owner)


def _is_asleep(data: Any) -> bool:
    asleep = getattr(data, "is_asleep", None)
    # vLLM 0.24 shows level 1 only, by the copy that it keeps.
    return data.cpu_backup_tensor is not None if asleep is None else bool(asleep)


def _require_all(expected: set[str], loaded: Sequence[LoadGroup]) -> None:
    if any(group.parameters is None for group in loaded):
        return  # this loader does not tell
    found = {name for group in loaded for name in group.parameters or ()}
    if missing := sorted(expected - found):
        raise CoverageError(
            f"{len(missing)} parameters got no tensor: {missing[:3]}; send all tensors of the "
            "checkpoint"
        )
