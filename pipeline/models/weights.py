"""Transfer of trained weights from the trained model to the sampler's copy of the model."""

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from pipeline.models import lora
from pipeline.models.ops import use_fp32_logits
from pipeline.models.packing import PackedWeights, packed_bytes

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
    """A copy of a model for sampling, which shares the memory of all weights of equal dtypes.

    If the original model has no LoRA, `load` replaces every parameter of the attribute `model`. If
    the original model has LoRA, `model` has layers with adapters like the original; the copy has
    its own adapters, in float32, and `load` replaces only the adapters.
    """

    def __init__(self, model: Any) -> None:
        adapted = has_adapters(model)
        # Buffers are copied with their dtype, because rotary frequencies need fp32.
        shared = {
            id(p): nn.Parameter(p.data, requires_grad=False)
            for p in model.parameters()
            if not (adapted and p.requires_grad)
        }
        whole = copy.deepcopy(model, shared)
        self.model: Any = lora.base_model(whole).requires_grad_(False).eval()
        self._adapters = lora.adapters_of(whole) if adapted else None
        self._packed: PackedWeights | None = None
        self._packs = False

    def cast(self, dtype: torch.dtype) -> None:
        """Convert parameters that are not adapters to `dtype`; `load` then converts new weights."""
        lora.cast(self.model, dtype)
        use_fp32_logits(self.model.get_output_embeddings())
        is_on_cpu = self.model.get_input_embeddings().weight.device.type == "cpu"
        self._packs = is_on_cpu and packed_bytes(self.model, dtype) > 0

    def pack(self) -> None:
        """Copy large weights on a CPU so that sampling is faster, until `unpack`."""
        if self._packs:
            self._packed = PackedWeights(self.model)

    def unpack(self) -> None:
        """Free the copies of `pack`."""
        if self._packed is not None:
            self._packed.release()
        self._packed = None

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        """Load trained weights into the copy.

        Raises ValueError if a name is unknown, missing or given twice, or if a shape differs. If
        `load` raises an error, some weights may already have changed.
        """
        self.unpack()
        own_weights = self._adapters or dict(self.model.named_parameters())
        for own, tensor in _paired(own_weights, weights):
            if self._adapters is None and (own.dtype, own.device) == (tensor.dtype, tensor.device):
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
