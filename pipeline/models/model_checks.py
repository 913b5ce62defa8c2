"""Checks of a model before a run, without its weights."""

import os
from typing import Any

from pipeline.common.errors import UserError
from pipeline.config.settings import Config
from pipeline.models import lora
from pipeline.models.capabilities import why_generate
from pipeline.models.layers import recompute_layers
from pipeline.models.loading import empty_model, load_folder


def check_model(config: Config, tokenizer: Any) -> tuple[Any, str | None, list[str]]:
    """Make the empty model; return it, why `generate` must sample (or None), and notes.

    Raises UserError if the model's files do not fit each other, or if it has too few positions.
    """
    name = config.model.model
    if lora.is_adapter(name):
        lora.read_adapters(name)
        name = lora.base_named_in(name)
    model = empty_model(config, tokenizer)
    if config.grpo.gradient_checkpointing:
        recompute_layers(model)  # raises UserError for a model without layers
    refuse_other_vocabulary(tokenizer, model)
    if os.path.isdir(name):
        load_folder(name, config.model, device="meta")
    notes = check_positions(model, config.rollout.max_tokens)
    return model, why_generate(model, config.rollout.max_tokens), notes


def check_positions(model: Any, max_tokens: int) -> list[str]:
    """Return a note if episodes may be longer than the texts that a model was made for.

    Raises UserError if the model has no rotary positions, and so none for longer texts.
    """
    shape = model.config.get_text_config(decoder=True)
    trained = getattr(shape, "max_position_embeddings", None)
    if not isinstance(trained, int) or max_tokens <= trained:
        return []
    if not any(name.endswith("inv_freq") for name, _ in model.named_buffers()):
        raise UserError(
            f"max_tokens: got {max_tokens}, but the model has positions for {trained} tokens; "
            "lower max_tokens, or use another model"
        )
    return [
        f"max_tokens is {max_tokens}, and the model was made for {trained} tokens "
        "(max_position_embeddings): longer texts may be poor"
    ]


def refuse_other_vocabulary(tokenizer: Any, model: Any) -> None:
    """Raise UserError if a token id of the tokenizer has no embedding in the model."""
    last = max(tokenizer.get_vocab().values())
    size = model.get_input_embeddings().num_embeddings
    if last >= size:
        raise UserError(
            f"model: its tokenizer has ids up to {last}, but the model {size} embeddings; use the "
            "tokenizer that the model was trained with"
        )
