"""What is tried before a run: limits of a rollout, demonstrations and reward functions."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

from pipeline.chat.template import Chat
from pipeline.config.cli import flag
from pipeline.config.settings import SINGLE_TURN, Config, RolloutSettings
from pipeline.data.splits import same_by
from pipeline.data.tasks import Message, Task
from pipeline.environments.calls import guarded
from pipeline.environments.demonstrations import (
    Demonstration,
    demonstrations_of,
    has_demonstrations,
)
from pipeline.environments.discovery import OWN_LOOP
from pipeline.environments.domains import Domain, generated
from pipeline.environments.faults import EnvironmentFault
from pipeline.environments.tools import RandomState, run_here, started, tool_schemas
from pipeline.environments.trials import try_expert
from pipeline.errors import UserError
from pipeline.files.untrusted import one_line, shown
from pipeline.preflight.task_sets import is_single_turn
from pipeline.rollout.rewards import (
    JUDGE,
    Completion,
    RewardFunction,
    RewardFunctions,
    columns_of,
    load_reward_functions,
)
from pipeline.rollout.trajectory import Trajectory
from pipeline.sft import parts_of, sources_of

NUM_TRIED = 100  # maximum number of a file's demonstrations that are checked before a run
NUM_TRIED_BY_EXPERT = 8  # number of tasks of a domain that the expert must solve before a run
NUM_REWARDED = 8  # number of a domain's tasks with which each reward function is tried
OF_EVERY_TASK = {"domain", "id", "payload", "family", "branch"}


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
    notes = [*_without_demonstrations(config, domains)]
    beyond = list[TooLow]()
    for domain in sources:
        tried = list(_tried(config, domain, count))
        notes += _other_tools(domain, tried)
        notes += _held_out_prompts(config, domain, count, (held_out or {}).get(domain.name, ()))
        beyond += _beyond_limits(config.rollout, domain, chat, tried)
    return notes, beyond


def _without_demonstrations(config: Config, domains: Mapping[str, Domain]) -> Iterator[str]:
    names = [name for name, d in domains.items() if not has_demonstrations(config, d)]
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


def _tried(config: Config, domain: Domain, count: int) -> Iterator[Demonstration]:
    """Yield some of a domain's demonstrations; raises UserError if the expert fails on a task."""
    if domain.name in config.data.demonstrations:
        made = list(demonstrations_of(config, domain, count))
        yield from made[:: -(-len(made) // NUM_TRIED)]
        return
    threshold = config.evaluation.success_threshold
    limit = domain.max_tasks
    if limit is not None and count > limit:
        raise UserError(
            f"warm_start: got {config.warm_start.steps} steps of {config.warm_start.batch_size} "
            f"demonstrations, but the experts give at most {limit} a domain; give fewer"
        )
    # If `max_tasks` is None, the check makes all tasks, to see whether the domain has enough.
    num_made = count if limit is None else min(count, NUM_TRIED_BY_EXPERT)
    tasks = generated(config, domain, num_made, "train")
    tools = tool_schemas(domain.environment)
    for task in tasks[:: -(-len(tasks) // NUM_TRIED_BY_EXPERT)]:
        messages = try_expert(domain, task, config.rollout.call_timeout, threshold)
        yield Demonstration(f"the expert's task {shown(task.id)}", messages, tools)


def _held_out_prompts(
    config: Config, domain: Domain, count: int, held_out: Sequence[Task]
) -> Iterator[str]:
    """Yield a warning if a file shows answers to held-out requests."""
    if domain.name not in config.data.demonstrations:
        return
    begins = {
        _request(takewhile(lambda message: message["role"] != "assistant", one.messages))
        for one in demonstrations_of(config, domain, count)
    }
    if seen := sum(_request(task.prompt) in begins for task in held_out):
        but = "" if is_single_turn(domain) else ", unless the tools find something else there"
        yield (
            f"demonstrations of {domain.name}: {seen} of {len(held_out)} held-out requests are "
            f"answered in the file; take them out, or give other eval_tasks{but}"
        )


def _request(messages: Iterable[Message]) -> int:
    """Return the hash of what the customer says, however it is written."""
    said = [message for message in messages if message["role"] != "system"]
    return same_by(())(said, "{}", {})


def _other_tools(domain: Domain, tried: Sequence[Demonstration]) -> Iterator[str]:
    schemas = tool_schemas(domain.environment)
    if others := [one.where for one in tried if one.tools != schemas]:
        yield (
            f"demonstrations of {domain.name}: the tools of {len(others)} of {len(tried)} tried "
            "are not those of the environment, which the model gets in a rollout; leave `tools` "
            f"out ({others[0]})"
        )


def _beyond_limits(
    limits: RolloutSettings, domain: Domain, chat: Chat, tried: Sequence[Demonstration]
) -> Iterator[TooLow]:
    """Yield what a rollout needs to hold the demonstrations; refused if a tenth do not fit."""
    needs = dict[str, int]()
    beyond = list[str]()  # where the demonstrations are that do not fit
    for one in tried:
        sizes = _sizes(chat, one).items()
        over = {name: number for name, number in sizes if number > getattr(limits, name)}
        needs |= {name: max(number, needs.get(name, 0)) for name, number in over.items()}
        if over:
            beyond.append(one.where)
    if beyond:
        of = f"{len(beyond)} of {len(tried)} tried demonstrations of {domain.name}"
        is_refused = 10 * len(beyond) > len(tried)
        yield TooLow(f"{of} (such as {beyond[0]})", needs, is_refused)


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


def check_reward_functions(
    config: Config,
    domains: Mapping[str, Domain],
    tasks: Mapping[str, Sequence[Task]],
    held_out: Mapping[str, Sequence[Task]],
) -> list[str]:
    """Try the reward functions; return notes on functions and on columns that are not used.

    Raises UserError if a function applies to no domain, if a domain has no reward, if held-out
    tasks lack a column that training tasks have and a function needs, if a function cannot ask the
    judge, or if a function fails on an empty answer. Async functions are not called.
    """
    rewards = load_reward_functions(config)
    functions = [] if rewards is None else list(rewards.functions)
    notes = [
        f"reward function {function.name} is async, so its first call is in the run"
        for function in functions
        if function.is_async
    ]
    judge = _judge_of(config, domains, functions)
    missing = dict[str, str]()  # name of a function -> what tasks lack
    unscored = list[str]()
    used = set[str]()
    for name, domain in domains.items() if functions else ():
        if hasattr(domain.environment, OWN_LOOP):
            notes.append(
                f"{name}: its loop returns the reward; no reward function is called for it"
            )
            continue
        columns = columns_of(tasks[name][0])
        if judge and JUDGE in columns:
            raise UserError(
                f"{name}: its tasks have a column {JUDGE}; this is the judge's name in reward "
                "functions; rename the column"
            )
        applying = [function for function in functions if not function.missing([*columns, *judge])]
        for function in functions:
            if lacking := function.missing([*columns, *judge]):
                names = [f"{n} (which judge_url gives)" if n == JUDGE else n for n in lacking]
                given = f"its tasks have no {', '.join(names)}, only {', '.join(columns)}"
                missing[function.name] = given
                notes.append(f"reward function {function.name} is not called for {name}: {given}")
        summed = [f"{function.name} (weight {function.weight:g})" for function in applying]
        if hasattr(domain.environment, "get_reward"):
            summed.insert(0, f"get_reward of {domain.environment.__name__} (weight 1)")
        if not summed:
            unscored.append(name)
        elif len(summed) > 1:
            notes.append(f"{name}: the reward is the sum of {' and '.join(summed)}")
        for task in held_out[name]:
            known = [k for k, value in columns_of(task).items() if value is not None]
            for function in applying:
                # A column that a row of a file lacks is null there; training tasks may have that.
                lacking = function.missing([*known, *judge])
                if lacking and not any(
                    columns_of(t).get(lacking[0], "") is None for t in tasks[name]
                ):
                    raise UserError(
                        f"reward_funcs: {function.name} needs what its training tasks have, but "
                        f"the held-out tasks of {name} have no {', '.join(lacking)} (task "
                        f"{shown(task.id)}); add it to them"
                    )
        for task in tasks[name][:NUM_REWARDED]:
            _try([f for f in applying if not f.is_async], domain, task, config)
        is_single = config.factories[name].factory == SINGLE_TURN
        if is_single and not any(function.takes_all for function in applying):
            read = OF_EVERY_TASK.union(*(function.parameters for function in applying))
            notes += [f"{name}: no one reads the column {c}" for c in sorted(columns.keys() - read)]
        used.update(function.name for function in applying)
    for name in missing.keys() - used:
        raise UserError(
            f"reward_funcs: {name} applies to no domain: {missing[name]}; rename an argument or a "
            "column"
        )
    if unscored:
        raise UserError(
            f"reward_funcs: no function applies to {unscored[0]}; give a function for its columns, "
            "or the environment a get_reward"
        )
    return notes


def _judge_of(
    config: Config, domains: Mapping[str, Domain], functions: Sequence[RewardFunction]
) -> list[str]:
    """Return the name under which functions get the judge, or nothing if no function asks it."""
    url = config.judge.url
    asking = [f for f in functions if f.asks_judge]
    judged = [n for n, domain in domains.items() if domain.asks_judge]
    if url is None and judged:
        raise UserError(
            f"judge_url: the environment of {judged[0]} asks a judge (has_judge); give judge_url "
            "and judge_model"
        )
    if url is None:
        return []
    if not asking and not judged:
        raise UserError(
            f"judge_url: got {url}, and no reward function or environment asks a judge; give a "
            f"reward function the argument {JUDGE}, or take it out"
        )
    if waiting := [f.name for f in asking if not f.is_async]:
        raise UserError(
            f"reward_funcs: {waiting[0]} asks the judge, and is not async; write `async def`, and "
            f"await what {JUDGE} returns"
        )
    return [JUDGE] if asking else []


def _try(functions: Sequence[RewardFunction], domain: Domain, task: Task, config: Config) -> None:
    """Call reward functions with one and with two empty answers. Raises UserError if one fails."""
    seconds = config.rollout.call_timeout
    for count in (1, 2):
        answers = list[Completion]()
        for _ in range(count):
            messages = [*map(dict, task.prompt), {"role": "assistant", "content": ""}]
            trajectory = Trajectory(domain=task.domain, task_id=task.id, messages=messages)
            try:
                with RandomState(task):
                    start = partial(run_here, started, domain.environment, task.row())
                    made = guarded("reset", seconds, start)
            except EnvironmentFault as fault:
                raise UserError(
                    f"{domain.name}: reset failed on task {shown(task.id)}: "
                    f"{one_line(str(fault))}; mend the environment or the task"
                ) from None
            answers.append(Completion(task, made.environment, trajectory))
        RewardFunctions(functions, seconds)(answers)
        if any(function.name not in trajectory.rewards for function in functions):
            raise UserError(
                f"reward_funcs: {count} empty answer(s) to task {shown(task.id)} of "
                f"{domain.name}: {one_line(trajectory.error)}; mend the function"
            )
