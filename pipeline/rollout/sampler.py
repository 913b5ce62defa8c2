"""The interface of samplers, and the choice of one for a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from pipeline.chat.template import Chat
from pipeline.config.settings import RolloutSettings
from pipeline.errors import UserError
from pipeline.files.untrusted import shown
from pipeline.models.capabilities import refuse_changed_logits, why_generate
from pipeline.models.lora import base_model
from pipeline.models.weights import Weights
from pipeline.rollout.generate_sampler import GenerateSampler
from pipeline.rollout.row_sampler import RowSampler
from pipeline.rollout.trajectory import Sampled

Handle = Any  # an open conversation; only its sampler knows the type


class Sampler(Protocol):
    """Samples the policy's messages: tokens in, tokens and log-probabilities out.

    It is made from a model, plain or with LoRA adapters. A token is a function of the weights, the
    conversation's tokens and the draw at (key, number of sampled tokens); other conversations and
    their order change only rounding. `num_tokens` and `num_padded_tokens` count the tokens that the
    model computed, without and with padding.
    """

    num_tokens: int
    num_padded_tokens: int

    def load_weights(self, weights: Weights) -> None:
        """Take trained weights from `trained_weights`, while no conversation is open.

        Whole tensors: every parameter of a plain model, or the LoRA adapters under PEFT's names.
        The sampler may share them with the model, so that a later update changes them here, too.
        ValueError if a name is unknown or missing, or a shape differs.
        """

    def open(self, prompts: Sequence[list[int]], keys: Sequence[int]) -> list[Handle]:
        """Start one conversation per prompt of 1 or more tokens; returns them in order.

        `keys` are the 64-bit keys of their streams of draws, one per prompt (else ValueError).
        """

    def extend(self, episode: Handle, ids: list[int]) -> None:
        """Append the tokens of a reply to a conversation whose message is complete."""

    def sample(
        self,
        episodes: Sequence[Handle],
        max_tokens: Sequence[int],
        greedy: bool = False,
        until: int | None = None,
    ) -> list[Sampled | None]:
        """Sample the next message of each conversation, of at most `max_tokens` tokens (1 or more).

        Returns when `until` messages (all, if missing) are complete, or later. Incomplete messages
        are None, and the next call continues them. A message includes the id that ended it. Its
        log-probabilities are at the sampling temperature, in nats. Greedy takes the most likely
        token instead of the drawn one.
        """

    def close(self, episode: Handle) -> None:
        """End a conversation, complete or not; its handle is invalid afterwards."""


def make_sampler(
    model: Any,
    chat: Chat,
    settings: RolloutSettings,
    dtype: torch.dtype,
    is_main: bool,
    *,
    row_sampler: type[RowSampler] = RowSampler,
) -> Sampler:
    """The fastest sampler for the model; the main rank prints a warning if `generate` is needed.

    `row_sampler` is the class for models whose keys and values fit into rows. UserError if no
    sampler can serve the model.
    """
    plain = base_model(model)
    refuse_changed_logits(plain)
    why = why_generate(plain)
    stops = other_stops(plain, chat)
    if stops and is_main:
        also = ", ".join(map(shown, chat.tokenizer.convert_ids_to_tokens(stops)))
        print(f"messages end at {chat.end_of_turn}, and by the model's files at {also}", flush=True)
    limits = chat.end_of_turn_id, settings.temperature, dtype, settings.top_k, settings.top_p
    if why is None:
        return row_sampler(model, *limits, other_stops=stops)
    sampler = GenerateSampler(model, *limits, other_stops=stops)
    if is_main:
        beside = "" if sampler.pads else ", beside others of equal length only"
        print(
            f"warning: {type(plain).__name__} is sampled through generate, every message from the "
            f"start again{beside}, which is slower than one cache over all turns; {why}",
            flush=True,
        )
    return sampler


def other_stops(model: Any, chat: Chat) -> list[int]:
    """Ids that end a message besides the template's end of turn, in order.

    As on servers, these are the ids in the model's generation config, and the tokenizer's end of
    sequence. UserError if the config has anything but ids.
    """
    listed = getattr(model.generation_config, "eos_token_id", None)
    ids = listed if isinstance(listed, list) else [listed]
    if not all(token is None or type(token) is int for token in ids):
        what = f"model: its generation config has the eos_token_id {shown(listed)}"
        raise UserError(f"{what}; write an id or a list of ids")
    known = set(chat.tokenizer.get_vocab().values())
    return sorted(known.intersection([*ids, chat.tokenizer.eos_token_id]) - {chat.end_of_turn_id})
