"""The two tables of "Reinforcement learning is an infrastructure problem", computed.

Stored are sizes and prices, as published; every time and cost follows from them. Beside each row
stands the same from the exact bytes of the model and list prices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from gymfast.cost.links import Link, cold_tcp_s, warm_tcp_s, wire_s
from gymfast.cost.prices import PRICES
from gymfast.models import Format, Lora, Role, lora_bytes, model, model_bytes

PUBLISHED_DOLLARS_PER_GPU_S = 0.01  # implied by all nine rows; no list price is near it

# One core, BF16 bytes a second at 1 % changed: benchmarks/results/delta-1pct.csv, gymfast fast.
ENCODE_BYTES_PER_S = 8.44e9
APPLY_BYTES_PER_S = 19.76e9


@dataclass(frozen=True)
class Update:
    """What one row sends: a model in a format, or an adapter on it."""

    model: str
    fmt: Format = "bf16"
    lora: Lora | None = None

    @cached_property
    def num_bytes(self) -> int:
        """Bytes counted from the configuration of the model."""
        config = model(self.model)
        return model_bytes(config, self.fmt) if self.lora is None else lora_bytes(config, self.lora)


@dataclass(frozen=True)
class ClusterRow:
    """A row of the first table. `computed_gb` is the unrounded size its times came from."""

    label: str
    update: Update
    published_gb: float
    gpu: str
    num_nodes: int
    computed_gb: float | None = None

    @property
    def num_gpus(self) -> int:
        """Reference GPUs, eight a node."""
        return 8 * self.num_nodes


@dataclass(frozen=True)
class WanRow:
    """A row of the second table, with the unrounded sizes of its two times."""

    label: str
    update: Update
    published_gb: float
    full_gb: float | None = None
    delta_gb: float | None = None
    published_fmt: Format | None = None  # where it is not that of the bytes


_TCP, _RDMA, _WAN = Link(50), Link(3200), Link(10, rtt_s=0.06)


@dataclass(frozen=True)
class Networks:
    """The assumptions of both tables; `saved_ratio` is the part that a delta does not send."""

    tcp: Link = _TCP
    rdma: Link = _RDMA
    wan: Link = _WAN
    saved_ratio: float = 0.98

    def __post_init__(self) -> None:
        if not 0 <= self.saved_ratio < 1:
            raise ValueError(f"saved_ratio is {self.saved_ratio}, expected 0 to below 1")


@dataclass(frozen=True)
class ClusterTimes:
    """Seconds and dollars of one row of the first table."""

    num_bytes: float
    tcp_s: float
    rdma_s: float
    saved_dollars: float


@dataclass(frozen=True)
class WanTimes:
    """Seconds of one row of the second table; encode and apply on one core, not overlapped."""

    num_bytes: float
    delta_bytes: float
    full_s: float
    delta_s: float
    cold_s: float
    warm_s: float
    encode_s: float
    apply_s: float


_LORA, _PER_EXPERT = Lora(), Lora(is_shared_outer=False)
# Kimi's published sizes leave out the shared expert and the dense layer, GLM's do not.
_KIMI_TARGETS: tuple[Role, ...] = ("attention", "routed")
_KIMI_LORA = Lora(targets=_KIMI_TARGETS)
_KIMI_PER_EXPERT = Lora(is_shared_outer=False, targets=_KIMI_TARGETS)
_GLM, _KIMI, _Q30 = "GLM-4.7", "Kimi-K2.6", "Qwen3-30B-A3B"

CLUSTER_ROWS = (
    ClusterRow("Qwen3 8B", Update("Qwen3-8B"), 16.3, "H100", 1, computed_gb=16.38),
    ClusterRow(_Q30, Update(_Q30), 61.1, "H100", 1),
    ClusterRow(f"{_Q30} LoRA r=32 shared-outer", Update(_Q30, lora=_LORA), 1.0, "H100", 1),
    ClusterRow("GLM 4.7", Update(_GLM), 716.7, "B200", 4),
    ClusterRow("GLM 4.7 LoRA r=32 shared-outer", Update(_GLM, lora=_LORA), 4.7, "B200", 4),
    ClusterRow("GLM 4.7 LoRA r=32 per-expert", Update(_GLM, lora=_PER_EXPERT), 18.8, "B200", 4),
    ClusterRow("Kimi K2.6", Update(_KIMI, "int4"), 595.2, "H200", 16),
    ClusterRow("Kimi K2.6 LoRA r=32 shared-outer", Update(_KIMI, lora=_KIMI_LORA), 9.4, "H200", 16),
    ClusterRow(
        "Kimi K2.6 LoRA r=32 per-expert", Update(_KIMI, lora=_KIMI_PER_EXPERT), 41.0, "H200", 16
    ),
)
"""Sizes: as published. Compositions of the adapters: those whose count gives the published size."""

WAN_ROWS = (
    WanRow("Qwen3 8B", Update("Qwen3-8B"), 16),
    WanRow("Qwen3 30B-A3B", Update(_Q30), 60),
    WanRow(*("GLM 4.7 (~355B)", Update(_GLM, "fp8"), 357), delta_gb=358.3, published_fmt="bf16"),
    WanRow("Kimi K2.6 (~1T)", Update(_KIMI, "int4"), 595.2, full_gb=600, delta_gb=600),
)


def published_cluster(row: ClusterRow, networks: Networks) -> ClusterTimes:
    """What the article computes for a row of its first table."""
    size = 1e9 * (row.computed_gb or row.published_gb)
    return _cluster(size, row.num_gpus * PUBLISHED_DOLLARS_PER_GPU_S, networks)


def corrected_cluster(row: ClusterRow, networks: Networks) -> ClusterTimes:
    """The same from exact bytes and the list price of the GPU."""
    price = row.num_gpus * PRICES[row.gpu].dollars_per_s
    return _cluster(row.update.num_bytes, price, networks)


def published_wan(row: WanRow, networks: Networks) -> WanTimes:
    """What the article computes for a row of its second table."""
    full = 1e9 * (row.full_gb or row.published_gb)
    delta = 1e9 * (row.delta_gb or row.published_gb) * (1 - networks.saved_ratio)
    return _wan(full, delta, networks)


def corrected_wan(row: WanRow, networks: Networks) -> WanTimes:
    """The same from exact bytes."""
    size = row.update.num_bytes
    return _wan(size, size * (1 - networks.saved_ratio), networks)


def _cluster(num_bytes: float, dollars_per_s: float, networks: Networks) -> ClusterTimes:
    tcp_s, rdma_s = wire_s(num_bytes, networks.tcp), wire_s(num_bytes, networks.rdma)
    return ClusterTimes(num_bytes, tcp_s, rdma_s, (tcp_s - rdma_s) * dollars_per_s)


def _wan(full_bytes: float, delta_bytes: float, networks: Networks) -> WanTimes:
    return WanTimes(
        num_bytes=full_bytes,
        delta_bytes=delta_bytes,
        full_s=wire_s(full_bytes, networks.wan),
        delta_s=wire_s(delta_bytes, networks.wan),
        cold_s=cold_tcp_s(delta_bytes, networks.wan),
        warm_s=warm_tcp_s(delta_bytes, networks.wan),
        encode_s=full_bytes / ENCODE_BYTES_PER_S,
        apply_s=full_bytes / APPLY_BYTES_PER_S,
    )
