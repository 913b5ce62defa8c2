"""The exchange of gradients: what DDP wraps, and a backward pass that does nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Exchange(nn.Module):
    """Its backward pass adds nothing to the gradients, and lets DDP sum them over the ranks.

    It cannot fail on one rank alone, as one of real tokens can that runs out of memory; then the
    other ranks would wait. Every trained parameter takes part, whichever of them the rank's own
    tokens have reached.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self) -> torch.Tensor:
        trained = [p for p in self.module.parameters() if p.requires_grad]
        return torch.stack([_Nothing.apply(p) for p in trained]).sum()


class _Nothing(torch.autograd.Function):
    """Zero, with a gradient of zero that takes no memory."""

    @staticmethod
    def forward(context: Any, parameter: torch.Tensor) -> torch.Tensor:
        context.like = parameter.detach()
        return parameter.new_zeros(())

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        like: torch.Tensor = context.like
        return like.new_zeros(()).expand(like.shape)
