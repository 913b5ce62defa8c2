"""A recipe's model without its weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from pipeline.config.settings import Config
from pipeline.errors import UserError
from pipeline.files.hub import hub_reachable
from pipeline.models import lora
from pipeline.models.loading import from_files
from pipeline.models.tiny import tiny_model, tiny_tokenizer

# Shapes of hub models in shipped recipes, so that their memory can be added up where the hub
# cannot be reached. Source: the config.json of each model on the Hugging Face hub.
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

    `tokenizer` is that of the run, after which a model that is made here has its vocabulary; None
    is that of the default domains.
    """
    name = config.model.model
    if name == "tiny":
        with torch.device("meta"):
            return tiny_model(tokenizer or tiny_tokenizer(), 0)
    base, settings = name, config.model
    while lora.is_adapter(base):
        base = lora.base_of(base)

    def shape_of() -> Any:
        return AutoConfig.from_pretrained(
            base,
            trust_remote_code=settings.trust_remote_code,
            local_files_only=not hub_reachable(),
        )

    def make() -> Any:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                shape,
                trust_remote_code=settings.trust_remote_code,
                attn_implementation=settings.attn_implementation,
            )

    try:
        shape = from_files(base, "configuration", shape_of)
    except UserError:
        if name not in SHAPES:
            raise
        shape = Qwen3Config(**SHAPES[name])
    return from_files(base, "model", make)
