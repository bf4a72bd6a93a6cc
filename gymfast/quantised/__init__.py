"""Quantised checkpoints: INT4 and FP8 tensors as inference engines read them, made bit for bit."""

from gymfast.quantised.fp8 import Fp8Scheme
from gymfast.quantised.int4 import Int4Scheme
from gymfast.quantised.quantiser import Quantiser, Scheme

__all__ = ["Fp8Scheme", "Int4Scheme", "Quantiser", "Scheme"]
