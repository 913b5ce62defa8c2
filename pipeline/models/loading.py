"""The policy: loading it, and the log-probabilities that training needs.

Legend: B sequences, T tokens, N selected tokens, U distinct predictions of them, V vocabulary.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import parse_flag_from_env
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from pipeline.config.settings import ModelSettings
from pipeline.environments.domains import Domain
from pipeline.errors import UserError
from pipeline.files.hub import hub_reachable
from pipeline.files.untrusted import printable, reason_of, shown
from pipeline.models import lora
from pipeline.models.files import missing_weights, problem_of_name, weights_in
from pipeline.models.tiny import tiny_model, tiny_tokenizer


def load_tokenizer(settings: ModelSettings, domains: Iterable[Domain] = ()) -> Any:
    """The tokenizer of a model, for these domains where it is made here.

    UserError where there is none.
    """
    if settings.model == "tiny":
        return tiny_tokenizer(domains)
    return from_files(
        settings.model,
        "tokenizer",
        lambda: AutoTokenizer.from_pretrained(
            settings.model,
            trust_remote_code=settings.trust_remote_code,
            local_files_only=not hub_reachable(),
        ),
    )


def load_model(settings: ModelSettings, tokenizer: Any, seed: int) -> Any:
    """A causal language model with fp32 parameters; UserError where it cannot be loaded."""
    if settings.model == "tiny":
        return tiny_model(tokenizer, seed)
    return load_folder(settings.model, settings)


def load_folder(folder: str | Path, settings: ModelSettings) -> Any:
    """A causal language model with fp32 parameters from a folder or a hub id.

    The adapters of a LoRA checkpoint come merged into their base model. UserError where its files
    hold no safetensors, or not all weights of the model.
    """
    if lora.is_adapter(folder):
        return lora.load_merged(load_folder(lora.base_of(folder), settings), folder)
    if not problem_of_name(str(folder)) and os.path.isdir(folder):
        weights_in(folder)
    model, told = from_files(
        str(folder),
        "model",
        lambda: AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation=settings.attn_implementation,
            trust_remote_code=settings.trust_remote_code,
            use_safetensors=True,
            local_files_only=not hub_reachable(),
            output_loading_info=True,
        ),
    )
    if missing := sorted(told["missing_keys"]):  # which transformers would draw at random
        raise missing_weights(folder, missing)
    if unused := sorted(told["unexpected_keys"]):
        warnings.warn(
            f"{folder} holds {len(unused)} weights that the model does not use, such as "
            f"{printable(unused[0])}",
            stacklevel=2,
        )
    return model


def on_gpu() -> bool:
    """Whether this process computes on a GPU; ACCELERATE_USE_CPU forbids it, as in Accelerate."""
    return torch.cuda.is_available() and not parse_flag_from_env("ACCELERATE_USE_CPU")


def uses_bf16(settings: ModelSettings) -> bool:
    """Whether forward passes run under bf16 autocast here."""
    if settings.mixed_precision == "auto":
        return on_gpu()
    return settings.mixed_precision == "bf16"


def from_files(name: str, what: str, load: Callable[[], Any]) -> Any:
    """What `load` makes of the files of a model; UserError where it cannot."""
    remedy = "give a folder made by save_pretrained"
    reason = problem_of_name(name)
    if not reason:
        try:
            with _quiet():
                return load()
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever libraries say of files that are not what they expect
            reason = reason_of(error)
            if "attention implementation" in str(error):
                remedy = "set attn_implementation eager, or use another model"
            if "custom code" in str(error) or "trust_remote_code" in str(error):
                remedy = "read its code, then set trust_remote_code, which runs it"
    raise UserError(
        f"model: got {shown(name)}, but its {what} cannot be loaded ({reason}); {remedy}"
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what transformers logs beside the reason that it raises."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
