"""Refuses or sets environment variables that would change or break a run."""

import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.common.errors import RunError, UserError
from pipeline.common.untrusted import keep_secret, reason_of, shown

# Accelerate's ways to shard a model, none of which the pipeline supports.
_WAYS = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG", "SAGEMAKER")
# Variables of Accelerate 1.15, torch 2.13 and their libraries that would change what is computed,
# with the values that do not.
REFUSED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((f"ACCELERATE_USE_{name}" for name in _WAYS), ("0", "false", "no", "off")),
    "ACCELERATE_DYNAMO_BACKEND": ("no",),  # A backend would compile training, but not sampling.
    "ACCELERATE_TORCH_DEVICE": (),  # This variable would put all ranks on the same device.
    # The next three variables lower the precision of float32 matrix products.
    "NVIDIA_TF32_OVERRIDE": ("0",),
    "ONEDNN_DEFAULT_FPMATH_MODE": ("strict",),
    "DNNL_DEFAULT_FPMATH_MODE": ("strict",),
}
# Variables that Accelerate and W&B read late: the form of a value, and what to give.
FORMS = {
    "OMP_NUM_THREADS": ("[1-9][0-9]*", "a number of threads"),
    "MKL_NUM_THREADS": ("[1-9][0-9]*", "a number of threads"),
    "WANDB_MODE": (
        "online|offline|shared|disabled|dryrun|run",
        "one of online, offline, shared, disabled, dryrun, run",
    ),
}
_LIBRARIES = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})


def refuse() -> None:
    """Raise UserError for a variable that would change results, or that cannot be read."""
    for name in (*REFUSED, *FORMS):
        if not os.environ.get(name, "").strip():
            os.environ.pop(name, None)  # Accelerate cannot read an empty value.
    for name, (form, remedy) in FORMS.items():
        value = os.environ.get(name)
        if value is not None and not re.fullmatch(form, value.strip()):
            raise UserError(f"{name}: got {value!r} in the environment; give {remedy}")
    for name, harmless in REFUSED.items():
        value = os.environ.get(name)
        if value is not None and value.lower() not in harmless:
            raise UserError(
                f"{name}: got {value!r} in the environment, which would change what is computed; "
                "unset it"
            )


@contextmanager
def naming_variable() -> Iterator[None]:
    """Raise UserError for a variable that a library cannot read as it is imported.

    Its name stands in the lines of code that failed, or its value in the error's message.
    """
    try:
        yield
    except (UserError, RunError, ImportError):
        raise
    except Exception as error:
        code = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename.startswith(_LIBRARIES)
        ]
        if all(frame.name != "<module>" for frame in code):
            raise
        lines = " ".join(frame.line or "" for frame in code)
        for name, value in os.environ.items():
            is_text = "_" in name and value and not value.isdigit()
            if is_text and (_holds(lines, name) or _holds(str(error), value)):
                if re.search("KEY|TOKEN|SECRET|PASSWORD", name):
                    keep_secret(value)
                raise UserError(
                    f"{name}: got {shown(value)} in the environment, which cannot be read "
                    f"({reason_of(error)}); mend it, or unset it"
                ) from None
        raise


def _holds(text: str, word: str) -> bool:
    return re.search(rf"(?<![\w/.-]){re.escape(word)}(?![\w/.-])", text) is not None


def pin(mixed_precision: str) -> None:
    """Set the precision of a run before the Accelerator is made, whatever the launcher has set."""
    import torch

    os.environ["ACCELERATE_MIXED_PRECISION"] = mixed_precision  # for Accelerators of others
    torch.set_float32_matmul_precision("highest")  # overrides TORCH_ALLOW_TF32_CUBLAS_OVERRIDE
