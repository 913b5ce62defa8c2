"""Environment variables that would change the numbers of a run: refused, or set to its values.

The settings of a run are in its recipe and its flags.
"""

from __future__ import annotations

import os

from pipeline.errors import UserError

# Ways of Accelerate to spread a model over ranks that the update does not support.
_WAYS = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG", "SAGEMAKER")
_OFF = ("", "0", "false", "no", "off")
# Variables of Accelerate 1.15, torch 2.13 and their libraries, with the values that have no effect.
REFUSED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((f"ACCELERATE_USE_{name}" for name in _WAYS), _OFF),
    "ACCELERATE_DYNAMO_BACKEND": ("", "no"),  # would compile only the training forward
    "ACCELERATE_TORCH_DEVICE": ("",),  # one device for all ranks
    # Matrix products below float32 precision, which torch's own settings cannot undo.
    "NVIDIA_TF32_OVERRIDE": ("", "0"),
    "ONEDNN_DEFAULT_FPMATH_MODE": ("", "strict"),
    "DNNL_DEFAULT_FPMATH_MODE": ("", "strict"),
}


def refuse() -> None:
    """Raise UserError for a variable that would change the numbers of a run."""
    for name, harmless in REFUSED.items():
        value = os.environ.get(name, "")
        if value.lower() not in harmless:
            raise UserError(
                f"{name}: got {value!r} in the environment, which would change what is computed; "
                "unset it"
            )


def pin(mixed_precision: str) -> None:
    """Set variables that a launcher may have set to the run's values, before the Accelerator."""
    import torch

    os.environ["ACCELERATE_MIXED_PRECISION"] = mixed_precision  # read by the warm start's trainer
    torch.set_float32_matmul_precision("highest")  # TORCH_ALLOW_TF32_CUBLAS_OVERRIDE lowers it
