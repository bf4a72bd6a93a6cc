"""Publishes what a trainer yields tensor by tensor as versions of a run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from gymfast.delta.memory import CPU
from gymfast.delta.tensors import Tensor, as_tensor
from gymfast.errors import CoverageError
from gymfast.sync import Publisher, PublishReport

NamedTensors = Iterable[tuple[str, Any]]


class RunStream:
    """Collects the tensors of one step in CPU memory, then publishes them.

    A trainer frees what it yields, so there is one copy here, in the same memory at each step, and
    the snapshot of the publisher beside it. Not thread-safe.
    """

    def __init__(self, publisher: Publisher) -> None:
        """A stream into the run of the publisher, which belongs to the stream from now on."""
        self.publisher = publisher
        self._weights: dict[str, Tensor] = {}
        self._published: set[str] = set()

    def publish(self, stream: NamedTensors, *, anchor: bool = False) -> PublishReport:
        """Commits all tensors of the stream as the next version; `anchor` asks for a full frame.

        The stream is always read to its end, since other ranks of a trainer take part in making
        each tensor; an error is raised after that. Nothing is committed then.
        Raises CoverageError for a tensor that was published and is missing now, or a name that
        comes twice with different bytes; TypeError; what `Publisher.publish` raises.
        """
        rest = iter(stream)
        seen: set[str] = set()
        try:
            for name, value in rest:
                self._keep(name, value, is_repeated=name in seen)
                seen.add(name)
        finally:
            drain(rest)
        if missing := sorted(self._published - seen):
            raise CoverageError(
                f"{len(missing)} of {len(self._published)} tensors did not come: {missing[:3]}; a "
                "step has to yield all of them, a model with other tensors needs a run of its own"
            )
        for name in self._weights.keys() - seen:  # of a step that was not published
            del self._weights[name]
        report = self.publisher.publish(self._weights, anchor=anchor)
        self._published = seen
        return report

    def _keep(self, name: str, value: Any, *, is_repeated: bool) -> None:
        tensor = as_tensor(value, name)
        held = self._weights.get(name)
        if held is None or (held.dtype, held.shape) != (tensor.dtype, tensor.shape):
            if is_repeated:
                raise _contradicts(name)
            self._weights[name] = tensor.copy(CPU)
            return
        data = tensor.data if tensor.place == CPU else tensor.copy(CPU).data
        if not is_repeated:
            held.data[:] = data
        elif not np.array_equal(held.data, data):
            raise _contradicts(name)


def drain(stream: NamedTensors) -> None:
    """Reads a stream to its end and keeps nothing: what ranks do that do not publish."""
    deque(stream, maxlen=0)


def _contradicts(name: str) -> CoverageError:
    return CoverageError(
        f"tensor {name!r} comes twice in one step with different bytes: copies have to be equal"
    )
