"""Clusters and networks that a plan is made for, with the figures of their makers."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gymfast.cost.links import Link

_CLUSTER = re.compile(r"([1-9]\d*)x([1-9]\d*):(\w+)")


@dataclass(frozen=True)
class Gpu:
    """Bytes a second of its memory, and to its neighbours by NVLink, one way."""

    memory_bytes_per_s: float
    nvlink_bytes_per_s: float


GPUS = {
    "A100": Gpu(2.039e12, 300e9),
    "H100": Gpu(3.35e12, 450e9),
    "H200": Gpu(4.8e12, 450e9),
    "B200": Gpu(8.0e12, 900e9),
}
"""Source: NVIDIA's data sheets of the SXM parts; NVLink counts both ways there."""


@dataclass(frozen=True)
class Cluster:
    """Nodes of one sort of GPU."""

    num_nodes: int
    gpus_per_node: int
    gpu: str

    def __post_init__(self) -> None:
        if self.gpu not in GPUS:
            raise ValueError(f"GPU {self.gpu!r} is not known, expected one of {', '.join(GPUS)}")

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """A cluster from `NODESxGPUS:KIND`, such as `4x8:B200`. Raises ValueError."""
        found = _CLUSTER.fullmatch(text.strip())
        if found is None:
            raise ValueError(f"{text!r} is no cluster, expected NODESxGPUS:KIND, as in 4x8:B200")
        nodes, gpus, kind = found.groups()
        return cls(int(nodes), int(gpus), kind.upper())

    @property
    def num_gpus(self) -> int:
        """All GPUs."""
        return self.num_nodes * self.gpus_per_node

    def __str__(self) -> str:
        return f"{self.num_nodes}x{self.gpus_per_node} {self.gpu}"


@dataclass(frozen=True)
class Network:
    """How nodes reach each other. `launch_s` and `hop_s` are paid by each bucket."""

    name: str
    nic: Link
    is_per_gpu: bool  # a NIC for each GPU; else one for the node, or the site
    launch_s: float
    hop_s: float


NETWORKS = {
    "rdma": Network("rdma", Link(400), is_per_gpu=True, launch_s=28.4e-6, hop_s=14e-6),
    "tcp": Network("tcp", Link(50), is_per_gpu=False, launch_s=300e-6, hop_s=50e-6),
    "wan": Network("wan", Link(10, rtt_s=0.06), is_per_gpu=False, launch_s=300e-6, hop_s=0.0),
}
"""Source: NCCL's tuner (8.4 us and 14 us a hop, Simple protocol) and 20 us of launch; sockets: a
Python call and an acknowledgement for each bucket."""
