"""The numbers of a demo run: what `--json` prints and the table and the report show."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from gymfast.demo.projection import Projection

SCHEMA = "gymfast.demo/1"
MarkKind: TypeAlias = Literal[
    "publish", "serve", "start", "hold", "kill", "damage", "refuse", "repair"
]
HarmKind: TypeAlias = Literal["kill", "corruption"]


class Machine(msgspec.Struct, frozen=True):
    """Where the run took place; `cache_bytes` is the last-level cache, None if unknown."""

    cpu: str
    num_cores: int
    cache_bytes: int | None
    platform: str
    python: str
    numpy: str
    torch: str
    zstd: str | None
    instruction_set: str


class Model(msgspec.Struct, frozen=True):
    """The network in training."""

    num_parameters: int
    num_tensors: int
    state_bytes: int
    num_layers: int
    width: int
    text_bytes: int
    warmup_steps: int
    first_loss: float
    last_loss: float
    learning_rate: float
    matmul_dtype: str


class Version(msgspec.Struct, frozen=True):
    """One published version: bytes of its frame, and of every other way to send it.

    All but version, kind, at_s, stored_bytes and root are those of the replay; None for the anchor.
    """

    version: int
    kind: str
    at_s: float
    root: str
    stored_bytes: int
    num_changed: int
    reward: float
    full_bytes: int
    density: float | None = None
    xor_zstd1_bytes: int | None = None
    fast_bytes: int | None = None
    small_bytes: int | None = None
    limit_bytes: float | None = None


class Speed(msgspec.Struct, frozen=True):
    """GB of uncompressed state per second: median and the 10 % and 90 % quantiles."""

    median_gbps: float
    p10_gbps: float
    p90_gbps: float
    num_samples: int


class Codec(msgspec.Struct, frozen=True):
    """One row of the table: mean bytes of a version and the speeds of one thread."""

    name: str
    mean_bytes: float
    saving_ratio: float
    over_limit_ratio: float
    encode: Speed | None
    apply: Speed | None
    is_exact: bool | None


class Receiver(msgspec.Struct, frozen=True):
    """What became of one receiver."""

    name: str
    target: str
    num_served: int
    last_version: int
    num_starts: int
    num_refusals: int
    median_apply_s: float


class Incident(msgspec.Struct, frozen=True):
    """Something bad that was done on purpose, and how it ended."""

    kind: HarmKind
    receiver: str
    version: int
    at_s: float
    healed_at_s: float
    detail: str


class AuditResult(msgspec.Struct, frozen=True):
    """The proof: everything served, compared with the trainer's own list."""

    num_served: int
    num_outside_reads: int
    num_wrong: int
    digests_equal: bool
    wrong: list[str]


class Mark(msgspec.Struct, frozen=True):
    """A moment in the life of a process, for the timeline."""

    at_s: float
    who: str
    what: MarkKind
    version: int | None = None


class DemoResult(msgspec.Struct, frozen=True):
    """Everything a run found out."""

    schema: str
    gymfast: str
    started: str
    total_s: float
    is_quick: bool
    seed: int
    machine: Machine
    model: Model
    versions: list[Version]
    memcpy: Speed
    limit_bytes: float
    limit_bits_per_change: float
    mean_density: float
    codecs: list[Codec]
    receivers: list[Receiver]
    incidents: list[Incident]
    audit: AuditResult
    projections: list[Projection]
    unmeasured: str
    timeline: list[Mark]

    def to_fields(self) -> dict[str, object]:
        """The result as plain dicts, lists, texts and numbers, for JSON."""
        fields: dict[str, object] = msgspec.to_builtins(self)
        return fields
