"""Refuses or sets environment variables that would change or break a run."""

import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.errors import RunError, UserError
from pipeline.files.untrusted import keep_secret, reason_of, shown

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
# Options of torch's allocator, which torch reads when it first needs a GPU: KEY:VALUE, with commas.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_OPTION = r"\s*\w+\s*:\s*(?:\[[^\]]+\]|[\w.]+)\s*"
_OPTIONS = re.compile(f"{_OPTION}(?:,{_OPTION})*,?")
_NO_NUMBER = re.compile(r"_(?:mb|threshold|fraction)\s*:\s*[^\s\d.]")
_NAME = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+")
_READS = re.compile("environ|getenv|from_env")
_LIBRARIES = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
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
    for name in ALLOCATOR:
        value = os.environ.get(name, "")
        if value and (_OPTIONS.fullmatch(value) is None or _NO_NUMBER.search(value)):
            form = "give KEY:VALUE pairs with commas, such as expandable_segments:True"
            raise UserError(f"{name}: got {value!r} in the environment; {form}")
    for name, harmless in REFUSED.items():
        value = os.environ.get(name, "")
        if not value:
            os.environ.pop(name, None)  # Accelerate cannot read an empty ACCELERATE_TORCH_DEVICE
        if value.lower() not in harmless:
            got = f"got {value!r} in the environment, which would change what is computed"
            raise UserError(f"{name}: {got}; unset it")


@contextmanager
def named() -> Iterator[None]:
    """Raise UserError for an environment variable that a library cannot read."""
    try:
        yield
    except (UserError, RunError):
        raise
    except Exception as error:
        if name := _blamed(error):
            if re.search("KEY|TOKEN|SECRET|PASSWORD", name):
                keep_secret(os.environ[name])
            got = f"got {shown(os.environ[name])} in the environment"
            why = f"which cannot be read ({reason_of(error)})"
            raise UserError(f"{name}: {got}, {why}; mend it, or unset it") from None
        raise


def _blamed(error: Exception) -> str:
    """Return the variable whose value made a library fail, or "".

    It stands in the line of code that read it and failed. If the import of a library failed, it may
    also stand in another line or in the error's message, or its value may stand in the message.
    """
    frames = list(reversed(traceback.extract_tb(error.__traceback__)))
    in_library = [frame for frame in frames if frame.filename.startswith(_LIBRARIES)]
    reading = [frame.line or "" for frame in frames[:3] if _READS.search(frame.line or "")]
    texts = reading if isinstance(error, ValueError) else []
    is_import = any(frame.name == "<module>" for frame in in_library)
    if is_import := is_import and not isinstance(error, ImportError):
        texts += [str(error), *(frame.line or "" for frame in in_library)]
    for text in texts:
        if names := [name for name in _NAME.findall(text) if name in os.environ]:
            return str(names[0])
    values = {n: value for n, value in os.environ.items() if "_" in n and not value.isdigit()}
    reason = reason_of(error) if is_import else ""
    found = [name for name, value in values.items() if value and _holds(reason, value)]
    return max(found, key=lambda name: len(values[name]), default="")


def _holds(text: str, value: str) -> bool:
    word = rf"(?<![\w/.-]){re.escape(value)}(?![\w/.-])"
    return re.search(word, text, re.IGNORECASE) is not None


def pin(mixed_precision: str) -> None:
    """Set the precision of a run before the Accelerator is made, whatever the launcher has set."""
    import torch

    os.environ["ACCELERATE_MIXED_PRECISION"] = mixed_precision  # for Accelerators of others
    torch.set_float32_matmul_precision("highest")  # overrides TORCH_ALLOW_TF32_CUBLAS_OVERRIDE
