"""The page that `--report` writes: one file, no network, light and dark."""

from __future__ import annotations

from html import escape
from pathlib import Path
from string import Template

from gymfast.demo import rows
from gymfast.demo.charts import bytes_chart, density_chart, speed_chart
from gymfast.demo.html import html_card, html_table
from gymfast.demo.result import Codec, DemoResult
from gymfast.demo.timeline import timeline_chart
from gymfast.demo.words import count_text, percent_text, size_text

TEMPLATE = Path(__file__).with_name("report_template.html")


def write_report(result: DemoResult, path: Path) -> None:
    """Write the page of a run; an existing file is replaced."""
    path.write_text(render_report(result), encoding="utf-8")


def render_report(result: DemoResult) -> str:
    """The page of a run."""
    stressed = [i for i, codec in enumerate(result.codecs) if codec.name.startswith("gymfast")]
    offset = 0 if result.machine.zstd else 1
    fields = {
        "lead": escape(_lead(result)),
        "cards": _cards(result),
        "verdict": escape(rows.verdict(result)),
        "verdict_class": "wrong" if result.audit.num_wrong else "ok",
        "codec_text": escape(_codec_text(result)),
        "codec_table": html_table(
            rows.CODEC_HEADER, rows.codec_rows(result), strong=[i + offset for i in stressed]
        ),
        "codec_note": escape(_codec_note(result)),
        "bytes_chart": bytes_chart(result),
        "density_chart": density_chart(result),
        "density_text": escape(_density_text(result)),
        "speed_chart": speed_chart(result),
        "speed_text": escape(_speed_text(result)),
        "timeline_chart": timeline_chart(result),
        "incident_table": html_table(rows.INCIDENT_HEADER, rows.incident_rows(result), wrap=[5])
        + html_table(rows.RECEIVER_HEADER, rows.receiver_rows(result)),
        "audit_text": escape(rows.audit_text(result)),
        "projection_table": html_table(rows.PROJECTION_HEADER, rows.projection_rows(result)),
        "projection_note": escape(rows.projection_note(result)),
        "machine_table": html_table(("", ""), rows.machine_rows(result), wrap=[1]),
        "footer": escape(_footer(result)),
    }
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(fields)


def _lead(result: DemoResult) -> str:
    num_deltas = sum(version.small_bytes is not None for version in result.versions)
    return (
        f"A transformer of {count_text(result.model.num_parameters)} parameters was trained for "
        f"{num_deltas} steps at an RL learning rate. Each step was published, and two receiver "
        "processes followed. One was killed in the middle of an apply; one stored object was "
        "damaged on purpose."
    )


def _cards(result: DemoResult) -> str:
    small = _codec(result, "gymfast small")
    audit = result.audit
    cards = [
        html_card(percent_text(small.saving_ratio), "fewer bytes than the full weights"),
        html_card(
            f"{size_text(small.mean_bytes)}",
            f"a version, instead of {size_text(result.model.state_bytes)}",
        ),
        html_card(f"{small.over_limit_ratio:.2f}x", "of the information limit"),
        html_card(
            f"{audit.num_wrong} of {audit.num_served + audit.num_outside_reads}",
            "states served or on disk were wrong",
        ),
    ]
    return "".join(cards)


def _codec_text(result: DemoResult) -> str:
    return (
        "Means over all versions after the first. On average "
        f"{100 * result.mean_density:.2f} % of the weights changed; the limit is "
        f"{result.limit_bits_per_change:.2f} bits for each change."
    )


def _codec_note(result: DemoResult) -> str:
    zstd = result.machine.zstd
    library = f" The zstd library is {zstd}." if zstd else " No zstd library is installed."
    return (
        "One thread each; GB of uncompressed weights. The receivers and publishers are resident. "
        "gymfast's times include the digests of blocks and tensors before and after; "
        "xor + zstd-1 checks nothing." + library
    )


def _density_text(result: DemoResult) -> str:
    return (
        "The first steps change more: the optimiser starts fresh at the RL learning rate of "
        f"{result.model.learning_rate:g}, and Adam's first updates all have full size."
    )


def _speed_text(result: DemoResult) -> str:
    samples = result.memcpy.num_samples
    return (
        f"Medians of {samples} versions; thin lines run from the 10 % to the 90 % quantile. "
        + rows.cache_text(result)
    )


def _footer(result: DemoResult) -> str:
    return (
        f"Made by gymfast {result.gymfast} demo, {result.started}. Numbers: gymfast demo --json "
        f"(schema {result.schema})."
    )


def _codec(result: DemoResult, name: str) -> Codec:
    return next(codec for codec in result.codecs if codec.name == name)
