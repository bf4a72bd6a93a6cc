"""Frames: their records, their writer and the strict parser (docs/wire-format.md section 3)."""

from gymfast.delta.frame_parser import parse_frame
from gymfast.delta.frame_writer import FrameWriter
from gymfast.delta.records import (
    FAST,
    MAGIC,
    PROFILES,
    BlocksRecord,
    EndEntry,
    EndRecord,
    FrameInfo,
    HeaderInfo,
    Kind,
    Mode,
    ParsedFrame,
    Status,
    TensorInfo,
    TensorRecord,
    frame_info,
    root_of,
)

__all__ = [
    "FAST",
    "MAGIC",
    "PROFILES",
    "BlocksRecord",
    "EndEntry",
    "EndRecord",
    "FrameInfo",
    "FrameWriter",
    "HeaderInfo",
    "Kind",
    "Mode",
    "ParsedFrame",
    "Status",
    "TensorInfo",
    "TensorRecord",
    "frame_info",
    "parse_frame",
    "root_of",
]
