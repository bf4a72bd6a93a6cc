"""A made-up result of the demo, for tests of the tables and the report."""

from __future__ import annotations

from gymfast.demo.projection import FIGURES, UNMEASURED, project
from gymfast.demo.result import (
    SCHEMA,
    AuditResult,
    Codec,
    DemoResult,
    Incident,
    Machine,
    Mark,
    Model,
    Receiver,
    Speed,
    Version,
)

STATE_BYTES = 51_659_776
BYTES_PER_CHANGE = {"xor + zstd-1": 2.7, "gymfast fast": 1.4, "gymfast small": 0.86}


def sample_result(
    num_versions: int = 20, zstd: str | None = "zstandard", num_wrong: int = 0
) -> DemoResult:
    """A result with plausible numbers; `num_wrong` served states are wrong."""
    versions = [Version(0, "anchor", 31.0, "ab" * 32, STATE_BYTES, 0, 0.0, STATE_BYTES)]
    versions += [_version(v, zstd) for v in range(1, num_versions + 1)]
    limit = sum(v.limit_bytes or 0 for v in versions) / num_versions
    codecs = [Codec("full", STATE_BYTES, 0.0, STATE_BYTES / limit, None, None, None)]
    codecs += [
        _codec(name, versions, limit) for name in BYTES_PER_CHANGE if zstd or "xor" not in name
    ]
    ratios = {codec.name: codec.mean_bytes / STATE_BYTES for codec in codecs}
    fast, small = ratios["gymfast fast"], ratios["gymfast small"]
    return DemoResult(
        schema=SCHEMA,
        gymfast="0.1.0",
        started="2026-11-30 03:50 UTC",
        total_s=72.3,
        is_quick=False,
        seed=0,
        machine=Machine(
            "A <CPU> & more", 2, 32 << 20, "Linux x86_64", "3.11.7", "2.4.6", "2.13.0", zstd, "avx2"
        ),
        model=Model(25_829_888, 75, STATE_BYTES, 8, 512, 4_000_000, 80, 5.62, 2.5, 1e-6, "BF16"),
        versions=versions,
        memcpy=_speed(13.6, num_versions),
        limit_bytes=limit,
        limit_bits_per_change=6.6,
        mean_density=sum(v.density or 0 for v in versions) / num_versions,
        codecs=codecs,
        receivers=[
            Receiver("live", "tensors in memory", 21, num_versions, 1, 2, 0.011),
            Receiver("checkpoint", "safetensors file", 19, num_versions, 2, 3, 0.21),
        ],
        incidents=[
            Incident(
                "kill", "checkpoint", 3, 36.0, 37.8, "killed before writing model.safetensors"
            ),
            Incident("corruption", "both", 5, 38.5, 40.0, "5 refusals"),
        ],
        audit=AuditResult(40, 33, num_wrong, not num_wrong, ["live served rubbish"] * num_wrong),
        projections=[project(f, fast, small, ratios.get("xor + zstd-1")) for f in FIGURES],
        unmeasured=UNMEASURED,
        timeline=_timeline(num_versions),
    )


def _version(version: int, zstd: str | None) -> Version:
    density = 0.011 + 0.018 * 0.6**version
    changed = density * STATE_BYTES / 2
    return Version(
        version,
        "delta",
        31 + 1.4 * version,
        "cd" * 32,
        int(changed * 0.86),
        int(changed),
        0.05,
        STATE_BYTES,
        density=density,
        xor_zstd1_bytes=int(changed * 2.7) if zstd else None,
        fast_bytes=int(changed * 1.4),
        small_bytes=int(changed * 0.86),
        limit_bytes=changed * 0.83,
    )


def _codec(name: str, versions: list[Version], limit: float) -> Codec:
    mean = sum(v.num_changed for v in versions) / (len(versions) - 1) * BYTES_PER_CHANGE[name]
    speed = _speed({"gymfast fast": 12.1, "gymfast small": 7.2}.get(name, 1.6), len(versions))
    return Codec(name, mean, 1 - mean / STATE_BYTES, mean / limit, speed, speed, True)


def _speed(rate_gbps: float, num_samples: int) -> Speed:
    return Speed(rate_gbps, rate_gbps * 0.9, rate_gbps * 1.1, num_samples)


def _timeline(num_versions: int) -> list[Mark]:
    marks = [Mark(0.4, who, "start") for who in ("trainer", "live", "checkpoint")]
    for version in range(num_versions + 1):
        at_s = 31 + 1.4 * version
        marks.append(Mark(at_s, "trainer", "publish", version))
        marks += [Mark(at_s + 0.2, who, "serve", version) for who in ("live", "checkpoint")]
    marks += [
        Mark(36.0, "checkpoint", "hold", 3),
        Mark(36.1, "checkpoint", "kill", 3),
        Mark(36.3, "checkpoint", "start"),
        Mark(38.5, "trainer", "damage", 5),
        Mark(38.7, "live", "refuse", 4),
        Mark(38.8, "checkpoint", "refuse", 4),
        Mark(39.5, "trainer", "repair", 5),
    ]
    return marks
