"""Publish and subscribe: versions of weights in a store, committed once and followed exactly."""

from gymfast.sync.cleaner import CleanReport, collect
from gymfast.sync.publish_report import PhaseSeconds, PublishReport
from gymfast.sync.publisher import Publisher

__all__ = ["CleanReport", "PhaseSeconds", "PublishReport", "Publisher", "collect"]
