"""Sampling through `model.generate`, for models with sliding windows or linear attention.

A cache for sliding windows or linear attention does not keep all positions of a conversation, so
the model computes the whole conversation again for each message.

Letters in shapes: B sequences, T tokens, V entries of the vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import StoppingCriteriaList

from pipeline.models.capabilities import padded, padding_is_harmless
from pipeline.rollout.samplers.drawing import ModelSampler, logprobs_of, streams_of
from pipeline.rollout.trajectory import Sampled

TOKENS_PER_BATCH = 1 << 17  # maximum number of tokens in a batch, padding included


@dataclass(kw_only=True, eq=False)
class GenerateConversation:
    """One conversation of a GenerateSampler."""

    key: int  # 64-bit key that selects the conversation's random numbers
    ids: list[int]
    num_sampled: int = 0  # number of random numbers that the conversation has used


class GenerateSampler(ModelSampler):
    """A `Sampler` that calls `model.generate`, with the same random numbers as `RowSampler`.

    The shorter conversations of a batch get padding on the left. If padding changes the model's
    output (`pads` is False), all conversations of a batch have equal lengths.
    """

    def _prepare(self) -> None:
        # A new generation config drops the checkpoint's own sampling settings (top_k, penalties).
        self.model.generation_config = GenerationConfig(do_sample=False, use_cache=True)
        self.pads = padding_is_harmless(self.model)

    def open(
        self, prompts: Sequence[list[int]], keys: Sequence[int], num_drawn: Sequence[int] = ()
    ) -> list[GenerateConversation]:
        lines = zip(prompts, keys, num_drawn or [0] * len(keys), strict=True)
        return [
            GenerateConversation(key=key, ids=list(ids), num_sampled=n) for ids, key, n in lines
        ]

    def extend(self, conversation: GenerateConversation, ids: list[int]) -> None:
        conversation.ids += ids

    def close(self, conversation: GenerateConversation) -> None:
        conversation.ids = []

    @torch.no_grad()
    def sample(
        self,
        conversations: Sequence[GenerateConversation],
        max_tokens: Sequence[int],
        greedy: bool = False,
        until: int | None = None,
    ) -> list[Sampled | None]:
        """See `Sampler.sample`. Every call completes all messages and ignores `until`."""
        messages: list[Sampled | None] = [None] * len(conversations)
        for batch in self._batches(conversations):
            rows = [conversations[i] for i in batch]
            sampled = self._generate(rows, [max_tokens[i] for i in batch], greedy)
            for i, message in zip(batch, sampled, strict=True):
                messages[i] = message
                conversations[i].ids += message.ids
                conversations[i].num_sampled += len(message.ids)
        return messages

    def _batches(self, conversations: Sequence[GenerateConversation]) -> list[list[int]]:
        """Group conversations of similar lengths; return the indices of each batch."""
        lengths = [len(conversation.ids) for conversation in conversations]
        batches: list[list[int]] = []
        for i in sorted(range(len(conversations)), key=lambda i: -lengths[i]):
            longest = lengths[batches[-1][0]] if batches else 0
            fits = batches and (len(batches[-1]) + 1) * longest <= TOKENS_PER_BATCH
            if fits and (self.pads or lengths[i] == longest):
                batches[-1].append(i)
            else:
                batches.append([i])
        return batches

    def _generate(
        self, rows: Sequence[GenerateConversation], limits: Sequence[int], greedy: bool
    ) -> list[Sampled]:
        tokens_BT, mask_BT = (x.to(self.device) for x in padded([row.ids for row in rows]))
        keys, used = streams_of(rows)
        stops, limits_B = (torch.tensor(x, device=self.device) for x in (self.stops, limits))
        tokens = list[torch.Tensor]()
        values = list[torch.Tensor]()

        def choose(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            """Sample the next token of each row; return scores that allow only this token."""
            logprobs_BV = logprobs_of(scores, self.temperature)
            sampled_B = self.sample_tokens(logprobs_BV, keys, used + len(tokens), greedy)
            tokens.append(sampled_B[:, None])
            values.append(logprobs_BV.gather(-1, tokens[-1]))
            return torch.full_like(scores, float("-inf")).scatter_(-1, tokens[-1], 0.0)

        def has_ended(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return (tokens[-1] == stops).any(-1) | (len(tokens) >= limits_B)

        self.model.generate(
            tokens_BT,
            attention_mask=mask_BT,
            max_new_tokens=max(limits),
            logits_processor=LogitsProcessorList([choose]),
            stopping_criteria=StoppingCriteriaList([has_ended]),
        )
        # Tokens that `generate` adds to a row after the end of the row's message are dropped.
        sampled, chosen = (torch.cat(x, 1).cpu().numpy() for x in (tokens, values))
        stopped = (sampled[:, :, None] == self.stops).any(2)
        ends = stopped | (np.arange(1, sampled.shape[1] + 1) >= np.array(limits)[:, None])
        counts = ends.argmax(1) + 1
        # The model has not yet computed the last token of a message, hence `counts - 1`.
        self.num_tokens += int(mask_BT.sum()) + int((counts - 1).sum())
        self.num_padded_tokens += mask_BT.numel() + len(rows) * (sampled.shape[1] - 1)
        return [
            self.message(ids[:count].tolist(), logprobs[:count].tolist())
            for ids, logprobs, count in zip(sampled, chosen, counts, strict=True)
        ]
