"""Loading a tokenizer and a model, and where and in which precision it computes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import parse_flag_from_env
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.config.settings import ModelSettings
from pipeline.environments.domains import Domain
from pipeline.errors import UserError
from pipeline.files.hub import hub_reachable
from pipeline.files.untrusted import printable, reason_of, shown
from pipeline.models import lora
from pipeline.models.files import problem_of_name
from pipeline.models.lora import quiet
from pipeline.models.tiny import tiny_model, tiny_tokenizer


def load_tokenizer(settings: ModelSettings, domains: Iterable[Domain] = ()) -> Any:
    """The tokenizer of a model; UserError if it has none.

    `domains`: the tokenizer of the tiny model gets a token for each of their words.
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
    """A causal language model with fp32 parameters; UserError if it cannot be loaded."""
    if settings.model == "tiny":
        return tiny_model(tokenizer, seed)
    return load_folder(settings.model, settings)


def load_folder(folder: str | Path, settings: ModelSettings, device: str | None = None) -> Any:
    """A causal language model with fp32 parameters from a folder or a hub id.

    The adapters of a LoRA checkpoint come merged into their base model. On the device `meta` the
    files are checked, and no weights read. UserError if the files hold no safetensors, lack
    weights of the model or hold them in another shape.
    """
    if lora.is_adapter(folder):
        return lora.load_merged(load_folder(lora.base_of(folder), settings), folder)
    model, info = from_files(
        str(folder),
        "model",
        lambda: AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation=settings.attn_implementation,
            trust_remote_code=settings.trust_remote_code,
            use_safetensors=True,
            local_files_only=not hub_reachable(),
            device_map=device,
            ignore_mismatched_sizes=True,  # refused below
            output_loading_info=True,
        ),
    )
    if misfits := sorted(info["mismatched_keys"]):
        name, found, wanted = misfits[0]
        raise UserError(
            f"model: {folder} holds {name} as {list(found)}, but its config.json asks for "
            f"{list(wanted)}; take both from one model"
        )
    if missing := sorted(info["missing_keys"]):  # which transformers would draw at random
        more = f" and {len(missing) - 1} more weights" if len(missing) > 1 else ""
        raise UserError(
            f"model: {folder} lacks {missing[0]}{more} that its config.json asks for; take both "
            "from one model"
        )
    if unused := sorted(info["unexpected_keys"]):
        warnings.warn(
            f"{folder} holds {len(unused)} weights that the model does not use, such as "
            f"{printable(unused[0])}",
            stacklevel=1,  # Python shows a warning once for each line that warns
        )
    return model


def refuse_other_vocabulary(tokenizer: Any, model: Any) -> None:
    """UserError if the tokenizer has ids without an embedding in the model."""
    last, size = max(tokenizer.get_vocab().values()), model.get_input_embeddings().num_embeddings
    if last >= size:
        raise UserError(
            f"model: its tokenizer has ids up to {last}, but the model {size} embeddings; use the "
            "tokenizer that the model was trained with"
        )


def on_gpu() -> bool:
    """Whether this process computes on a GPU; ACCELERATE_USE_CPU forbids it, as in Accelerate."""
    return torch.cuda.is_available() and not parse_flag_from_env("ACCELERATE_USE_CPU")


def uses_bf16(settings: ModelSettings) -> bool:
    """Whether forward passes run under bf16 autocast here."""
    if settings.mixed_precision == "auto":
        return on_gpu()
    return settings.mixed_precision == "bf16"


def from_files(name: str, what: str, load: Callable[[], Any]) -> Any:
    """The result of `load`, which reads the files of a model; UserError if it fails."""
    remedy = "give a folder made by save_pretrained"
    reason = problem_of_name(name)
    if not reason:
        try:
            with quiet(bars=not os.path.isdir(name)):  # of downloads
                return load()
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # libraries raise anything for files that they do not expect
            reason = reason_of(error)
            if "attention implementation" in str(error):
                remedy = "set attn_implementation eager, or use another model"
            if "custom code" in str(error) or "trust_remote_code" in str(error):
                remedy = "read its code, then set trust_remote_code, which runs it"
    raise UserError(
        f"model: got {shown(name)}, but its {what} cannot be loaded ({reason}); {remedy}"
    )
