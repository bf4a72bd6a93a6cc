"""Where an updater is picked by the flags."""

from __future__ import annotations

from slime.backends.megatron_utils.update_weight import update_weight_from_distributed

UpdateWeightFromDistributed = update_weight_from_distributed.UpdateWeightFromDistributed


class UpdateWeightFromDisk: ...


class UpdateWeightFromTensor: ...


def pick(args):
    if args.update_weight_transport == "disk":
        return UpdateWeightFromDisk
    return UpdateWeightFromTensor if args.colocate else UpdateWeightFromDistributed
