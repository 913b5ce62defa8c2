"""Blind baselines: the rewards of policies that never read the record of a request."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, islice, pairwise, product
from statistics import fmean
from typing import Any

from pipeline.config.settings import RolloutSettings
from pipeline.data.tasks import Task
from pipeline.environments.domains import Domain
from pipeline.environments.experts import goal_of, run_expert
from pipeline.environments.timeouts import Calls, Guard
from pipeline.environments.tools import (
    EnvironmentFault,
    answer_call,
    reward_of,
    started,
    tool_schemas,
)

LOOKUPS = ("find", "get")  # beginnings of the names of tools that change nothing
ID = re.compile(r"\w*\d\w*")  # a word with a digit
Schemas = Sequence[dict[str, Any]]
Trace = tuple[tuple[str, str], ...]  # each step, and its outcome for the policy


def baselines(
    domains: Mapping[str, Domain],
    tasks: Mapping[str, Sequence[Task]],
    call_timeout: float = RolloutSettings().call_timeout,
) -> dict[str, dict[str, float]]:
    """The mean reward of each blind policy on the tasks of each domain.

    One policy does nothing, one always transfers (for the best single reason), one calls each tool.
    If the environment class names the tools that show the record of a request (`record_tools`, the
    beginnings of their names), transfers come after the lookups; if there is an expert as well, the
    best of all such policies is added. An episode whose environment fails, or takes more than
    `call_timeout` seconds for a call, earns nothing.
    """
    calls = Calls(call_timeout, lambda _: None)
    return {name: _of_domain(calls, domains[name], tasks[name]) for name in tasks}


def _of_domain(calls: Calls, domain: Domain, tasks: Sequence[Task]) -> dict[str, float]:
    def mean_reward(schemas: Schemas) -> float:
        play = partial(_play_blind, domain.environment, schemas)
        return fmean(_result(calls, task, play) or 0.0 for task in tasks)

    async def trace(task: Task, guard: Guard) -> Any:
        return await guard("expert", partial(_trace, domain, task))

    record_tools = getattr(domain.environment, "record_tools", ())
    schemas = [schema["function"] for schema in tool_schemas(domain.environment)]
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
        families: dict[str, list[Trace]] = defaultdict(list)
        for task in tasks:
            if (found := _result(calls, task, trace)) is not None:
                families[task.family].append(found)
        # The best policy for all requests, and the best one for each family.
        rewards["unread"] = most_solved([*chain(*families.values())]) / len(tasks)
        rewards["unread_by_family"] = sum(map(most_solved, families.values())) / len(tasks)
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
    environment_class: type[Any], schemas: Schemas, task: Task, guard: Guard
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
    """The expert's steps on a task and their outcomes; the record's lookup has an empty outcome.

    Ids that the goal or an earlier outcome names are replaced by roles such as `<record>`. None
    if the task has no goal or the expert does not earn the reward.
    """
    goal = goal_of(task)
    if goal is None or domain.expert is None:
        return None
    messages, reward = run_expert(domain.environment(), domain.expert, task)
    if reward < 1:
        return None
    roles = {value: f"<{key}>" for key, value in goal.items() if key != "family"}

    def by_role(text: str) -> str:
        return re.sub(r"\w+", lambda word: roles.get(word[0], word[0]), text)

    trace = []
    for message, answer in pairwise([*messages[len(task.prompt) :], {"content": ""}]):
        if message["role"] != "assistant":
            continue
        step, outcome = by_role(message["content"]), ""
        for call in message.get("tool_calls", ()):
            function = call["function"]
            arguments = {key: roles.get(of, of) for key, of in function["arguments"].items()}
            step = f"{function['name']} {json.dumps(arguments, sort_keys=True)}"
        if not answer.get("name", "").startswith(domain.environment.record_tools):
            text = answer["content"]
            values = json.loads(text) if text.startswith("{") else {"answer": text}
            for key, value in sorted(values.items()):
                for an_id in ID.findall(value):
                    roles.setdefault(an_id, f"<{key}>")
            outcome = json.dumps({key: by_role(of) for key, of in sorted(values.items())})
        trace.append((step, outcome))
    return tuple(trace)


def most_solved(traces: Sequence[Trace], at: int = 0) -> int:
    """The most tasks that one policy solves, among tasks that share their first `at` steps."""
    nexts: dict[str, dict[str, list[Trace]]] = defaultdict(lambda: defaultdict(list))
    for trace in traces:
        if at < len(trace):
            step, outcome = trace[at]
            nexts[step][outcome].append(trace)
    solved = [
        sum(most_solved(of, at + 1) for of in outcomes.values()) for outcomes in nexts.values()
    ]
    return max([sum(len(trace) == at for trace in traces), *solved])
