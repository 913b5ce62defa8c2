"""Sampling through `model.generate`, for models that the row cache cannot serve.

Models with sliding windows or linear attention do not keep the keys and values of all positions, so
a row could not be continued: each message computes its whole conversation again.

Legend: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import StoppingCriteriaList

from pipeline.rollout.sequences import ModelSampler, logprobs_of, streams_of
from pipeline.rollout.trajectory import Sampled

TOKENS_PER_BATCH = 1 << 17  # of conversations side by side, with padding


@dataclass(kw_only=True, eq=False)
class GenerateEpisode:
    """One conversation inside the sampler."""

    key: int  # of its stream of draws
    ids: list[int]
    num_sampled: int = 0  # draws used so far


class GenerateSampler(ModelSampler):
    """A `Sampler` on transformers' own cache; it uses the same random numbers as `RowSampler`.

    Shorter conversations get padding on the left. If padding changes the model's output (`pads` is
    False), only conversations of equal length run side by side.
    """

    def _prepare(self) -> None:
        # The checkpoint's own sampling settings (top_k, penalties) would apply as well.
        self.model.generation_config = GenerationConfig(do_sample=False, use_cache=True)
        self.pads = padding_is_harmless(self.model)

    def open(self, prompts: Sequence[list[int]], keys: Sequence[int]) -> list[GenerateEpisode]:
        pairs = zip(prompts, keys, strict=True)
        return [GenerateEpisode(key=key, ids=list(prompt)) for prompt, key in pairs]

    def extend(self, episode: GenerateEpisode, ids: list[int]) -> None:
        episode.ids += ids

    def close(self, episode: GenerateEpisode) -> None:
        episode.ids = []

    @torch.no_grad()
    def sample(
        self,
        episodes: Sequence[GenerateEpisode],
        max_tokens: Sequence[int],
        greedy: bool = False,
        until: int | None = None,
    ) -> list[Sampled | None]:
        """See `Sampler`; the call completes all messages, whatever `until` is."""
        messages: list[Sampled | None] = [None] * len(episodes)
        for batch in self._batches(episodes):
            rows = [episodes[i] for i in batch]
            sampled = self._generate(rows, [max_tokens[i] for i in batch], greedy)
            for i, message in zip(batch, sampled, strict=True):
                messages[i] = message
                episodes[i].ids += message.ids
                episodes[i].num_sampled += len(message.ids)
        return messages

    def _batches(self, episodes: Sequence[GenerateEpisode]) -> list[list[int]]:
        """Indices of the conversations that run side by side: neighbours in order of length."""
        lengths = [len(episode.ids) for episode in episodes]
        batches: list[list[int]] = []
        for i in sorted(range(len(episodes)), key=lambda i: -lengths[i]):
            longest = lengths[batches[-1][0]] if batches else 0
            fits = batches and (len(batches[-1]) + 1) * longest <= TOKENS_PER_BATCH
            if fits and (self.pads or lengths[i] == longest):
                batches[-1].append(i)
            else:
                batches.append([i])
        return batches

    def _generate(
        self, rows: Sequence[GenerateEpisode], limits: Sequence[int], greedy: bool
    ) -> list[Sampled]:
        tokens_BT, mask_BT = (x.to(self.device) for x in padded([row.ids for row in rows]))
        keys, drawn = streams_of(rows)
        stops, limits_B = (torch.tensor(x, device=self.device) for x in (self.stops, limits))
        tokens: list[torch.Tensor] = []
        values: list[torch.Tensor] = []

        def draw(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            """Draw the next token of each row, and leave `generate` no other choice."""
            logprobs_BV = logprobs_of(scores, self.temperature)
            tokens.append(
                self.sample_tokens(logprobs_BV, keys, drawn + len(tokens), greedy)[:, None]
            )
            values.append(logprobs_BV.gather(-1, tokens[-1]))
            return torch.full_like(scores, float("-inf")).scatter_(-1, tokens[-1], 0.0)

        def has_ended(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return (tokens[-1] == stops).any(-1) | (len(tokens) >= limits_B)

        self.model.generate(
            tokens_BT,
            attention_mask=mask_BT,
            max_new_tokens=max(limits),
            logits_processor=LogitsProcessorList([draw]),
            stopping_criteria=StoppingCriteriaList([has_ended]),
        )
        # Complete rows continue until the last one ends; the surplus tokens are ignored.
        sampled, chosen = (torch.cat(x, 1).cpu().numpy() for x in (tokens, values))
        stopped = (sampled[:, :, None] == self.stops).any(2)
        ends = stopped | (np.arange(1, sampled.shape[1] + 1) >= np.array(limits)[:, None])
        counts = ends.argmax(1) + 1
        # The last token of a message is fed with the next message.
        self.num_tokens += int(mask_BT.sum()) + int((counts - 1).sum())
        self.num_padded_tokens += mask_BT.numel() + len(rows) * (sampled.shape[1] - 1)
        lines = [
            (ids[:count].tolist(), logprobs[:count].tolist())
            for ids, logprobs, count in zip(sampled, chosen, counts, strict=True)
        ]
        return [self.message(*line) for line in lines]


def padded(sequences: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequences with padding on the left, and the mask of real tokens, [B, T] each."""
    longest = max(map(len, sequences))
    both = (sequences, [[1] * len(ids) for ids in sequences])
    tokens, mask = ([[0] * (longest - len(row)) + row for row in rows] for rows in both)
    return torch.tensor(tokens), torch.tensor(mask)


@torch.no_grad()
def padding_is_harmless(model: Any) -> bool:
    """Whether padding on the left leaves a row's logits unchanged, in the prompt and after it."""
    device, size = next(model.parameters()).device, model.get_input_embeddings().num_embeddings

    def logits(*sequences: list[int]) -> torch.Tensor:
        tokens, mask = (x.to(device) for x in padded([[i % size for i in s] for s in sequences]))
        out = model.generate(
            tokens,
            attention_mask=mask,
            max_new_tokens=3,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return torch.stack(out.logits, 1)[-1]

    short, long = [3, 1, 4, 1, 5], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8]
    alone, behind = logits(short), logits(long, short)
    return torch.allclose(alone, behind, rtol=0, atol=1e-3 * float(alone.std()))
