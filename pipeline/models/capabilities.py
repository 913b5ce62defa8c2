"""Checks of how a model can be sampled and trained."""

from __future__ import annotations

from typing import Any

import torch

from pipeline.errors import UserError
from pipeline.files.untrusted import reason_of


def why_generate(model: Any) -> str | None:
    """Why `generate` must sample this model; None if our key-value cache can. Reads no weights.

    Raises UserError if neither the row sampler nor `generate` can run the model.
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
    """UserError if the output layer does not compute the logits from the decoder's last states.

    Training computes the logits in this way.
    """
    was_training = model.training
    model.eval()  # without dropout
    ids = torch.arange(1, 8, device=next(model.parameters()).device)[None]
    ids = ids % model.get_input_embeddings().num_embeddings
    problem = "whose logits are not those of its decoder and its output layer"
    try:
        logits = model(ids, use_cache=False).logits
        hidden = getattr(model.get_decoder()(ids, use_cache=False), "last_hidden_state", None)
        output, atol = model.get_output_embeddings(), 1e-3 * float(logits.std())
        is_equal = hidden is not None and torch.allclose(output(hidden), logits, 0, atol)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # code of transformers, or of the model's author
        is_equal, problem = False, f"which does not compute ({reason_of(error)})"
    model.train(was_training)
    if not is_equal:
        raise UserError(f"model: got {type(model).__name__}, {problem}; use another")


def unserved(config: Any) -> str | None:
    """Why our cache cannot keep and share a model's keys and values; None if it can."""
    window = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    kinds = set(getattr(config, "layer_types", None) or [window])
    return None if kinds == {"full_attention"} else f"its layers are {', '.join(sorted(kinds))}"
