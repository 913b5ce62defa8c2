"""Checks of the warm start's demonstrations before a run."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile

from pipeline.chat.template import Chat
from pipeline.config.settings import Config, RolloutSettings
from pipeline.data.splits import content_of
from pipeline.data.tasks import Task
from pipeline.environments.demonstrations import (
    Demonstration,
    demonstrations_of,
    has_demonstrations,
)
from pipeline.environments.domains import Domain, generated
from pipeline.environments.tools import tool_schemas
from pipeline.environments.trials import try_expert
from pipeline.errors import UserError
from pipeline.files.untrusted import shown
from pipeline.preflight.limits import TooLow
from pipeline.preflight.tasks import is_single_turn
from pipeline.sft import parts_of, sources_of

NUM_TRIED = 100  # maximum number of a file's demonstrations that are checked before a run
NUM_TRIED_BY_EXPERT = 8  # number of tasks of a domain that the expert must solve before a run


def check_demonstrations(
    config: Config,
    domains: Mapping[str, Domain],
    chat: Chat,
    held_out: Mapping[str, Sequence[Task]] | None = None,
) -> tuple[list[str], list[TooLow]]:
    """Return warnings about the demonstrations of a warm start, and those beyond the limits.

    Up to NUM_TRIED demonstrations of a domain's file are encoded. The expert of a domain without a
    file must solve up to NUM_TRIED_BY_EXPERT tasks. Raises UserError if a demonstration is faulty,
    or if a domain of the tiny model has no demonstrations.
    """
    if not config.grpo.use_grpo or config.warm_start.steps == 0:
        return [], []
    sources, count = sources_of(config, domains)
    notes = _without_demonstrations(config, domains)
    beyond = list[TooLow]()
    for domain in sources:
        tried = list(_tried(config, domain, count))
        notes += _other_tools(domain, tried)
        notes += _held_out_prompts(config, domain, count, (held_out or {}).get(domain.name, ()))
        beyond += _beyond_limits(config.rollout, domain, chat, tried)
    return notes, beyond


def _without_demonstrations(config: Config, domains: Mapping[str, Domain]) -> list[str]:
    names = [name for name, d in domains.items() if not has_demonstrations(config, d)]
    if not names:
        return []
    files = ", ".join(f"{name}: FILE" for name in names)
    remedy = f"give --demonstrations '{{{files}}}', or add an expert(agent, goal) to the module"
    lacking = f"demonstrations: none of {', '.join(names)}, which has no file and no expert"
    if config.model.model == "tiny" or len(names) == len(domains):
        why = "the warm start cannot teach its tools"
        raise UserError(f"{lacking}: {why}; {remedy}, or set --warm-start-steps 0")
    return [f"{lacking}: only what the model can do already counts there; {remedy}"]


def _tried(config: Config, domain: Domain, count: int) -> Iterator[Demonstration]:
    """Yield some of a domain's demonstrations; raises UserError if the expert fails on a task."""
    if domain.name in config.data.demonstrations:
        made = list(demonstrations_of(config, domain, count))
        yield from made[:: -(-len(made) // NUM_TRIED)]
        return
    timeout = config.rollout.call_timeout
    threshold = config.evaluation.success_threshold
    settings = config.warm_start
    limit = domain.max_tasks
    if limit is not None and count > limit:
        raise UserError(
            f"warm_start: got {settings.steps} steps of {settings.batch_size} demonstrations, "
            f"but the experts give at most {limit} a domain; give fewer"
        )
    # If `max_tasks` is None, the check makes all tasks, to see whether the domain has enough.
    num_made = count if limit is None else min(count, NUM_TRIED_BY_EXPERT)
    tasks = generated(config.data, domain, num_made, "train")
    tools = tool_schemas(domain.environment)
    for task in tasks[:: -(-len(tasks) // NUM_TRIED_BY_EXPERT)]:
        messages = try_expert(domain, task, timeout, threshold)
        yield Demonstration(f"the expert's task {shown(task.id)}", messages, tools)


def _held_out_prompts(
    config: Config, domain: Domain, count: int, held_out: Sequence[Task]
) -> list[str]:
    """Return a warning if a file shows answers to held-out prompts of tasks of one turn.

    In other environments, tasks with equal prompts may differ in what the tools find.
    """
    if domain.name not in config.data.demonstrations or not is_single_turn(domain):
        return []
    begins = {
        content_of(takewhile(lambda message: message["role"] != "assistant", one.messages))
        for one in demonstrations_of(config, domain, count)
    }
    if not (seen := sum(content_of(task.prompt) in begins for task in held_out)):
        return []
    found = f"{seen} of {len(held_out)} held-out prompts are answered in the file"
    return [f"demonstrations of {domain.name}: {found}; take them out, or give other eval_tasks"]


def _other_tools(domain: Domain, tried: Sequence[Demonstration]) -> list[str]:
    schemas = tool_schemas(domain.environment)
    others = [one.where for one in tried if one.tools != schemas]
    if not others:
        return []
    given = f"the tools of {len(others)} of {len(tried)} tried are not those of the environment"
    return [
        f"demonstrations of {domain.name}: {given}, which the model gets in a rollout; leave "
        f"`tools` out ({others[0]})"
    ]


def _beyond_limits(
    limits: RolloutSettings, domain: Domain, chat: Chat, tried: Sequence[Demonstration]
) -> list[TooLow]:
    """Return what a rollout needs to hold the demonstrations; refused if a tenth do not fit."""
    needs = dict[str, int]()
    count = 0
    first = ""
    for one in tried:
        sizes = _sizes(chat, one).items()
        over = {name: number for name, number in sizes if number > getattr(limits, name)}
        needs |= {name: max(number, needs.get(name, 0)) for name, number in over.items()}
        count += bool(over)
        if over and not first:
            first = one.where
    if not count:
        return []
    what = f"{count} of {len(tried)} tried demonstrations of {domain.name} (such as {first})"
    return [TooLow(what, needs, is_refused=10 * count > len(tried))]


def _sizes(chat: Chat, demonstration: Demonstration) -> dict[str, int]:
    """Return the least value of each limit of a rollout that holds a demonstration."""
    where, messages, tools = demonstration
    try:
        parts = parts_of(chat, messages, tools or [])
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    turns = [len(ids) for is_sampled, ids in parts if is_sampled]
    results = [m["content"] for m in messages if m["role"] == "tool"]
    return {
        "max_tokens": sum(len(ids) for _, ids in parts),
        "max_tokens_per_turn": max(turns),
        "max_turns": len(turns),
        "max_tool_result_tokens": max(map(chat.num_content_tokens, results), default=0),
    }
