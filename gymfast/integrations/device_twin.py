"""A tensor of a trainer in CUDA memory: its snapshot is compared there, its bytes are kept here.

Only what changed crosses to the host: the body of a frame, which is applied to a copy of the old
bytes and checked by its digests.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from gymfast.delta import apply, encode, inspect
from gymfast.delta.backends import select
from gymfast.delta.memory import CUDA, PINNED, U8, copy_to, kind_of, on_host
from gymfast.delta.state import Slot, State, room_for
from gymfast.delta.tensors import Tensor, as_tensor
from gymfast.errors import CoverageError, MissingDependencyError

Place = Literal["auto", "beside", "pinned", "host"]
_MAX_FREE_RATIO = 0.25  # of the free device memory; the rest is for training
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeviceSpec:
    """What a tensor on a device is like."""

    dtype: str
    shape: tuple[int, ...]
    device: str

    @classmethod
    def of(cls, tensor: Tensor) -> DeviceSpec:
        """That of a tensor."""
        return cls(tensor.dtype, tensor.shape, tensor.place)


class DeviceTwin:
    """The snapshot of one tensor, on its device or in pinned memory, and the same bytes here."""

    def __init__(self, name: str, spec: DeviceSpec, held: U8, place: str) -> None:
        """A twin of `held`, for tensors of the spec; `place` is "beside" or "pinned".

        Raises BudgetError if there is no room.
        """
        self._name, self._spec = name, spec
        self._is_same_memory = place == "pinned"
        where = PINNED if self._is_same_memory else spec.device
        with room_for(name, held.size, where):
            data = copy_to(held, where)
        self.held: U8 = on_host(data) if self._is_same_memory else held
        self._state = State.attach({name: Tensor(spec.dtype, spec.shape, data)})

    def difference(self, value: Any) -> bytes:
        """The frame that turns the snapshot into a value; empty if they are equal.

        Works on the current stream. Raises CoverageError if dtype or shape are others now.
        """
        tensor = as_tensor(value, self._name)
        was = self._spec
        if (tensor.dtype, tensor.shape) != (was.dtype, was.shape):
            raise CoverageError(
                f"tensor {self._name!r} was {was.dtype} {was.shape} and is {tensor.dtype} "
                f"{tensor.shape}: begin a new run, or set gymfast_snapshot to host"
            )
        if tensor.place != was.device:
            tensor = tensor.copy(was.device)
        frame = encode(self._state, {self._name: tensor}, profile="fast", threads=1)
        found = inspect(frame)
        return b"" if found.base_root == found.new_root else frame

    def after(self, frame: bytes) -> U8:
        """The new bytes, in memory of their own. Raises ChecksumError if they came damaged."""
        new = self.held.copy()
        apply(self._host_state(new), frame)
        return new

    def promote(self, frame: bytes) -> None:
        """The snapshot is what the frame makes of it; safe to repeat after an error."""
        host = None if self._is_same_memory else self._host_state(self.held)
        apply(self._state, frame)
        if host is not None:
            apply(host, frame)

    def _host_state(self, data: U8) -> State:
        """A state over bytes here that are those of the snapshot: its digests are known."""
        slot = self._state.slots[self._name]
        state = State(backend="cpu", threads=1)
        tensor = Tensor(self._spec.dtype, self._spec.shape, data)
        state.slots[self._name] = Slot(tensor, slot.geometry, slot.rows.copy())
        return state


def check_place(place: str) -> Place:
    """The place itself; ValueError if there is none of this name."""
    if place not in get_args(Place):
        raise ValueError(
            f"gymfast_snapshot is {place!r}, expected one of {', '.join(get_args(Place))}: correct "
            "the file of --custom-config-path"
        )
    return place  # type: ignore[return-value]


def choose_place(wanted: Place, bytes_by_device: Mapping[str, int]) -> Place:
    """Where the snapshot of tensors on devices goes, and one line about it; never "auto".

    Raises MissingDependencyError if a place is asked for that no back end here works on.
    """
    if wanted == "host" or not bytes_by_device:
        return "host"
    try:
        takes_pinned = select("auto").takes(PINNED)
    except MissingDependencyError as error:
        if wanted != "auto":
            raise
        _log.warning("every tensor is copied to the host at each update: %s", error)
        return "host"
    if wanted == "pinned" and not takes_pinned:
        raise MissingDependencyError(
            "gymfast_snapshot is pinned, which needs gymfast._cuda: build gymfast where nvcc is, "
            "or take beside, host or auto"
        )
    place = _by_free_memory(bytes_by_device, takes_pinned) if wanted == "auto" else wanted
    sizes = ", ".join(f"{size} bytes of {device}" for device, size in bytes_by_device.items())
    _log.info("the snapshot of %s lies %s", sizes, "in host memory" if place == "host" else place)
    return place


def _by_free_memory(bytes_by_device: Mapping[str, int], takes_pinned: bool) -> Place:
    """Beside the weights where that leaves nearly all free memory to training."""
    import torch

    for device, size in bytes_by_device.items():
        free, _ = torch.cuda.mem_get_info(device)
        if size > _MAX_FREE_RATIO * free:
            return "pinned" if takes_pinned else "host"
    return "beside"


def is_on_device(tensor: Tensor) -> bool:
    """Whether a tensor has bytes, and they lie in CUDA memory."""
    return tensor.num_bytes > 0 and kind_of(tensor.place) == CUDA
