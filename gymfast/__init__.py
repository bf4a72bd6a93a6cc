"""Fast, lossless weight sync for RL post-training."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gymfast.delta.apply import apply, inspect, restore, verify
    from gymfast.delta.encode import Encoder, encode
    from gymfast.delta.state import State
    from gymfast.delta.tensors import Tensor

__version__ = "0.1.0"
__all__ = [
    "Encoder",
    "State",
    "Tensor",
    "__version__",
    "apply",
    "encode",
    "inspect",
    "restore",
    "verify",
]


def __getattr__(name: str) -> object:
    """A public name of gymfast.delta, loaded on first use: `gymfast --help` needs no NumPy."""
    if name not in __all__:
        raise AttributeError(f"module 'gymfast' has no attribute {name!r}")
    from gymfast import delta

    return getattr(delta, name)
