"""The codec as operators of torch: `import gymfast.delta.torch_ops` registers them.

`torch.ops.gymfast.digest`, `diff` and `apply_` work on one tensor of any dtype, in CPU or CUDA
memory, and trace under torch.compile and torch.export. Frames are uint8 tensors in CPU memory: they
hold what changed, and carry the digests that say which base they are for.
"""

from __future__ import annotations

from typing import Any

import torch

from gymfast.delta.apply import apply
from gymfast.delta.encode import encode
from gymfast.delta.state import State

_NAME = "tensor"


@torch.library.custom_op("gymfast::digest", mutates_args=())
def digest(data: torch.Tensor) -> torch.Tensor:
    """The 128-bit digest of the bits of a tensor: int64 [2] in CPU memory.

    Source: docs/wire-format.md section 2. TypeError for a dtype without a safetensors tag.
    """
    words = State.reading({_NAME: data}).tensor_digest(_NAME)
    return torch.tensor([word - (word >> 63 << 64) for word in words], dtype=torch.int64)


@digest.register_fake
def _(data: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    return torch.empty(2, dtype=torch.int64, device="cpu")


@torch.library.custom_op("gymfast::diff", mutates_args=())
def diff(base: torch.Tensor, new: torch.Tensor, profile: str = "auto") -> torch.Tensor:
    """The frame that turns base into new: uint8 [n] in CPU memory; neither is changed.

    Raises ValueError if dtype, shape or device differ, or for an unknown profile.
    """
    if base.dtype != new.dtype or base.shape != new.shape:
        raise ValueError(
            f"base is {base.dtype} of shape {tuple(base.shape)}, new {new.dtype} of "
            f"{tuple(new.shape)}: expected the same"
        )
    frame = encode({_NAME: base}, {_NAME: new}, profile=profile)  # type: ignore[arg-type]
    return torch.frombuffer(bytearray(frame), dtype=torch.uint8)


@diff.register_fake
def _(base: torch.Tensor, new: torch.Tensor, profile: str = "auto") -> torch.Tensor:  # noqa: ARG001
    size: Any = torch.library.get_ctx().new_dynamic_size()
    return torch.empty(size, dtype=torch.uint8, device="cpu")


@torch.library.custom_op("gymfast::apply_", mutates_args={"data"})
def apply_(data: torch.Tensor, frame: torch.Tensor) -> None:
    """Turns data into the new state of a frame of diff, in place; again, it changes nothing.

    Raises FormatError (of gymfast.errors) for a frame that is damaged or was made for another
    base, ValueError for a tensor that cannot be written in place: nothing was written then, unless
    the error says "inconsistent".
    """
    if frame.dtype is not torch.uint8 or frame.dim() != 1:
        raise ValueError(
            f"frame is {frame.dtype} of {frame.dim()} dimensions, expected 1-D torch.uint8"
        )
    apply({_NAME: data}, memoryview(frame.cpu().numpy()))


@apply_.register_fake
def _(data: torch.Tensor, frame: torch.Tensor) -> None:  # noqa: ARG001
    return None
