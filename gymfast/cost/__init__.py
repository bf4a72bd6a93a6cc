"""Bytes, seconds and dollars of a sync, for a model, a network and a cluster; pure."""

from gymfast.cost.links import Link, cold_tcp_s, warm_tcp_s, wire_s
from gymfast.cost.pipeline import Stage, best_bucket, pipeline_s
from gymfast.cost.prices import PRICES, Price

__all__ = [
    "PRICES",
    "Link",
    "Price",
    "Stage",
    "best_bucket",
    "cold_tcp_s",
    "pipeline_s",
    "warm_tcp_s",
    "wire_s",
]
