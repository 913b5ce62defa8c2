"""Sampling conversations: one KV cache over all their turns, each row at its own positions.

Legend: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count

import numpy as np
import torch

from pipeline.models.capabilities import unserved
from pipeline.models.weights import Weights
from pipeline.rollout.kv_cache import ROWS, RowCache
from pipeline.rollout.sequences import (
    Ids,
    ModelSampler,
    RowEpisode,
    Slot,
    logprobs_of,
    members_of,
    num_common,
    passes,
    shared_prefixes,
    streams_of,
)
from pipeline.rollout.trajectory import Sampled

MIN_PREFIX = 64  # tokens; shorter common prefixes of prompts are not computed apart
MIN_FILL = 0.85  # share of unfinished rows in a batch; below it the batch is made smaller
STEPS_PER_LOOK = 8  # tokens between two checks of what a GPU has sampled


class RowSampler(ModelSampler):
    """Samples conversations with one KV cache over all their turns; the calls are `Sampler`'s.

    Tokens are drawn by inverse-CDF sampling with counter-based random numbers, so that they do not
    depend on the other conversations of the batch, beyond rounding. Conversations with the same
    tokens share a row, which is computed once; the row is copied when their sampled tokens differ.
    Rows are shared on a CPU only: a GPU would have to synchronize after each token.
    """

    def _prepare(self) -> None:
        why = unserved(self.model.config.get_text_config())
        assert why is None, why
        self.model.set_attn_implementation("row_cache")
        self.shares_rows = self.device.type != "cuda"
        self.steps_per_look = 1 if self.shares_rows else STEPS_PER_LOOK
        self._slots: dict[int, Slot] = {}  # by place
        self._cache = RowCache(0, 0, self.device)
        self._shared_prefixes: dict[Ids, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def load_weights(self, weights: Weights) -> None:
        """See `Sampler`; the kept prefixes of prompts are dropped."""
        self._shared_prefixes = {}
        super().load_weights(weights)

    @torch.no_grad()
    def open(self, prompts: Sequence[list[int]], keys: Sequence[int]) -> list[RowEpisode]:
        """Start one conversation per prompt; common prefixes of prompts are computed once."""
        if not self._cache.layers:
            layers = self.model.config.get_text_config().num_hidden_layers
            self._cache = RowCache(layers, 2 * max(map(len, prompts)), self.device)
        rows: dict[Ids, Slot] = {}
        episodes = []
        for prompt, key in list(zip(prompts, keys, strict=True)):  # raises before a row is made
            held = tuple(prompt[:-1])  # the last token is left for `sample`
            if held not in rows:
                rows[held] = self._new_slot(len(held))
            episodes.append(RowEpisode(key=key, pending=[prompt[-1]], slot=rows[held]))
            rows[held].members.append(episodes[-1])
        self._prefill({prompt: row.place for prompt, row in rows.items() if prompt})
        return episodes

    def extend(self, episode: RowEpisode, ids: list[int]) -> None:
        """Append the tokens of a reply; they are computed with the next `sample`."""
        episode.pending += ids

    def close(self, episode: RowEpisode) -> None:
        """End a conversation; a row without conversations is free."""
        episode.slot.members.remove(episode)
        if not episode.slot.members:
            del self._slots[episode.slot.place]
        if not self._slots and self.device.type == "cuda":
            # The update needs the memory; a CPU keeps it, because allocating it again is slow.
            self._cache = RowCache(0, 0, self.device)

    def _new_slot(self, length: int) -> Slot:
        place = next(place for place in count() if place not in self._slots)
        self._slots[place] = row = Slot(place=place, length=length)
        self._cache.num_rows = max(self._cache.num_rows, -(-len(self._slots) // ROWS) * ROWS)
        return row

    @torch.no_grad()
    def sample(
        self,
        episodes: Sequence[RowEpisode],
        max_tokens: Sequence[int],
        greedy: bool = False,
        until: int | None = None,
    ) -> list[Sampled | None]:
        """See `Sampler`: None stands for messages that are incomplete when the call returns."""
        for episode, room in zip(episodes, max_tokens, strict=True):
            episode.room = room
        wanted = len(episodes) if until is None else min(until, len(episodes))
        self._begin_messages([episode for episode in episodes if not episode.ids], greedy)
        while True:
            going = [episode for episode in episodes if not self._ended(episode)]
            if len(episodes) - len(going) >= wanted:
                return [self._message(e) if self._ended(e) else None for e in episodes]
            self._decode(going, wanted - len(episodes) + len(going), greedy)

    def _ended(self, episode: RowEpisode) -> bool:
        ids = episode.ids
        return bool(ids) and (ids[-1] in self.stop_ids or len(ids) >= episode.room)

    def _message(self, episode: RowEpisode) -> Sampled:
        ids, logprobs = episode.ids, episode.logprobs
        episode.ids, episode.logprobs = [], []
        return Sampled(ids=ids, logprobs=logprobs, finished=ids[-1] in self.stop_ids)

    def _begin_messages(self, episodes: Sequence[RowEpisode], greedy: bool) -> None:
        """Feed the pending tokens and sample the first token of each message."""
        if not episodes:
            return
        rows = sorted(self._parted(episodes), key=lambda row: row.place)
        fed = [row.members[0].pending for row in rows]
        hidden = self._feed([row.place for row in rows], fed, [row.length for row in rows])
        for row, ids in zip(rows, fed, strict=True):
            row.length += len(ids)
        members, which = members_of(rows)
        logprobs_BV = self._logprobs(hidden)[torch.from_numpy(which).to(self.device)]
        picked = self.sample_tokens(logprobs_BV, *streams_of(members), greedy)
        chosen = logprobs_BV.gather(-1, picked[:, None])
        for episode, token, values in zip(members, picked.tolist(), chosen.tolist(), strict=True):
            episode.append([token], values)

    def _parted(self, episodes: Sequence[RowEpisode]) -> list[Slot]:
        """The rows of these conversations, each with the same pending tokens in all of its members.

        Conversations that differ from the others of their row get a copy of it.
        """
        alike: dict[tuple[int, Ids], list[RowEpisode]] = {}
        for episode in episodes:
            fed = tuple(episode.pending) if self.shares_rows else (id(episode),)
            alike.setdefault((id(episode.slot), fed), []).append(episode)
        rows, copies, longest = [], [], 0
        for members in alike.values():
            row = members[0].slot
            if len(members) < len(row.members):
                leaving = set(members)
                row.members = [episode for episode in row.members if episode not in leaving]
                new = self._new_slot(row.length)
                new.members = members
                copies.append((row.place, new.place))
                longest = max(longest, row.length)
                for episode in members:
                    episode.slot = new
                row = new
            rows.append(row)
        if longest:
            source, target = torch.tensor(copies).T.to(self.device)
            self._cache.copy_rows(source, target, longest)
        return rows

    def _decode(self, episodes: Sequence[RowEpisode], wanted: int, greedy: bool) -> None:
        """Sample tokens until `wanted` messages are complete, or the batch must change.

        It must if too few rows are unfinished, or if the conversations of a row differ. Every
        conversation has one pending token.
        """
        rows = self._compact_slots(self._parted(episodes))
        count = len(rows)
        members, which = members_of(rows)
        # The batch is filled up with the next rows, which are written only beyond their length.
        held = [0] * (-(-count // ROWS) * ROWS)
        for place in self._slots.keys() & range(len(held)):
            held[place] = self._slots[place].length
        first = np.flatnonzero(np.diff(which, prepend=-1))  # a member of each row
        tokens = torch.zeros((len(held), 1), dtype=torch.int64)
        tokens[:count, 0] = torch.tensor([row.members[0].pending[0] for row in rows])
        tokens, positions = tokens.to(self.device), torch.tensor(held).to(self.device)[:, None]
        index = torch.arange(len(held), device=self.device)
        which_B, first_B = (torch.from_numpy(x).to(self.device) for x in (which, first))
        keys, drawn = streams_of(members)
        left = np.array([e.room - len(e.ids) for e in members])
        lengths = np.zeros(len(members), dtype=np.int64)  # of the messages; 0: incomplete
        # Complete rows are computed on until the others end, at positions up to this one.
        last = max(max(held), *(held[w] + n for w, n in zip(which.tolist(), left, strict=True)))
        picked, chosen = [], []
        for step in range(1, int(left.max()) + 1):
            hidden = self._forward(index, tokens, positions, max(held) + step, True)[:, 0]
            self.num_tokens += count
            logprobs_BV = self._logprobs(hidden)[which_B]
            picked.append(self.sample_tokens(logprobs_BV, keys, drawn + step - 1, greedy))
            chosen.append(logprobs_BV.gather(-1, picked[-1][:, None]))
            tokens[:count, 0] = picked[-1][first_B]
            positions = (positions + 1).clamp_(max=last)
            if step % self.steps_per_look and step < left.max():
                continue
            seen = step - 1 - (step - 1) % self.steps_per_look
            for number, ids in enumerate(torch.stack(picked[seen:]).cpu().numpy(), seen + 1):
                ends = (ids[:, None] == self.stops).any(1) | (number >= left)
                lengths[ends & (lengths == 0)] = number
            goes_on = lengths == 0
            apart = (ids != ids[first][which]) | (goes_on != goes_on[first][which])
            if (apart & (goes_on | goes_on[first][which])).any():
                break
            going = int(goes_on[first].sum())
            ended = len(members) - int(goes_on.sum())
            if ended >= wanted or -(-going // ROWS) * ROWS <= MIN_FILL * count:
                break
        lengths[lengths == 0] = step
        for row, length in zip(rows, lengths[first].tolist(), strict=True):
            row.length += length
        ids, logprobs = torch.stack(picked, 1).cpu().numpy(), torch.cat(chosen, 1).cpu().numpy()
        for episode, length, *sampled in zip(members, lengths, ids, logprobs, strict=True):
            episode.append(*(line[:length].tolist() for line in sampled))

    def _compact_slots(self, wanted: Sequence[Slot]) -> list[Slot]:
        """Swap rows into the first places; returns them in order."""
        count, inside = len(wanted), set(wanted)
        holes = [place for place in range(count) if self._slots.get(place) not in inside]
        movers = [row.place for row in wanted if row.place >= count]
        if holes:
            source, target = (torch.tensor(x) for x in (movers + holes, holes + movers))
            longest = max(self._slots[r].length for r in movers + holes if r in self._slots)
            self._cache.copy_rows(source.to(self.device), target.to(self.device), longest)
        for hole, mover in zip(holes, movers, strict=True):
            moved, displaced = self._slots.pop(mover), self._slots.pop(hole, None)
            moved.place, self._slots[hole] = hole, moved
            if displaced is not None:
                displaced.place, self._slots[mover] = mover, displaced
        return [self._slots[place] for place in range(count)]

    def _prefill(self, place: Mapping[Ids, int]) -> None:
        """Compute prompts, each in its row; common prefixes are computed once and kept."""
        for prefix in shared_prefixes(list(place), MIN_PREFIX):
            if not any(2 * num_common(old, prefix) >= len(prefix) for old in self._shared_prefixes):
                row = next(row for prompt, row in place.items() if prompt[: len(prefix)] == prefix)
                self._feed([row], [list(prefix)], [0])
                self._shared_prefixes[prefix] = self._cache.save_prefix(row, len(prefix))
        rest = []
        for prompt, row in place.items():
            known = (prefix for prefix in self._shared_prefixes if prompt[: len(prefix)] == prefix)
            prefix = max(known, key=len, default=())
            if prefix:
                self._cache.load_prefix(row, self._shared_prefixes[prefix])
            if len(prefix) < len(prompt):
                rest.append((row, list(prompt[len(prefix) :]), len(prefix)))
        if rest:
            self._feed(*zip(*rest, strict=True))

    def _feed(
        self, rows: Sequence[int], tokens: Sequence[list[int]], starts: Sequence[int]
    ) -> torch.Tensor:
        """Feed tokens to rows from the given positions; those of similar length share a pass.

        Returns the hidden state of each row's last token, [B, H].
        """
        states: list[torch.Tensor] = [torch.empty(0)] * len(rows)
        order = sorted(range(len(rows)), key=lambda i: -len(tokens[i]))
        for first, last in passes([len(tokens[i]) for i in order]):
            batch, longest = sorted(order[first:last]), len(tokens[order[first]])
            padded = torch.tensor([tokens[i] + [0] * (longest - len(tokens[i])) for i in batch])
            begin = torch.tensor([[starts[i]] for i in batch])
            counts = torch.tensor([len(tokens[i]) for i in batch])
            index = torch.tensor([rows[i] for i in batch])
            # Positions of padding stay below `end`, because a model may not have more positions.
            end = max(starts[i] + len(tokens[i]) for i in batch) + 1
            in_front = index.tolist() == list(range(len(batch)))
            index, padded, begin = (x.to(self.device) for x in (index, padded, begin))
            positions = (begin + torch.arange(longest, device=self.device)).clamp_(max=end - 1)
            hidden_BT = self._forward(index, padded, positions, end, in_front)
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
