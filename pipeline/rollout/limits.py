"""The limits of a rollout: prompts that are too long, and what needs larger limits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.common.errors import UserError
from pipeline.config.cli import flag
from pipeline.config.settings import Config, RolloutSettings
from pipeline.environments.domains import Domain
from pipeline.environments.task_sets import IsLong
from pipeline.models.chat.template import Chat


def is_too_long(limits: RolloutSettings, num_tokens: int) -> bool:
    """Return whether a prompt of so many tokens leaves no room for a turn."""
    return num_tokens + limits.max_tokens_per_turn > limits.max_tokens


def long_prompts(config: Config, domain: Domain, chat: Chat) -> IsLong | None:
    """Return a function that finds the prompts that `skip_long_tasks` leaves out, or None."""
    schemas = domain.tools
    if not config.data.skip_long_tasks:
        return None
    return lambda prompt: is_too_long(config.rollout, len(chat.prompt_ids([*prompt], schemas)))


@dataclass(frozen=True)
class TooLow:
    """What does not fit into a rollout, and the least value of each limit that would hold it."""

    what: str
    needs: Mapping[str, int]
    is_refused: bool  # False: a run can go on without it


def check_limits(
    limits: RolloutSettings, found: Sequence[TooLow], prompts: Mapping[str, int]
) -> list[str]:
    """Return warnings about limits that are too low. Raises UserError if something is refused.

    The error and the last warning end with the flags that make room for all of it. `prompts` has
    the tokens of each domain's longest prompt.
    """
    lines = list[str]()
    values = dict[str, int]()
    for low in found:
        needed = (f"{name} {n} (got {getattr(limits, name)})" for name, n in low.needs.items())
        lines.append(f"{low.what}: needs {', '.join(needed)}")
        values |= {name: max(n, values.get(name, 0)) for name, n in low.needs.items()}
    if not lines:
        return []
    # With a longer turn, an episode is longer, too.
    turn = values.get("max_tokens_per_turn", limits.max_tokens_per_turn)
    episode = max([values.get("max_tokens", 0), *(tokens + turn for tokens in prompts.values())])
    if episode > limits.max_tokens:
        values["max_tokens"] = episode
    told = " ".join(f"{flag('rollout', name)} {value}" for name, value in sorted(values.items()))
    if any(low.is_refused for low in found):
        raise UserError(f"limits are too low: {'; '.join(lines)}; give {told}")
    lines[-1] += f"; give {told}"
    return lines
