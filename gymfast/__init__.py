"""Fast, lossless weight sync for RL post-training."""

__version__ = "0.1.0"
__all__ = ["__version__"]
