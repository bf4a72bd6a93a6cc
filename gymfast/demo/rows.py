"""The tables of a run as rows of text, for the terminal and for the report."""

from __future__ import annotations

from gymfast.demo.projection import LINK_GBPS
from gymfast.demo.result import Codec, DemoResult, Speed
from gymfast.demo.words import count_text, percent_text, seconds_text, size_text

Row = tuple[str, ...]
CODEC_HEADER: Row = (
    "one version",
    "bytes",
    "saving",
    "x limit",
    "encode GB/s",
    "apply GB/s",
    "equal",
)
PROJECTION_HEADER: Row = (
    "model",
    "BF16",
    "full",
    "98 % saved",
    "xor + zstd-1",
    "gymfast fast",
    "gymfast small",
    "published",
)
INCIDENT_HEADER: Row = ("what was done", "version", "to", "at", "healed after", "how it went")
RECEIVER_HEADER: Row = ("receiver", "target", "served", "newest", "starts", "refusals", "apply")


def codec_rows(result: DemoResult) -> list[Row]:
    """One row for each way to send a version, the plain copy and the limit among them."""
    rows = [_codec_row(codec) for codec in result.codecs]
    if not any(codec.name == "xor + zstd-1" for codec in result.codecs):
        rows.insert(1, ("xor + zstd-1", *["not installed"], *["-"] * 5))
    limit_saving = 1 - result.limit_bytes / result.model.state_bytes
    limit = ("limit", size_text(result.limit_bytes), percent_text(limit_saving), "1.00")
    memcpy = _speed_text(result.memcpy)
    return [
        *rows,
        (*limit, "-", "-", "-"),
        ("memcpy", size_text(result.model.state_bytes), "-", "-", memcpy, memcpy, "-"),
    ]


def projection_rows(result: DemoResult) -> list[Row]:
    """Seconds on the wire for each model."""
    return [
        (
            projection.model,
            size_text(projection.bf16_bytes),
            f"{projection.full_s:.3g}",
            f"{projection.saving_98_s:.3g}",
            "-" if projection.xor_zstd1_s is None else f"{projection.xor_zstd1_s:.3g}",
            f"{projection.fast_s:.3g}",
            f"{projection.small_s:.3g}",
            f"{projection.published_s:g} ({projection.published_dtype})",
        )
        for projection in result.projections
    ]


def incident_rows(result: DemoResult) -> list[Row]:
    """What was done on purpose, and how it ended."""
    names = {"kill": "SIGKILL in mid-apply", "corruption": "stored object damaged"}
    return [
        (
            names[incident.kind],
            str(incident.version),
            incident.receiver,
            f"{incident.at_s:.1f} s",
            f"{incident.healed_at_s - incident.at_s:.1f} s",
            incident.detail,
        )
        for incident in result.incidents
    ]


def receiver_rows(result: DemoResult) -> list[Row]:
    """What became of each receiver."""
    return [
        (
            receiver.name,
            receiver.target,
            str(receiver.num_served),
            str(receiver.last_version),
            str(receiver.num_starts),
            str(receiver.num_refusals),
            seconds_text(receiver.median_apply_s),
        )
        for receiver in result.receivers
    ]


def machine_rows(result: DemoResult) -> list[Row]:
    """Model, text, machine and libraries."""
    model, machine = result.model, result.machine
    cache = "unknown" if machine.cache_bytes is None else size_text(machine.cache_bytes)
    network = (
        f"{count_text(model.num_parameters)} parameters, {model.num_layers} layers of width "
        f"{model.width}, {model.num_tensors} tensors, {size_text(model.state_bytes)} in BF16"
    )
    training = (
        f"{model.warmup_steps} warm-up steps on {size_text(model.text_bytes)} of the standard "
        f"library's sources (loss {model.first_loss:.2f} to {model.last_loss:.2f} nats a byte), "
        "then group-normalised policy-gradient steps: AdamW (0.9, 0.98), learning rate "
        f"{model.learning_rate:g}, FP32 masters, matrix products in {model.matmul_dtype}"
    )
    software = (
        f"gymfast {result.gymfast} (kernels: {machine.instruction_set}), "
        f"Python {machine.python}, NumPy {machine.numpy}, torch {machine.torch}, "
        f"zstd: {machine.zstd or 'not installed'}, {machine.platform}"
    )
    return [
        ("model", network),
        ("training", training),
        ("machine", f"{machine.cpu}, {machine.num_cores} cores, last-level cache {cache}"),
        ("software", software),
        ("run", f"seed {result.seed}, started {result.started}, {result.total_s:.0f} s in all"),
    ]


def audit_text(result: DemoResult) -> str:
    """What was compared with what."""
    audit = result.audit
    return (
        f"{audit.num_served} served versions were compared with the trainer's own list: the root "
        "of the protocol, and a SHA-256 over names and bytes that shares no code with the codec. "
        f"A third program read the checkpoint from disk {audit.num_outside_reads} times while it "
        f"was declared to be a version. Wrong: {audit.num_wrong or 'none'}."
    )


def verdict(result: DemoResult) -> str:
    """The outcome in one sentence."""
    if result.audit.num_wrong:
        return f"{result.audit.num_wrong} wrong: {result.audit.wrong[0]}"
    return "Digests equal: yes. Both receivers healed; nothing wrong was ever served."


def cache_text(result: DemoResult) -> str:
    """Whether the speeds are those of memory or of the cache."""
    state, cache = result.model.state_bytes, result.machine.cache_bytes
    if cache is None:
        return f"The state has {size_text(state)}; the size of the cache is unknown here."
    if 2 * state <= cache:
        return (
            f"The state has {size_text(state)} and fits the cache of {size_text(cache)} twice: "
            "these speeds are those of the cache, all of them."
        )
    return (
        f"The state has {size_text(state)}, the last-level cache {size_text(cache)}: two states "
        "do not fit, so most bytes come from memory."
    )


def projection_note(result: DemoResult) -> str:
    """What the projection rests on."""
    return (
        f"Line rate of {LINK_GBPS:g} Gb/s, density measured here for BF16 "
        f"({100 * result.mean_density:.2f} % a version). The published figures assume 98 % saving; "
        "GLM 4.7's is for its 357 GB of FP8, so the 98 % column gives the BF16 size instead. "
        + result.unmeasured
    )


def _codec_row(codec: Codec) -> Row:
    return (
        codec.name,
        size_text(codec.mean_bytes),
        percent_text(codec.saving_ratio) if codec.saving_ratio else "-",
        f"{codec.over_limit_ratio:.2f}",
        _speed_text(codec.encode),
        _speed_text(codec.apply),
        "-" if codec.is_exact is None else "yes" if codec.is_exact else "NO",
    )


def _speed_text(speed: Speed | None) -> str:
    if speed is None:
        return "-"
    digits = 2 if speed.median_gbps < 1 else 1
    return f"{speed.median_gbps:.{digits}f}"
