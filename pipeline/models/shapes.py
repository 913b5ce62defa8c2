"""A recipe's model without its weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from pipeline.config.settings import Config
from pipeline.errors import UserError
from pipeline.files.hub import hub_reachable
from pipeline.models import lora
from pipeline.models.loading import from_files
from pipeline.models.tiny import tiny_model, tiny_tokenizer

# Shapes of hub models in shipped recipes, to estimate their memory without the hub.
# Source: the config.json of each model on the Hugging Face hub.
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-4B": {
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    }
}


def empty_model(config: Config, tokenizer: Any = None) -> Any:
    """The recipe's model without its weights.

    The tiny model has the vocabulary of `tokenizer`, by default that of the default domains.
    """
    name = config.model.model
    if name == "tiny":
        with torch.device("meta"):
            return tiny_model(tokenizer or tiny_tokenizer(), 0)
    base = lora.base_of(name) if lora.is_adapter(name) else name
    code = {"trust_remote_code": config.model.trust_remote_code}
    read = partial(AutoConfig.from_pretrained, base, local_files_only=not hub_reachable(), **code)
    try:
        shape = from_files(base, "configuration", read)
    except UserError:
        if name not in SHAPES:
            raise
        shape = Qwen3Config(**SHAPES[name])
    attention = {"attn_implementation": config.model.attn_implementation}
    make = partial(AutoModelForCausalLM.from_config, shape, **attention, **code)
    with torch.device("meta"):
        return from_files(base, "model", make)
