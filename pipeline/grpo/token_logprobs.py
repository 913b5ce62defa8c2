"""The trained `nn.Module`, which computes the log-probabilities of sampled tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipeline.grpo.micro_batches import MicroBatch
from pipeline.grpo.prefix_tree import NO_MASK, follow_prefixes
from pipeline.models.output_layer import logits_of, weight_of_logits
from pipeline.models.weights import has_adapters

LOGITS_PER_CHUNK = 1 << 24  # maximum number of logits that are in memory at the same time
LOGITS_PER_CHUNK_ON_GPU = 1 << 27  # 883 rows of Qwen's vocabulary; fewer leave a GPU idle


class TokenLogprobs(nn.Module):
    """The policy as a module that computes log-probabilities and entropies of sampled tokens.

    To save memory, the module computes logits in chunks, only at positions before sampled tokens.
    The backward pass computes the logits of each chunk again. Entropies have gradients, which need
    a second tensor of the logits' size, if `trains_entropy` is True. `max_tokens` is the maximum
    number of tokens of a sequence (0: not known).
    """

    def __init__(
        self, model: Any, temperature: float, trains_entropy: bool = True, max_tokens: int = 0
    ) -> None:
        super().__init__()
        self.model = model
        self.temperature, self.trains_entropy = temperature, trains_entropy
        self.shares_prefixes = follow_prefixes(model, max_tokens)

    def forward(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the targets' log-probabilities and entropies at the targets, each [N], in nats."""
        tree: dict[str, Any] = {}
        if batch.tree is not None:
            assert self.shares_prefixes, "this model's attention cannot use prefix trees"
            tree = {"tree": batch.tree, "attention_mask": NO_MASK.to(batch.input_ids.device)}
        if not has_adapters(self.model):
            return self._logprobs(batch, tree)
        # LoRA's frozen weights are in the type in which the model computes; adapters stay in fp32.
        with torch.autocast(batch.input_ids.device.type, enabled=False):
            return self._logprobs(batch, tree)

    def _logprobs(
        self, batch: MicroBatch, tree: Mapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_BT = self.model.get_decoder()(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **tree
        ).last_hidden_state
        indices_N = batch.rows * batch.input_ids.shape[1] + batch.columns
        indices_U, which_N = torch.unique_consecutive(indices_N, return_inverse=True)
        hidden_U = hidden_BT.flatten(0, 1)[indices_U]
        head = self.model.get_output_embeddings()
        layer = head, weight_of_logits(head)
        most = LOGITS_PER_CHUNK_ON_GPU if hidden_U.is_cuda else LOGITS_PER_CHUNK
        size = max(1, most // head.weight.shape[0])
        if len(hidden_U) <= size:
            return self._head(*layer, hidden_U, which_N, batch.targets)
        firsts = torch.arange(0, len(hidden_U), size)
        ends = torch.searchsorted(which_N, firsts[1:].to(which_N.device)).cpu()
        chunks = hidden_U.split(size), *(x.tensor_split(ends) for x in (which_N, batch.targets))
        pieces = [
            checkpoint(self._head, *layer, hidden, which - first, targets, use_reentrant=False)
            for first, hidden, which, targets in zip(firsts.tolist(), *chunks, strict=True)
        ]
        logprobs, entropies = zip(*pieces, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def _head(
        self,
        head: nn.Module,
        weight_VH: torch.Tensor | None,
        hidden_U: torch.Tensor,
        which_N: torch.Tensor,
        targets: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-probabilities of N targets, and the entropies at the targets' positions.

        The hidden state that predicts target n is `hidden_U[which_N[n]]`.
        """
        logits_UV = logits_of(head, hidden_U, weight_VH)
        at_least_fp32 = torch.promote_types(logits_UV.dtype, torch.float32)
        logits_UV = logits_UV.to(at_least_fp32) / self.temperature  # frees the tensor before
        logprobs_UV = logits_UV.log_softmax(-1)
        del logits_UV
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.trains_entropy):
            entropy_U = -(logprobs_UV.exp() * logprobs_UV).sum(-1)
        return logprobs_UV[which_N, targets], entropy_U[which_N]
