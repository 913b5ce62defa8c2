"""The device of this rank, and the type in which it computes."""

import torch
from accelerate.utils import parse_flag_from_env

from pipeline.config.settings import ModelSettings


def on_gpu() -> bool:
    """Return whether to use a GPU; the environment variable ACCELERATE_USE_CPU forbids GPUs."""
    return torch.cuda.is_available() and not parse_flag_from_env("ACCELERATE_USE_CPU")


def dtype_of(settings: ModelSettings) -> torch.dtype:
    """Return the type in which a model computes: the sampler's weights, and LoRA's frozen ones."""
    return torch.bfloat16 if uses_bf16(settings) else torch.float32


def uses_bf16(settings: ModelSettings) -> bool:
    return on_gpu() if settings.mixed_precision == "auto" else settings.mixed_precision == "bf16"
