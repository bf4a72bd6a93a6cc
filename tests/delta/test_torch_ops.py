"""The operators of torch: what they compute, that they trace, and what they refuse."""

from __future__ import annotations

import pytest
import torch

import gymfast.delta.torch_ops  # noqa: F401
from gymfast import delta
from gymfast.errors import FormatError

ops = torch.ops.gymfast
DTYPES = (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.bool)


def pair(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    base = torch.randn(60, 70, generator=made).to(dtype)
    new = base.clone()
    new[3] = new[4]
    return base, new


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("profile", ["auto", "fast", "small"])
def test_diff_and_apply_give_the_new_bits(dtype, profile) -> None:
    base, new = pair(dtype)
    frame = ops.diff(base, new, profile)
    assert bytes(frame.numpy()) == delta.encode({"tensor": base}, {"tensor": new}, profile=profile)
    ops.apply_(base, frame)
    assert torch.equal(base.view(torch.uint8), new.view(torch.uint8))
    assert torch.equal(ops.digest(base), ops.digest(new))
    ops.apply_(base, frame)
    assert torch.equal(base.view(torch.uint8), new.view(torch.uint8))


def test_the_digest_is_that_of_a_state() -> None:
    base, new = pair()
    words = delta.State.reading({"w": base}).tensor_digest("w")
    assert [word % 2**64 for word in ops.digest(base).tolist()] == list(words)
    assert not torch.equal(ops.digest(base), ops.digest(new))


def test_opcheck() -> None:
    base, new = pair()
    torch.library.opcheck(ops.digest.default, (base,))
    torch.library.opcheck(ops.diff.default, (base, new, "fast"))
    torch.library.opcheck(ops.apply_.default, (base, ops.diff(base, new, "auto")))


def test_the_operators_trace() -> None:
    def sync(base: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        ops.apply_(base, ops.diff(base, new))
        return ops.digest(base) * 1

    base, new = pair()
    program = torch.export.export(_Module(sync), pair(), strict=False)
    names = {str(node.target) for node in program.graph.nodes}
    assert {"gymfast.diff.default", "gymfast.digest.default"} <= names
    assert any("apply_" in name for name in names)
    assert torch.equal(program.module()(base, new), ops.digest(new) * 1)
    assert torch.equal(base, new)


class _Module(torch.nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self._function(*args)


def test_bad_input_is_refused_and_nothing_is_written() -> None:
    base, new = pair()
    kept = base.clone()
    frame = ops.diff(base, new)
    with pytest.raises(ValueError, match="expected the same"):
        ops.diff(base, new.float())
    with pytest.raises(ValueError, match="expected the same"):
        ops.diff(base, new[:1])
    with pytest.raises(ValueError, match="profile 'best', expected one of"):
        ops.diff(base, new, "best")
    with pytest.raises(ValueError, match=r"expected 1-D torch\.uint8"):
        ops.apply_(base, frame.float())
    with pytest.raises(FormatError):
        ops.apply_(base, frame[:-1])
    with pytest.raises(FormatError, match="the frame was made for"):
        ops.apply_(torch.zeros_like(base), frame)
    with pytest.raises(ValueError, match="not contiguous"):
        ops.apply_(base.t(), ops.diff(base.t(), new.t()))
    with pytest.raises(TypeError, match="has no safetensors tag"):
        ops.digest(torch.zeros(3, dtype=torch.complex128))
    assert torch.equal(base, kept)
