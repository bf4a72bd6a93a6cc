"""Measured and claimed figures of providers, and prices; each says where it comes from.

Latencies drift and prices change: a preset is a starting point, never a default. A scenario takes
`provider(name).sandboxes` and `.limits`, and `prices(name, ...)`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from gymfast_sim.reading import ScenarioError, from_toml
from gymfast_sim.scenario import Limits, Prices, Sandboxes

_HERE = Path(__file__).parent


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where figures come from; `num_samples` is 0 for a claim or a document."""

    source: str
    date: str
    num_samples: int
    licence: str
    note: str = ""


class Provider(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How sandboxes of a provider start and fail, and what an account may do."""

    name: str
    start: Source
    account: Source
    sandboxes: Sandboxes
    limits: Limits


class PriceList(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a provider asks for a core and a GiB, in dollars a second."""

    name: str
    source: Source
    core_per_s: float
    gib_per_s: float


def providers() -> list[str]:
    """Names that `provider` knows."""
    return _names("providers")


def provider(name: str) -> Provider:
    """The preset of a provider. Raises ScenarioError for a name that is not known."""
    return from_toml(_text("providers", name), Provider)


def price_lists() -> list[str]:
    """Names that `prices` knows."""
    return _names("prices")


def prices(
    name: str, *, gpus: int, gpu_per_s: float, cores: float, gib: float, region_factor: float = 1.0
) -> Prices:
    """Prices of a list, for sandboxes of so many cores and GiB, multiplied for a region.

    The price of a GPU is always yours to give. Raises ScenarioError for a name that is not known.
    """
    found = from_toml(_text("prices", name), PriceList)
    return Prices(
        gpus=gpus,
        gpu_per_s=gpu_per_s,
        cores=cores,
        core_per_s=found.core_per_s * region_factor,
        gib=gib,
        gib_per_s=found.gib_per_s * region_factor,
        source=found.source.source,
        date=found.source.date,
    )


def _names(folder: str) -> list[str]:
    return sorted(path.stem for path in (_HERE / folder).glob("*.toml"))


def _text(folder: str, name: str) -> str:
    known = _names(folder)
    if name not in known:
        raise ScenarioError(f"no preset {name!r} in {folder}, expected one of {', '.join(known)}")
    return (_HERE / folder / f"{name}.toml").read_text(encoding="utf-8")
