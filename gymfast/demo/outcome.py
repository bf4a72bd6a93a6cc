"""From what happened and what was measured to the numbers of the run."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from gymfast import __version__
from gymfast.demo.director import RECEIVERS, Log
from gymfast.demo.events import Published, TrainerReady
from gymfast.demo.machine import describe_machine
from gymfast.demo.options import LEARNING_RATE, DemoOptions
from gymfast.demo.projection import FIGURES, UNMEASURED, project
from gymfast.demo.replay import PairResult, Timing, speed
from gymfast.demo.result import (
    SCHEMA,
    AuditResult,
    Codec,
    DemoResult,
    Model,
    Receiver,
    Version,
)
from gymfast.errors import GymfastError

TARGETS = {"live": "tensors in memory", "checkpoint": "safetensors file"}


def build_result(
    options: DemoOptions,
    log: Log,
    pairs: Sequence[PairResult],
    *,
    zstd: str | None,
    start_s: float,
    total_s: float,
) -> DemoResult:
    """Everything about a run; `start_s` is its start on the monotonic clock.

    Raises GymfastError if there is nothing to report.
    """
    if log.ready is None or not pairs:
        raise GymfastError("the demo ended before a delta was published: nothing to report")
    state_bytes = log.ready.state_bytes
    codecs = _codecs(pairs, state_bytes)
    ratios = {codec.name: codec.mean_bytes / state_bytes for codec in codecs}
    fast, small = ratios["gymfast fast"], ratios["gymfast small"]
    num_changed = sum(pair.limit.num_changed for pair in pairs)
    return DemoResult(
        schema=SCHEMA,
        gymfast=__version__,
        started=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        total_s=total_s,
        is_quick=options.quick,
        seed=options.seed,
        machine=describe_machine(log.ready.torch_version, zstd),
        model=_model(options, log, log.ready),
        versions=_versions(log, pairs, state_bytes, start_s),
        memcpy=speed(state_bytes, [pair.memcpy_s for pair in pairs]),
        limit_bytes=_mean(pair.limit.size_bytes for pair in pairs),
        limit_bits_per_change=8 * sum(p.limit.size_bytes for p in pairs) / max(num_changed, 1),
        mean_density=num_changed / sum(pair.limit.num_elements for pair in pairs),
        codecs=codecs,
        receivers=_receivers(log),
        incidents=log.incidents,
        audit=_audit(log, pairs),
        projections=[project(f, fast, small, ratios.get("xor + zstd-1")) for f in FIGURES],
        unmeasured=UNMEASURED,
        timeline=log.timeline,
    )


def _codecs(pairs: Sequence[PairResult], state_bytes: int) -> list[Codec]:
    limit = _mean(pair.limit.size_bytes for pair in pairs)

    def codec(name: str, timings: Sequence[Timing]) -> Codec:
        mean = _mean(timing.size_bytes for timing in timings)
        return Codec(
            name=name,
            mean_bytes=mean,
            saving_ratio=1 - mean / state_bytes,
            over_limit_ratio=mean / limit,
            encode=speed(state_bytes, [timing.encode_s for timing in timings]),
            apply=speed(state_bytes, [timing.apply_s for timing in timings]),
            is_exact=all(timing.is_exact for timing in timings),
        )

    xor = [pair.xor_zstd1 for pair in pairs if pair.xor_zstd1 is not None]
    return [
        Codec("full", state_bytes, 0.0, state_bytes / limit, None, None, None),
        *([codec("xor + zstd-1", xor)] if xor else []),
        codec("gymfast fast", [pair.fast for pair in pairs]),
        codec("gymfast small", [pair.small for pair in pairs]),
    ]


def _model(options: DemoOptions, log: Log, ready: TrainerReady) -> Model:
    losses = log.losses or [(0, 0.0)]
    return Model(
        num_parameters=ready.num_parameters,
        num_tensors=ready.num_tensors,
        state_bytes=ready.state_bytes,
        num_layers=options.shape.num_layers,
        width=options.shape.width,
        text_bytes=ready.text_bytes,
        warmup_steps=losses[-1][0],
        first_loss=losses[0][1],
        last_loss=losses[-1][1],
        learning_rate=LEARNING_RATE,
        matmul_dtype="BF16" if ready.uses_bf16 else "FP32",
    )


def _versions(
    log: Log, pairs: Sequence[PairResult], state_bytes: int, start_s: float
) -> list[Version]:
    by_version = {pair.version: pair for pair in pairs}
    published = [log.audit.published[version] for version in sorted(log.audit.published)]
    return [_version(e, by_version.get(e.version), state_bytes, start_s) for e in published]


def _version(
    event: Published, pair: PairResult | None, state_bytes: int, start_s: float
) -> Version:
    version = Version(
        version=event.version,
        kind=event.kind,
        at_s=event.at_s - start_s,
        root=event.root,
        stored_bytes=event.frame_bytes,
        num_changed=event.num_changed,
        reward=event.reward,
        full_bytes=state_bytes,
    )
    if pair is None:
        return version
    return Version(
        **{name: getattr(version, name) for name in version.__struct_fields__[:8]},
        density=pair.limit.num_changed / pair.limit.num_elements,
        xor_zstd1_bytes=pair.xor_zstd1.size_bytes if pair.xor_zstd1 else None,
        fast_bytes=pair.fast.size_bytes,
        small_bytes=pair.small.size_bytes,
        limit_bytes=pair.limit.size_bytes,
    )


def _receivers(log: Log) -> list[Receiver]:
    receivers = []
    for name in RECEIVERS:
        served = [event for who, event in log.audit.served if who == name]
        installed = [event for event in served if event.num_versions]
        receivers.append(
            Receiver(
                name=name,
                target=TARGETS[name],
                num_served=len(served),
                last_version=served[-1].version,
                num_starts=log.num_starts[name],
                num_refusals=sum(who == name for who, _ in log.refusals),
                median_apply_s=statistics.median(event.apply_s for event in installed),
            )
        )
    return receivers


def _audit(log: Log, pairs: Sequence[PairResult]) -> AuditResult:
    wrong = log.audit.wrong()
    for pair in pairs:
        ways = {"fast": pair.fast, "small": pair.small, "xor + zstd-1": pair.xor_zstd1}
        wrong += [
            f"version {pair.version} came out of {name} with other bytes"
            for name, timing in ways.items()
            if timing is not None and not timing.is_exact
        ]
    return AuditResult(
        num_served=len(log.audit.served),
        num_outside_reads=sum(read.version is not None for read in log.audit.outside_reads),
        num_wrong=len(wrong),
        digests_equal=not wrong,
        wrong=wrong,
    )


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)
