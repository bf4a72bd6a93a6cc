from __future__ import annotations

import torch.distributed as dist

_groups = []


def init_gloo_group():
    _groups.append(dist.new_group(backend="gloo"))
    return _groups[-1]


def get_gloo_group():
    return _groups[-1]
