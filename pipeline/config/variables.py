"""Refuses or sets environment variables that would change the results of a run."""

import os

from pipeline.errors import UserError

# Accelerate's ways to shard a model, none of which the pipeline supports.
_WAYS = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG", "SAGEMAKER")
# The allowed values of environment variables of Accelerate 1.15, torch 2.13 and their libraries.
REFUSED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((f"ACCELERATE_USE_{name}" for name in _WAYS), ("", "0", "false", "no", "off")),
    "ACCELERATE_DYNAMO_BACKEND": ("", "no"),  # A backend would compile training, but not sampling.
    "ACCELERATE_TORCH_DEVICE": ("",),  # This variable would put all ranks on the same device.
    # The next three variables lower the precision of float32 matrix products.
    "NVIDIA_TF32_OVERRIDE": ("", "0"),
    "ONEDNN_DEFAULT_FPMATH_MODE": ("", "strict"),
    "DNNL_DEFAULT_FPMATH_MODE": ("", "strict"),
}


def refuse() -> None:
    """Raise UserError for an environment variable that would change the results of a run."""
    for name, harmless in REFUSED.items():
        value = os.environ.get(name, "")
        if value.lower() not in harmless:
            got = f"got {value!r} in the environment, which would change what is computed"
            raise UserError(f"{name}: {got}; unset it")


def pin(mixed_precision: str) -> None:
    """Set the precision of a run before the Accelerator is made, whatever the launcher has set."""
    import torch

    os.environ["ACCELERATE_MIXED_PRECISION"] = mixed_precision  # for Accelerators of others
    torch.set_float32_matmul_precision("highest")  # overrides TORCH_ALLOW_TF32_CUBLAS_OVERRIDE
