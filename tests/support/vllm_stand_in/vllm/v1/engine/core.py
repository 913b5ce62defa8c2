"""As in vLLM: an engine that ends takes the process group along, unless this does nothing."""

from torch import distributed


def cleanup_dist_env_and_memory() -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()
