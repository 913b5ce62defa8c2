"""Blind baselines: the rewards of policies that never read the record of a request."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice, pairwise, product
from statistics import fmean
from typing import Any

from pipeline.config.settings import RolloutSettings
from pipeline.data.tasks import Message, Task
from pipeline.environments.calls import Calls, Guard
from pipeline.environments.domains import Domain
from pipeline.environments.experts import goal_of, run_expert
from pipeline.environments.tools import (
    EnvironmentFault,
    answer_call,
    reward_of,
    started,
    tool_schemas,
)

LOOKUPS = ("find", "get")  # the names of tools that change nothing begin so
ID = re.compile(r"\w*\d\w*")  # a word with a digit
Trace = tuple[tuple[str, str], ...]  # each step, and the outcome that the policy sees


def baselines(
    domains: Mapping[str, Domain],
    tasks: Mapping[str, Sequence[Task]],
    call_timeout: float = RolloutSettings().call_timeout,
) -> dict[str, dict[str, float]]:
    """The mean reward of each blind policy on the tasks of each domain.

    The policies do nothing, always transfer (the best single reason), or call every tool in turn.
    If the environment class names the tools that show the record of a request (`record_tools`, the
    beginnings of their names), transfers come after the lookups; if there is an expert as well, the
    best of all such policies is added. An episode whose environment fails, or takes more than
    `call_timeout` seconds for a call, earns nothing.
    """
    calls = Calls(call_timeout, lambda _: None)
    return {name: _baselines_of(calls, domains[name], tasks[name]) for name in tasks}


def _baselines_of(calls: Calls, domain: Domain, tasks: Sequence[Task]) -> dict[str, float]:
    environment_class = domain.environment

    def mean_reward(schemas: Sequence[dict[str, Any]]) -> float:
        play = partial(_play_blind, environment_class, schemas)
        return fmean(_result(calls, task, play) or 0.0 for task in tasks)

    record_tools = getattr(environment_class, "record_tools", ())
    schemas = [schema["function"] for schema in tool_schemas(environment_class)]
    lookups = [s for s in schemas if record_tools and s["name"].startswith(LOOKUPS)]
    transfers = [schema for schema in schemas if schema["name"].startswith("transfer")][:1]
    parameters = [p for s in transfers for p in s["parameters"]["properties"].values()]
    reasons: list[str] = next((p["enum"] for p in parameters if p.get("enum")), [])
    fixed = [{**schema, "fixed": reason} for schema in transfers for reason in reasons]
    rewards = {
        "nothing": mean_reward([]),
        "transfer": max((mean_reward([*lookups, transfer]) for transfer in fixed), default=0.0),
        "every_tool": mean_reward(schemas),
    }
    if record_tools and domain.expert is not None:

        async def trace(task: Task, guard: Guard) -> Any:
            return await guard("expert", partial(_trace, domain, task))

        rewards |= _best_blind([_result(calls, task, trace) for task in tasks], tasks)
    return rewards


def _result(calls: Calls, task: Task, play: Callable[[Task, Guard], Awaitable[Any]]) -> Any:
    """The result of `play`; None if the environment fails."""
    results: list[Any] = [None]

    async def work(guard: Guard) -> None:
        results.append(await play(task, guard))

    with suppress(EnvironmentFault):
        calls.here(task.key, work)
    return results[-1]


async def _play_blind(
    environment_class: type[Any], schemas: Sequence[dict[str, Any]], task: Task, guard: Guard
) -> float:
    """The reward after calling the tools in turn, lookups first, and a closing word.

    A text argument is an id from the request or from results: the newest that the tool accepts. A
    choice is its first option.
    """
    environment, *_ = await guard("reset", partial(started, environment_class, task.row()))
    ids = ID.findall(task.prompt[-1]["content"]) or ["x"]
    for schema in sorted(schemas, key=lambda s: not s["name"].startswith(LOOKUPS)):
        name, properties = schema["name"], schema["parameters"]["properties"]
        for values in islice(product(reversed(ids), repeat=len(properties)), 100):
            choices = zip(properties.items(), values, strict=True)
            arguments = {key: p.get("enum", [an_id])[0] for (key, p), an_id in choices}
            if "fixed" in schema:
                arguments = dict.fromkeys(arguments, schema["fixed"])
            answer = await guard(name, partial(answer_call, environment, name, arguments))
            if "error" not in answer.content:
                ids += [an_id for an_id in ID.findall(answer.content) if an_id not in ids]
                break
        if answer.is_last:
            break
    await guard("final message", partial(setattr, environment, "final_message", "Done."))
    return float(await guard("get_reward", partial(reward_of, environment)))


def _trace(domain: Domain, task: Task) -> Trace | None:
    """The expert's steps on a task and their outcomes, without that of the lookup of the record.

    An id that the goal or an earlier outcome names is written as its role: `<record>`, `<free>`.
    None if the task has no goal or the expert does not earn the reward.
    """
    goal = goal_of(task)
    if goal is None or domain.expert is None:
        return None
    messages, reward = run_expert(domain.environment(), domain.expert, task)
    if reward < 1:
        return None
    roles = {value: f"<{key}>" for key, value in goal.items() if key != "family"}
    trace = []
    episode: Sequence[Message] = [*messages[len(task.prompt) :], {"role": "user", "content": ""}]
    for message, answer in pairwise(episode):
        if message["role"] == "assistant":
            is_record = answer.get("name", "").startswith(domain.environment.record_tools)
            step = _step(message, roles)
            trace.append((step, "" if is_record else _outcome(answer["content"], roles)))
    return tuple(trace)


def _step(message: Message, roles: dict[str, str]) -> str:
    for call in message.get("tool_calls", ()):
        function = call["function"]
        arguments = {name: roles.get(value, value) for name, value in function["arguments"].items()}
        return f"{function['name']} {json.dumps(arguments, sort_keys=True)}"
    return _by_role(message["content"], roles)


def _outcome(content: str, roles: dict[str, str]) -> str:
    """The outcome of a step, after each new id in it has got its key as its role."""
    values = json.loads(content) if content.startswith("{") else {"answer": content}
    for key, value in sorted(values.items()):
        for an_id in ID.findall(value):
            roles.setdefault(an_id, f"<{key}>")
    return json.dumps({key: _by_role(value, roles) for key, value in sorted(values.items())})


def _by_role(text: str, roles: dict[str, str]) -> str:
    return re.sub(r"\w+", lambda word: roles.get(word[0], word[0]), text)


def most_solved(traces: Sequence[Trace], at: int = 0) -> int:
    """How many of these tasks one policy solves that has taken their first `at` steps."""
    nexts: dict[str, dict[str, list[Trace]]] = defaultdict(lambda: defaultdict(list))
    for trace in traces:
        if at < len(trace):
            step, outcome = trace[at]
            nexts[step][outcome].append(trace)
    solved = [
        sum(most_solved(alike, at + 1) for alike in outcomes.values())
        for outcomes in nexts.values()
    ]
    return max([sum(len(trace) == at for trace in traces), *solved])


def _best_blind(traces: Sequence[Trace | None], tasks: Sequence[Task]) -> dict[str, float]:
    """The share of tasks solved by the best policy for all requests, and by one for each family."""
    families: dict[str, list[Trace]] = defaultdict(list)
    for trace, task in zip(traces, tasks, strict=True):
        if trace is not None:
            families[task.family].append(trace)
    unread = most_solved([trace for group in families.values() for trace in group])
    by_family = sum(map(most_solved, families.values()))
    return {"unread": unread / len(tasks), "unread_by_family": by_family / len(tasks)}
