"""Sampling of many conversations with one KV cache, which keeps the tokens of all turns.

The cache (RowCache) has one row for each sequence, and the sequences have different lengths.

Letters in shapes: B sequences, T tokens, V entries of the vocabulary, H hidden size.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin

from pipeline.common.console import say
from pipeline.common.untrusted import reason_of
from pipeline.models.capabilities import widest
from pipeline.models.rank_memory import (
    KEPT,
    LARGE,
    empty_caches,
    is_out_of_memory,
    memory_of_rank,
    num_cache_rows,
)
from pipeline.rollout.samplers.drawing import (
    FLOPS_OF_A_START,
    PASS_TOKENS,
    PASS_TOKENS_GPU,
    Ids,
    ModelSampler,
    draw,
    forward_passes,
    shared_prefixes,
    streams_of,
)
from pipeline.rollout.samplers.graphs import Batch, BlockDecoder, Graphs
from pipeline.rollout.trajectory import Sampled

# Minimum number of tokens of a common prefix that is computed only once. With few weights, or on a
# GPU, starting a forward pass takes as long as computing many tokens.
MIN_PREFIX = 64
FEW_WEIGHTS = 10**7
MIN_PREFIX_OF_MORE = 16
MIN_FILL = 0.85  # a batch is made smaller if at most this share of its rows is unfinished
MASK = 1 << 27  # maximum number of entries of an attention mask
# Numbers of rows are rounded up to a multiple of ROWS, and lengths to a multiple of LENGTHS, so
# that the rounding errors of a row seldom depend on the number of rows in the batch.
ROWS = 4
LENGTHS = 16
PROBE = 64  # tokens whose log-probabilities fused layers and the model's own must agree on
# The mean difference, as a share of the standard deviation over these tokens.
CLOSE = {torch.float32: 1e-3, torch.bfloat16: 0.05}


def attend_to_cache(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention outputs, [B, T, heads, size of a value].

    Queries are [B, heads, T, size]; keys and values are [B, key heads, length, size]. Query heads
    that share a key head become extra queries of one head, so that no key is copied.
    """
    batch, heads, num_queries, size = query.shape
    shared = heads // key.shape[1]
    mask = attention_mask
    if shared > 1 and num_queries > 1:
        mask = mask[:, :, None].expand(-1, -1, shared, -1, -1).flatten(2, 3)
    stacked = query.reshape(batch, key.shape[1], shared * num_queries, size)
    output = nn.functional.scaled_dot_product_attention(
        stacked, key, value, attn_mask=mask.to(query.dtype), scale=scaling
    )
    return output.reshape(batch, heads, num_queries, -1).transpose(1, 2), None


AttentionInterface.register("row_cache", attend_to_cache)


class _RowLayer(CacheLayerMixin):
    """The keys and the values of one layer, each [rows, heads, positions, size]."""

    keys: Any
    values: Any

    def __init__(self, cache: RowCache) -> None:
        super().__init__()
        self.cache: RowCache = weakref.proxy(cache)  # a cycle would keep the memory for a while

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        # In latent attention, keys and values have different sizes, so each has its own tensor.
        empty = (x.new_zeros((0, x.shape[1], 0, x.shape[3])) for x in (key_states, value_states))
        self.keys, self.values = empty
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values [B, heads, T, size]; return the part of the cache to attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.grow()
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def _write(self, held: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        cache = self.cache
        held.transpose(1, 2)[cache.rows[:, None], cache.positions] = states.transpose(1, 2)
        if cache.first_rows:
            return held[: len(states), :, : cache.length]
        return held[:, :, : cache.length].index_select(0, cache.rows)

    def grow(self) -> None:
        """Enlarge the keys and the values to the cache's numbers of rows and positions."""
        rows = self.cache.num_rows - self.keys.shape[0]
        positions = self.cache.capacity - self.keys.shape[2]
        if rows > 0 or positions > 0:
            padding = (0, 0, 0, positions, 0, 0, 0, rows)
            states = [nn.functional.pad(x, padding) for x in (self.keys, self.values)]
            self.keys, self.values = states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.length, 0

    def get_seq_length(self) -> int:
        return self.cache.length

    def get_max_length(self) -> int:
        return -1


class RowCache(Cache):
    """A key-value cache; each row holds one sequence of up to `capacity` tokens.

    The first forward pass allocates `num_rows` rows. Only a larger `num_rows` allocates again.
    """

    layers: list[Any]

    def __init__(self, num_layers: int, capacity: int, dtype: torch.dtype = torch.float32) -> None:
        self.num_rows = 0
        self.capacity = -(-capacity // LENGTHS) * LENGTHS
        self.length = 0
        self.dtype = dtype
        super().__init__(layers=[_RowLayer(self) for _ in range(num_layers)])

    @property
    def num_bytes(self) -> int:
        made = [layer for layer in self.layers if layer.is_initialized]
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in made)

    def need_rows(self, number: int) -> None:
        """Let the next forward pass allocate at least `number` rows."""
        self.num_rows = max(self.num_rows, -(-number // ROWS) * ROWS)

    def allocate(self, rows: int, positions: int) -> None:
        """Allocate at least so many rows and positions; what is large enough keeps its address."""
        self.need_rows(rows)
        self._need_positions(positions)
        for layer in self.layers:
            layer.grow()

    def _need_positions(self, number: int) -> None:
        if self.capacity < number:  # no sampler with `max_tokens` comes here
            most = max(number, self.capacity + self.capacity // 4)
            self.capacity = -(-most // LENGTHS) * LENGTHS

    def place(
        self, rows: torch.Tensor, positions_BT: torch.Tensor, end: int, first_rows: bool
    ) -> torch.Tensor:
        """Set the rows and the positions (below `end`) that the next forward pass writes.

        `first_rows` means that `rows` is 0, 1, 2, ...; attention then reads the cache without a
        copy. Returns the additive attention mask, [B, 1, T, self.length] of the type `dtype`.
        """
        self.rows = rows
        self.positions = positions_BT
        self.first_rows = first_rows
        self.length = -(-end // LENGTHS) * LENGTHS
        self._need_positions(self.length)
        visible = torch.arange(self.length, device=positions_BT.device)
        hidden = (visible > positions_BT[:, :, None])[:, None]
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=hidden.device)
        return mask.masked_fill_(hidden, -math.inf)

    def copy_rows(self, source: list[int], target: list[int], length: int) -> None:
        """Copy `length` positions of the rows `source` to `target`; a GPU gets the indices once."""
        rows = torch.tensor([source, target], dtype=torch.int64).to(self.rows.device)
        for layer in self.layers:
            layer.grow()
            for held in (layer.keys, layer.values):
                held[rows[1], :, :length] = held[rows[0], :, :length]


@dataclass(kw_only=True, eq=False)
class Slot:
    """A row of the cache, and the conversations whose tokens equal the tokens of the row."""

    row: int
    length: int  # number of tokens that the row holds
    members: list[RowConversation] = field(default_factory=list)


@dataclass(kw_only=True, eq=False)
class RowConversation:
    """One conversation of a RowSampler."""

    key: int  # 64-bit key that selects the conversation's random numbers
    pending: list[int]  # last tokens of the conversation, not yet in the cache
    slot: Slot
    num_sampled: int = 0  # number of random numbers that the conversation has used
    room: int = 0  # maximum number of tokens of the current message
    ids: list[int] = field(default_factory=list)  # tokens of the current message
    logprobs: list[float] = field(default_factory=list)

    def append(self, ids: list[int], logprobs: list[float]) -> None:
        """Add sampled tokens to the current message; `pending` keeps only the last token."""
        self.ids += ids
        self.logprobs += logprobs
        self.num_sampled += len(ids)
        self.pending = ids[-1:]


def members_of(slots: Sequence[Slot]) -> tuple[list[RowConversation], NDArray[np.int64]]:
    """Return the conversations of the slots, and the index of each conversation's slot."""
    index = np.repeat(np.arange(len(slots)), [len(slot.members) for slot in slots])
    return [conversation for slot in slots for conversation in slot.members], index


class RowSampler(ModelSampler):
    """A `Sampler` that keeps the keys and values of all turns in one KV cache.

    Conversations with equal tokens share a row of the cache, so that the model computes the tokens
    once. When conversations of a row sample different tokens, the row is copied. On a GPU, each
    conversation has its own row after the prompt, because a shared row needs a synchronization with
    the CPU at each token; `BlockDecoder` then samples the tokens.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.model.set_attn_implementation("row_cache")
        self._blocks: BlockDecoder | None = None
        self._slots: dict[int, Slot] = {}  # row: slot
        self._cache = RowCache(0, 0)
        self._most_rows = 0  # of all caches of a GPU
        self._must_free = False  # after a failure, which may be one of memory
        self._pass_tokens = PASS_TOKENS
        is_slow = self.model.num_parameters() > FEW_WEIGHTS
        self._min_prefix = MIN_PREFIX_OF_MORE if is_slow else MIN_PREFIX
        shape = self.model.config.get_text_config()
        heads = widest(shape, "num_attention_heads") or 1
        self._shared = heads // (widest(shape, "num_key_value_heads") or heads)
        if self.device.type == "cuda":
            self.decode_with(Graphs(self.device))

    def decode_with(self, graphs: Any) -> None:
        """Compute as on a GPU; `graphs` are CUDA's or, on a CPU, a stand-in's, or None."""
        self._blocks = BlockDecoder(self, graphs, self.device)
        cost = FLOPS_OF_A_START // (2 * self.model.num_parameters())
        self._pass_tokens = min(PASS_TOKENS_GPU, cost)
        self._min_prefix = MIN_PREFIX
        probe = list(range(min(PROBE, len(self.model.get_input_embeddings().weight))))
        expected = self.logprobs(probe)
        self._copy.fuse()
        assert self._copy.fused is not None
        problem = ""
        try:
            gap = float((self.logprobs(probe) - expected).abs().mean())
        except Exception as error:  # of a layer that looks like a known one
            if is_out_of_memory(error):
                raise
            problem = f"they fail: {reason_of(error)}"
        else:
            if not gap <= CLOSE[self._cache_dtype] * float(expected.std()):
                problem = f"they differ from the model's by {gap:.2g} nats in the mean"
        if problem:
            self._copy.fused.release()
            say(f"warning: sampling without fused layers, which takes longer: {problem}")

    @property
    def shares_rows(self) -> bool:
        """Conversations with equal tokens share a row also after the prompt."""
        return self._blocks is None

    @property
    def _cache_dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.get_input_embeddings().weight.dtype
        return dtype

    @torch.no_grad()
    def open(
        self, prompts: Sequence[list[int]], keys: Sequence[int], num_drawn: Sequence[int] = ()
    ) -> list[RowConversation]:
        """See `Sampler.open`. The model computes each common prefix of the prompts once."""
        lines = list(zip(prompts, keys, num_drawn or [0] * len(keys), strict=True))
        if not self._slots:
            self._copy.pack()
        if not self._cache.layers:
            self._cache = self._new_cache(self.max_tokens or 2 * max(map(len, prompts)))
        if not self.shares_rows:
            held = sum(len(slot.members) for slot in self._slots.values())
            self._most_rows = max(self._most_rows, num_cache_rows(held + len(lines)))
            self._cache.need_rows(self._most_rows)
        # The last token of each prompt enters the cache only when `sample` is called.
        texts = [tuple(prompt[:-1]) for prompt in prompts]
        slots = {ids: self._new_slot(len(ids)) for ids in dict.fromkeys(texts)}
        conversations = [
            RowConversation(key=key, pending=[prompt[-1]], slot=slots[ids], num_sampled=drawn)
            for ids, (prompt, key, drawn) in zip(texts, lines, strict=True)
        ]
        for conversation in conversations:
            conversation.slot.members.append(conversation)
        try:
            self._prefill({ids: slot.row for ids, slot in slots.items() if ids})
        except BaseException:
            self._must_free = True
            for conversation in conversations:
                self.close(conversation)
            raise
        return conversations

    def extend(self, conversation: RowConversation, ids: list[int]) -> None:
        conversation.pending += ids

    def close(self, conversation: RowConversation) -> None:
        """See `Sampler.close`. A row without conversations becomes free."""
        conversation.slot.members.remove(conversation)
        if not conversation.slot.members:
            del self._slots[conversation.slot.row]
        if not self._slots:
            self._copy.unpack()
            if self._must_free or self._cache.num_bytes > self._most_kept:
                self._free()

    @property
    def _most_kept(self) -> float:
        """The bytes that the cache may have without conversations; graphs need it where it is."""
        return LARGE if self.shares_rows else KEPT * memory_of_rank()

    def end(self) -> None:
        """See `Sampler.end`. Fused layers and graphs know the model, which knows them."""
        self._free()
        self._blocks = None
        if self._copy.fused is not None:
            self._copy.fused.release()

    def _free(self) -> None:
        self._cache = RowCache(0, 0)  # the update and NCCL need the memory
        if self._must_free:
            self._most_rows = 0
        self._must_free = False
        if self._blocks is not None:
            self._blocks.forget()
        empty_caches()

    def _new_cache(self, capacity: int) -> RowCache:
        layers = self.model.config.get_text_config().num_hidden_layers
        return RowCache(layers, capacity, self._cache_dtype)

    def _new_slot(self, length: int) -> Slot:
        row = next(row for row in count() if row not in self._slots)
        self._slots[row] = slot = Slot(row=row, length=length)
        self._cache.need_rows(len(self._slots))
        return slot

    @torch.no_grad()
    def sample(
        self,
        conversations: Sequence[RowConversation],
        max_tokens: Sequence[int],
        greedy: bool = False,
        until: int | None = None,
    ) -> list[Sampled | None]:
        """See `Sampler.sample`."""
        for conversation, room in zip(conversations, max_tokens, strict=True):
            conversation.room = room
        wanted = len(conversations) if until is None else min(until, len(conversations))
        try:
            self._complete(conversations, wanted, greedy)
        except BaseException:
            self._must_free = True
            raise
        return [self._message(e) if self._ended(e) else None for e in conversations]

    def _complete(
        self, conversations: Sequence[RowConversation], wanted: int, greedy: bool
    ) -> None:
        """Sample until `wanted` messages are complete."""
        if fresh := [conversation for conversation in conversations if not conversation.ids]:
            self._begin_messages(fresh, greedy)
        while True:
            going = [
                conversation for conversation in conversations if not self._ended(conversation)
            ]
            if len(conversations) - len(going) >= wanted:
                return
            self._decode(going, wanted - len(conversations) + len(going), greedy)

    def _ended(self, conversation: RowConversation) -> bool:
        ids = conversation.ids
        return bool(ids) and (ids[-1] in self.stop_ids or len(ids) >= conversation.room)

    def _message(self, conversation: RowConversation) -> Sampled:
        message = self.message(conversation.ids, conversation.logprobs)
        conversation.ids = []
        conversation.logprobs = []
        return message

    def _begin_messages(self, conversations: Sequence[RowConversation], greedy: bool) -> None:
        """Compute each conversation's pending tokens, and sample the first token of its message."""
        slots = sorted(self._split(conversations), key=lambda slot: slot.row)
        fed = [slot.members[0].pending for slot in slots]
        hidden = self._feed([slot.row for slot in slots], fed, [slot.length for slot in slots])
        for slot, ids in zip(slots, fed, strict=True):
            slot.length += len(ids)
        members, index = members_of(slots)
        logprobs_BV = self._logprobs(hidden)
        if len(members) > len(slots):
            logprobs_BV = logprobs_BV[torch.from_numpy(index).to(self.device)]
        sampled = self.sample_tokens(logprobs_BV, *streams_of(members), greedy)
        chosen = logprobs_BV.gather(-1, sampled[:, None])
        for conversation, token, values in zip(
            members, sampled.tolist(), chosen.tolist(), strict=True
        ):
            conversation.append([token], values)

    def _split(self, conversations: Sequence[RowConversation]) -> list[Slot]:
        """Separate conversations with different pending tokens; return their slots.

        Conversations that leave a slot move to a copy of the slot's row.
        """
        alike: dict[tuple[int, Ids], list[RowConversation]] = {}
        for conversation in conversations:
            fed = tuple(conversation.pending) if self.shares_rows else (id(conversation),)
            alike.setdefault((id(conversation.slot), fed), []).append(conversation)
        slots = []
        source = []
        target = []
        longest = 0
        for members in alike.values():
            slot = members[0].slot
            if len(members) < len(slot.members):
                old = slot
                slot = self._new_slot(slot.length)
                leaving = set(members)
                old.members = [
                    conversation for conversation in old.members if conversation not in leaving
                ]
                slot.members = members
                for conversation in members:
                    conversation.slot = slot
                source.append(old.row)
                target.append(slot.row)
                longest = max(longest, slot.length)
            slots.append(slot)
        if longest:
            self._cache.copy_rows(source, target, longest)
        return slots

    def _decode(self, conversations: Sequence[RowConversation], wanted: int, greedy: bool) -> None:
        """Sample tokens until `wanted` messages are complete, or the batch must change.

        The batch must change if few rows of the batch are unfinished, or if the conversations of a
        row have sampled different tokens. Every conversation must have exactly one pending token.
        """
        slots = self._compact_slots(self._split(conversations))
        if self._blocks is not None:
            return self._decode_blocks(self._blocks, slots, wanted, greedy)
        members, index = members_of(slots)
        held = self._held(-(-len(slots) // ROWS) * ROWS)
        first = np.flatnonzero(np.diff(index, prepend=-1))  # index of each slot's first member
        tokens = torch.zeros((len(held), 1), dtype=torch.int64)
        tokens[: len(slots), 0] = torch.tensor([slot.members[0].pending[0] for slot in slots])
        tokens = tokens.to(self.device)
        positions = torch.tensor(held).to(self.device)[:, None]
        rows = torch.arange(len(held), device=self.device)
        index_B, first_B = (torch.from_numpy(x).to(self.device) for x in (index, first))
        keys, used = streams_of(members)
        left = np.array([e.room - len(e.ids) for e in members])
        lengths = np.zeros(len(members), dtype=np.int64)  # 0 while the message is incomplete
        # Rows with complete messages stay in the batch, and write at positions up to `last`.
        last = max(max(held), *(held[i] + n for i, n in zip(index.tolist(), left, strict=True)))
        most = max(last + 1, self.max_tokens)
        sampled = []
        chosen = []
        for step in range(1, int(left.max()) + 1):
            end = min(max(held) + step, most)
            hidden = self._forward(rows, tokens, positions, end, True)[:, 0]
            self.num_tokens += len(slots)
            self.num_padded_tokens += len(held)
            logprobs_BV = self._logprobs(hidden)
            # A copy of all values takes long, and most rows have one conversation.
            is_whole = len(members) == len(slots)
            logprobs_BV = logprobs_BV[: len(slots)] if is_whole else logprobs_BV[index_B]
            sampled.append(self.sample_tokens(logprobs_BV, keys, used + step - 1, greedy))
            chosen.append(logprobs_BV.gather(-1, sampled[-1][:, None]))
            tokens[: len(slots), 0] = sampled[-1][first_B]
            positions = (positions + 1).clamp_(max=last)
            ids = sampled[-1].numpy()
            ends = (ids[:, None] == self.stops).any(1) | (step >= left)
            lengths[ends & (lengths == 0)] = step
            goes_on = lengths == 0
            differs = (ids != ids[first][index]) | (goes_on != goes_on[first][index])
            if (differs & (goes_on | goes_on[first][index])).any():
                break
            going = int(goes_on[first].sum())
            ended = len(members) - int(goes_on.sum())
            if ended >= wanted or -(-going // ROWS) * ROWS <= MIN_FILL * len(slots):
                break
        lengths[lengths == 0] = step
        for slot, length in zip(slots, lengths[first].tolist(), strict=True):
            slot.length += length
        ids = torch.stack(sampled, 1).numpy()
        logprobs = torch.cat(chosen, 1).numpy()
        for conversation, length, *lines in zip(members, lengths, ids, logprobs, strict=True):
            conversation.append(*(line[:length].tolist() for line in lines))

    def _held(self, num_rows: int) -> list[int]:
        """Return the number of tokens in each of the first rows.

        Rows that do not sample pad a batch; their tokens in the cache do not change.
        """
        held = [0] * num_rows
        for row in self._slots.keys() & range(num_rows):
            held[row] = self._slots[row].length
        return held

    def _decode_blocks(
        self, blocks: BlockDecoder, slots: Sequence[Slot], wanted: int, greedy: bool
    ) -> None:
        """Do the same as `_decode` with one conversation in each slot."""
        members = [slot.members[0] for slot in slots]
        keys, used = streams_of(members)
        batch = Batch(
            tokens=[conversation.pending[0] for conversation in members],
            held=np.array(self._held(num_cache_rows(len(slots)))),
            left=np.array([e.room - len(e.ids) for e in members]),
            keys=keys,
            used=used,
        )
        self._cache.allocate(len(batch.held), batch.last + 1)
        decoded = blocks.decode(batch, wanted, self.stops, self._cache.capacity, greedy)
        num_steps = decoded.ids.shape[1]
        self.num_tokens += num_steps * len(slots)
        self.num_padded_tokens += num_steps * len(batch.held)
        for slot, ids, logprobs, length in zip(slots, *decoded, strict=True):
            slot.length += length
            slot.members[0].append(ids[:length].tolist(), logprobs[:length].tolist())

    def next_logprobs(
        self, rows_B: torch.Tensor, tokens_B1: torch.Tensor, positions_B1: torch.Tensor, length: int
    ) -> torch.Tensor:
        """See `graphs.Policy`."""
        return self._logprobs(self._forward(rows_B, tokens_B1, positions_B1, length, True)[:, 0])

    def draw(self, logprobs_BV: torch.Tensor, numbers_B: torch.Tensor) -> torch.Tensor:
        """See `graphs.Policy`."""
        return draw(logprobs_BV, numbers_B, self.top_k, self.top_p)

    def fixed(self) -> list[torch.Tensor]:
        """See `graphs.Policy`."""
        cached = [x for layer in self._cache.layers for x in (layer.keys, layer.values)]
        signs = self._copy.fused.signs if self._copy.fused is not None else []
        return [*cached, *self.model.parameters(), *self.model.buffers(), *signs]

    def _compact_slots(self, wanted: Sequence[Slot]) -> list[Slot]:
        """Move the slots `wanted` to the first rows; return these slots, sorted by row."""
        inside = set(wanted)
        holes = [row for row in range(len(wanted)) if self._slots.get(row) not in inside]
        movers = [slot.row for slot in wanted if slot.row >= len(wanted)]
        if holes:
            longest = max(self._slots[r].length for r in movers + holes if r in self._slots)
            self._cache.copy_rows(movers + holes, holes + movers, longest)
        for hole, mover in zip(holes, movers, strict=True):
            moved = self._slots.pop(mover)
            displaced = self._slots.pop(hole, None)
            moved.row, self._slots[hole] = hole, moved
            if displaced is not None:
                displaced.row, self._slots[mover] = mover, displaced
        return [self._slots[row] for row in range(len(wanted))]

    def _prefill(self, rows: Mapping[Ids, int]) -> None:
        """Compute each prompt in its cache row; a common prefix is computed once and copied."""
        begins = dict.fromkeys(rows, 0)
        for prefix in shared_prefixes(list(rows), self._min_prefix):
            size = len(prefix)
            alike = [p for p in rows if p[:size] == prefix and begins[p] < size]
            if not self.shares_rows and size * (len(alike) - 1) <= self._pass_tokens:
                continue
            first, *others = [rows[prompt] for prompt in alike]
            self._feed([first], [list(prefix)], [0])
            self._cache.copy_rows([first] * len(others), others, size)
            begins.update(dict.fromkeys(alike, size))
        rest = [(row, list(p[begins[p] :]), begins[p]) for p, row in rows.items()]
        if rest := [line for line in rest if line[1]]:
            self._feed(*zip(*rest, strict=True))

    def _feed(
        self, rows: Sequence[int], tokens: Sequence[list[int]], begins: Sequence[int]
    ) -> torch.Tensor:
        """Run the model on `tokens[i]` in the cache row `rows[i]`, from position `begins[i]` on.

        Returns the hidden state of each row's last token, [B, H].
        """
        states = [torch.empty(0)] * len(rows)
        lengths = [len(ids) for ids in tokens]
        order = sorted(range(len(rows)), key=lambda i: -lengths[i])
        for first, last in forward_passes([lengths[i] for i in order], self._pass_tokens):
            batch = sorted(order[first:last])
            longest = lengths[order[first]]
            padded = torch.tensor([tokens[i] + [0] * (longest - lengths[i]) for i in batch])
            # Padding gets positions below `end`, because the model may fail at higher positions.
            end = max(begins[i] + lengths[i] for i in batch) + 1
            begin = torch.tensor([[begins[i]] for i in batch]).to(self.device)
            positions = (begin + torch.arange(longest, device=self.device)).clamp_(max=end - 1)
            index = [rows[i] for i in batch]
            in_front = index == list(range(len(batch)))
            index_B = torch.tensor(index).to(self.device)
            padded = padded.to(self.device)
            size = max(1, MASK // (len(batch) * self._shared * end))
            for begin_of in range(0, longest, size):  # almost always one piece
                part = slice(begin_of, begin_of + size)
                hidden_BT = self._forward(
                    index_B, padded[:, part], positions[:, part], end, in_front
                )
                for row, i in enumerate(batch):
                    if 0 <= (at := lengths[i] - 1 - begin_of) < size:
                        states[i] = hidden_BT[row, at]
            self.num_tokens += sum(lengths[i] for i in batch)
            self.num_padded_tokens += len(batch) * longest
        return torch.stack(states)

    def _forward(
        self,
        rows: torch.Tensor,
        tokens_BT: torch.Tensor,
        positions_BT: torch.Tensor,
        end: int,
        first_rows: bool,
    ) -> torch.Tensor:
        """Return hidden states [B, T, H] of tokens at the given rows and positions of the cache."""
        hidden_BT: torch.Tensor = self.model.get_decoder()(
            input_ids=tokens_BT,
            attention_mask=self._cache.place(rows, positions_BT, end, first_rows),
            position_ids=positions_BT,
            past_key_values=self._cache,
            use_cache=True,
        ).last_hidden_state
        return hidden_BT

    def _hidden(self, ids_T: torch.Tensor) -> torch.Tensor:
        cache = self._cache
        length = len(ids_T)
        self._cache = self._new_cache(length)
        self._cache.num_rows = 1
        positions_BT = torch.arange(length, device=self.device)[None]
        try:
            return self._forward(positions_BT[0, :1], ids_T[None], positions_BT, length, True)[0]
        finally:
            self._cache = cache
