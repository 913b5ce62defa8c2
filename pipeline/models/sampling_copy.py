"""The copy of a model that samples, and the transfer of trained weights to it.

On a CPU, large layers of the copy multiply weights in a layout that is faster with few rows.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from pipeline.distributed.sharding import whole
from pipeline.models import lora
from pipeline.models.fused_layers import FusedLayers
from pipeline.models.layers import bf16_units, use_fp32_logits

Weights = Iterable[tuple[str, torch.Tensor]]

LARGE = 1 << 18  # minimum number of entries of a weight for which another layout pays
MOST_BYTES = 1 << 31  # maximum number of bytes of weights in another layout
BLOCK = 512  # entries of the vocabulary whose weights and logits stay in a CPU's cache
ROWS = 64  # number of rows that oneDNN lays weights out for

Forward = Callable[[torch.Tensor], torch.Tensor]


def trained_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the tensor of each trained weight; tensors are not copied.

    All ranks must take the weights of a sharded model together; each is gathered on its own.

    Without LoRA, every parameter is a trained weight; tied parameters appear once. With LoRA, the
    trained weights are the adapters, with the names in `adapter_model.safetensors`.
    """
    adapted = has_adapters(model)
    for name, tensor in lora.adapters_of(model).items() if adapted else model.named_parameters():
        yield name, whole(tensor.detach())


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
        self._original = {parameter.data_ptr() for parameter in model.parameters()}
        whole = copy.deepcopy(model, shared)
        self.model: Any = lora.base_model(whole).requires_grad_(False).eval()
        self._adapters = lora.adapters_of(whole) if adapted else None
        self._packed: PackedWeights | None = None
        self._packs = False
        self.fused: FusedLayers | None = None
        self._owns = False  # shares no weight with the original, which `fuse` finds out

    def cast(self, dtype: torch.dtype) -> None:
        """Convert parameters that are not adapters to `dtype`; `load` then converts new weights."""
        lora.cast(self.model, dtype)
        use_fp32_logits(self.model.get_output_embeddings())
        is_on_cpu = self.model.get_input_embeddings().weight.device.type == "cpu"
        self._packs = is_on_cpu and packed_bytes(self.model, dtype) > 0

    @torch.no_grad()
    def fuse(self) -> None:
        """Compute in fewer operations; weights that the copy does not share then move for once.

        Weights keep their address from then on, as CUDA graphs need, unless `load` gets weights in
        a type that the copy shares at another address.
        """
        self._packs = False
        addresses = {parameter.data_ptr() for parameter in self.model.parameters()}
        self._owns = self._adapters is None and addresses.isdisjoint(self._original)
        self.fused = FusedLayers(self.model, joins=self._owns)

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
        shapes = {name: own.shape for name, own in own_weights.items()}
        for name, tensor in complete(weights, shapes):
            own = own_weights[name]
            is_alike = (own.dtype, own.device) == (tensor.dtype, tensor.device)
            if is_alike and self._adapters is None and not self._owns:
                own.data = tensor.detach()
            else:
                own.copy_(tensor)


def complete(
    weights: Weights, shapes: Mapping[str, torch.Size]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights; raise ValueError unless they have exactly these names and shapes."""
    left = dict(shapes)
    for name, tensor in weights:
        if name not in left:
            problem = "is given twice" if name in shapes else "is not one of the sampler's"
            raise ValueError(f"weights: {name} {problem}; give those of the original model")
        if tensor.shape != left[name]:
            both = f"{list(tensor.shape)}, but {list(left[name])} is the sampler's"
            raise ValueError(f"weights: {name} has the shape {both}")
        del left[name]
        yield name, tensor
    if left:
        raise ValueError(f"weights: {next(iter(left))} is missing")


def has_adapters(model: Any) -> bool:
    return hasattr(model, "peft_config")


def large_layers(model: Any) -> list[nn.Linear]:
    layers = (layer for layer in model.modules() if isinstance(layer, nn.Linear))
    return [layer for layer in layers if layer.weight.numel() >= LARGE]


def packed_bytes(model: Any, dtype: torch.dtype) -> int:
    """Return the size of the copies; 0 if they are too large, or if this CPU gains nothing by them.

    `dtype` is that of the model's weights in the sampler. The copy of an output layer in bf16 is
    float32; one in float32 needs none.
    """
    if dtype != torch.float32 and not _packs(dtype):
        return 0
    of_head = 4 * (dtype != torch.float32)
    head = model.get_output_embeddings()
    large = large_layers(model)
    size = sum(x.weight.numel() * (of_head if x is head else dtype.itemsize) for x in large)
    return size if size <= MOST_BYTES else 0


class PackedWeights:
    """Lets large linear layers of a model multiply copies of their weights, until `release`.

    Float32 weights are laid out by columns (products of 64 rows are up to 1.4 times as fast), those
    in bf16 as oneDNN wants them, which it otherwise does at every product (1.7 times as fast, with
    equal bits). The output layer's logits are float32: its weights in bf16 are laid out in float32,
    and those in float32 are multiplied in blocks without a copy. The model, for which
    `packed_bytes` must be above 0, must not get other weights before `release`.
    """

    @torch.no_grad()
    def __init__(self, model: Any) -> None:
        head = model.get_output_embeddings()
        self._before = dict[Any, Any]()  # layer: its own `forward`, None for its class's
        for layer in large_layers(model):
            self._before[layer] = vars(layer).get("forward")
            packed: Any = _of_head(layer) if layer is head else _of_layer(layer)
            layer.forward = packed

    def release(self) -> None:
        """Let the layers compute as before, and free the copies."""
        for layer, forward in self._before.items():
            del layer.forward
            if forward is not None:
                layer.forward = forward
        self._before.clear()


def _of_layer(layer: nn.Linear) -> Forward:
    weight = layer.weight.detach()
    bias = layer.bias
    if weight.dtype == torch.float32:
        return partial(linear, weight=weight.T.contiguous().T, bias=bias)
    return partial(_multiplied, _packed(weight), bias)


def _of_head(layer: nn.Linear) -> Forward:
    """Return the layer's product with float32 logits, as in `ops`."""
    weight = layer.weight.detach()
    if weight.dtype == torch.float32:
        return partial(_in_blocks, weight, layer.bias)
    bias = None if layer.bias is None else layer.bias.float()
    return partial(_logits, _packed(weight.float()), bias)


def _packs(dtype: torch.dtype) -> bool:
    """Return True if oneDNN is there, and multiplies numbers of the type `dtype`."""
    has_units = dtype == torch.bfloat16 and torch.backends.mkldnn.is_available()
    return has_units and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _packed(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
    return packed


def _multiplied(
    packed: torch.Tensor, bias: torch.Tensor | None, hidden: torch.Tensor
) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(hidden, packed, bias, "none", [], "")
    return product


def _logits(packed: torch.Tensor, bias: torch.Tensor | None, hidden: torch.Tensor) -> torch.Tensor:
    with bf16_units(hidden.dtype):
        return _multiplied(packed, bias, hidden.float())


def _in_blocks(
    weight_VH: torch.Tensor, bias: torch.Tensor | None, hidden: torch.Tensor
) -> torch.Tensor:
    hidden_NH = hidden.flatten(0, -2)
    logits_NV = hidden.new_empty(len(hidden_NH), len(weight_VH))
    for block, rows in zip(logits_NV.split(BLOCK, 1), weight_VH.split(BLOCK), strict=True):
        torch.mm(hidden_NH, rows.T, out=block)
    return (logits_NV if bias is None else logits_NV.add_(bias)).view(*hidden.shape[:-1], -1)
