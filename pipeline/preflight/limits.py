"""Limits of a rollout that are too low: all are found before one is named."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.config.cli import flag
from pipeline.config.settings import RolloutSettings
from pipeline.errors import UserError


@dataclass(frozen=True)
class TooLow:
    """What does not fit into a rollout, and the least value of each limit that would hold it."""

    what: str
    needs: Mapping[str, int]
    is_refused: bool  # False: a run can go on without it
    remedy: str = ""  # beside larger limits


def is_too_long(limits: RolloutSettings, num_tokens: int) -> bool:
    """Return whether a prompt of so many tokens leaves no room for a turn."""
    return num_tokens + limits.max_tokens_per_turn > limits.max_tokens


def prompts_beyond(
    limits: RolloutSettings, prompts: Mapping[str, int], named: Callable[[str], tuple[str, str]]
) -> list[TooLow]:
    """Return the domains whose longest prompt, of so many tokens, leaves no room for a turn.

    `named` returns the name and place of a domain's longest prompt, and a remedy.
    """
    turn = limits.max_tokens_per_turn
    found = list[TooLow]()
    for domain, tokens in prompts.items():
        if is_too_long(limits, tokens):
            name, remedy = named(domain)
            what = f"a prompt of {domain} has {tokens} tokens and a turn may take {turn} ({name})"
            found.append(TooLow(what, {"max_tokens": tokens + turn}, True, remedy))
    return found


def check_limits(
    limits: RolloutSettings, found: Sequence[TooLow], prompts: Mapping[str, int]
) -> list[str]:
    """Return warnings about limits that are too low. Raises UserError if something is refused.

    The error and the last warning end with the flags that make room for all of it.
    """
    lines = [f"{low.what}: needs {_in_words(limits, low.needs)}" for low in found]
    if not lines:
        return []
    told = " ".join(f"{flag('rollout', n)} {v}" for n, v in _mended(limits, found, prompts).items())
    told += "".join(dict.fromkeys(low.remedy for low in found))
    if any(low.is_refused for low in found):
        raise UserError(f"limits are too low: {'; '.join(lines)}; give {told}")
    lines[-1] += f"; give {told}"
    return lines


def _in_words(limits: RolloutSettings, needs: Mapping[str, int]) -> str:
    texts = (f"{name} {value} (got {getattr(limits, name)})" for name, value in needs.items())
    return ", ".join(texts)


def _mended(
    limits: RolloutSettings, found: Sequence[TooLow], prompts: Mapping[str, int]
) -> dict[str, int]:
    """Return the least values that fit together: with a longer turn, an episode is longer, too."""
    values = dict[str, int]()
    for low in found:
        for name, value in low.needs.items():
            values[name] = max(value, values.get(name, 0))
    turn = values.get("max_tokens_per_turn", limits.max_tokens_per_turn)
    episode = max([values.get("max_tokens", 0), *(tokens + turn for tokens in prompts.values())])
    if episode > limits.max_tokens:
        values["max_tokens"] = episode
    return dict(sorted(values.items()))
