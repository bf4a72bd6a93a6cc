"""Where an updater is picked by the flags."""

from __future__ import annotations

from miles.backends.megatron_utils.update_weight.update_weight_from_distributed import broadcast

UpdateWeightFromDistributed = broadcast.UpdateWeightFromDistributed


def pick(args):
    return UpdateWeightFromDistributed
