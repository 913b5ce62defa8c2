"""Refuses or sets environment variables that would change or break a run."""

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


# Numbers that Accelerate reads before anything is checked.
COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
WANDB_MODES = ("online", "offline", "shared", "disabled", "dryrun", "run")


def refuse() -> None:
    """Raise UserError for a variable that would change results, or that a library cannot read.

    An empty number counts as none.
    """
    for name in COUNTS:
        value = os.environ.get(name, "").strip()
        if not value:
            os.environ.pop(name, None)
        elif not (value.isascii() and value.isdigit() and int(value)):
            raise UserError(f"{name}: got {value!r} in the environment; give a number of threads")
    mode = os.environ.get("WANDB_MODE") or WANDB_MODES[0]
    if mode not in WANDB_MODES:
        known = ", ".join(WANDB_MODES)
        raise UserError(f"WANDB_MODE: got {mode!r} in the environment; give one of {known}")
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
