"""Sums of gradients over the ranks, and optimizer state that is sharded over the ranks."""

from collections.abc import Iterable
from typing import Any
from weakref import proxy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class GradientAllReduce(nn.Module):
    """A module whose backward pass adds zeros to all gradients, and so starts DDP's all-reduce.

    The backward passes that compute the gradients run earlier and do not communicate. A rank that
    runs out of memory can therefore repeat its own backward passes without the other ranks.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self) -> torch.Tensor:
        trained = [p for p in self.module.parameters() if p.requires_grad]
        return torch.stack([_ZeroGradient.apply(p) for p in trained]).sum()


class _ZeroGradient(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, parameter: torch.Tensor) -> torch.Tensor:
        context.like = parameter.detach()
        return parameter.new_zeros(())

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        like: torch.Tensor = context.like
        return like.new_zeros(()).expand(like.shape)  # an expanded tensor takes almost no memory


def sum_gradients(module: Any) -> Any:
    """Make DDP sum gradients over the ranks instead of averaging gradients; returns the module.

    The loss is already divided by the number of tokens of all ranks, so no average is needed.
    """
    if isinstance(module, DistributedDataParallel):
        wrapped: Any = proxy(module)  # The hook must not keep the module, and its buckets, alive.
        wrapped.add_up = add_up  # a benchmark may replace this attribute
        wrapped.register_comm_hook(None, lambda _, bucket: wrapped.add_up(bucket))
    return module


def add_up(bucket: dist.GradBucket) -> Any:
    """Start the all-reduce of the gradients in DDP's `bucket`; returns a future of the sums."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


def sharded_adamw(parameters: Iterable[Any], **settings: Any) -> torch.optim.Optimizer:
    """AdamW with moments sharded over the ranks (ZeRO stage 1, arXiv 1910.02054, section 5.1)."""
    if not dist.is_initialized():
        return torch.optim.AdamW(parameters, **settings)
    from torch.distributed.optim import ZeroRedundancyOptimizer  # the import takes a second

    return ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.AdamW, **settings)


def consolidated_state_dict(optimizer: torch.optim.Optimizer, rank: int) -> dict[str, Any] | None:
    """Return the whole optimizer state on rank 0, else None; every rank must call the function."""
    if hasattr(optimizer, "consolidate_state_dict"):
        optimizer.consolidate_state_dict(to=0)
    return optimizer.state_dict() if rank == 0 else None


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """Sum the tensor over the ranks in place, by NCCL on GPU and gloo on CPU."""
    dist.all_reduce(tensor)
    return tensor
