"""Sampling conversations through `model.generate`, for models that the row cache cannot serve.

Models with sliding windows or linear attention do not keep the keys and values of every position,
so a row could not be continued: each message computes its whole conversation anew.

Legend: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import StoppingCriteriaList

from pipeline.rollout.sequences import ModelSampler, logprobs_of, streams_of
from pipeline.rollout.trajectory import Sampled

TOKENS_PER_BATCH = 1 << 17  # of conversations computed side by side, padding included


@dataclass(kw_only=True, eq=False)
class GenerateEpisode:
    """One conversation inside the sampler; no cache holds it between messages."""

    key: int  # of its stream of draws
    ids: list[int]
    num_sampled: int = 0  # draws used so far


class GenerateSampler(ModelSampler):
    """The calls of `Sampler`, and the draws of the row sampler, on transformers' own cache.

    Shorter conversations are padded on the left. Where padding changes what the model computes
    (`pads` is False), only conversations of equal length are computed side by side.
    """

    def _prepare(self) -> None:
        # Sampling settings of a checkpoint (top_k, penalties) would be applied as well.
        self.model.generation_config = GenerationConfig(do_sample=False, use_cache=True)
        self.pads = padding_is_harmless(self.model)

    def open(self, prompts: Sequence[list[int]], keys: Sequence[int]) -> list[GenerateEpisode]:
        """Start one conversation per prompt."""
        return [
            GenerateEpisode(key=key, ids=list(prompt))
            for prompt, key in zip(prompts, keys, strict=True)
        ]

    def extend(self, episode: GenerateEpisode, ids: list[int]) -> None:
        """Append the tokens of a reply."""
        episode.ids += ids

    def close(self, episode: GenerateEpisode) -> None:
        """End a conversation."""
        episode.ids = []

    @torch.no_grad()
    def sample(
        self,
        episodes: Sequence[GenerateEpisode],
        max_tokens: Sequence[int],
        greedy: bool = False,
        until: int | None = None,
    ) -> list[Sampled | None]:
        """Sample the next message of each conversation, of at most `max_tokens` tokens (1 or more).

        All are complete when it returns, whatever `until` is.
        """
        messages: dict[int, Sampled] = {}
        for batch in self._batches(episodes):
            rows = [episodes[i] for i in batch]
            sampled = self._generate(rows, [max_tokens[i] for i in batch], greedy)
            messages.update(zip(batch, sampled, strict=True))
            for episode, message in zip(rows, sampled, strict=True):
                episode.ids += message.ids
                episode.num_sampled += len(message.ids)
        return [messages[i] for i in range(len(episodes))]

    def _batches(self, episodes: Sequence[GenerateEpisode]) -> Iterator[list[int]]:
        """Indices of the conversations to compute side by side: neighbours in order of length."""
        lengths = [len(episode.ids) for episode in episodes]
        batch: list[int] = []
        for i in sorted(range(len(episodes)), key=lambda i: -lengths[i]):
            if batch and (
                (len(batch) + 1) * lengths[batch[0]] > TOKENS_PER_BATCH
                or (not self.pads and lengths[i] != lengths[batch[0]])
            ):
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch

    def _generate(
        self, rows: Sequence[GenerateEpisode], limits: Sequence[int], greedy: bool
    ) -> list[Sampled]:
        tokens_BT, mask_BT = padded([row.ids for row in rows])
        keys, drawn = streams_of(rows)
        stops, limits_B = torch.from_numpy(self.stops), torch.tensor(limits, device=self.device)
        stops = stops.to(self.device)
        tokens: list[torch.Tensor] = []
        values: list[torch.Tensor] = []

        def draw(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            """Draw the next token of each row, and leave generate no other choice."""
            logprobs_BV = logprobs_of(scores, self.temperature)
            picked = self.sample_tokens(logprobs_BV, keys, drawn + len(tokens), greedy)[:, None]
            tokens.append(picked)
            values.append(logprobs_BV.gather(-1, picked))
            return torch.full_like(scores, float("-inf")).scatter_(-1, picked, 0.0)

        def has_ended(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return (tokens[-1] == stops).any(-1) | (len(tokens) >= limits_B)

        self.model.generate(
            tokens_BT.to(self.device),
            attention_mask=mask_BT.to(self.device),
            max_new_tokens=max(limits),
            logits_processor=LogitsProcessorList([draw]),
            stopping_criteria=StoppingCriteriaList([has_ended]),
        )
        # Rows that have ended are drawn on until the last one ends; those tokens are ignored.
        picked, chosen = (torch.cat(x, 1).cpu().numpy() for x in (tokens, values))
        stopped = (picked[:, :, None] == self.stops).any(2)
        ends = stopped | (np.arange(1, picked.shape[1] + 1) >= np.array(limits)[:, None])
        counts = ends.argmax(1) + 1
        # The last token of a message is not fed until the next one.
        self.num_tokens += int(mask_BT.sum() + (counts - 1).sum())
        self.num_padded_tokens += mask_BT.numel() + len(rows) * (picked.shape[1] - 1)
        return [
            Sampled(
                ids=ids[:count].tolist(),
                logprobs=logprobs[:count].tolist(),
                finished=ids[count - 1] in self.stop_ids,
            )
            for ids, logprobs, count in zip(picked, chosen, counts, strict=True)
        ]


def padded(sequences: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequences, padded on the left, and the mask of real tokens, [B, T] each."""
    longest = max(map(len, sequences))
    tokens = [[0] * (longest - len(ids)) + ids for ids in sequences]
    mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in sequences]
    return torch.tensor(tokens), torch.tensor(mask)


@torch.no_grad()
def padding_is_harmless(model: Any) -> bool:
    """Whether padding on the left leaves a row's logits unchanged, in the prompt and after it."""
    device, size = next(model.parameters()).device, model.get_input_embeddings().num_embeddings

    def logits(sequences: list[list[int]]) -> torch.Tensor:
        tokens, mask = padded([[i % size for i in ids] for ids in sequences])
        out = model.generate(
            tokens.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=3,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return torch.stack(out.logits, 1)[-1]

    short, long = [3, 1, 4, 1, 5], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8]
    alone, behind = logits([short]), logits([long, short])
    return torch.allclose(alone, behind, rtol=0, atol=1e-3 * float(alone.std()))
