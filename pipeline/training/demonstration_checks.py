"""Demonstrations are tried before a run."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile

from pipeline.common.errors import UserError
from pipeline.common.untrusted import shown
from pipeline.config.settings import Config, RolloutSettings
from pipeline.data.tasks import Task
from pipeline.environments.demonstrations import Demonstration, Demonstrations
from pipeline.environments.domains import Domain, generated
from pipeline.environments.task_checks import try_expert
from pipeline.models.chat.template import Chat
from pipeline.rollout.limits import TooLarge
from pipeline.rollout.reward_checks import request_key
from pipeline.training.sft import tokens_of_messages

NUM_TRIED_OF_FILE = 100  # maximum number of a file's demonstrations that are checked before a run
NUM_TRIED_BY_EXPERT = 8  # number of tasks of a domain that the expert must solve before a run


def check_demonstrations(
    config: Config,
    domains: Mapping[str, Domain],
    demonstrations: Mapping[str, Demonstrations],
    chat: Chat,
    held_out: Mapping[str, Sequence[Task]] | None = None,
) -> tuple[list[str], list[TooLarge]]:
    """Return warnings about the demonstrations of a warm start, and those beyond the limits.

    Up to NUM_TRIED_OF_FILE demonstrations of a domain's file are encoded. The expert of a domain
    without a file must solve up to NUM_TRIED_BY_EXPERT tasks. Raises UserError if a demonstration
    is faulty, or if a domain of the tiny model has no demonstrations.
    """
    if not config.grpo.use_grpo or config.warm_start.steps == 0:
        return [], []
    notes = [*_without_demonstrations(config, domains, demonstrations)]
    beyond = list[TooLarge]()
    for name, source in demonstrations.items():
        tried = [*_tried(config, source)]
        notes += _other_tools(source.domain, tried)
        notes += _held_out_prompts(source, (held_out or {}).get(name, ()))
        beyond += _beyond_limits(config.rollout, source.domain, chat, tried)
    return notes, beyond


def _without_demonstrations(
    config: Config, domains: Mapping[str, Domain], demonstrations: Mapping[str, Demonstrations]
) -> Iterator[str]:
    names = [name for name in domains if name not in demonstrations]
    if not names:
        return
    files = ", ".join(f"{name}: FILE" for name in names)
    remedy = f"give --demonstrations '{{{files}}}', or add an expert(agent, goal) to the module"
    lacking = f"demonstrations: none of {', '.join(names)}, which has no file and no expert"
    if config.model.model == "tiny" or len(names) == len(domains):
        raise UserError(
            f"{lacking}: the warm start cannot teach its tools; {remedy}, or set "
            "--warm-start-steps 0"
        )
    yield f"{lacking}: only what the model can do already counts there; {remedy}"


def _tried(config: Config, source: Demonstrations) -> Iterator[Demonstration]:
    """Yield some of a domain's demonstrations; raises UserError if the expert fails on a task."""
    if source.file is not None:
        every = [*source]
        yield from every[:: -(-len(every) // NUM_TRIED_OF_FILE)]
        return
    domain = source.domain
    count = source.count
    limit = domain.max_tasks
    if limit is not None and count > limit:
        raise UserError(
            f"warm_start: got {config.warm_start.steps} steps of {config.warm_start.batch_size} "
            f"demonstrations, but the experts give at most {limit} a domain; give fewer"
        )
    # If `max_tasks` is None, the check makes all tasks, to see whether the domain has enough.
    num_made = count if limit is None else min(count, NUM_TRIED_BY_EXPERT)
    tasks = generated(config, domain, num_made, "train")
    for task in tasks[:: -(-len(tasks) // NUM_TRIED_BY_EXPERT)]:
        messages = try_expert(
            domain, task, config.rollout.call_timeout, config.evaluation.success_threshold
        )
        yield Demonstration(f"the expert's task {shown(task.id)}", messages, domain.tools)


def _held_out_prompts(source: Demonstrations, held_out: Sequence[Task]) -> Iterator[str]:
    """Yield a warning if a file shows answers to held-out requests."""
    if source.file is None:
        return
    domain = source.domain
    begins = {
        request_key(takewhile(lambda message: message["role"] != "assistant", one.messages))
        for one in source
    }
    if seen := sum(request_key(task.prompt) in begins for task in held_out):
        but = "" if domain.is_single_turn else ", unless the tools find something else there"
        yield (
            f"demonstrations of {domain.name}: {seen} of {len(held_out)} held-out requests are "
            f"answered in the file; take them out, or give other eval_tasks{but}"
        )


def _other_tools(domain: Domain, tried: Sequence[Demonstration]) -> Iterator[str]:
    if others := [one.where for one in tried if one.tools != domain.tools]:
        yield (
            f"demonstrations of {domain.name}: the tools of {len(others)} of {len(tried)} tried "
            "are not those of the environment, which the model gets in a rollout; leave `tools` "
            f"out ({others[0]})"
        )


def _beyond_limits(
    limits: RolloutSettings, domain: Domain, chat: Chat, tried: Sequence[Demonstration]
) -> Iterator[TooLarge]:
    """Yield what a rollout needs to hold the demonstrations; refused if a tenth do not fit."""
    needs = dict[str, int]()
    beyond = list[str]()  # where the demonstrations are that do not fit
    for one in tried:
        sizes = _sizes(chat, one)
        over = {name: size for name, size in sizes.items() if size > getattr(limits, name)}
        needs |= {name: max(number, needs.get(name, 0)) for name, number in over.items()}
        if over:
            beyond.append(one.where)
    if beyond:
        of = f"{len(beyond)} of {len(tried)} tried demonstrations of {domain.name}"
        is_refused = 10 * len(beyond) > len(tried)
        yield TooLarge(f"{of} (such as {beyond[0]})", needs, is_refused)


def _sizes(chat: Chat, demonstration: Demonstration) -> dict[str, int]:
    """Return the least value of each limit of a rollout that holds a demonstration."""
    where, messages, tools = demonstration
    try:
        parts = tokens_of_messages(chat, messages, tools or [])
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
