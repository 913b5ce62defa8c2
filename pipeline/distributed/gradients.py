"""Gradients, which are summed over ranks, not averaged, and optimizer state spread over ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class GradientAllReduce(nn.Module):
    """A backward pass that adds zero and uses no memory; DDP then sums the gradients over ranks.

    A backward pass of real tokens can run out of memory on one rank while the other ranks wait for
    its gradients. This pass reaches every trained parameter, also if a rank's own tokens do not.
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


def sum_gradients(module: Any) -> Any:
    """Make DDP add the gradients of the ranks instead of averaging them; returns the module.

    A loss that is normalised over all ranks then needs no factor; the rounding of a factor would
    depend on the number of ranks. A benchmark may replace `module.add_up`.
    """
    if isinstance(module, DistributedDataParallel):
        wrapped: Any = module
        wrapped.add_up = add_up
        # A lambda, because DDP refuses functions with annotations as text.
        wrapped.register_comm_hook(None, lambda _, bucket: wrapped.add_up(bucket))
    return module


def skip_gradient_sync(module: Any) -> None:
    """Make DDP leave each rank its own gradients."""

    def unchanged(bucket: dist.GradBucket) -> Any:
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    if isinstance(module, DistributedDataParallel):
        module.register_comm_hook(None, lambda _, bucket: unchanged(bucket))


def add_up(bucket: dist.GradBucket) -> Any:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


def sharded_adamw(parameters: Iterable[torch.Tensor], **settings: Any) -> torch.optim.Optimizer:
    """AdamW whose moments are spread over the ranks (ZeRO stage 1, arXiv 1910.02054, section 5.1).

    Needs a process group; with one rank it is plain AdamW.
    """
    if not dist.is_initialized():
        return torch.optim.AdamW(parameters, **settings)
    from torch.distributed.optim import ZeroRedundancyOptimizer  # compiles for a second

    return ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.AdamW, **settings)


def consolidated_state_dict(optimizer: torch.optim.Optimizer, rank: int) -> dict[str, Any] | None:
    """The optimizer's state as one process would have it, on rank 0; every rank must call this."""
    if hasattr(optimizer, "consolidate_state_dict"):
        optimizer.consolidate_state_dict(to=0)
    return optimizer.state_dict() if rank == 0 else None


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over the ranks in place, by NCCL on GPU and gloo on CPU."""
    dist.all_reduce(tensor)
    return tensor
