"""Blind baselines: the rewards of fixed policies that make no decision."""

import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import islice, product
from statistics import fmean
from typing import Any

from pipeline.config.settings import RolloutSettings
from pipeline.data.tasks import Task
from pipeline.environments.domains import Domain
from pipeline.environments.random_state import RandomState
from pipeline.environments.timeouts import Calls, Guard
from pipeline.environments.tools import (
    EnvironmentFault,
    answer_call,
    reward_of,
    started,
    tool_schemas,
    uses_random_state,
)

LOOKUPS = ("find", "get")  # prefixes of the names of tools that change nothing
ID = re.compile(r"\w*\d\w*")  # a word with a digit
Schemas = Sequence[dict[str, Any]]


def baselines(
    domains: Mapping[str, Domain],
    tasks: Mapping[str, Sequence[Task]],
    call_timeout: float = RolloutSettings().call_timeout,
) -> dict[str, dict[str, float]]:
    """Return the mean reward of each blind policy on the tasks of each domain.

    The policy `nothing` calls no tool, and `every_tool` calls each tool once. The policy `transfer`
    calls tools that change nothing, then one `transfer...` tool with the reason that earns most.
    An episode earns 0 if its environment fails or a call takes more than `call_timeout` seconds.
    """
    calls = Calls(call_timeout, lambda _: None)
    return {name: _of_domain(calls, domains[name].environment, tasks[name]) for name in tasks}


def _of_domain(calls: Calls, environment: type[Any], tasks: Sequence[Task]) -> dict[str, float]:
    def mean_reward(schemas: Schemas) -> float:
        return fmean(_reward(calls, environment, schemas, task) for task in tasks)

    schemas = [schema["function"] for schema in tool_schemas(environment)]
    lookups = [schema for schema in schemas if schema["name"].startswith(LOOKUPS)]
    transfers = [schema for schema in schemas if schema["name"].startswith("transfer")][:1]
    parameters = [p for s in transfers for p in s["parameters"]["properties"].values()]
    reasons: list[str] = next((p["enum"] for p in parameters if p.get("enum")), [])
    fixed = [{**schema, "fixed": reason} for schema in transfers for reason in reasons]
    return {
        "nothing": mean_reward([]),
        "transfer": max((mean_reward([*lookups, transfer]) for transfer in fixed), default=0.0),
        "every_tool": mean_reward(schemas),
    }


def _reward(calls: Calls, environment_class: type[Any], schemas: Schemas, task: Task) -> float:
    rewards = [0.0]

    async def play(guard: Guard) -> None:
        environment, *_ = await guard("reset", partial(started, environment_class, task.row()))
        ids = ID.findall(task.prompt[-1]["content"]) or ["x"]
        for schema in sorted(schemas, key=lambda s: not s["name"].startswith(LOOKUPS)):
            name, properties = schema["name"], schema.get("parameters", {}).get("properties", {})
            # As arguments, try ids from the request and from tool answers, the newest ids first.
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
        rewards.append(await guard("get_reward", partial(reward_of, environment)))

    is_used = uses_random_state(environment_class)
    with suppress(EnvironmentFault), RandomState(task) if is_used else nullcontext():
        calls.here(task.key, play)
    return rewards[-1]
