"""The layers of a model in fewer, larger operations, for sampling on a GPU.

A GPU computes one token of a small model faster than Python starts the operations. Queries, keys
and values become one product, as do gate and up; queries and keys are normed and rotated together;
an RMS norm is one operation and a product. Numbers are rounded where transformers rounds them, so
that a CPU computes equal bits. Only layers with the code of Llama's, Mistral's, Qwen2's or Qwen3's
change; the others compute as before.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import rms_norm
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
    rotate_half,
)
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from pipeline.models.layers import has_code

ATTENTION = (LlamaAttention, MistralAttention, Qwen2Attention, Qwen3Attention)
Rotary = tuple[torch.Tensor, torch.Tensor]  # cosines and sines of the positions


class FusedLayers:
    """Changes the layers of a model. No layer has gradients from then on.

    If `joins` is True, the weights that are multiplied together move into one tensor, and must be
    changed in place from then on.
    """

    def __init__(self, model: Any, joins: bool) -> None:
        self._forwards = dict[Any, Callable[..., Any]]()  # by module
        self.signs: list[torch.Tensor] = []  # which no module knows
        rotary = getattr(model.get_decoder(), "rotary_emb", None)
        attentions = [m for m in model.modules() if "Attention" in type(m).__name__]
        # All layers get the rotary factors in a form that only fused layers can read.
        frequencies = getattr(rotary, "inv_freq", None)
        if rotary is not None and frequencies is not None and all(map(_is_known, attentions)):
            sign = torch.ones_like(frequencies).repeat(2)
            sign[: len(sign) // 2] = -1
            self.signs.append(sign)
            self._forwards[rotary] = partial(_factors, rotary.forward, sign)
            for module in attentions:
                inputs = Product([module.q_proj, module.k_proj, module.v_proj], joins)
                output = Product([module.o_proj], joins)
                self._forwards[module] = partial(_attention, module, inputs, output)
        for module in model.modules():
            if has_code(module, LlamaRMSNorm):
                self._forwards[module] = partial(_norm, module)
            elif has_code(module, LlamaMLP):
                inputs = Product([module.gate_proj, module.up_proj], joins)
                output = Product([module.down_proj], joins)
                self._forwards[module] = partial(_mlp, module.act_fn, inputs, output)
        for module, forward in self._forwards.items():
            module.forward = forward

    def release(self) -> None:
        """Let the layers compute as transformers wrote them."""
        for module in self._forwards:
            del module.forward
        self._forwards.clear()


def _is_known(attention: nn.Module) -> bool:
    """Return True for attention with a known forward pass and Llama's rotation."""
    names = type(attention).forward.__globals__
    turns = all(
        getattr(names.get(function.__name__), "__code__", None) is not None
        and names[function.__name__].__code__.co_code == function.__code__.co_code
        for function in (apply_rotary_pos_emb, rotate_half)
    )
    return turns and any(has_code(attention, kind) for kind in ATTENTION)


class Product:
    """The products of one input with the weights of linear layers, side by side."""

    @torch.no_grad()
    def __init__(self, layers: list[Any], joins: bool) -> None:
        self._layers = layers
        self._weight: torch.Tensor | None = None
        self._bias: torch.Tensor | None = None
        biases = [layer.bias for layer in layers if hasattr(layer, "bias")]
        has_one_form = len({bias is None for bias in biases}) == 1
        if joins and has_one_form and all(type(layer) is nn.Linear for layer in layers):
            self._weight = _joined([layer.weight for layer in layers]).T
            self._bias = None if biases[0] is None else _joined(biases)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the products of x [..., H] as [N, sum of the layers' sizes]."""
        if self._weight is None:
            return torch.cat([layer(x) for layer in self._layers], -1).flatten(0, -2)
        x_NH = x.reshape(-1, x.shape[-1])
        if self._bias is None:
            return x_NH.mm(self._weight)
        return torch.addmm(self._bias, x_NH, self._weight)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Move parameters into one tensor, and return it; each becomes a view of its rows."""
    if len(parts) == 1:
        return parts[0].data
    whole = torch.cat([part.data for part in parts])
    for part, rows in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        part.data = rows
    return whole


def _factors(
    forward: Callable[..., Rotary], sign: torch.Tensor, *args: Any, **named: Any
) -> Rotary:
    cos, sin = forward(*args, **named)
    return cos.unsqueeze(2), (sin * sign.to(sin.dtype)).unsqueeze(2)


def _norm(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    # Given to `rms_norm`, the weight would be multiplied before the rounding to bf16.
    normal = rms_norm(hidden, hidden.shape[-1:], None, module.variance_epsilon)
    product: torch.Tensor = module.weight * normal
    return product


def _mlp(act: Any, inputs: Product, output: Product, x: torch.Tensor) -> torch.Tensor:
    gate, up = inputs(x).chunk(2, -1)
    return output(act(gate) * up).view(x.shape)


def _attention(
    module: Any,
    inputs: Product,
    output: Product,
    *,
    hidden_states: torch.Tensor,
    position_embeddings: Rotary,
    attention_mask: torch.Tensor | None,
    past_key_values: Any = None,
    **named: Any,
) -> tuple[torch.Tensor, None]:
    batch, length, _ = hidden_states.shape
    size = module.head_dim
    heads = module.config.num_attention_heads
    key_heads = module.config.num_key_value_heads
    states = inputs(hidden_states).view(batch, length, heads + 2 * key_heads, size)
    turned, value = states.split([heads + key_heads, key_heads], 2)
    if hasattr(module, "q_norm"):
        turned = rms_norm(turned, (size,), None, module.q_norm.variance_epsilon)
        turned[:, :, :heads].mul_(module.q_norm.weight)
        turned[:, :, heads:].mul_(module.k_norm.weight)
    cos, sin = position_embeddings
    turned = (turned * cos).add_(turned.roll(size // 2, -1).mul_(sin))
    query, key = (x.transpose(1, 2) for x in turned.split([heads, key_heads], 2))
    value = value.transpose(1, 2)
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, module.layer_idx)
    attend = ALL_ATTENTION_FUNCTIONS[module.config._attn_implementation]
    attended, _ = attend(
        module, query, key, value, attention_mask, scaling=module.scaling, dropout=0.0, **named
    )
    return output(attended.flatten(-2)).view(batch, length, -1), None
