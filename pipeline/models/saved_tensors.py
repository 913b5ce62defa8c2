"""RMS norms and gated MLPs that keep fewer tensors for the backward pass.

Written as separate operations, an RMS norm keeps its input twice, and SwiGLU (Shazeer 2020, arXiv
2002.05202) keeps three tensors of the intermediate size: a quarter of what autograd keeps of a
layer. Here, the backward pass computes what it needs from the inputs. Outputs have equal bits.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import silu
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm


def keep_less(model: nn.Module) -> None:
    """Change the classes of a model's modules whose code is that of Llama's norm or MLP.

    Most models have a copy of this code. A copy of a changed module works. Without gradients,
    modules compute as before.
    """
    changed = dict[type, type]()
    for module in model.modules():
        kind = type(module)
        for mixin, same in ((_Norm, LlamaRMSNorm), (_MLP, LlamaMLP)):
            if not isinstance(module, mixin) and _code(kind) == _code(same):
                if kind not in changed:
                    changed[kind] = type(kind.__name__, (mixin, kind), {"__module__": __name__})
                module.__class__ = changed[kind]


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
