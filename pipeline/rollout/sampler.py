"""TEMP."""

from __future__ import annotations

from typing import Any

import torch

from pipeline.chat.template import Chat
from pipeline.config.settings import RolloutSettings
from pipeline.errors import UserError
from pipeline.files.untrusted import shown
from pipeline.models.capabilities import refuse_changed_logits, why_generate
from pipeline.rollout.generate_sampler import GenerateSampler
from pipeline.rollout.row_sampler import Sampler


def make_sampler(
    model: Any, chat: Chat, settings: RolloutSettings, dtype: torch.dtype, is_main: bool
) -> Sampler | GenerateSampler:
    """The sampler that can serve the model; the main rank says so where it is the slower one."""
    refuse_changed_logits(model)
    why = why_generate(model)
    stops = other_stops(model, chat)
    if stops and is_main:
        also = ", ".join(map(shown, chat.tokenizer.convert_ids_to_tokens(stops)))
        print(
            f"messages end at {chat.end_of_turn}, and by the model's files at {also}",
            flush=True,
        )
    sampler = (Sampler if why is None else GenerateSampler)(
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
            f"warning: {type(model).__name__} is sampled through generate, every message from the "
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
