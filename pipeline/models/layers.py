"""Changes of a model's layers, and operations with backward passes of our own.

- The output layer of a model that computes in bf16: logits and the weight's gradient in float32.
  Logits that are rounded to bf16 differ from the exact ones by up to 1/16 at 20 nats, in the
  trainer otherwise than in the sampler. Both therefore multiply bf16 numbers and add in float32.
- RMS norms and gated MLPs that keep fewer tensors for the backward pass. Written as separate
  operations, an RMS norm keeps its input twice, and SwiGLU (Shazeer 2020, arXiv 2002.05202) keeps
  three tensors of the intermediate size: a quarter of what autograd keeps of a layer. Here, the
  backward pass computes what it needs from the inputs. Outputs have equal bits.
- Layers that the backward pass computes again (`recompute_layers`).
- Rotary factors that do not depend on the sequence length (`fix_rotary`).

Letters in shapes: N hidden states, H hidden size, V entries of the vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint
from transformers.activations import SiLUActivation
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from pipeline.common.errors import UserError

ALIGNMENT = 64  # bytes, of the address of a new tensor on a CPU
PART = 4096  # rows or columns that a CPU converts to float32 at once
FIXED = "fixed"  # a rope_type for which transformers does not change the rotary factors


def weight_of_logits(head: nn.Module) -> torch.Tensor | None:
    """Return the output layer's weight in bf16; None if the layer computes in float32 or float64.

    Under autocast this is one cast, which all products of a forward and a backward pass can use.
    """
    if type(head) is not nn.Linear:
        return None
    kind = head.weight.device.type
    dtype = head.weight.dtype
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    return None if dtype.itemsize > 2 else head.weight.detach().to(dtype)


def logits_of(head: Any, hidden: torch.Tensor, weight_VH: torch.Tensor | None) -> torch.Tensor:
    """Return logits [..., V] for hidden states [..., H]; `weight_VH` is from `weight_of_logits`."""
    if weight_VH is None:
        logits: torch.Tensor = head(hidden)
        return logits
    product: torch.Tensor = _Product.apply(hidden.flatten(0, -2), head.weight, weight_VH)
    biased = product if head.bias is None else product + head.bias.float()
    return biased.view(*hidden.shape[:-1], -1)


def use_fp32_logits(head: Any) -> None:
    """Make an output layer in bf16 return logits in float32; it must not be trained."""
    if weight_of_logits(head) is not None:
        head.forward = partial(logits_of, head, weight_VH=head.weight)


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply matrices [M, K] and [K, N] of equal dtypes with a float32 result.

    CPUs have no product of bf16 matrices in float32. Every bf16 number is a float32 number, so the
    product of converted matrices is the same. The larger matrix is converted in parts, because
    fresh memory for all of it takes longer than the product.
    """
    with torch.autocast(a.device.type, enabled=False):
        if a.device.type == "cuda":
            return torch.mm(a, b, out_dtype=torch.float32)
        product = torch.empty((a.shape[0], b.shape[1]), dtype=torch.float32)
        with bf16_units(a.dtype):
            if a.shape[0] > b.shape[1]:
                converted = b.float()
                for part, rows in zip(product.split(PART), a.split(PART), strict=True):
                    torch.mm(rows.float(), converted, out=part)
            else:
                converted = a.float()
                for part, columns in zip(product.split(PART, 1), b.split(PART, 1), strict=True):
                    torch.mm(converted, columns.float(), out=part)
        return product


@contextmanager
def bf16_units(dtype: torch.dtype) -> Iterator[None]:
    """Let a CPU that has units for bf16 multiply float32 matrices there, if `dtype` is bf16.

    The units multiply numbers that bf16 can hold without rounding, and add in float32.
    """
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # made at import
    before = matmul.fp32_precision
    if dtype == torch.bfloat16:
        matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


class _Product(torch.autograd.Function):
    """hidden_NH times the transpose of weight_VH; `master` gets the weight's gradient."""

    @staticmethod
    def forward(
        context: Any, hidden_NH: torch.Tensor, master: torch.Tensor, weight_VH: torch.Tensor
    ) -> torch.Tensor:
        rounded_NH = hidden_NH.to(weight_VH.dtype)
        context.save_for_backward(rounded_NH, weight_VH)
        context.dtypes = hidden_NH.dtype, master.dtype
        return _mm(rounded_NH, weight_VH.T)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        rounded_NH, weight_VH = context.saved_tensors
        of_hidden, of_master = context.dtypes
        rounded_NV = gradients[0].to(weight_VH.dtype)
        master = None
        if context.needs_input_grad[1]:
            master = _mm(rounded_NV.T, rounded_NH).to(of_master)
        # As in the other layers, the hidden states' gradient is in the type of the products.
        with torch.autocast(weight_VH.device.type, enabled=False):
            return torch.mm(rounded_NV, weight_VH).to(of_hidden), master, None


def keep_less(model: nn.Module) -> None:
    """Change the classes of a model's modules whose code is that of Llama's norm or MLP.

    Most models have a copy of this code. A copy of a changed module works. Without gradients,
    modules compute as before.
    """
    changed = dict[type, type]()
    for module in model.modules():
        kind = type(module)
        for mixin, same in ((_Norm, LlamaRMSNorm), (_MLP, LlamaMLP)):
            if not isinstance(module, mixin) and has_code(module, same):
                if kind not in changed:
                    changed[kind] = type(kind.__name__, (mixin, kind), {"__module__": __name__})
                module.__class__ = changed[kind]


def has_code(module: nn.Module, same: type) -> bool:
    """Return True if a module computes as the class `same`, also after `keep_less`."""
    kind = type(module)
    if issubclass(kind, _Norm | _MLP):
        kind = kind.__mro__[2]  # the class that was changed
    return bool(_code(kind) == _code(same))


def _code(kind: type) -> Any:
    """Return what the method `forward` does, whatever its annotations are."""
    code = getattr(getattr(kind, "forward", None), "__code__", None)
    return code and (code.co_code, code.co_names, code.co_consts)


class _Norm:
    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        # The class of Llama rounds numbers of all other types to float32.
        is_rounded = {hidden_states.dtype, self.weight.dtype} != {torch.float32}
        if is_rounded or not torch.is_grad_enabled():
            return super().forward(hidden_states)  # type: ignore[misc]
        return _RMSNorm.apply(hidden_states, self.weight, self.variance_epsilon)


class _MLP:
    def forward(self: Any, x: torch.Tensor) -> Any:
        if not isinstance(self.act_fn, nn.SiLU | SiLUActivation) or not torch.is_grad_enabled():
            return super().forward(x)  # type: ignore[misc]
        return self.down_proj(_SwiGLU.apply(self.gate_proj(x), self.up_proj(x)))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
        context.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        x, weight, scale = context.saved_tensors
        normal = x * scale
        of_weight = None
        if context.needs_input_grad[1]:
            of_weight = (gradients[0] * normal).flatten(0, -2).sum(0)
        of_normal = gradients[0] * weight
        mean = (of_normal * normal).mean(-1, keepdim=True)
        return of_normal.addcmul_(normal, mean, value=-1).mul_(scale), of_weight, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(gate, up)
        return silu(gate).mul_(up)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        gate, up = context.saved_tensors
        of_gate = torch.ops.aten.silu_backward(gradients[0] * up, gate)
        return of_gate, silu(gate).mul_(gradients[0])


def outer_layers(model: nn.Module) -> list[nn.Module]:
    """Return a model's outermost blocks (GradientCheckpointingLayer) in forward order."""
    layers: list[nn.Module] = []
    for child in model.children():
        layers += [child] if isinstance(child, GradientCheckpointingLayer) else outer_layers(child)
    return list(dict.fromkeys(layers))  # A model may contain the same layer object twice.


def recompute_layers(model: Any) -> None:
    """Make the backward pass recompute each layer from the layer's saved inputs.

    Recomputing changes no bit of the gradients. Gradient checkpointing by the library transformers
    would need training mode, which turns on dropout and router noise. Raises UserError if
    `outer_layers` finds no layer.
    """
    layers = outer_layers(model)
    if not layers:
        raise UserError(
            f"gradient_checkpointing: got true, but {type(model).__name__} has no layers that can "
            "be computed again; set it false"
        )
    for layer in (layer for layer in layers if not isinstance(layer.forward, partial)):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


@torch.no_grad()
def align(model: Any) -> None:
    """Move weights on a CPU to addresses such as new tensors have.

    What is read from a file stands where it stands in the file. On some CPUs, the rounding of
    products depends on addresses.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu" and tensor.data_ptr() % ALIGNMENT:
            tensor.data = tensor.data.clone()


@torch.no_grad()
def fix_rotary(model: Any, max_tokens: int) -> str:
    """Make a model use the rotary factors of `max_tokens` tokens for sequences of every length.

    LongRoPE (Ding et al. 2024, arXiv 2402.13753; Phi-3 and Phi-4-mini) and dynamic NTK scaling
    change the factors if a sequence is longer than a limit. The library transformers chooses the
    factors once for each forward pass, so one long sequence changes the log-probabilities of all
    other sequences in the batch. Every forward pass of a run therefore uses the factors for
    `max_tokens` tokens, as vLLM does for LongRoPE.

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
