"""Functions that check whether and how a model can be sampled.

The row sampler (`rollout/samplers/own.py`) is the pipeline's own sampler.
"""

from collections.abc import Sequence
from typing import Any

import torch

from pipeline.common.errors import UserError
from pipeline.common.untrusted import shown
from pipeline.models.chat.template import Chat

FULL = "full_attention"
SLIDING = "sliding_attention"
# Architectures whose sliding layers differ from full attention by the window alone. Others also
# have attention sinks, soft caps, or layers that share keys and values.
PLAIN_WINDOWS = {
    *("gemma3_text", "ministral", "mistral", "mixtral", "olmo3", "phi3", "smollm3", "starcoder2"),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
}


def why_generate(model: Any, max_tokens: int = 0) -> str | None:
    """Return why a model needs transformers' `generate`, or None if the row sampler suffices.

    `max_tokens` is the maximum number of tokens of an episode (0: not known). The check reads no
    weights. Raises UserError if neither `generate` nor the row sampler can sample the model.
    """
    why = unserved(model.config.get_text_config(), max_tokens)
    if why is None and getattr(model, "_is_stateful", False):
        raise UserError(
            f"model: got {type(model).__name__}, which is recurrent and names no kinds of layers; "
            "use another"
        )
    return why


def unserved(config: Any, max_tokens: int = 0) -> str | None:
    """Return why the row sampler cannot run a model; None if all layers have full attention.

    In sequences of at most `max_tokens` tokens (0: of any length), a layer whose sliding window is
    not shorter has full attention.
    """
    window = getattr(config, "sliding_window", None) or 0
    kinds = set(getattr(config, "layer_types", None) or [SLIDING if window else FULL])
    why = f"its layers are {', '.join(sorted(kinds))}"
    if kinds == {FULL}:
        return None
    if not window or not kinds <= {FULL, SLIDING} or config.model_type not in PLAIN_WINDOWS:
        return why
    if 0 < max_tokens <= window:
        return None
    return f"{why}; with max_tokens up to its window of {window}, one cache would do"


def padded(sequences: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids padded on the left, and a mask that is 1 at real tokens; both are [B, T]."""
    longest = max(map(len, sequences))
    tokens = [[0] * (longest - len(ids)) + ids for ids in sequences]
    mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in sequences]
    return torch.tensor(tokens), torch.tensor(mask)


@torch.no_grad()
def padding_is_harmless(model: Any) -> bool:
    """Return True if padding on the left changes the logits of a row only by rounding errors."""
    device = next(model.parameters()).device
    logits = []
    short = [3, 1, 4, 1, 5]
    for batch in ([short], [[2, 7, 1, 8, 2, 8, 1, 8, 2, 8], short]):
        tokens, mask = (x.to(device) for x in padded(batch))
        out = model.generate(
            tokens,
            attention_mask=mask,
            max_new_tokens=3,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logits.append(torch.stack(out.logits, 1)[-1])
    alone, beside = logits
    rounding = 1e-3 if model.dtype.itemsize > 2 else 0.1
    return torch.allclose(alone, beside, rtol=0, atol=rounding * float(alone.std()))


def widest(shape: Any, name: str) -> int:
    """Return the largest value of the attribute `name` in any layer; 0 if no layer has `name`."""
    differ = name in (getattr(shape, "per_layer_attributes", None) or ())
    layers = shape.per_layer_config if differ else [shape]
    return max(getattr(layer, name, None) or 0 for layer in layers)


def idle_weights(model: Any) -> int:
    """Return how many weights of experts a token does not use; 0 without experts."""
    shape = model.config.get_text_config()
    experts = max(
        widest(shape, name) for name in ("num_local_experts", "num_experts", "n_routed_experts")
    )
    used = widest(shape, "num_experts_per_tok")
    size = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    return size * (experts - used) // experts if used else 0


def attention_size(shape: Any) -> int:
    """Return heads times head size; if layers differ, those of the largest attention."""
    heads = widest(shape, "num_attention_heads")
    return heads * (widest(shape, "head_dim") or shape.hidden_size // max(1, heads))


def other_stops(model: Any, chat: Chat) -> list[int]:
    """Return the sorted ids, other than the chat template's end of turn, that end a message.

    As in inference servers, the eos_token_id of the generation config and of the tokenizer end a
    message. Raises UserError if the generation config's eos_token_id is not an id or a list of ids.
    """
    listed = getattr(model.generation_config, "eos_token_id", None)
    ids = listed if isinstance(listed, list) else [listed]
    if not all(token is None or type(token) is int for token in ids):
        what = f"model: its generation config has the eos_token_id {shown(listed)}"
        raise UserError(f"{what}; write an id or a list of ids")
    known = set(chat.tokenizer.get_vocab().values())
    return sorted(known.intersection([*ids, chat.tokenizer.eos_token_id]) - {chat.end_of_turn_id})


def enter_ends(model: Any, chat: Chat) -> None:
    """Enter the ids that end a message in the model's configurations, which checkpoints hold."""
    ends = [chat.end_of_turn_id, *other_stops(model, chat)]
    for config in (model.config, model.generation_config):
        config.eos_token_id = ends if len(ends) > 1 else ends[0]
