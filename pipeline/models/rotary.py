"""Rotary positions with length-dependent factors, held at one set of factors for a run.

LongRoPE (Ding et al. 2024, arXiv 2402.13753; Phi-3 and Phi-4-mini) and dynamic NTK scaling rotate
by other factors once a sequence is longer than a border. transformers decides that for a whole
forward pass: one long row, or padding beyond the border, changes all others, so log-probabilities
would depend on which conversations share a batch. A run takes the factors of its longest episode
for every pass, as vLLM does for LongRoPE with its `max_model_len`.
"""

from __future__ import annotations

from typing import Any

import torch

from pipeline.errors import UserError

FIXED = "fixed"  # a rope_type that transformers' forward does not update


@torch.no_grad()
def fix_rotary(model: Any, max_tokens: int) -> str:
    """Hold length-dependent rotary factors at those of a sequence of `max_tokens` tokens.

    Returns one line if short sequences get other factors than before, else "". Raises UserError
    if a model's rotary positions still depend on the length afterwards.
    """
    changed: dict[str, None] = {}
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        by_layer = kinds if isinstance(kinds, dict) else {None: kinds}
        moving = {  # as `transformers.modeling_rope_utils.dynamic_rope_update` decides
            layer: kind
            for layer, kind in by_layer.items()
            if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope")
        }
        before = {layer: _rotate(module, layer, [0, 1]) for layer in moving}
        for layer in moving:
            _rotate(module, layer, [max_tokens - 1])  # sets the factors of this length
        if moving:
            fixed = {**by_layer, **dict.fromkeys(moving, FIXED)}
            module.rope_type = fixed if isinstance(kinds, dict) else FIXED
        for layer, kind in moving.items():
            alone = _rotate(module, layer, [0, 1])
            # Padding stands at most max_tokens behind the last token.
            beside = _rotate(module, layer, [0, 1, max_tokens - 1, 2 * max_tokens])
            if not _equal(alone, beside):
                raise UserError(
                    f"model: got {type(model).__name__} with rotary scaling {kind}, whose factors "
                    f"change within max_tokens {max_tokens}, and a run needs one set of them; "
                    "lower max_tokens, or use another model"
                )
            if not _equal(alone, before[layer]):
                changed[kind] = None
    if not changed:
        return ""
    return (
        f"rotary scaling {', '.join(changed)}: the factors of {max_tokens} tokens (max_tokens) "
        "hold for every length; serve the model with the same maximum length"
    )


def _rotate(module: Any, layer: str | None, positions: list[int]) -> tuple[torch.Tensor, ...]:
    """Cosines and sines, or complex factors, [1, T, ...] each, of a rotary module."""
    device = next(module.buffers()).device
    options = {} if layer is None else {"layer_type": layer}
    factors = module(torch.zeros(1, device=device), torch.tensor([positions]).to(device), **options)
    return factors if isinstance(factors, tuple) else (factors,)


def _equal(short: tuple[torch.Tensor, ...], long: tuple[torch.Tensor, ...]) -> bool:
    """Whether both rotate their first two positions equally."""
    return all(torch.equal(a, b[..., :2, :]) for a, b in zip(short, long, strict=True))
