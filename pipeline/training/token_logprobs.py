"""The trained `nn.Module`, which computes the log-probabilities of sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from pipeline.distributed.sharding import Sharded, computed
from pipeline.models.layers import keep_less, logits_of, weight_of_logits
from pipeline.models.rank_memory import LOGITS_PER_CHUNK
from pipeline.models.sampling_copy import has_adapters
from pipeline.training.micro_batches import MicroBatch
from pipeline.training.prefix_tree import NO_MASK, follow_prefixes

IN_CACHE = 1 << 18  # number of logits that stay in a CPU's cache from one operation to the next


class TokenLogprobs(nn.Module):
    """The policy as a module that computes log-probabilities and entropies of sampled tokens.

    To save memory, the module computes logits in chunks, only at positions before sampled tokens.
    The backward pass computes the logits of each chunk but the last again. Entropies have gradients
    if `trains_entropy` is True. `max_tokens` is the maximum number of tokens of a sequence (0: not
    known). `sharded` is the model if its parameters are spread over the ranks.
    """

    def __init__(
        self,
        model: Any,
        temperature: float,
        trains_entropy: bool = True,
        max_tokens: int = 0,
        *,
        sharded: Sharded | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.sharded = sharded
        self.temperature = temperature
        self.trains_entropy = trains_entropy
        self.shares_prefixes = follow_prefixes(model, max_tokens)
        keep_less(model)

    def forward(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the targets' log-probabilities and entropies at the targets, each [N], in nats."""
        tree: dict[str, Any] = {}
        if batch.tree is not None:
            assert self.shares_prefixes, "this model's attention cannot use prefix trees"
            mask = torch.empty(NO_MASK, dtype=torch.bool, device=batch.input_ids.device)
            tree = {"tree": batch.tree, "attention_mask": mask}
        compute = partial(self._logprobs, batch, tree)
        if not has_adapters(self.model):
            return computed(self.sharded, compute)
        # LoRA's frozen weights are in the type in which the model computes; adapters stay in fp32.
        with torch.autocast(batch.input_ids.device.type, enabled=False):
            return computed(self.sharded, compute)

    def _logprobs(
        self, batch: MicroBatch, tree: Mapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_BT = self.model.get_decoder()(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **tree
        ).last_hidden_state
        hidden_U = hidden_BT.flatten(0, 1)[batch.predictors]
        head = self.model.get_output_embeddings()
        compute = partial(logits_of, head, weight_VH=weight_of_logits(head))
        parameters = [p for p in head.parameters() if p.requires_grad]
        count = -(-len(hidden_U) * head.weight.shape[0] // LOGITS_PER_CHUNK)
        size = -(-len(hidden_U) // count)
        firsts = range(0, len(hidden_U), size)
        ends = [batch.starts[first] for first in firsts[1:]]
        pieces = []
        chunks = zip(
            firsts,
            hidden_U.split(size),
            batch.which.tensor_split(ends),
            batch.targets.tensor_split(ends),
            strict=True,
        )
        for first, hidden, which, targets in chunks:
            keeps = torch.is_grad_enabled() and first + size >= len(hidden_U)
            pieces.append(
                _Chunk.apply(
                    compute,
                    self.temperature,
                    self.trains_entropy,
                    keeps,
                    which - first,
                    targets,
                    hidden,
                    *parameters,
                )
            )
        logprobs, entropies = zip(*pieces, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)


class _Chunk(torch.autograd.Function):
    """The log-probabilities of N targets, and the entropies at the targets' positions.

    The hidden state that predicts target n is `hidden_U[which_N[n]]`. The gradient of the logits
    takes the place of the logits in memory. Only a chunk that `keeps` its logits does not compute
    them again in the backward pass. `parameters` are the trained ones that `compute` uses.
    """

    @staticmethod
    def forward(
        context: Any,
        compute: Callable[[torch.Tensor], torch.Tensor],
        temperature: float,
        trains_entropy: bool,
        keeps: bool,
        which_N: torch.Tensor,
        targets: torch.Tensor,
        hidden_UH: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_UH = hidden_UH.detach().requires_grad_()
        with torch.set_grad_enabled(keeps):
            raw_UV = compute(hidden_UH)
        logits_UV = _at_least_fp32(raw_UV)
        sums = []
        entropies = []
        for x in logits_UV.split(_rows_at_once(logits_UV)):
            x = x / temperature
            highest = x.amax(-1, keepdim=True)
            below = x.sub_(highest)
            weights = below.exp()
            total = weights.sum(-1)
            sums.append(total.log() + highest[:, 0])
            entropies.append(total.log() - below.mul_(weights).sum(-1) / total)
        logsumexp_U = torch.cat(sums)
        entropy_U = torch.cat(entropies)
        kind = hidden_UH.device.type
        context.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        context.settings = compute, temperature, trains_entropy, parameters
        context.kept = (hidden_UH, raw_UV) if keeps else None
        context.save_for_backward(which_N, targets, hidden_UH, logsumexp_U, entropy_U)
        logprobs_N = logits_UV[which_N, targets] / temperature - logsumexp_U[which_N]
        entropy_N = entropy_U[which_N]
        if not trains_entropy:
            context.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        which_N, targets, hidden_UH, logsumexp_U, entropy_U = context.saved_tensors
        compute, temperature, trains_entropy, parameters = context.settings
        if context.kept:
            (hidden_UH, raw_UV), context.kept = context.kept, None
        else:
            with torch.enable_grad(), torch.autocast(*context.autocast):
                raw_UV = compute(hidden_UH := hidden_UH.detach().requires_grad_())
        gradient_UV = _at_least_fp32(raw_UV)
        of_logprobs, of_entropies = (gradient / temperature for gradient in gradients)
        zeros = torch.zeros_like(entropy_U)
        sums_U = zeros.index_add(0, which_N, of_logprobs)
        entropies_U = zeros.index_add(0, which_N, of_entropies)
        size = _rows_at_once(gradient_UV)
        rows = (x.unsqueeze(1).split(size) for x in (logsumexp_U, entropy_U, sums_U, entropies_U))
        for x, logsumexp, entropy, sums, of_entropy in zip(
            gradient_UV.split(size), *rows, strict=True
        ):
            x.div_(temperature).sub_(logsumexp)
            factors = -sums - of_entropy * (x + entropy) if trains_entropy else -sums
            x.exp_().mul_(factors)
        gradient_UV.index_put_((which_N, targets), of_logprobs, accumulate=True)
        inputs = hidden_UH, *parameters
        found = torch.autograd.grad(raw_UV, inputs, gradient_UV.to(raw_UV.dtype))
        return None, None, None, None, None, None, *found


def _at_least_fp32(logits: torch.Tensor) -> torch.Tensor:
    return logits.detach().to(torch.promote_types(logits.dtype, torch.float32))


def _rows_at_once(logits_UV: torch.Tensor) -> int:
    """Return the number of rows that a CPU's cache holds; on a GPU, all rows."""
    return len(logits_UV) if logits_UV.is_cuda else max(1, IN_CACHE // logits_UV.shape[1])
