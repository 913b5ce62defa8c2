"""Sampling conversations through `model.generate`, for models that the row cache cannot serve.

Sliding windows and linear attention keep no key and value of every position, so there is nothing
that a row could go on from: each message computes its whole conversation anew.

Legend: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation import StoppingCriteria, StoppingCriteriaList

from pipeline.rollout.sequences import (
    ModelSampler,
    logprobs_of,
    pick,
)
from pipeline.rollout.trajectory import Sampled

TOKENS_PER_BATCH = 1 << 17  # of conversations computed side by side, padding included


@dataclass(kw_only=True, eq=False)
class GenerateEpisode:
    """One conversation inside the sampler, which is in no cache between messages."""

    key: int  # of its stream of draws
    ids: list[int]
    num_sampled: int = 0  # draws used so far


class GenerateSampler(ModelSampler):
    """The calls of `Sampler`, and the draws of the row sampler, on transformers' own cache.

    Conversations that are not equally long are padded on the left, unless `pads` is False, because
    that would change what the model computes; then only equally long ones are computed side by
    side.
    """

    def _prepare(self) -> None:
        # A checkpoint's own way to sample (top_k, penalties) would come on top of ours.
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

        All are complete when it returns, whatever `until` asks for at least.
        """
        found: list[Sampled | None] = [None] * len(episodes)
        for batch in self._batches(episodes):
            rows = [episodes[i] for i in batch]
            messages = self._generate(rows, [max_tokens[i] for i in batch], greedy)
            for i, message in zip(batch, messages, strict=True):
                found[i] = message
                episodes[i].ids += message.ids
                episodes[i].num_sampled += len(message.ids)
        return found

    def _batches(self, episodes: Sequence[GenerateEpisode]) -> Iterator[list[int]]:
        """Indices of the conversations to compute side by side, those of like lengths together."""
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
        picker = _Picker(self, rows, greedy)
        self.model.generate(
            tokens_BT.to(self.device),
            attention_mask=mask_BT.to(self.device),
            max_new_tokens=max(limits),
            logits_processor=LogitsProcessorList([picker]),
            stopping_criteria=StoppingCriteriaList([_Ends(self, tokens_BT.shape[1], limits)]),
        )
        picked, chosen = (torch.stack(x, 1).cpu().numpy() for x in (picker.picked, picker.chosen))
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


class _Picker(LogitsProcessor):
    """Draws the token of each row and leaves generate no other; keeps it and its log-probability.

    Rows that are at their end draw on; what they draw is ignored.
    """

    def __init__(
        self, sampler: GenerateSampler, rows: Sequence[GenerateEpisode], greedy: bool
    ) -> None:
        self.sampler, self.greedy = sampler, greedy
        self.keys: NDArray[np.uint64] = np.array([row.key for row in rows], dtype=np.uint64)
        self.drawn: NDArray[np.int64] = np.array([row.num_sampled for row in rows])
        self.picked: list[torch.Tensor] = []
        self.chosen: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        sampler = self.sampler
        logprobs_BV = logprobs_of(scores, sampler.temperature)
        places = self.keys, self.drawn + len(self.picked)
        picked = pick(logprobs_BV, *places, self.greedy, sampler.top_k, sampler.top_p)
        self.picked.append(picked)
        self.chosen.append(logprobs_BV.gather(-1, picked[:, None])[:, 0])
        return torch.full_like(scores, float("-inf")).scatter_(-1, picked[:, None], 0.0)


class _Ends(StoppingCriteria):
    """Ends a row at its end of turn, at another stop or at its limit."""

    def __init__(self, sampler: GenerateSampler, start: int, limits: Sequence[int]) -> None:
        self.start = start
        self.stops = torch.from_numpy(sampler.stops).to(sampler.device)
        self.limits = torch.tensor(limits, device=sampler.device)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        at_end = (input_ids[:, -1:] == self.stops).any(-1)
        return at_end | (input_ids.shape[1] - self.start >= self.limits)


def padded(sequences: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequences, padded on their left, and the mask of what is theirs, [B, T] each."""
    longest = max(map(len, sequences))
    tokens = [[0] * (longest - len(ids)) + ids for ids in sequences]
    mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in sequences]
    return torch.tensor(tokens), torch.tensor(mask)


@torch.no_grad()
def padding_is_harmless(model: Any) -> bool:
    """Whether a row is computed alike alone and behind padding, in the prompt and after it."""
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
