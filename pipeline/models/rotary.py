"""Makes the factors of rotary position embeddings independent of the sequence length.

LongRoPE (Ding et al. 2024, arXiv 2402.13753; Phi-3 and Phi-4-mini) and dynamic NTK scaling change
the factors if a sequence is longer than a limit. The library transformers chooses the factors
once for each forward pass, so one long sequence changes the factors of all other sequences in the
batch. A sequence's log-probabilities would depend on the other sequences in the batch. Every
forward pass of a run therefore uses the factors for `max_tokens` tokens, as vLLM does for LongRoPE.
"""

from typing import Any

import torch

from pipeline.errors import UserError

FIXED = "fixed"  # a rope_type for which transformers does not change the rotary factors


@torch.no_grad()
def fix_rotary(model: Any, max_tokens: int) -> str:
    """Make a model use the rotary factors of `max_tokens` tokens for sequences of every length.

    Returns a note for the user if the factors of short sequences change, else "". Raises UserError
    if the model's rotary factors cannot be made independent of the sequence's length.
    """
    changed = set()
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for layer, kind in (kinds if isinstance(kinds, dict) else {None: kinds}).items():
            # The condition is copied from `transformers.modeling_rope_utils.dynamic_rope_update`.
            if not isinstance(kind, str) or not ("dynamic" in kind or kind == "longrope"):
                continue
            before = _factors(module, layer, 0, 1)
            _factors(module, layer, max_tokens - 1)  # The module keeps the factors of this call.
            module.rope_type = FIXED if layer is None else {**module.rope_type, layer: FIXED}
            alone = _factors(module, layer, 0, 1)
            # In padded batches, positions are at most 2 * max_tokens.
            padded = _factors(module, layer, 0, 1, max_tokens - 1, 2 * max_tokens)
            if not torch.equal(alone, padded):
                raise UserError(
                    f"model: got {type(model).__name__} with rotary scaling {kind}, whose factors "
                    f"change within max_tokens {max_tokens}, and a run needs one set of them; "
                    "lower max_tokens, or use another model"
                )
            if not torch.equal(alone, before):
                changed.add(kind)
    note = (
        f"rotary scaling {', '.join(sorted(changed))}: the factors of {max_tokens} tokens "
        "(max_tokens) hold for every length; serve the model with the same maximum length"
    )
    return note if changed else ""


def _factors(module: Any, layer: str | None, *positions: int) -> torch.Tensor:
    """Return the factors (cosines and sines, or complex numbers) of the first two `positions`."""
    device = next(module.buffers()).device
    options = {} if layer is None else {"layer_type": layer}
    factors = module(torch.zeros(1, device=device), torch.tensor([positions]).to(device), **options)
    factors = torch.stack(factors) if isinstance(factors, tuple) else factors
    return factors[..., :2, :].clone()
