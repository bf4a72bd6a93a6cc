"""A tiny torch decoder with fused parameters that loads checkpoints as SGLang's models do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

HIDDEN, HEAD, INNER, VOCAB, NUM_LAYERS, NUM_EXPERTS = 16, 8, 24, 32, 3, 2
FUSED = {
    "q_proj": ("qkv_proj", slice(0, HIDDEN)),
    "k_proj": ("qkv_proj", slice(HIDDEN, HIDDEN + HEAD)),
    "v_proj": ("qkv_proj", slice(HIDDEN + HEAD, HIDDEN + 2 * HEAD)),
    "gate_proj": ("gate_up_proj", slice(0, INNER)),
    "up_proj": ("gate_up_proj", slice(INNER, 2 * INNER)),
}
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HEAD, HIDDEN),
    "self_attn.v_proj": (HEAD, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
    "input_layernorm": (HIDDEN,),
}


class UnquantizedLinearMethod:
    """Named as SGLang's: what lies in memory is what the checkpoint holds."""


class PackingMethod:
    """A method that packs weights after loading, as those of quantized models do."""


class Weight(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False)
        self.quant_method = UnquantizedLinearMethod()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        self.self_attn.qkv_proj = Weight(HIDDEN + 2 * HEAD, HIDDEN)
        self.self_attn.o_proj = Weight(HIDDEN, HIDDEN)
        self.mlp.gate_up_proj = Weight(2 * INNER, HIDDEN)
        self.mlp.down_proj = Weight(HIDDEN, INNER)
        self.mlp.experts = Weight(NUM_EXPERTS, INNER, HIDDEN)
        self.input_layernorm = Weight(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.input_layernorm.weight
        q, k, v = (x @ self.self_attn.qkv_proj.weight.T).split([HIDDEN, HEAD, HEAD], -1)
        x = x + q @ self.self_attn.o_proj.weight.T + torch.cat([k, v], -1)
        gate, up = (x @ self.mlp.gate_up_proj.weight.T).chunk(2, -1)
        experts = (x @ self.mlp.experts.weight.sum(0).T).tanh()
        return x + (gate.sigmoid() * up + experts) @ self.mlp.down_proj.weight.T


class ToyModel(nn.Module):
    """`loads` lists the names of each call of the loader; `break_after` tensors it raises."""

    def __init__(self, *, tells: bool = True, packs: bool = False) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = Weight(VOCAB, HIDDEN)
        self.model.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        self.model.norm = Weight(HIDDEN)
        self.lm_head = Weight(VOCAB, HIDDEN)
        self.loads: list[list[str]] = []
        self.break_after: int | None = None
        if packs:
            self.model.layers[0].mlp.experts.quant_method = PackingMethod()
        self._tells = tells

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.model.embed_tokens.weight[tokens]
        for layer in self.model.layers:
            x = layer(x)
        return (x * self.model.norm.weight) @ self.lm_head.weight.T

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str] | None:
        parameters, filled = dict(self.named_parameters()), set()
        names: list[str] = []
        self.loads.append(names)
        for name, loaded in weights:
            if self.break_after is not None and len(names) == self.break_after:
                raise RuntimeError("the loader broke")
            target, part = _place(name)
            if target in parameters:  # as SGLang's: what it does not know, it leaves out
                parameters[target].data[part].copy_(loaded)
                filled.add(target)
            names.append(name)
        return filled if self._tells else None


class FlatModel(nn.Module):
    """A parameter for every tensor of a checkpoint, under its name; as ToyModel, but to be run."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.loads: list[list[str]] = []
        self.break_after: int | None = None
        for name, tensor in weights.items():
            module: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module._modules[part]
            module.register_parameter(last, nn.Parameter(tensor.clone(), requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        parameters, names = dict(self.named_parameters()), []
        self.loads.append(names)
        for name, loaded in weights:
            if self.break_after is not None and len(names) == self.break_after:
                raise RuntimeError("the loader broke")
            parameters[name].data.copy_(loaded)
            names.append(name)
        return set(names)


def _place(name: str) -> tuple[str, slice | int]:
    head, _, rest = name.partition(".experts.")
    if rest:
        return f"{head}.experts.weight", int(rest.split(".")[0])
    for member, (fused, part) in FUSED.items():
        if f".{member}." in name:
            return name.replace(member, fused), part
    return name, slice(None)


def checkpoint(seed: int) -> dict[str, Tensor]:
    """Random tensors with the names and shapes of a checkpoint of the model."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(NUM_LAYERS):
        begin = f"model.layers.{layer}."
        shapes |= {f"{begin}{name}.weight": shape for name, shape in SHAPES.items()}
        for expert in range(NUM_EXPERTS):
            shapes[f"{begin}mlp.experts.{expert}.up_proj.weight"] = (INNER, HIDDEN)
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}
    return {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16)
        for name, shape in shapes.items()
    }


def step(weights: Mapping[str, Tensor], seed: int, *, names: str = "") -> dict[str, Tensor]:
    """The weights after an update that changes a few elements of each tensor with `names` in it."""
    generator = torch.Generator().manual_seed(seed)
    new = {name: tensor.clone() for name, tensor in weights.items()}
    for name, tensor in new.items():
        if names in name:
            changed = torch.rand(tensor.shape, generator=generator) < 0.05
            changed.view(-1)[0] = True
            tensor[changed] = tensor[changed] * 1.5 + 0.25
    return new


def model_of(weights: Mapping[str, Tensor]) -> ToyModel:
    """A model that was loaded from a checkpoint once."""
    model = ToyModel()
    model.load_weights(weights.items())
    return model


def differences(model: nn.Module, expected: nn.Module) -> list[str]:
    """Names of the parameters whose bits differ."""
    others = dict(expected.named_parameters())
    return [
        name
        for name, value in model.named_parameters()
        if not torch.equal(value.view(torch.uint8), others[name].view(torch.uint8))
    ]
