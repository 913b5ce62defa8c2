"""Sampling with one KV cache over all turns of many conversations.

Legend: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.models.capabilities import unserved
from pipeline.models.weights import Weights
from pipeline.rollout.kv_cache import ROWS, RowCache
from pipeline.rollout.sequences import (
    Ids,
    ModelSampler,
    logprobs_of,
    num_common,
    passes,
    shared_prefixes,
    streams_of,
)
from pipeline.rollout.trajectory import Sampled

MIN_PREFIX = 64  # tokens; shorter common prefixes of prompts are not computed apart
MIN_FILL = 0.85  # share of unfinished rows in a batch; below it the batch is made smaller
STEPS_PER_LOOK = 8  # tokens that a GPU samples between two checks for complete messages


@dataclass(kw_only=True, eq=False)
class Slot:
    """A row of the cache, and the conversations that consist of its tokens so far."""

    row: int
    length: int  # tokens in the cache
    members: list[RowEpisode] = field(default_factory=list)


@dataclass(kw_only=True, eq=False)
class RowEpisode:
    """One conversation inside the row sampler."""

    key: int  # of its stream of draws
    pending: list[int]  # tokens to feed before the next one is sampled
    slot: Slot
    num_sampled: int = 0  # draws used so far
    room: int = 0  # largest number of tokens of the current message
    ids: list[int] = field(default_factory=list)  # of the current message
    logprobs: list[float] = field(default_factory=list)

    def append(self, ids: list[int], logprobs: list[float]) -> None:
        """Add sampled tokens to the current message; only the last one is not yet in the cache."""
        self.ids += ids
        self.logprobs += logprobs
        self.num_sampled += len(ids)
        self.pending = ids[-1:]


def members_of(slots: Sequence[Slot]) -> tuple[list[RowEpisode], NDArray[np.int64]]:
    """The conversations of the slots, and for each the index of its slot."""
    index = np.repeat(np.arange(len(slots)), [len(slot.members) for slot in slots])
    return [episode for slot in slots for episode in slot.members], index


class RowSampler(ModelSampler):
    """Samples conversations with one KV cache over all their turns; the calls are `Sampler`'s.

    Tokens are drawn by inverse-CDF sampling with counter-based random numbers, so that they do not
    depend on the other conversations of the batch, beyond rounding. Conversations with the same
    tokens share a slot, which is computed once; the row is copied when their sampled tokens differ.
    Slots are shared on a CPU only: a GPU would have to synchronize after each token.
    """

    def _prepare(self) -> None:
        why = unserved(self.model.config.get_text_config())
        assert why is None, why
        self.model.set_attn_implementation("row_cache")
        self.shares_rows = self.device.type != "cuda"
        self.steps_per_look = 1 if self.shares_rows else STEPS_PER_LOOK
        self._slots: dict[int, Slot] = {}  # by row
        self._cache = RowCache(0, 0)
        self._prefixes: dict[Ids, list[list[torch.Tensor]]] = {}

    def load_weights(self, weights: Weights) -> None:
        """See `Sampler`; the saved prefixes of prompts are dropped."""
        self._prefixes = {}
        super().load_weights(weights)

    @torch.no_grad()
    def open(self, prompts: Sequence[list[int]], keys: Sequence[int]) -> list[RowEpisode]:
        """Start one conversation per prompt; common prefixes of prompts are computed once."""
        if not self._cache.layers:
            layers = self.model.config.get_text_config().num_hidden_layers
            self._cache = RowCache(layers, 2 * max(map(len, prompts)))
        # `sample` feeds the last token of a prompt.
        opened = [(tuple(p[:-1]), p[-1], key) for p, key in zip(prompts, keys, strict=True)]
        slots = {ids: self._new_slot(len(ids)) for ids in dict.fromkeys(ids for ids, *_ in opened)}
        episodes = [
            RowEpisode(key=key, pending=[last], slot=slots[ids]) for ids, last, key in opened
        ]
        for episode in episodes:
            episode.slot.members.append(episode)
        self._prefill({ids: slot.row for ids, slot in slots.items() if ids})
        return episodes

    def extend(self, episode: RowEpisode, ids: list[int]) -> None:
        episode.pending += ids

    def close(self, episode: RowEpisode) -> None:
        """End a conversation; a slot without conversations is free."""
        episode.slot.members.remove(episode)
        if not episode.slot.members:
            del self._slots[episode.slot.row]
        if not self._slots and self.device.type == "cuda":
            # The update needs the memory; a CPU keeps it, because allocating it again is slow.
            self._cache = RowCache(0, 0)

    def _new_slot(self, length: int) -> Slot:
        row = next(row for row in count() if row not in self._slots)
        self._slots[row] = slot = Slot(row=row, length=length)
        self._cache.num_rows = max(self._cache.num_rows, -(-len(self._slots) // ROWS) * ROWS)
        return slot

    @torch.no_grad()
    def sample(
        self,
        episodes: Sequence[RowEpisode],
        max_tokens: Sequence[int],
        greedy: bool = False,
        until: int | None = None,
    ) -> list[Sampled | None]:
        """See `Sampler`: None stands for an incomplete message."""
        for episode, room in zip(episodes, max_tokens, strict=True):
            episode.room = room
        wanted = len(episodes) if until is None else min(until, len(episodes))
        if fresh := [episode for episode in episodes if not episode.ids]:
            self._begin_messages(fresh, greedy)
        while True:
            going = [episode for episode in episodes if not self._ended(episode)]
            if len(episodes) - len(going) >= wanted:
                return [self._message(e) if self._ended(e) else None for e in episodes]
            self._decode(going, wanted - len(episodes) + len(going), greedy)

    def _ended(self, episode: RowEpisode) -> bool:
        ids = episode.ids
        return bool(ids) and (ids[-1] in self.stop_ids or len(ids) >= episode.room)

    def _message(self, episode: RowEpisode) -> Sampled:
        message = self.message(episode.ids, episode.logprobs)
        episode.ids, episode.logprobs = [], []
        return message

    def _begin_messages(self, episodes: Sequence[RowEpisode], greedy: bool) -> None:
        """Feed the pending tokens and sample the first token of each message."""
        slots = sorted(self._split(episodes), key=lambda slot: slot.row)
        fed = [slot.members[0].pending for slot in slots]
        hidden = self._feed([slot.row for slot in slots], fed, [slot.length for slot in slots])
        for slot, ids in zip(slots, fed, strict=True):
            slot.length += len(ids)
        members, index = members_of(slots)
        logprobs_BV = self._logprobs(hidden)[torch.from_numpy(index).to(self.device)]
        sampled = self.sample_tokens(logprobs_BV, *streams_of(members), greedy)
        chosen = logprobs_BV.gather(-1, sampled[:, None])
        for episode, token, values in zip(members, sampled.tolist(), chosen.tolist(), strict=True):
            episode.append([token], values)

    def _split(self, episodes: Sequence[RowEpisode]) -> list[Slot]:
        """The slots of these conversations; afterwards all members of one have equal pending ids.

        Conversations that differ from the others of their slot move to a copy of it.
        """
        alike: dict[tuple[int, Ids], list[RowEpisode]] = {}
        for episode in episodes:
            fed = tuple(episode.pending) if self.shares_rows else (id(episode),)
            alike.setdefault((id(episode.slot), fed), []).append(episode)
        slots, copies, longest = [], [], 0
        for members in alike.values():
            slot = members[0].slot
            if len(members) < len(slot.members):
                old, slot = slot, self._new_slot(slot.length)
                leaving = set(members)
                old.members = [episode for episode in old.members if episode not in leaving]
                slot.members = members
                for episode in members:
                    episode.slot = slot
                copies.append((old.row, slot.row))
                longest = max(longest, slot.length)
            slots.append(slot)
        if longest:
            source, target = torch.tensor(copies).T.to(self.device)
            self._cache.copy_rows(source, target, longest)
        return slots

    def _decode(self, episodes: Sequence[RowEpisode], wanted: int, greedy: bool) -> None:
        """Sample tokens until `wanted` messages are complete, or the batch must change.

        It must change if too few rows are unfinished, or if the conversations of a row differ.
        Every conversation has one pending token.
        """
        slots = self._compact_slots(self._split(episodes))
        members, index = members_of(slots)
        # The next rows fill the batch up; a pass writes them only beyond their length.
        held = [0] * (-(-len(slots) // ROWS) * ROWS)
        for row in self._slots.keys() & range(len(held)):
            held[row] = self._slots[row].length
        first = np.flatnonzero(np.diff(index, prepend=-1))  # one member of each slot
        tokens = torch.zeros((len(held), 1), dtype=torch.int64)
        tokens[: len(slots), 0] = torch.tensor([slot.members[0].pending[0] for slot in slots])
        tokens, positions = tokens.to(self.device), torch.tensor(held).to(self.device)[:, None]
        rows = torch.arange(len(held), device=self.device)
        index_B, first_B = (torch.from_numpy(x).to(self.device) for x in (index, first))
        keys, drawn = streams_of(members)
        left = np.array([e.room - len(e.ids) for e in members])
        lengths = np.zeros(len(members), dtype=np.int64)  # of complete messages; others have 0
        # Complete rows are computed until the batch ends, at positions up to this one.
        last = max(max(held), *(held[i] + n for i, n in zip(index.tolist(), left, strict=True)))
        sampled, chosen = [], []
        for step in range(1, int(left.max()) + 1):
            hidden = self._forward(rows, tokens, positions, max(held) + step, True)[:, 0]
            self.num_tokens += len(slots)
            logprobs_BV = self._logprobs(hidden)[index_B]
            sampled.append(self.sample_tokens(logprobs_BV, keys, drawn + step - 1, greedy))
            chosen.append(logprobs_BV.gather(-1, sampled[-1][:, None]))
            tokens[: len(slots), 0] = sampled[-1][first_B]
            positions = (positions + 1).clamp_(max=last)
            if step % self.steps_per_look and step < left.max():
                continue
            seen = step - 1 - (step - 1) % self.steps_per_look
            for number, ids in enumerate(torch.stack(sampled[seen:]).cpu().numpy(), seen + 1):
                ends = (ids[:, None] == self.stops).any(1) | (number >= left)
                lengths[ends & (lengths == 0)] = number
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
        ids, logprobs = torch.stack(sampled, 1).cpu().numpy(), torch.cat(chosen, 1).cpu().numpy()
        for episode, length, *lines in zip(members, lengths, ids, logprobs, strict=True):
            episode.append(*(line[:length].tolist() for line in lines))

    def _compact_slots(self, wanted: Sequence[Slot]) -> list[Slot]:
        """Swap slots into the first rows; returns them in the order of rows."""
        inside = set(wanted)
        holes = [row for row in range(len(wanted)) if self._slots.get(row) not in inside]
        movers = [slot.row for slot in wanted if slot.row >= len(wanted)]
        if holes:
            source, target = (torch.tensor(x) for x in (movers + holes, holes + movers))
            longest = max(self._slots[r].length for r in movers + holes if r in self._slots)
            self._cache.copy_rows(source.to(self.device), target.to(self.device), longest)
        for hole, mover in zip(holes, movers, strict=True):
            moved, displaced = self._slots.pop(mover), self._slots.pop(hole, None)
            moved.row, self._slots[hole] = hole, moved
            if displaced is not None:
                displaced.row, self._slots[mover] = mover, displaced
        return [self._slots[row] for row in range(len(wanted))]

    def _prefill(self, rows: Mapping[Ids, int]) -> None:
        """Compute prompts, each in its row; common prefixes are computed once and saved."""
        for prefix in shared_prefixes(list(rows), MIN_PREFIX):
            if not any(2 * num_common(saved, prefix) >= len(prefix) for saved in self._prefixes):
                row = next(row for prompt, row in rows.items() if prompt[: len(prefix)] == prefix)
                self._feed([row], [list(prefix)], [0])
                self._prefixes[prefix] = self._cache.save_prefix(row, len(prefix))
        rest = []
        for prompt, row in rows.items():
            found = (prefix for prefix in self._prefixes if prompt[: len(prefix)] == prefix)
            prefix = max(found, key=len, default=())
            if prefix:
                self._cache.load_prefix(row, self._prefixes[prefix])
            if len(prefix) < len(prompt):
                rest.append((row, list(prompt[len(prefix) :]), len(prefix)))
        if rest:
            self._feed(*zip(*rest, strict=True))

    def _feed(
        self, rows: Sequence[int], tokens: Sequence[list[int]], begins: Sequence[int]
    ) -> torch.Tensor:
        """Feed tokens to rows from the given positions; similar lengths share a forward pass.

        Returns the hidden state of each row's last token, [B, H].
        """
        states = [torch.empty(0)] * len(rows)
        lengths = [len(ids) for ids in tokens]
        order = sorted(range(len(rows)), key=lambda i: -lengths[i])
        for first, last in passes([lengths[i] for i in order]):
            batch, longest = sorted(order[first:last]), lengths[order[first]]
            padded = torch.tensor([tokens[i] + [0] * (longest - lengths[i]) for i in batch])
            # Positions of padding stay below `end`, because a model may not have more positions.
            end = max(begins[i] + lengths[i] for i in batch) + 1
            begin = torch.tensor([[begins[i]] for i in batch]).to(self.device)
            positions = (begin + torch.arange(longest, device=self.device)).clamp_(max=end - 1)
            index = [rows[i] for i in batch]
            in_front = index == list(range(len(batch)))
            index_B = torch.tensor(index).to(self.device)
            hidden_BT = self._forward(index_B, padded.to(self.device), positions, end, in_front)
            counts = torch.tensor([lengths[i] for i in batch])
            self.num_tokens += int(counts.sum())
            ends = hidden_BT[torch.arange(len(batch)), counts - 1]
            for i, hidden in zip(batch, ends, strict=True):
                states[i] = hidden
        return torch.stack(states)

    def _forward(
        self,
        rows: torch.Tensor,
        tokens_BT: torch.Tensor,
        positions_BT: torch.Tensor,
        end: int,
        first_rows: bool,
    ) -> torch.Tensor:
        """The hidden states, [B, T, H], of tokens at positions below `end` of cache rows."""
        self.num_padded_tokens += tokens_BT.numel()
        hidden_BT: torch.Tensor = self.model.get_decoder()(
            input_ids=tokens_BT,
            attention_mask=self._cache.place(rows, positions_BT, end, first_rows),
            position_ids=positions_BT,
            past_key_values=self._cache,
            use_cache=True,
        ).last_hidden_state
        return hidden_BT

    def _logprobs(self, hidden: torch.Tensor) -> torch.Tensor:
        return logprobs_of(self.model.get_output_embeddings()(hidden), self.temperature)
