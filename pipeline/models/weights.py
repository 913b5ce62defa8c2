"""Weights passed from the trained model to the copy of it that samples."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from pipeline.models import lora

Weights = Iterable[tuple[str, torch.Tensor]]


def trained_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) pairs of the trained weights: the model's own tensors, no copies.

    Every parameter under the model's own name, tied ones once. Of a model with LoRA only the
    adapters, under PEFT's names, which are those of `adapter_model.safetensors`.
    """
    if has_adapters(model):
        yield from lora.adapters_of(model).items()
    else:
        for name, parameter in model.named_parameters():
            yield name, parameter.detach()


class SamplingCopy:
    """A plain copy of a model, `model`, which takes over the pairs of `trained_weights`.

    A copy of a plain model takes every parameter. A copy of a model with LoRA takes the adapters
    and adds their products to the weights of the frozen base, at the base's precision. Weights
    that need no other type are shared.
    """

    def __init__(self, model: Any) -> None:
        adapted = has_adapters(model)
        # Buffers are copied and keep their type: rotary frequencies need fp32.
        shared = {id(p): nn.Parameter(p.data, requires_grad=False) for p in model.parameters()}
        plain = copy.deepcopy(model, shared)
        self.model: Any = (plain.unload() if adapted else plain).eval()
        frozen = {id(p): p for p in model.parameters() if not p.requires_grad}
        self._adapted: Any = copy.deepcopy(model, frozen) if adapted else None
        self._adapters = {} if self._adapted is None else lora.adapters_of(self._adapted)

    def cast(self, dtype: torch.dtype) -> None:
        """Give the parameters a type; weights that are loaded later get it as well."""
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(dtype)

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        """Take over trained weights.

        ValueError if a name is unknown, missing or given twice, or a shape differs; some weights
        may be the new ones then.
        """
        if self._adapted is not None:
            for own, tensor in _paired(self._adapters, weights):
                own.copy_(tensor)
            weights = lora.merged_parameters(self._adapted)
        for own, tensor in _paired(dict(self.model.named_parameters()), weights):
            if (own.dtype, own.device) == (tensor.dtype, tensor.device):
                own.data = tensor.detach()
            else:
                own.copy_(tensor)


def _paired(
    own: Mapping[str, torch.Tensor], weights: Weights
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    left = dict(own)
    for name, tensor in weights:
        if name not in left:
            twice = "is given twice" if name in own else "is not one of the sampler's"
            raise ValueError(f"weights: {name} {twice}; give those of the model it was made from")
        if tensor.shape != left[name].shape:
            shapes = f"{list(tensor.shape)}, but {list(left[name].shape)} is the sampler's"
            raise ValueError(f"weights: {name} has the shape {shapes}")
        yield left.pop(name), tensor
    if left:
        names = f"{next(iter(left))} and {len(left) - 1} more are"
        raise ValueError(f"weights: {names if len(left) > 1 else f'{next(iter(left))} is'} missing")


def has_adapters(model: Any) -> bool:
    return hasattr(model, "peft_config")
