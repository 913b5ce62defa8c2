"""The limits of a rollout: prompts that are too long, and what needs larger limits."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.common.errors import UserError
from pipeline.common.untrusted import shown
from pipeline.config.cli import flag
from pipeline.config.settings import Config, RolloutSettings
from pipeline.data.tasks import Message
from pipeline.environments.domains import Domain
from pipeline.environments.task_sets import IsLong, TaskSets, longest_of
from pipeline.models.chat.template import Chat
from pipeline.models.tiny import CHAT_TEMPLATE as TINY_TEMPLATE


def is_too_long(limits: RolloutSettings, num_tokens: int) -> bool:
    """Return whether a prompt of so many tokens leaves no room for a turn."""
    return num_tokens + limits.max_tokens_per_turn > limits.max_tokens


def long_prompts(config: Config, chat: Chat) -> IsLong | None:
    """Return a function that finds the prompts that `skip_long_tasks` leaves out, or None."""
    if not config.data.skip_long_tasks:
        return None

    def is_long(domain: Domain, prompt: Sequence[Message]) -> bool:
        return is_too_long(config.rollout, len(chat.prompt_ids([*prompt], domain.tools)))

    return is_long


@dataclass(frozen=True)
class TooLarge:
    """What does not fit into a rollout, and the least value of each limit that would hold it."""

    what: str
    needs: Mapping[str, int]
    is_refused: bool  # False: a run can go on without it


@dataclass(frozen=True)
class Prompts:
    """The prompts of a run's tasks, in tokens."""

    longest: dict[str, int]  # of the training tasks, by domain
    longest_of_all: dict[str, int]  # of all tasks, by domain
    unseen: dict[str, str]  # "all" or "a part", by the role whose messages prompts leave out
    too_long: list[TooLarge]
    is_tiny: bool  # the template is the tiny model's, which reads a first line alone, as said

    @property
    def warnings(self) -> list[str]:
        return [
            f"the chat template leaves {part} of the {role} message out of prompts"
            for role, part in self.unseen.items()
            if not self.is_tiny
        ]


def measure_prompts(
    limits: RolloutSettings,
    chat: Chat,
    domains: Mapping[str, Domain],
    tasks: Mapping[str, TaskSets],
) -> Prompts:
    """Measure the longest prompts of each domain. Raises UserError if the template leaves them out.

    Not only those that are trained on: what has no room for a turn would count as failed.
    """
    in_training = dict[str, int]()
    of_all = dict[str, int]()
    unseen = dict[str, str]()
    too_long = list[TooLarge]()
    for name, sets in tasks.items():
        longest = [*sets.longest, *longest_of([*sets.validation, *sets.held_out])]
        schemas = domains[name].tools
        for prompt in {str([m["role"] for m in t.prompt]): t.prompt for t in longest}.values():
            unseen |= chat.check_shown(prompt, schemas)
        lengths = [len(chat.prompt_ids(task.prompt, schemas)) for task in longest]
        most = of_all[name] = max(lengths)
        in_training[name] = max(lengths[: len(sets.longest)])
        if is_too_long(limits, most):
            task = longest[lengths.index(most)]
            where = f"task {shown(task.id)}"
            if place := sets.where(task.id):
                where += f", {place}; --skip-long-tasks leaves such rows out"
            turn = limits.max_tokens_per_turn
            what = f"a prompt of {name} has {most} tokens and a turn may take {turn} ({where})"
            too_long.append(TooLarge(what, {"max_tokens": most + turn}, is_refused=True))
    is_tiny = chat.tokenizer.chat_template == TINY_TEMPLATE
    return Prompts(in_training, of_all, unseen, too_long, is_tiny)


def long_results(
    limits: RolloutSettings, chat: Chat, tasks: Mapping[str, TaskSets]
) -> Iterator[str]:
    """Yield notes on domains whose `reset` returns more than a tool may."""
    most = limits.max_tool_result_tokens
    for name, sets in tasks.items():
        num_tokens = max(map(chat.num_content_tokens, sets.texts), default=0)
        if num_tokens > most:
            yield (
                f"{name}: reset returns {num_tokens} tokens; tool results of more than "
                f"max_tool_result_tokens ({most}) become errors"
            )


def check_limits(
    limits: RolloutSettings,
    needs: Sequence[TooLarge],
    prompts: Mapping[str, int],
    recipes: str = "",
) -> list[str]:
    """Return warnings about limits that are too low. Raises UserError if something is refused.

    The error and the last warning end with the flags that make room for all of it. `prompts` has
    the tokens of each domain's longest prompt. The error also names `recipes` that fit.
    """
    lines = list[str]()
    values = dict[str, int]()
    for low in needs:
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
    flags = " ".join(f"{flag('rollout', name)} {value}" for name, value in sorted(values.items()))
    if any(low.is_refused for low in needs):
        others = f", or take a recipe that fits: {recipes}" * bool(recipes)
        raise UserError(f"limits are too low: {'; '.join(lines)}; give {flags}{others}")
    lines[-1] += f"; give {flags}"
    return lines
