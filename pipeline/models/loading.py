"""Loads tokenizers and models, and tells which device and precision a run uses."""

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)
from transformers.tokenization_utils_base import FULL_TOKENIZER_FILE
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, cached_file

from pipeline.common.children import rehearse
from pipeline.common.console import say
from pipeline.common.errors import UserError
from pipeline.common.hub import hub_reachable
from pipeline.common.untrusted import is_inside, parse_json, read_file, reason_of, shown
from pipeline.config.settings import Config, ModelSettings
from pipeline.environments.domains import Domain
from pipeline.models import lora
from pipeline.models.lora import quiet
from pipeline.models.model_files import MAX_JSON_BYTES, problem_of_name, remedy_of
from pipeline.models.tiny import tiny_model, tiny_tokenizer

# Sizes of hub models, copied from config.json. With SHAPES, `--check` estimates the memory of the
# shipped recipes without the hub.
_QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128}
SHAPES: dict[str, dict[str, Any]] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": {
        **{"model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "head_dim": 64},
        **{"intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9},
        **{"num_key_value_heads": 3, "tie_word_embeddings": True},
    },
    "Qwen/Qwen3-0.6B": {
        **{**_QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
        **{"num_attention_heads": 16, "tie_word_embeddings": True},
    },
    "Qwen/Qwen3-4B": {
        **{**_QWEN3, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36},
        **{"num_attention_heads": 32, "tie_word_embeddings": True},
    },
    "Qwen/Qwen3-8B": {
        **{**_QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36},
        **{"num_attention_heads": 32, "tie_word_embeddings": False},
    },
    "Qwen/Qwen3-32B": {
        **{**_QWEN3, "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64},
        **{"num_attention_heads": 64, "tie_word_embeddings": False},
    },
}


def load_tokenizer(settings: ModelSettings, domains: Iterable[Domain] = ()) -> Any:
    """Return the tokenizer of a model; raises UserError if the tokenizer cannot be loaded.

    The tokenizer of the tiny model has a token for each word of `domains`.
    """
    if settings.model == "tiny":
        return tiny_tokenizer(domains)
    tokenizer = _from_files(_tokenizer_of_files, settings.model, "tokenizer", settings)
    most = tokenizer.model_max_length
    if type(most) not in (int, float) or not most >= 0:
        got = f"model_max_length {shown(most)} in its tokenizer_config.json"
        raise UserError(f"model: {settings.model} has the {got}; give a number, or take it out")
    return tokenizer


def tokenizer_settings(config: Config, checkpoint: Path | None) -> ModelSettings:
    """Return where the tokenizer is: that of a resumed run's tiny model is in the checkpoint."""
    if config.model.model != "tiny" or checkpoint is None:
        return config.model
    return config.model.model_copy(update={"model": str(checkpoint)})


def _tokenizer_of_files(name: str, **options: Any) -> Any:
    """Load a tokenizer that does what its tokenizer.json says, if there is this file.

    Most classes of transformers take only the vocabulary of the file, and split text in a way of
    their own.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(name, **options)
    kind = type(tokenizer)
    is_rebuilt = issubclass(kind, PreTrainedTokenizerFast) and kind is not PreTrainedTokenizerFast
    file = cached_file(
        name,
        FULL_TOKENIZER_FILE,
        local_files_only=options["local_files_only"],
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if not is_rebuilt or not kind.__module__.startswith("transformers.") or file is None:
        return tokenizer
    own: Any = PreTrainedTokenizerFast.from_pretrained(name, **options)
    for token in ("bos_token", "eos_token", "unk_token", "pad_token"):  # classes have defaults
        if getattr(own, token) is None and getattr(tokenizer, token) in own.get_vocab():
            setattr(own, token, getattr(tokenizer, token))
    return own


def load_model(
    settings: ModelSettings,
    tokenizer: Any,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: str | None = None,
) -> Any:
    """Return a causal language model as `dtype`; raises UserError for unusable files."""
    if settings.model != "tiny":
        return load_folder(settings.model, settings, device, dtype)
    model = tiny_model(tokenizer, seed, settings.attn_implementation)
    lora.cast(model, dtype)
    return model


def load_folder(
    folder: str | Path,
    settings: ModelSettings,
    device: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """Return a causal language model with parameters of `dtype` from a folder or a hub id.

    If the folder has LoRA adapters, `load_folder` merges the adapters into the base model, in fp32
    on CPU, before the conversion to `dtype`. Other weights are read to `device` without a copy in
    main memory; with the device `meta`, `load_folder` checks the files alone. Raises UserError if
    there are no safetensors files, or if weights are missing or have wrong shapes.
    """
    if lora.is_adapter(folder):
        merged = lora.load_merged(load_folder(lora.base_named_in(folder), settings), folder)
        lora.cast(merged, dtype)
        return merged
    model, info = _from_files(
        _weights_inside,
        str(folder),
        "model",
        settings,
        config=with_our_kernels(_shape_of(str(folder), "model", settings), settings),
        dtype=dtype,
        attn_implementation=settings.attn_implementation,
        use_safetensors=True,
        device_map=device,
        ignore_mismatched_sizes=True,  # The code after this call reports wrong shapes.
        output_loading_info=True,
    )
    problem = f"lacks {min(info['missing_keys'])}" if info["missing_keys"] else ""
    for name, shape_there, wanted in sorted(info["mismatched_keys"])[:1]:
        problem = f"holds {name} as {list(shape_there)} and not the {list(wanted)}"
    if problem:  # transformers initializes missing or wrong weights at random.
        raise UserError(
            f"model: {folder} {problem} that its config.json asks for; take both from one model"
        )
    vars(model).pop("hf_device_map", None)  # Trainers would look for several devices.
    if unused := sorted(info["unexpected_keys"]):
        what = f"{len(unused)} weights that the model does not use, such as {unused[0]}"
        say(f"warning: {folder} holds {what}")
    return model


def _weights_inside(name: str, config: Any, local_files_only: bool, **options: Any) -> Any:
    """Load a model. Raises ValueError if config.json or an index names a file outside of it."""
    stated = getattr(config, "transformers_weights", None) or SAFE_WEIGHTS_INDEX_NAME
    names = [stated]
    folder = Path(name)
    if is_inside(folder / stated, folder) and stated.endswith(".index.json"):
        found = cached_file(
            name,
            stated,
            local_files_only=local_files_only,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if found is not None:
            folder = Path(found).parents[len(Path(stated).parts) - 1]
            index = parse_json(read_file(found, MAX_JSON_BYTES).decode())
            names += index["weight_map"].values()
    for named in names:
        if not is_inside(folder / named, folder):
            raise ValueError(f"it names {shown(named)} outside of it")
    return AutoModelForCausalLM.from_pretrained(
        name, config=config, local_files_only=local_files_only, **options
    )


def with_our_kernels(shape: Any, settings: ModelSettings) -> Any:
    """Return a configuration whose file chooses no kernels, in any part: the settings do.

    transformers prefers what config.json names, which may be code to download.
    """
    parts = [shape, *(part for name in shape.sub_configs if (part := getattr(shape, name, None)))]
    for part in parts:
        # Outputs beside the logits would cost memory, and no checkpoint could be saved with them.
        part.output_attentions = False
        part.output_hidden_states = False
        part.return_dict = True
        part._attn_implementation = settings.attn_implementation
        if hasattr(part, "_experts_implementation"):
            part._experts_implementation = None
    return shape


def empty_model(config: Config, tokenizer: Any = None) -> Any:
    """Return the model that `config` names, on the device `meta`, without weights.

    Without `tokenizer`, the tiny model gets the vocabulary of the default domains.
    """
    settings = config.model
    name = config.model.model
    if name == "tiny":
        with torch.device("meta"):
            return tiny_model(tokenizer or tiny_tokenizer(), 0, settings.attn_implementation)
    base = lora.base_named_in(name) if lora.is_adapter(name) else name
    try:
        shape = _shape_of(base, "configuration", settings)
    except UserError:
        if name not in SHAPES:
            raise
        shape = AutoConfig.for_model(**SHAPES[name])
    shape = with_our_kernels(shape, settings)

    def make(_: str, local_files_only: bool, **options: Any) -> Any:
        return AutoModelForCausalLM.from_config(shape, **options)

    with torch.device("meta"):
        return _from_files(
            make, base, "model", settings, attn_implementation=settings.attn_implementation
        )


def _shape_of(name: str, what: str, settings: ModelSettings) -> Any:
    """Load a configuration, first in a child: one number in its file can take all memory."""
    load = partial(_from_files, AutoConfig.from_pretrained, name, what, settings)
    if os.path.isdir(name):
        rehearse("model: its config.json", load, "mend it, or give another model")
    return load()


def _from_files(
    load: Callable[..., Any], name: str, what: str, settings: ModelSettings, **options: Any
) -> Any:
    """Call `load`, for example a method `from_pretrained`; raises UserError if `load` fails."""
    reason = problem_of_name(name)
    remedy = remedy_of(name)
    options["trust_remote_code"] = settings.trust_remote_code
    if not reason:
        try:
            with quiet():
                return load(name, local_files_only=not hub_reachable(), **options)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # Libraries raise all kinds of errors for wrong files.
            reason = reason_of(error)
            if "attention implementation" in str(error):
                remedy = "set attn_implementation eager, or use another model"
            if "custom code" in str(error) or "trust_remote_code" in str(error):
                remedy = "read its code, then set trust_remote_code, which runs it"
            if "tiktoken" in str(error):  # what transformers asks for last
                remedy = "pip install sentencepiece, which reads tokenizer.model"
    raise UserError(
        f"model: got {shown(name)}, but its {what} cannot be loaded ({reason}); {remedy}"
    )
