"""What a rollout asks of a sampler, and which sampler a model gets."""

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

Handle = Any  # a conversation under way, as its sampler holds it; opaque to everybody else


class Sampler(Protocol):
    """Samples the policy's messages in conversations: tokens in, tokens and log-probabilities out.

    Made from a model, plain or with LoRA adapters, whose frozen base is given by that once and for
    all; what is trained comes through `load_weights`. A token is a function of the weights, the
    conversation's tokens and the draw at (key, tokens sampled so far): never of other
    conversations, beyond rounding, nor of the order in which they come. Counts grow until the
    sampler's end: `num_tokens` that the model was fed, `num_padded_tokens` with padding.
    """

    num_tokens: int
    num_padded_tokens: int

    def load_weights(self, weights: Weights) -> None:
        """Take over what is trained, as `trained_weights` gives it, before the next `open`.

        Whole tensors: every parameter of a plain model, or the adapters of a model with LoRA under
        PEFT's names. They may be shared, not copied: then a later update changes them here, too,
        until the next call. No conversation is under way. ValueError where a name is unknown or
        missing, or a shape is another.
        """
        ...

    def open(self, prompts: Sequence[list[int]], keys: Sequence[int]) -> list[Handle]:
        """Start one conversation per prompt, of 1 token or more; in order.

        `keys` are those of their streams of draws, 64 bits each, one per prompt (else ValueError).
        """
        ...

    def extend(self, episode: Handle, ids: list[int]) -> None:
        """Append the tokens of a reply, after a message is complete and before the next one."""
        ...

    def sample(
        self,
        episodes: Sequence[Handle],
        max_tokens: Sequence[int],
        greedy: bool = False,
        until: int | None = None,
    ) -> list[Sampled | None]:
        """Sample the next message of each conversation, of at most `max_tokens` tokens (1 or more).

        Returns as soon as `until` messages (all, if missing) are complete, or later; None stands
        for those that are not, which the next call goes on with. A message holds the id that ended
        it, its log-probabilities are those at the sampling temperature, in nats. Greedy takes the
        most likely token instead of the drawn one.
        """
        ...

    def close(self, episode: Handle) -> None:
        """End a conversation, complete or not; its handle is of no use any more."""
        ...


def make_sampler(
    model: Any,
    chat: Chat,
    settings: RolloutSettings,
    dtype: torch.dtype,
    is_main: bool,
    *,
    row_sampler: type[RowSampler] = RowSampler,
) -> Sampler:
    """The sampler that can serve the model; the main rank says so where it is the slower one.

    A model with LoRA adapters gets one that takes these adapters' weights. `row_sampler` is the
    class that serves a model whose keys and values can be kept. UserError where none can serve it.
    """
    plain = base_model(model)
    refuse_changed_logits(plain)
    why = why_generate(plain)
    stops = other_stops(plain, chat)
    if stops and is_main:
        also = ", ".join(map(shown, chat.tokenizer.convert_ids_to_tokens(stops)))
        print(
            f"messages end at {chat.end_of_turn}, and by the model's files at {also}",
            flush=True,
        )
    kind = row_sampler if why is None else GenerateSampler
    sampler: RowSampler | GenerateSampler = kind(
        model,
        chat.end_of_turn_id,
        settings.temperature,
        dtype,
        settings.top_k,
        settings.top_p,
        other_stops=stops,
    )
    if isinstance(sampler, GenerateSampler) and is_main:
        beside = "" if sampler.pads else ", beside others of equal length only"
        print(
            f"warning: {type(plain).__name__} is sampled through generate, every message from the "
            f"start again{beside}, which is slower than one cache over all turns; {why}",
            flush=True,
        )
    return sampler


def other_stops(model: Any, chat: Chat) -> list[int]:
    """Ids that end a message besides the template's end of turn, in order.

    They are those at which servers stop: what the generation config of the model lists, and the
    tokenizer's end of sequence. UserError where the list holds no ids.
    """
    listed = getattr(model.generation_config, "eos_token_id", None)
    ids = listed if isinstance(listed, list) else [listed]
    if not all(token is None or type(token) is int for token in ids):
        raise UserError(
            f"model: its generation config has the eos_token_id {shown(listed)}; write an id or a "
            "list of ids"
        )
    known = set(chat.tokenizer.get_vocab().values())
    return sorted(known.intersection([*ids, chat.tokenizer.eos_token_id]) - {chat.end_of_turn_id})
