"""What a forward pass keeps for the backward pass, counted on the device `meta`.

The decoder runs once on tensors without data, and hooks add up the bytes of the tensors that
autograd saves. So the count follows the model's own code, precision and adapters.
"""

from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface

from pipeline.models.capabilities import outer_layers
from pipeline.models.lora import base_model
from pipeline.models.ops import keep_less

NAME = "counted"  # name of the attention implementation in transformers
NUM_TOKENS = 64


class Activations(NamedTuple):
    """Bytes per token that autograd keeps of a model's decoder."""

    saved: float  # all saved tensors
    layer: float  # saved tensors of the layer that saves most
    inputs: float  # inputs of all layers, which `gradient_checkpointing` keeps


class _Attention(torch.autograd.Function):
    """Saves what fused attention saves: queries, keys, values, outputs and a sum per query."""

    @staticmethod
    def forward(context: Any, *states: torch.Tensor) -> torch.Tensor:
        query, _, value = states
        batch, heads, length, _ = query.shape
        output = query.new_empty(batch, length, heads, value.shape[-1])
        sums = query.new_empty(batch, heads, length, dtype=torch.float32)
        context.save_for_backward(*states, output, sums)
        return output


def _attend(_: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *__: Any, **___: Any) -> Any:
    return _Attention.apply(q.to(v.dtype), k.to(v.dtype), v), None


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, lambda *_, **__: None)


class _Autocast(TorchFunctionMode):
    """Casts what linear layers multiply, as autocast does on devices that compute."""

    def __init__(self, dtype: torch.dtype, weights: dict[int, torch.Tensor]) -> None:
        super().__init__()
        self.dtype, self.weights = dtype, weights
        self.casts = dict[int, torch.Tensor]()

    def __torch_function__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if call is linear:
            inputs, weight, *rest = args
            cast = self.casts.setdefault(id(weight), weight.to(self.dtype))
            self.weights[_storage(cast)] = cast
            args = inputs.to(self.dtype), cast, *rest
        return call(*args, **(kwargs or {}))


def _storage(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def activations_of(model: Any, autocast: torch.dtype | None = None) -> Activations:
    """Count what the decoder of a model on `meta` keeps; changes the model's attention.

    `autocast` is the type in which linear layers compute, if it is not the model's. Weights and
    their casts do not count. A model that cannot run without data raises any exception.
    """
    model.set_attn_implementation(NAME)
    keep_less(model)
    weights = {_storage(parameter): parameter for parameter in model.parameters()}
    kept, before, inputs = dict[int, torch.Tensor](), list[int](), list[int]()

    def num_bytes() -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if _storage(tensor) not in weights:
            kept[_storage(tensor)] = tensor  # alive, so that no other storage gets its address
        return tensor

    def begin(_: Any, args: Any, kwargs: Any) -> None:
        before.append(num_bytes())
        given = [*args, *kwargs.values()]
        inputs.append(sum(t.nbytes for t in given if isinstance(t, torch.Tensor)))

    layers = outer_layers(base_model(model))
    hooks = [layer.register_forward_pre_hook(begin, with_kwargs=True) for layer in layers]
    ids = torch.zeros((1, NUM_TOKENS), dtype=torch.int64, device="meta")
    mask = torch.empty((1, 1, 1, 0), dtype=torch.bool, device="meta")  # so that none is made
    mode: AbstractContextManager[Any] = _Autocast(autocast, weights) if autocast else nullcontext()
    with mode, saved_tensors_hooks(keep, lambda tensor: tensor):
        decoder = base_model(model).get_decoder()
        decoder(input_ids=ids, position_ids=ids, attention_mask=mask, use_cache=False)
    for hook in hooks:
        hook.remove()
    saved = num_bytes()
    largest = max(after - first for first, after in pairwise([*before, saved]))
    return Activations(*(size / NUM_TOKENS for size in (saved, largest, sum(inputs))))
