"""Weights on their way from the model that is trained to a copy of it that samples."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from pipeline.models import lora

Weights = Iterable[tuple[str, torch.Tensor]]


def trained_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole (name, tensor) pairs of what is trained: the model's own tensors, no copies.

    Every parameter under the model's own name, tied ones once; of a model with LoRA the adapters
    alone, under PEFT's names, which are those of `adapter_model.safetensors`.
    """
    if has_adapters(model):
        yield from lora.adapters_of(model).items()
    else:
        for name, parameter in model.named_parameters():
            yield name, parameter.detach()


class SamplingCopy:
    """A plain copy of a model, `model`, which takes over weights as `trained_weights` gives them.

    Made from a plain model, it takes every parameter. Made from a model with LoRA, it takes the
    adapters and adds their products to the frozen base, always to the base anew, at the base's
    precision; the base itself is never given again. Weights that need no other type are shared.
    """

    def __init__(self, model: Any) -> None:
        adapted = has_adapters(model)
        # Not the buffers, which are copied: they keep their type, and rotary frequencies need fp32.
        shared = {id(p): nn.Parameter(p.data, requires_grad=False) for p in model.parameters()}
        plain = copy.deepcopy(model, shared)
        self.model: Any = (plain.unload() if adapted else plain).eval()
        frozen = {id(p): p for p in model.parameters() if not p.requires_grad}
        self._adapted: Any = copy.deepcopy(model, frozen) if adapted else None
        self._adapters = {} if self._adapted is None else lora.adapters_of(self._adapted)

    def cast(self, dtype: torch.dtype) -> None:
        """Give the parameters a type; what is loaded later gets it as well."""
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(dtype)

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        """Take over what is trained.

        ValueError where a name is unknown, missing or given twice, or a shape is another; then a
        part of the weights may be the new ones.
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
