"""The weights that are synchronised, and the changes that a step makes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
import xxhash
from safetensors.torch import load_file, save_file
from torch import Tensor

NUM_LAYERS = 8
HIDDEN = 1024
_SHAPES = {
    "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
    "self_attn.k_proj.weight": (HIDDEN // 4, HIDDEN),
    "self_attn.v_proj.weight": (HIDDEN // 4, HIDDEN),
    "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
    "input_layernorm.weight": (HIDDEN,),
    "post_attention_layernorm.weight": (HIDDEN,),
}
_MLP = {"gate_proj": True, "up_proj": True, "down_proj": False}


def shapes(size_bytes: int) -> dict[str, tuple[int, ...]]:
    """A decoder of eight layers whose feed-forward parts are as wide as the size asks for."""
    attention = sum(torch.Size(shape).numel() for shape in _SHAPES.values())
    inner = (size_bytes // 2 // NUM_LAYERS - attention) // (3 * HIDDEN) // 64 * 64
    if inner < HIDDEN:
        raise ValueError(f"a model of {size_bytes} bytes is too small, expected 128 MiB or more")
    found: dict[str, tuple[int, ...]] = {}
    for layer in range(NUM_LAYERS):
        begin = f"decoder.layers.{layer}."
        found |= {begin + name: shape for name, shape in _SHAPES.items()}
        for name, is_wide in _MLP.items():
            shape = (inner, HIDDEN) if is_wide else (HIDDEN, inner)
            found[f"{begin}mlp.{name}.weight"] = shape
    return found


def write_checkpoint(folder: Path, size_bytes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: (torch.randn(shape, generator=generator) * 0.02).to(torch.bfloat16)
        for name, shape in shapes(size_bytes).items()
    }
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def read_checkpoint(folder: Path) -> dict[str, Tensor]:
    (file,) = files_of(folder)
    return load_file(file)


def change(weights: dict[str, Tensor], density: float, where: str, step: int) -> None:
    """Moves a share of all elements to the next value, in the tensors with `where` in the name."""
    chosen = {name: tensor for name, tensor in weights.items() if where in name}
    total = sum(tensor.numel() for tensor in weights.values())
    share = density * total / sum(tensor.numel() for tensor in chosen.values())
    generator = torch.Generator().manual_seed(step)
    for tensor in chosen.values():
        bits = tensor.view(-1).view(torch.int16)
        count = max(1, round(share * bits.numel()))
        at = torch.randint(bits.numel(), (count,), generator=generator)
        bits[at] ^= 1


def digest_of(named: Iterable[tuple[str, Tensor]]) -> str:
    """One digest of names and bytes, in the order of names."""
    hasher = xxhash.xxh3_128()
    for name, tensor in sorted(named):
        hasher.update(name.encode())
        hasher.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return hasher.hexdigest()
