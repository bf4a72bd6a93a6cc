"""What the loader puts around a model of SGLang, so that messages reach it and answers leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gymfast.integrations.sglang_messages import STATUS, Status, is_message, to_numbers


class ModelHooks:
    """Stands in for two methods of a model: `load_weights` and `get_weights_by_name`.

    SGLang gives `load_weights` whatever comes by a broadcast, of whatever load format; the plug-in
    is not needed for that.
    """

    def __init__(
        self,
        model: Any,
        receive: Callable[[Sequence[tuple[str, Any]]], None],
        somebody_loads: Callable[[], None],
        status: Callable[[], Status],
    ) -> None:
        """Messages go to `receive`; `somebody_loads` is called before any other weights."""
        self._load_weights, self._get_weights = (
            getattr(model, name, None) for name in ("load_weights", "get_weights_by_name")
        )
        self._receive, self._somebody_loads, self._status = receive, somebody_loads, status
        self._is_off = False
        model.load_weights, model.get_weights_by_name = self._load, self._get

    def load_weights(self, tensors: Sequence[tuple[str, Any]]) -> None:
        """Gives tensors to the model's own method, if there are any."""
        if tensors:
            assert self._load_weights is not None, "a model of SGLang loads weights"
            self._load_weights(tensors)

    @contextmanager
    def off(self) -> Iterator[None]:
        """A context in which what is loaded comes from the loader itself."""
        self._is_off = True
        try:
            yield
        finally:
            self._is_off = False

    def _load(self, weights: Any) -> Any:
        assert self._load_weights is not None, "a model of SGLang loads weights"
        if self._is_off:
            return self._load_weights(weights)
        if is_message(weights):
            return self._receive(weights)
        self._somebody_loads()
        return self._load_weights(weights)

    def _get(self, name: str, *arguments: Any, **options: Any) -> Any:
        if name == STATUS:
            return to_numbers(self._status())
        return self._get_weights and self._get_weights(name, *arguments, **options)
