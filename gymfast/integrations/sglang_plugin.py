"""The distributed path of SGLang: pieces of frames arrive by a broadcast instead of over HTTP.

SGLang finds it by the entry point `sglang.srt.plugins`. See docs/integrations/sglang.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gymfast.integrations.sglang_messages import LOADER, RECORD

UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_Loaded = tuple[bool, str]


def register() -> None:
    """Puts the hook around the method that loads what was received, in each process of SGLang."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = f"{UPDATER}.load_weights_from_distributed"
    HookRegistry.register(target, load_received, HookType.AROUND)


def load_received(
    original: Callable[..., _Loaded], updater: Any, named_tensors: Sequence[tuple[str, Any]]
) -> _Loaded:
    """Success and text, as SGLang wants it: weights go where they always went, messages to us."""
    if RECORD not in {name for name, _ in named_tensors}:
        return original(updater, named_tensors)
    if LOADER not in updater.custom_weight_loaders:
        return False, f"the server was started without --custom-weight-loader {LOADER}: add it"
    loaded: _Loaded = updater.update_weights_from_tensor(named_tensors, load_format=LOADER)
    return loaded
