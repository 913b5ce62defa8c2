"""Baselines: what policies earn that never read the record of a request."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from itertools import islice, pairwise, product
from statistics import fmean
from typing import Any

from pipeline.config.settings import RolloutSettings
from pipeline.data.tasks import Message, Task
from pipeline.environments.domains import Domain
from pipeline.environments.experts import goal_of, play_expert
from pipeline.environments.timeouts import Calls, Guard
from pipeline.environments.tools import (
    EnvironmentFault,
    answer_call,
    reward_of,
    started,
    tool_schemas,
)

LOOKUPS = ("find", "get")  # beginnings of tools that change nothing
ID = r"\w*\d\w*"  # a word with a digit
# Of each domain, the tasks of the last call and what their floors are.
_FLOORS: dict[Domain, tuple[list[Task], dict[str, float]]] = {}


def floors(
    domains: Mapping[str, Domain],
    tasks: Mapping[str, Sequence[Task]],
    call_timeout: float = RolloutSettings().call_timeout,
) -> dict[str, dict[str, float]]:
    """What policies earn that never read the record of a request.

    They do nothing, always transfer (best single reason), or call every tool in turn. Where the
    environment class says which tools show the record of a request (`record_tools`, the beginnings
    of their names), transfers come after the lookups; where there is an expert as well, the best of
    all such policies is added. Where an environment fails, or a call of it takes more than so
    many seconds, they earn nothing. Where nothing failed, the same tasks are not played again.
    """
    calls = Calls(call_timeout, lambda _: None)
    return {name: _floor(calls, domains[name], tasks[name]) for name in tasks}


def _floor(calls: Calls, domain: Domain, tasks: Sequence[Task]) -> dict[str, float]:
    environment_class, known = domain.environment, _FLOORS.get(domain)
    if known and known[0] == list(tasks):
        return dict(known[1])
    failed: list[Task] = []

    def played(play: Callable[[Task, list[Any], Guard], Coroutine[Any, Any, None]]) -> list[Any]:
        """What came of every task; None where it failed."""
        found: list[Any] = []
        for task in tasks:
            outcome: list[Any] = []
            try:
                calls.here(task.key, partial(play, task, outcome))
            except EnvironmentFault:  # as in a rollout
                failed.append(task)
            found.append(outcome[0] if outcome else None)
        return found

    def earned(schemas: Sequence[dict[str, Any]]) -> float:
        return fmean(
            reward or 0.0 for reward in played(partial(_play_blind, environment_class, schemas))
        )

    record_tools = getattr(environment_class, "record_tools", ())
    schemas = [schema["function"] for schema in tool_schemas(environment_class)]
    lookups = [s for s in schemas if record_tools and s["name"].startswith(LOOKUPS)]
    transfers = [schema for schema in schemas if schema["name"].startswith("transfer")][:1]
    fixed = [{**s, "fixed": reason} for s in transfers for reason in _first_enum(s)]
    found = {
        "nothing": earned([]),
        "transfer": max((earned([*lookups, transfer]) for transfer in fixed), default=0.0),
        "every_tool": earned(schemas),
    }
    if record_tools and domain.expert is not None:
        found |= blind_baselines(played(partial(_trace, domain)), tasks)
    if not failed:
        _FLOORS[domain] = (list(tasks), dict(found))
    return found


async def _trace(domain: Domain, task: Task, outcome: list[Trace | None], guard: Guard) -> None:
    outcome.append(await guard("expert", partial(blind_trace, domain, task)))


def _first_enum(schema: dict[str, Any]) -> list[str]:
    for parameter in schema["parameters"]["properties"].values():
        if parameter.get("enum"):
            return list(parameter["enum"])
    return []


async def _play_blind(
    environment_class: type[Any],
    schemas: Sequence[dict[str, Any]],
    task: Task,
    rewards: list[float],
    guard: Guard,
) -> None:
    """Call tools in turn, lookups first, then say a closing word.

    Text arguments are ids seen in the request or in results, the newest that the tool accepts; a
    choice is its first option.
    """
    environment, *_ = await guard("reset", partial(started, environment_class, task.row()))
    ids = re.findall(ID, task.prompt[-1]["content"]) or ["x"]
    for schema in sorted(schemas, key=lambda s: not s["name"].startswith(LOOKUPS)):
        properties = schema["parameters"]["properties"]
        for known in islice(product(reversed(ids), repeat=len(properties)), 100):
            choices = zip(properties.items(), known, strict=True)
            arguments = {name: p.get("enum", [an_id])[0] for (name, p), an_id in choices}
            fixed = dict.fromkeys(arguments, schema.get("fixed"))
            given, name = fixed if "fixed" in schema else arguments, schema["name"]
            answer = await guard(name, partial(answer_call, environment, name, given))
            if "error" not in answer.content:
                ids += [found for found in re.findall(ID, answer.content) if found not in ids]
                break
        if answer.is_last:
            break
    await guard("final message", partial(setattr, environment, "final_message", "Done."))
    rewards.append(await guard("get_reward", partial(reward_of, environment)))


Trace = tuple[tuple[str, str], ...]  # each step, and what the policy saw of its outcome
AN_ID = re.compile(r"\w*\d\w*")


def blind_trace(domain: Domain, task: Task) -> Trace | None:
    """The expert's steps on a task, and what came of each but the lookup of the record.

    What the goal or an earlier outcome names is written as its role: `<record>`, `<free>`. None
    where no expert can earn the reward.
    """
    goal = goal_of(task)
    if goal is None or domain.expert is None:
        return None
    messages, reward = play_expert(domain.environment(), domain.expert, task)
    if reward < 1:
        return None
    roles = {value: f"<{key}>" for key, value in goal.items() if key != "family"}
    trace = []
    said: Sequence[Message] = [*messages[len(task.prompt) :], {"role": "user", "content": ""}]
    for message, answer in pairwise(said):
        if message["role"] == "assistant":
            is_record = answer.get("name", "").startswith(domain.environment.record_tools)
            step = _step(message, roles)
            trace.append((step, "" if is_record else _outcome(answer["content"], roles)))
    return tuple(trace)


def _step(message: Message, roles: dict[str, str]) -> str:
    for call in message.get("tool_calls", ()):
        function = call["function"]
        given = {name: roles.get(value, value) for name, value in function["arguments"].items()}
        return f"{function['name']} {json.dumps(given, sort_keys=True)}"
    return _by_role(message["content"], roles)


def _outcome(content: str, roles: dict[str, str]) -> str:
    """What came of a step, after the ids in it have got a role of their own."""
    found = json.loads(content) if content.startswith("{") else {"answer": content}
    for key, value in sorted(found.items()):
        for word in AN_ID.findall(value):
            roles.setdefault(word, f"<{key}>")
    return json.dumps({key: _by_role(value, roles) for key, value in sorted(found.items())})


def _by_role(text: str, roles: dict[str, str]) -> str:
    return re.sub(r"\w+", lambda word: roles.get(word[0], word[0]), text)


def most_solved(traces: Sequence[Trace], at: int = 0) -> int:
    """How many of these tasks one policy solves that has taken so many of their steps already."""
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


def blind_baselines(traces: Sequence[Trace | None], tasks: Sequence[Task]) -> dict[str, float]:
    """The share of tasks solved by the best policy that does the same whatever the request is.

    And by the best for each family of requests.
    """
    families: dict[str, list[Trace]] = defaultdict(list)
    for trace, task in zip(traces, tasks, strict=True):
        if trace is not None:
            families[task.family].append(trace)
    every = [trace for of_family in families.values() for trace in of_family]
    return {
        "unread": most_solved(every) / len(tasks),
        "unread_by_family": sum(map(most_solved, families.values())) / len(tasks),
    }
