from __future__ import annotations

import importlib


def load_function(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
