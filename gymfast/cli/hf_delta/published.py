"""What is told of a version that was published."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gymfast.cli.output import format_size

if TYPE_CHECKING:
    from gymfast.delta.hf_delta import PublishReport


def published_fields(report: PublishReport) -> dict[str, object]:
    """The report as JSON."""
    return {
        "path": str(report.path),
        "version": report.version,
        "is_full": report.is_full,
        "num_tensors": report.num_tensors,
        "num_changed": report.num_changed,
        "stored_bytes": report.stored_bytes,
    }


def published_text(report: PublishReport) -> list[str]:
    """The report for people."""
    size = format_size(report.stored_bytes)
    what = (
        f"a full version of {report.num_tensors} tensors"
        if report.is_full
        else f"{report.num_changed} of {report.num_tensors} tensors changed"
    )
    return [f"{report.path}: version {report.version}, {what}, {size}"]
