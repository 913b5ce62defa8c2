"""Variables of the environment that would change what a run computes: refused, or without effect.

The settings of a run are in its recipe and its flags. `refuse` imports no torch.
"""

from __future__ import annotations

import os

from pipeline.errors import UserError

# Of Accelerate 1.15, torch 2.13 and their libraries. Each with the values that change nothing.
_OFF = ("", "0", "false", "no", "off")
REFUSED: dict[str, tuple[str, ...]] = {
    # Other ways to spread a model than the one that the update is made for.
    "ACCELERATE_USE_DEEPSPEED": _OFF,
    "ACCELERATE_USE_FSDP": _OFF,
    "ACCELERATE_USE_MEGATRON_LM": _OFF,
    "ACCELERATE_USE_PARALLELISM_CONFIG": _OFF,
    "ACCELERATE_USE_SAGEMAKER": _OFF,
    "ACCELERATE_DYNAMO_BACKEND": ("", "no"),  # would compile the training forward alone
    "ACCELERATE_TORCH_DEVICE": ("",),  # one device for all ranks
    # Less precision than float32 in products of matrices, out of reach of torch's own settings.
    "NVIDIA_TF32_OVERRIDE": ("", "0"),
    "ONEDNN_DEFAULT_FPMATH_MODE": ("", "strict"),
    "DNNL_DEFAULT_FPMATH_MODE": ("", "strict"),
}


def refuse() -> None:
    """UserError names a variable that is set to what no setting of a run asks for."""
    for name, harmless in REFUSED.items():
        value = os.environ.get(name, "")
        if value.lower() in harmless:
            continue
        launcher = name.startswith("ACCELERATE_")
        remedy = ", or start with --config_file accelerate_configs/multi_gpu.yaml"
        raise UserError(
            f"{name}: got {value!r} in the environment, which would change what is computed; "
            f"unset it{remedy if launcher else ''}"
        )


def pin(mixed_precision: str) -> None:
    """Give the variables that a launcher's image or configuration may set the run's own values.

    The gradient's accumulation is pinned where the Accelerator is made.
    """
    import torch

    os.environ["ACCELERATE_MIXED_PRECISION"] = mixed_precision  # read by the warm start's trainer
    torch.set_float32_matmul_precision("highest")  # TORCH_ALLOW_TF32_CUBLAS_OVERRIDE lowers it
