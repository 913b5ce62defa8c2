"""The interface of samplers, and the choice of a sampler for a model."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any, Protocol

import torch

from pipeline.common.console import say
from pipeline.common.errors import UserError
from pipeline.common.untrusted import shown
from pipeline.config.settings import SAMPLERS, RolloutSettings, SamplerFacts
from pipeline.models.capabilities import other_stops, why_generate
from pipeline.models.chat.template import Chat
from pipeline.models.lora import base_model
from pipeline.models.sampling_copy import Weights
from pipeline.rollout.trajectory import Sampled

Handle = Any  # an open conversation; its type depends on the sampler


class Sampler(Protocol):
    """Samples the policy's messages as token ids with log-probabilities.

    A sampled token depends on the weights, on the conversation's tokens, and on a random number,
    which depends on the conversation's key and number of sampled tokens. A conversation's
    log-probabilities depend on the rest of the batch only by rounding errors. `num_tokens` counts
    the tokens that the model computed; `num_padded_tokens` also counts padding.
    """

    num_tokens: int
    num_padded_tokens: int

    def load_weights(self, weights: Weights) -> None:
        """Load weights from the function `trained_weights`; no conversation may be open.

        `weights` holds every parameter of a plain model, or only the adapters of a model with LoRA
        (PEFT's names). The sampler may share tensors with the model, so that an update of the model
        changes the sampler too. Raises ValueError if a name or a shape in `weights` does not fit
        the model.
        """

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """Return log-probabilities of all `ids` but the first, [T - 1] float32 on CPU, in nats.

        They are at temperature 1. The call draws nothing, changes no open conversation, and adds to
        no counter.
        """

    def open(
        self, prompts: Sequence[list[int]], keys: Sequence[int], num_drawn: Sequence[int] = ()
    ) -> list[Handle]:
        """Start one conversation per prompt; return the handles in the order of the prompts.

        A prompt has at least one token. `keys` holds a 64-bit key for each prompt's stream of
        random numbers, and `num_drawn` how many of them each conversation has used (default: 0).
        Raises ValueError if the numbers of keys and of prompts differ. A call that raises leaves no
        conversation open.
        """

    def extend(self, conversation: Handle, ids: list[int]) -> None:
        """Append the tokens of a reply to a conversation whose last message is complete."""

    def sample(
        self,
        conversations: Sequence[Handle],
        max_tokens: Sequence[int],
        greedy: bool = False,
        until: int | None = None,
    ) -> list[Sampled | None]:
        """Sample the next message of each conversation i, with at most `max_tokens[i]` >= 1 tokens.

        Returns when at least `until` messages are complete (default: all). An incomplete message is
        returned as None, and the next call continues the message. A complete message includes the
        token id that ended the message. Log-probabilities are in nats, at the sampling temperature,
        and of all tokens: `top_k` and `top_p` do not change them. `greedy` selects the most likely
        tokens.
        """

    def close(self, conversation: Handle) -> None:
        """End a conversation, even if its message is incomplete; the handle becomes invalid."""

    def rest(self) -> None:
        """Free the memory that an update needs; `load_weights` takes the memory back.

        No conversation may be open.
        """

    def end(self) -> None:
        """Free everything; the sampler cannot be used any more."""


def make_sampler(
    model: Any, chat: Chat, settings: RolloutSettings, dtype: torch.dtype, is_main: bool
) -> Sampler:
    """Return the sampler that the setting `sampler` names, or the fastest that can serve the model.

    With `auto`, models with full attention, at lengths up to `settings.max_tokens`, get the sampler
    `own`, and other models get `generate`. Raises UserError if the sampler cannot serve the model.
    """
    plain = base_model(model)
    stops = other_stops(plain, chat)
    if stops and is_main:
        also = ", ".join(map(shown, chat.tokenizer.convert_ids_to_tokens(stops)))
        print(f"messages end at {chat.end_of_turn}, and by the model's files at {also}", flush=True)
    name, why = chosen_sampler(settings.sampler, why_generate(plain, settings.max_tokens))
    if why and is_main:
        say(
            f"warning: {type(plain).__name__} is sampled through generate, every message from the "
            f"start again, which is slower than one cache over all turns; {why}"
        )
    refuse_missing(SAMPLERS[name])
    make: Callable[..., Sampler] = resolve_name(SAMPLERS[name].target)
    return make(model, settings, dtype, [chat.end_of_turn_id, *stops])


def chosen_sampler(sampler: str, why: str | None) -> tuple[str, str]:
    """Return the name of the sampler, and why it is `generate` (else "").

    `why` comes from `why_generate`. Raises UserError if `sampler` cannot serve the model.
    """
    if sampler == "generate":
        return sampler, "the setting sampler asks for it"
    if sampler == "own" and why is not None:
        raise UserError(f"sampler: got own, which cannot sample this model ({why}); set generate")
    if sampler in ("auto", "own"):
        return ("own", "") if why is None else ("generate", why)
    return sampler, ""


def refuse_missing(facts: SamplerFacts) -> None:
    """Raise UserError if a sampler's package is missing. This does not import the package."""
    if facts.package and find_spec(facts.package) is None:
        raise UserError(
            f"sampler: got {facts.package}, which is not installed; pip install "
            f"'three-domain-grpo[{facts.package}]', or set own"
        )
