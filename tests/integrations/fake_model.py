"""One rank's share of a model that holds its weights as engines do: fused, sharded, packed, tied.

The checkpoint has other names and shapes. The memory of all parameters is one arena, which a sleep
makes unreadable as it unmaps that of a GPU: who touches it then ends the process.
"""

from __future__ import annotations

import ctypes
import mmap  # noqa: TID251 - no file
import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

SIZE, INNER, NUM_EXPERTS, NUM_LAYERS, VOCAB = 8, 12, 4, 2, 16
BF16, FP8, F32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32
ARENA_BYTES = 1 << 16
FUSED = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2)}
FUSED |= {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}
TIED, HEAD = "embed.weight", "head.weight"
EXPERTS, DOWN, SCALE = "experts.gate_up", "down_proj.weight", "down_proj.weight_scale"
_ROWS_OF_KERNEL = torch.tensor([6, 0, 5, 2, 7, 1, 4, 3])
_libc = ctypes.CDLL(None, use_errno=True)


class Arena:
    """Memory for parameters; asleep it can be neither read nor written."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, ARENA_BYTES)
        self._all = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._used = 0
        self._backup: Tensor | None = None
        self.is_asleep = False

    @property
    def address(self) -> int:
        return self._all.data_ptr()

    def parameter(self, dtype: torch.dtype, *shape: int) -> nn.Parameter:
        begin, num_bytes = self._used, prod(shape) * dtype.itemsize
        self._used = (begin + num_bytes + 63) // 64 * 64
        taken = self._all[begin : begin + num_bytes]
        return nn.Parameter(taken.view(dtype).view(shape), requires_grad=False)

    def sleep(self, level: int) -> None:
        """Level 1 keeps a copy, level 2 discards."""
        self._backup = self._all.clone() if level == 1 else None
        self._protect(0)
        self.is_asleep = True

    def wake_up(self) -> None:
        if self.is_asleep:
            self._protect(mmap.PROT_READ | mmap.PROT_WRITE)
            self.is_asleep = False
            self._all[:] = 0xA5 if self._backup is None else self._backup

    def _protect(self, rights: int) -> None:
        done = _libc.mprotect(ctypes.c_void_p(self.address), ctypes.c_size_t(ARENA_BYTES), rights)
        assert done == 0, os.strerror(ctypes.get_errno())


class PackingMethod:
    """Named unlike the methods whose live bytes are those of the checkpoint."""


class Fp8(nn.Module):
    """An fp8 weight and its scale; packed, the rows lie in the order that a kernel wants."""

    def __init__(self, arena: Arena, *, packs: bool) -> None:
        super().__init__()
        self.weight = arena.parameter(FP8, SIZE, INNER)
        self.weight_scale = arena.parameter(F32, 1)
        self.quant_method = PackingMethod() if packs else None
        self._rows = _ROWS_OF_KERNEL if packs else torch.arange(SIZE)

    def pack(self, name: str, value: Tensor) -> Tensor:
        """The bytes of a parameter as the kernel wants them."""
        return value.view(torch.uint8)[self._rows].view(FP8) if name == "weight" else value

    def pack_in_place(self) -> None:
        self.weight.data.view(torch.uint8)[:] = self.pack("weight", self.weight).view(torch.uint8)

    def restore(self) -> None:
        """Ready to be loaded: a packed weight is not, and what it held is gone."""
        if self.quant_method is not None:
            self.weight.data.view(torch.uint8).fill_(0xFF)


class FakeModel(nn.Module):
    """`fails_at`: number of the tensor, from 1, and how loading ends there, "raise" or "kill"."""

    def __init__(self, rank: int = 0, num_ranks: int = 1, *, packs: bool = True) -> None:
        super().__init__()
        self.rank, self.num_ranks, self.arena = rank, num_ranks, Arena()
        self.fails_at: tuple[int, str] | None = None
        self.loads: list[list[str]] = []
        make = self.arena.parameter
        self.embed, self.head, self.layers = nn.Module(), nn.Module(), nn.ModuleList()
        self.embed.weight, self.head.weight = (make(BF16, VOCAB, SIZE) for _ in range(2))
        for _ in range(NUM_LAYERS):
            layer = nn.Module()
            for name in ("qkv_proj", "gate_up_proj", "experts", "mixer", "norm"):
                layer.add_module(name, nn.Module())
            layer.qkv_proj.weight = make(BF16, 3 * SIZE // num_ranks, SIZE)
            layer.gate_up_proj.weight = make(BF16, 2 * INNER // num_ranks, SIZE)
            layer.experts.w13 = make(BF16, NUM_EXPERTS // num_ranks, 2 * INNER, SIZE)
            layer.mixer.A = make(F32, SIZE)
            layer.norm.weight = make(BF16, SIZE)
            layer.down_proj = Fp8(self.arena, packs=packs)
            self.layers.append(layer)

    def pack(self) -> None:
        """What an engine does once after it has loaded a checkpoint."""
        for layer in self.layers:
            layer.down_proj.pack_in_place()

    def restore(self) -> None:
        """What it does before a load, where that has to be whole."""
        for layer in self.layers:
            layer.down_proj.restore()

    def forward(self) -> bytes:
        return b"eager"

    def compute_logits(self, hidden: Any) -> Any:
        return hidden

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        names: list[str] = []
        self.loads.append(names)
        filled: set[str] = set()
        for name, tensor in weights:
            names.append(name)
            self._fail_at(sum(map(len, self.loads)))
            for target, part, value in self._targets(name, tensor):
                parameter = self.get_parameter(target)
                as_bytes = parameter.data[part].view(torch.uint8)
                as_bytes.copy_(value.contiguous().view(torch.uint8))
                filled.add(target)
                if hasattr(parameter, "counted_by"):
                    parameter.counted_by.load_numel += value.numel()
        return filled

    def _fail_at(self, number: int) -> None:
        if self.fails_at is None or number != self.fails_at[0]:
            return
        if self.fails_at[1] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError(f"injected: tensor {number} of rank {self.rank}")

    def _targets(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Any, Tensor]]:
        """Live parameter, part of it, and what goes there."""
        member = name.rpartition(".weight")[0].rpartition(".")[2]
        if name == TIED:  # two storages: a config that says tied, a model that cloned
            yield from ((live, slice(None), tensor) for live in (TIED, HEAD))
        elif name.endswith("A_log"):
            yield name.replace("A_log", "A"), slice(None), -torch.exp(tensor)
        elif name.endswith(EXPERTS):
            mine = tensor.chunk(self.num_ranks)[self.rank]
            for place, expert in enumerate(mine.chunk(len(mine))):
                yield name.replace("gate_up", "w13"), place, expert[0]
        elif member in FUSED:
            fused, at = FUSED[member]
            mine = tensor.chunk(self.num_ranks)[self.rank]
            yield name.replace(member, fused), slice(at * len(mine), (at + 1) * len(mine)), mine
        else:
            yield name, slice(None), tensor


class Graph:
    """What a captured CUDA graph knows of a model: addresses. It reads there, whatever moved."""

    def __init__(self, model: FakeModel) -> None:
        parameters = [p for _, p in model.named_parameters()]
        self._kept = [p.data for p in parameters]  # a real one would read freed memory
        self._places = [(p.data_ptr(), p.numel() * p.itemsize) for p in parameters]

    def replay(self) -> str:
        """A digest of what lies there."""
        return sha256(b"".join(ctypes.string_at(*place) for place in self._places)).hexdigest()


def digests(model: FakeModel) -> dict[str, str]:
    """A digest of the live bytes of each parameter."""
    return {
        name: sha256(value.data.view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, value in model.named_parameters()
    }


def dense(
    weights: Mapping[str, Tensor], num_ranks: int = 1, *, packs: bool = True
) -> list[dict[str, str]]:
    """Digests of the live bytes of each rank of an engine that was started with a checkpoint."""
    models = [FakeModel(rank, num_ranks, packs=packs) for rank in range(num_ranks)]
    for model in models:
        model.load_weights(weights.items())
        model.pack()
    return [digests(model) for model in models]


def checkpoint(seed: int = 0) -> dict[str, Tensor]:
    """Random tensors under the names of a checkpoint of the model."""
    generator = torch.Generator().manual_seed(seed)
    specs: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {TIED: (BF16, (VOCAB, SIZE))}
    for number in range(NUM_LAYERS):
        at = f"layers.{number}."
        specs |= {f"{at}{x}_proj.weight": (BF16, (SIZE, SIZE)) for x in "qkv"}
        specs |= {f"{at}{x}_proj.weight": (BF16, (INNER, SIZE)) for x in ("gate", "up")}
        specs[at + EXPERTS] = (BF16, (NUM_EXPERTS, 2 * INNER, SIZE))
        specs[at + DOWN], specs[at + SCALE] = (FP8, (SIZE, INNER)), (F32, (1,))
        specs[f"{at}mixer.A_log"], specs[f"{at}norm.weight"] = (F32, (SIZE,)), (BF16, (SIZE,))
    return {n: torch.randn(s, generator=generator).to(d) for n, (d, s) in specs.items()}


def step(weights: Mapping[str, Tensor], seed: int, *, names: str = "") -> dict[str, Tensor]:
    """The weights after a bit of a few elements was flipped, where `names` is in the name."""
    generator = torch.Generator().manual_seed(seed)
    new = {name: tensor.clone() for name, tensor in weights.items()}
    for name, tensor in new.items():
        if names in name:
            flat = tensor.view(-1).view(torch.uint8).view(-1, tensor.itemsize)
            changed = torch.rand(len(flat), generator=generator) < 0.01
            changed[seed % len(flat)] = True
            flat[changed, 0] ^= 0x10
    return new
