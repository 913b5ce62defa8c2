"""Transfer of trained weights from the trained model to the sampler's copy of the model."""

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from pipeline.models import lora

Weights = Iterable[tuple[str, torch.Tensor]]


def trained_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the tensor of each trained weight; tensors are not copied.

    Without LoRA, every parameter is a trained weight; tied parameters appear once. With LoRA, the
    trained weights are the adapters, with the names in `adapter_model.safetensors`.
    """
    adapted = has_adapters(model)
    for name, tensor in lora.adapters_of(model).items() if adapted else model.named_parameters():
        yield name, tensor.detach()


class SamplingCopy:
    """A copy of a model for sampling. The attribute `model` is the copy, without adapter layers.

    If the original model has no LoRA, `load` replaces every parameter of the copy. If the original
    model has LoRA, `load` merges the adapters into the base weights of the copy, in the precision
    of the base weights. Copy and original share the memory of weights with equal dtypes.
    """

    def __init__(self, model: Any) -> None:
        adapted = has_adapters(model)
        # Buffers are copied with their dtype, because rotary frequencies need fp32.
        shared = {id(p): nn.Parameter(p.data, requires_grad=False) for p in model.parameters()}
        plain = copy.deepcopy(model, shared)
        self.model: Any = (plain.unload() if adapted else plain).eval()
        frozen = {id(p): p for p in model.parameters() if not p.requires_grad}
        self._adapted: Any = copy.deepcopy(model, frozen) if adapted else None
        self._adapters = {} if self._adapted is None else lora.adapters_of(self._adapted)

    def cast(self, dtype: torch.dtype) -> None:
        """Convert the copy's parameters to `dtype`; `load` then converts new weights to `dtype`."""
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(dtype)

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        """Load trained weights into the copy.

        Raises ValueError if a name is unknown, missing or given twice, or if a shape differs. If
        `load` raises an error, some weights may already have changed.
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
            problem = "is given twice" if name in own else "is not one of the sampler's"
            raise ValueError(f"weights: {name} {problem}; give those of the original model")
        if tensor.shape != left[name].shape:
            shapes = f"{list(tensor.shape)}, but {list(left[name].shape)} is the sampler's"
            raise ValueError(f"weights: {name} has the shape {shapes}")
        yield left.pop(name), tensor
    if left:
        raise ValueError(f"weights: {next(iter(left))} is missing")


def has_adapters(model: Any) -> bool:
    return hasattr(model, "peft_config")
