"""What a model can be sampled and trained through."""

from __future__ import annotations

from typing import Any

import torch

from pipeline.errors import UserError
from pipeline.files.untrusted import reason_of


def why_generate(model: Any) -> str | None:
    """Why conversations must be sampled through `generate`; None if a key-value cache serves.

    Reads no weights. Raises UserError if neither works.
    """
    why = unserved(model.config.get_text_config())
    if why is None and getattr(model, "_is_stateful", False):
        raise UserError(
            f"model: got {type(model).__name__}, which is recurrent and names no kinds of layers; "
            "use another"
        )
    return why


@torch.no_grad()
def refuse_changed_logits(model: Any) -> None:
    """UserError if logits are not the output layer's of the decoder's states, as in training."""
    was_training = model.training
    model.eval()  # without dropout
    ids = torch.arange(1, 8, device=next(model.parameters()).device)[None]
    ids = ids % model.get_input_embeddings().num_embeddings
    try:
        logits = model(ids, use_cache=False).logits
        hidden = getattr(model.get_decoder()(ids, use_cache=False), "last_hidden_state", None)
        plain = None if hidden is None else model.get_output_embeddings()(hidden)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # code of transformers, or of the model's author
        raise UserError(
            f"model: got {type(model).__name__}, which does not compute ({reason_of(error)}); use "
            "another"
        ) from None
    model.train(was_training)
    if plain is None or not torch.allclose(plain, logits, rtol=0, atol=1e-3 * float(logits.std())):
        raise UserError(
            f"model: got {type(model).__name__}, whose logits are not those of its decoder and its "
            "output layer, which is not supported; use another"
        )


def unserved(config: Any) -> str | None:
    """Why a model's keys and values cannot be kept and shared by our cache; None if they can."""
    window = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    kinds = set(getattr(config, "layer_types", None) or [window])
    return None if kinds == {"full_attention"} else f"its layers are {', '.join(sorted(kinds))}"
