"""Sampling conversations: one KV cache over all their turns, each row at its own positions.

Legend: B sequences, T tokens, N selected tokens, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers.cache_utils import Cache, CacheLayerMixin

from pipeline.config import UserError
from pipeline.draws import uniforms
from pipeline.lora import merged_parameters

# Shapes come in multiples of these: a row is then rounded alike in batches of other sizes.
ROWS, LENGTHS = 4, 16
# Settings of models that change logits after the output layer, which is applied here by itself.
SCALED_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale")


class _RowLayer(CacheLayerMixin):
    """Keys and values of a layer, [rows, positions, heads, size], each row at its own positions."""

    def __init__(self, cache: RowCache) -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        _, heads, _, size = key_states.shape
        shape = (self.cache.num_rows, self.cache.capacity, heads, size)
        self.keys, self.values = (key_states.new_zeros(shape), value_states.new_zeros(shape))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [B, heads, T, size] at `cache.positions` [B, T]; returns what the rows now hold."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        self._grow()
        rows, positions = self.cache.rows, self.cache.positions
        self.keys[rows[:, None], positions] = key_states.transpose(1, 2)
        self.values[rows[:, None], positions] = value_states.transpose(1, 2)
        count, length = len(rows), self.cache.length
        return (
            self.keys[:count, :length].transpose(1, 2),
            self.values[:count, :length].transpose(1, 2),
        )

    def _grow(self) -> None:
        assert self.keys is not None and self.values is not None
        missing = self.cache.capacity - self.keys.shape[1]
        if missing > 0:
            padding = (0, 0, 0, 0, 0, missing)
            self.keys = nn.functional.pad(self.keys, padding)
            self.values = nn.functional.pad(self.values, padding)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.length, 0

    def get_seq_length(self) -> int:
        return self.cache.length

    def get_max_length(self) -> int:
        return -1


class RowCache(Cache):
    """A key-value cache whose rows stand at their own positions; those in use are the first."""

    def __init__(self, num_layers: int, num_rows: int, capacity: int) -> None:
        self.num_rows, self.capacity, self.length = num_rows, capacity, 0
        self.rows = torch.empty(0, dtype=torch.int64)
        self.positions = torch.empty(0, dtype=torch.int64)
        super().__init__(layers=[_RowLayer(self) for _ in range(num_layers)])

    def place(self, positions_BT: torch.Tensor) -> torch.Tensor:
        """Say where the next forward writes; returns its attention mask, [B, 1, T, length] bool."""
        self.positions = positions_BT
        self.rows = torch.arange(len(positions_BT), device=positions_BT.device)
        self.length = (int(positions_BT.max()) // LENGTHS + 1) * LENGTHS
        if self.capacity < self.length:  # by quarters: doubling could take twice what is needed
            self.capacity = max(self.length, self.capacity + self.capacity // 4)
        visible = torch.arange(self.length, device=positions_BT.device)
        return (visible <= positions_BT[:, :, None])[:, None]

    def copy_rows(self, source: torch.Tensor, target: torch.Tensor) -> None:
        for layer in self.layers:
            assert (
                isinstance(layer, _RowLayer) and layer.keys is not None and layer.values is not None
            )
            layer.keys[target] = layer.keys[source]
            layer.values[target] = layer.values[source]


@dataclass(kw_only=True, eq=False)
class SamplerEpisode:
    """One conversation inside the sampler."""

    key: int  # of its stream of draws
    row: int  # in the cache
    length: int  # tokens in the cache
    pending: list[int]  # tokens to feed before the next one is sampled
    num_sampled: int = 0  # draws used so far


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """One assistant message as it was sampled; `finished` when its last id is the end of turn."""

    ids: list[int]
    logprobs: list[float]
    finished: bool


class Sampler:
    """Samples conversations from its own copy of the weights, with one KV cache over all turns.

    Five calls: `load_weights` once per step, `open` conversations, `extend` them by replies,
    `sample` the next message of each, `close`. A token is the inverse of the cumulative
    distribution at a counter-based draw, so what is sampled does not depend on which other
    conversations share the batch, beyond rounding.
    """

    def __init__(
        self, model: Any, end_of_turn_id: int, temperature: float, dtype: torch.dtype
    ) -> None:
        config = model.config
        scaled = [name for name in SCALED_LOGITS if getattr(config, name, None) not in (None, 1.0)]
        if scaled:
            raise UserError(
                f"model: its config sets {scaled[0]}, which is not supported; use another"
            )
        window = (
            "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
        )
        kinds = set(getattr(config, "layer_types", None) or [window])
        if kinds != {"full_attention"}:
            raise UserError(
                f"model: its layers are {sorted(kinds)}; the sampler serves full attention only"
            )
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.model.set_attn_implementation("sdpa")  # the others do not take the cache's mask
        for parameter in self.model.parameters():  # not the buffers: rotary frequencies need fp32
            parameter.data = parameter.data.to(dtype)
        self.device = next(self.model.parameters()).device
        self.end_of_turn_id, self.temperature = end_of_turn_id, temperature
        self._rows: dict[int, SamplerEpisode] = {}
        self._cache = RowCache(0, 0, 1)

    @torch.no_grad()
    def load_weights(self, model: Any) -> None:
        """Copy the weights of the trained model; LoRA's are merged on the way."""
        for own, trained in zip(self.model.parameters(), merged_parameters(model), strict=True):
            own.copy_(trained)

    @torch.no_grad()
    def open(self, prompts: Sequence[list[int]], keys: Sequence[int]) -> list[SamplerEpisode]:
        """Start one conversation per prompt; equal prompts are computed once.

        Earlier conversations must be closed.
        """
        assert not self._rows, "close every conversation before opening new ones"
        place = {
            prompt: row for row, prompt in enumerate({tuple(prompt): None for prompt in prompts})
        }
        num_rows = -(-len(prompts) // ROWS) * ROWS
        self._cache = RowCache(
            self.model.config.num_hidden_layers, num_rows, 2 * max(map(len, place))
        )
        # The last token of a prompt is left for `sample`, which needs its output.
        self._forward([list(prompt[:-1]) for prompt in place], [0] * len(place))
        source = torch.tensor([place[tuple(prompt)] for prompt in prompts], device=self.device)
        self._cache.copy_rows(source, torch.arange(len(prompts), device=self.device))
        self._rows = {
            row: SamplerEpisode(key=key, row=row, length=len(prompt) - 1, pending=[prompt[-1]])
            for row, (prompt, key) in enumerate(zip(prompts, keys, strict=True))
        }
        return list(self._rows.values())

    def extend(self, episode: SamplerEpisode, ids: list[int]) -> None:
        """Append the tokens of a reply; they are computed with the next `sample`."""
        episode.pending += ids

    def close(self, episode: SamplerEpisode) -> None:
        """End a conversation; its row is free."""
        del self._rows[episode.row]

    @torch.no_grad()
    def sample(
        self, episodes: Sequence[SamplerEpisode], max_tokens: Sequence[int], greedy: bool = False
    ) -> list[Sampled]:
        """Sample the next message of each conversation, of at most `max_tokens` tokens (1 or more).

        Greedy decoding takes the most likely token. Log-probabilities are those at the sampling
        temperature.
        """
        count, longest = len(episodes), max(max_tokens)
        limits = np.array(max_tokens)
        keys = np.array([episode.key for episode in episodes], dtype=np.uint64)
        drawn = np.array([episode.num_sampled for episode in episodes])
        tokens, logprobs = (np.zeros((count, longest), dtype=np.int64), np.zeros((count, longest)))
        lengths, last = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
        going = np.ones(count, dtype=bool)
        active = self._bring_to_front(episodes, going)  # the index of each row in the batch
        hidden = self._forward(
            [episodes[i].pending for i in active], [episodes[i].length for i in active]
        )
        cached = np.array([episode.length + len(episode.pending) for episode in episodes])
        for step in range(longest):
            logprobs_BV = self._logprobs(hidden)[: len(active)]
            places = keys[active], drawn[active] + step
            picked = self.pick(logprobs_BV, *places, greedy)
            chosen = logprobs_BV[torch.arange(len(picked)), torch.from_numpy(picked)].cpu().numpy()
            # A finished row may stay in the batch for a while; what it picks is ignored.
            live = going[active]
            rows = active[live]
            tokens[rows, step], logprobs[rows, step] = (picked[live], chosen[live])
            last[rows], lengths[rows] = picked[live], step + 1
            going[rows] = (picked[live] != self.end_of_turn_id) & (step + 1 < limits[rows])
            if not going.any():
                break
            if -(-going.sum() // ROWS) * ROWS <= 0.85 * len(active):
                # Those that finished can fill up: they write again what they hold already.
                kept = going.copy()
                kept[np.flatnonzero(~going)[: -going.sum() % ROWS]] = True
                active = self._bring_to_front(episodes, kept)
            positions = cached[active] + lengths[active] - 1
            hidden = self._forward([[token] for token in last[active].tolist()], positions.tolist())
        for i, episode in enumerate(episodes):
            episode.num_sampled += int(lengths[i])
            episode.length, episode.pending = (int(cached[i] + lengths[i] - 1), [int(last[i])])
        return [
            Sampled(
                ids=tokens[i, : lengths[i]].tolist(),
                logprobs=logprobs[i, : lengths[i]].tolist(),
                finished=bool(last[i] == self.end_of_turn_id),
            )
            for i in range(count)
        ]

    def _bring_to_front(self, episodes: Sequence[SamplerEpisode], wanted: np.ndarray) -> np.ndarray:
        """Swap the wanted episodes into the first rows; returns the episode index of each row."""
        index = {id(episode): i for i, episode in enumerate(episodes) if wanted[i]}
        count = len(index)
        holes = [r for r in range(count) if r not in self._rows or id(self._rows[r]) not in index]
        movers = [
            episode.row for i, episode in enumerate(episodes) if wanted[i] and episode.row >= count
        ]
        if holes:
            source = torch.tensor(movers + holes, device=self.device)
            target = torch.tensor(holes + movers, device=self.device)
            self._cache.copy_rows(source, target)
        for hole, mover in zip(holes, movers, strict=True):
            moved, displaced = self._rows.pop(mover), self._rows.pop(hole, None)
            moved.row, self._rows[hole] = hole, moved
            if displaced is not None:
                displaced.row, self._rows[mover] = mover, displaced
        return np.array([index[id(self._rows[row])] for row in range(count)])

    def _forward(self, tokens: Sequence[list[int]], starts: Sequence[int]) -> torch.Tensor:
        """Feed tokens to the first rows, from the given positions.

        Returns the hidden state of each row's last token, [B or more rows, H].
        """
        tokens, starts = list(tokens), list(starts)
        longest = max(map(len, tokens))
        # Free rows fill up single steps; a long prefill has rows enough, and would cost as much.
        while longest == 1 and len(tokens) % ROWS and len(tokens) not in self._rows:
            tokens.append([0])
            starts.append(0)
        counts = torch.tensor([len(ids) for ids in tokens])
        padded = torch.tensor([ids + [0] * (longest - len(ids)) for ids in tokens])
        positions = torch.tensor(starts)[:, None] + torch.arange(longest)
        positions = positions.to(self.device)
        mask = self._cache.place(positions)
        hidden_BT = self.model.get_decoder()(
            input_ids=padded.to(self.device),
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
        ).last_hidden_state
        picked: torch.Tensor = hidden_BT[torch.arange(len(tokens)), counts - 1]
        return picked

    def _logprobs(self, hidden: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of every next token at the sampling temperature, [B, V], float32."""
        logits: torch.Tensor = self.model.get_output_embeddings()(hidden)
        return (logits.float() / self.temperature).log_softmax(-1)

    def pick(
        self,
        logprobs_BV: torch.Tensor,
        keys: NDArray[np.uint64],
        positions: NDArray[np.int64],
        greedy: bool,
    ) -> NDArray[np.int64]:
        """The next token of each row, whose draw stands at `positions` of the stream `keys`."""
        if greedy:
            picked = logprobs_BV.argmax(-1)
        else:
            draws = torch.from_numpy(uniforms(keys, positions)).to(logprobs_BV.device)
            picked = inverse_cdf(cumulative(logprobs_BV), draws)
        tokens: NDArray[np.int64] = picked.cpu().numpy()
        return tokens


def cumulative(logprobs_BV: torch.Tensor) -> torch.Tensor:
    """The cumulative distribution of each row, [B, V], float64; its last value is near 1."""
    return logprobs_BV.double().exp().cumsum(-1)


def inverse_cdf(cumulative_BV: torch.Tensor, draws_B: torch.Tensor) -> torch.Tensor:
    """The token of each row in whose share of the distribution the draw, in [0, 1), lies."""
    numbers = draws_B[:, None] * cumulative_BV[:, -1:]
    last = cumulative_BV.shape[-1] - 1
    return torch.searchsorted(cumulative_BV, numbers, right=True)[:, 0].clamp_(max=last)
