"""The arithmetic of a model and the peak of a GPU: what MFU (model FLOP/s utilization) is made of.

Counted are matrix products, a multiplication and an addition each, after PaLM (Chowdhery et al.
2022, arXiv 2204.02311, appendix B) and Kaplan et al. 2020 (arXiv 2001.08361, table 1): per token
and parameter 2 in a forward pass, 2 for the gradient of what came in and 2 for that of a trained
weight; in attention 4 L H Q T forward and 8 backward, for L layers of H heads of size Q and
sequences of T tokens, as if a token saw all of its own. The embedding costs nothing, and the output
layer counts for the sampled tokens alone, which are all that meet it here. Not counted: padding,
what gradient checkpointing computes again, softmax, norms, the optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.models.layers import widest

# Dense bf16, FLOP/s, as public tables repeat NVIDIA's figures; read the card's own datasheet before
# quoting MFU. Names are words of CUDA's name of the device; the first whose words are all in it
# counts.
PEAKS = {
    "B200": 2250e12,
    "H200 NVL": 836e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "A40": 150e12,
    "A30": 165e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L4": 121e12,
}


def peak_of(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a GPU; None where the table lacks it, or it is a part (MIG) of one."""
    words = device_name.replace("-", " ").split()
    if "MIG" in words:
        return None
    return next((peak for name, peak in PEAKS.items() if set(name.split()) <= set(words)), None)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a token costs in a model, without LoRA's matrices and with them.

    All experts of a mixture count, so there FLOP/s come out too high.
    """

    body: int  # parameters between embedding and output layer
    head: int  # parameters of the output layer
    lora: int
    attention: int  # L H Q
    trains_all: bool  # False: only LoRA's matrices get gradients

    def of_sampling(self, tokens: float, sampled: float, length: float) -> float:
        """FLOPs of feeding `tokens`, of which `sampled` were drawn, in sequences of `length`."""
        return tokens * (2 * self.body + 4 * self.attention * length) + 2 * sampled * self.head

    def of_update(self, tokens: float, sampled: float, length: float) -> float:
        """FLOPs of a forward and a backward pass."""
        each = 6 if self.trains_all else 4
        per_token = each * self.body + 6 * self.lora + 12 * self.attention * length
        return tokens * per_token + each * sampled * self.head


def work_of(model: Any) -> Work:
    """Counted from a causal language model's parameters, with or without LoRA."""
    named = list(model.named_parameters())
    lora = sum(parameter.numel() for name, parameter in named if ".lora_" in name)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    outside = embedding.numel() + (0 if head is embedding else head.numel())
    return Work(
        body=sum(parameter.numel() for _, parameter in named) - lora - outside,
        head=head.numel(),
        lora=lora,
        attention=_attention(model.config.get_text_config(decoder=True)),
        trains_all=any(
            parameter.requires_grad for name, parameter in named if ".lora_" not in name
        ),
    )


def _attention(shape: Any) -> int:
    """L H Q; layers that have no attention, or smaller heads, count like the others."""
    heads = widest(shape, "num_attention_heads")
    size = widest(shape, "head_dim") or shape.hidden_size // max(1, heads)
    return int(shape.num_hidden_layers * heads * size)
