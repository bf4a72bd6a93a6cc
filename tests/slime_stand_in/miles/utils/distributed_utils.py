from slime.utils.distributed_utils import get_gloo_group, init_gloo_group, init_process_group

__all__ = ["get_gloo_group", "init_gloo_group", "init_process_group"]
