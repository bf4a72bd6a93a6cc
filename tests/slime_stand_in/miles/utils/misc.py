from slime.utils.misc import load_function

__all__ = ["load_function"]
