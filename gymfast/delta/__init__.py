"""The delta codec: frames that turn one state of named tensors into the next."""

from gymfast.delta.apply import ApplyReport, apply, inspect, restore, verify
from gymfast.delta.encode import Encoder, EncodeStats, encode
from gymfast.delta.frame import FrameInfo, TensorInfo
from gymfast.delta.state import State
from gymfast.delta.tensors import Tensor, Weights, as_tensor

__all__ = [
    "ApplyReport",
    "EncodeStats",
    "Encoder",
    "FrameInfo",
    "State",
    "Tensor",
    "TensorInfo",
    "Weights",
    "apply",
    "as_tensor",
    "encode",
    "inspect",
    "restore",
    "verify",
]
