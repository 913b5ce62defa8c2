"""Blind baselines: the rewards of fixed policies that make no decision."""

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import chain, islice, product
from statistics import fmean
from typing import Any, TypeAlias

from pipeline.config.settings import RolloutSettings
from pipeline.data.tasks import Task
from pipeline.environments.calls import Calls
from pipeline.environments.discovery import taken, taken_pairs
from pipeline.environments.domains import Call, Domain, refused
from pipeline.environments.experts import call_message
from pipeline.environments.random_state import RandomState
from pipeline.environments.tools import (
    EnvironmentFault,
    ToolAnswer,
    answer_call,
    reward_of,
    started,
    tool_schemas,
    uses_random_state,
)
from pipeline.errors import UserError
from pipeline.files.untrusted import is_plain, shown

LOOKUPS = ("find", "get")  # prefixes of the names of tools that change nothing
ID = re.compile(r"\w*\d\w*")  # a word with a digit
BEST, NUM_RANKED_ON = 3, 20  # number of actions to name, and of tasks that choose them
MOST_CHOICES = 32  # largest number of choices of a tool's enum values to try
Schemas = Sequence[dict[str, Any]]
Play: TypeAlias = Generator[Call, ToolAnswer, None]  # yields calls and gets the tools' answers
Policy = Callable[[Task], Play]


def baselines(
    domains: Mapping[str, Domain],
    tasks: Mapping[str, Sequence[Task]],
    call_timeout: float = RolloutSettings().call_timeout,
) -> dict[str, dict[str, float]]:
    """Return the mean reward of each blind policy on the tasks of each domain.

    The policy `nothing` calls no tool. A domain may have policies of its own. In other domains, the
    other policies are the best of those that take one action alone (see `final_actions`). An
    episode earns 0 if its environment fails or a call takes more than `call_timeout` seconds.
    Raises UserError if a domain's policies are no lists of calls.
    """
    calls = Calls(call_timeout)
    return {name: _of_domain(calls, domains[name], tasks[name]) for name in tasks}


def baseline_calls(domain: Domain, task: Task) -> dict[str, list[Call]]:
    """Return the calls of a domain's own policies; raises UserError if a policy is no list."""
    assert domain.baselines is not None, f"{domain.name} has no policies"
    where = f"baselines of {domain.name}"
    with refused(f"{where} fail on task {shown(task.id)}"):
        found = domain.baselines(task)
        policies = {str(name): taken(calls) for name, calls in taken_pairs(found).items()}
        if not is_plain(policies):
            raise ValueError("they hold what JSON cannot, such as NaN or half a character")
    for call in chain.from_iterable(policies.values()):
        if not (isinstance(call, tuple | list) and [type(part) for part in call] == [str, dict]):
            what = f"task {shown(task.id)} has the call {shown(call)}"
            raise UserError(f"{where}: {what}; give (tool, arguments)")
    return policies


def _of_domain(calls: Calls, domain: Domain, tasks: Sequence[Task]) -> dict[str, float]:
    def mean_reward(policy: Policy, of: Sequence[Task] = tasks) -> float:
        return fmean(_reward(calls, domain.environment, policy(task), task) for task in of)

    if domain.baselines is not None:
        own = {task.key: baseline_calls(domain, task) for task in tasks}
        names = dict.fromkeys(["nothing", *chain.from_iterable(own.values())])
        return {name: mean_reward(partial(_in_order, own, name)) for name in names}
    found = {"nothing": mean_reward(_nothing)}
    policies = final_actions([schema["function"] for schema in tool_schemas(domain.environment)])
    some = tasks[:: max(1, len(tasks) // NUM_RANKED_ON)]
    ranked = sorted(policies, key=lambda name: -mean_reward(policies[name], some))
    return found | {name: mean_reward(policies[name]) for name in ranked[:BEST]}


def final_actions(schemas: Schemas) -> dict[str, Policy]:
    """Return a policy for each tool that may change something and each choice of its enum values.

    A policy calls the tools that change nothing, then its one tool; its name is like `refund` or
    `refuse(late)`.
    """
    lookups = [schema for schema in schemas if schema["name"].startswith(LOOKUPS)]
    found = dict[str, Policy]()
    for schema in (schema for schema in schemas if schema not in lookups):
        properties = schema.get("parameters", {}).get("properties", {})
        enums = {key: of["enum"] for key, of in properties.items() if "enum" in of}
        for values in islice(product(*enums.values()), MOST_CHOICES):
            name = f"{schema['name']}({', '.join(map(str, values))})" if values else schema["name"]
            fixed = dict(zip(enums, values, strict=True))
            found[name] = partial(_alone, [*lookups, schema], fixed)
    return found


def _in_order(own: Mapping[Any, Mapping[str, Sequence[Call]]], name: str, task: Task) -> Play:
    """Make a task's calls of the domain's policy `name`; a task without the policy has no calls."""
    for call in own[task.key].get(name, ()):
        if (yield call).is_last:
            return


def _nothing(task: Task) -> Play:
    yield from ()


def _alone(schemas: Schemas, fixed: Mapping[str, Any], task: Task) -> Play:
    """Call look-ups, then the last tool, with ids from the request and from answers, newest first.

    An answer with an error makes the policy try other ids.
    """
    ids = ID.findall(task.prompt[-1]["content"]) or ["x"]
    for schema in schemas:
        given = fixed if schema is schemas[-1] else {}
        free = [
            key for key in schema.get("parameters", {}).get("properties", {}) if key not in given
        ]
        for values in islice(product(reversed(ids), repeat=len(free)), 100):
            answer = yield schema["name"], {**given, **dict(zip(free, values, strict=True))}
            if answer.is_last:
                return
            if "error" not in answer.content:
                ids += [an_id for an_id in ID.findall(answer.content) if an_id not in ids]
                break


def _reward(calls: Calls, environment_class: type[Any], policy: Play, task: Task) -> float:
    is_used = uses_random_state(environment_class)
    call = partial(calls.here, task.key)
    with suppress(EnvironmentFault), RandomState(task) if is_used else nullcontext():
        environment, addition, _ = call("reset", partial(started, environment_class, task.row()))
        *rules, request = task.prompt
        messages = [*rules, {**request, "content": request["content"] + addition}]
        made = next(policy, None)
        while made is not None:
            name, arguments = made
            messages.append(call_message(name, arguments))
            answer = call(name, partial(answer_call, environment, name, arguments))
            messages.append({"role": "tool", "name": name, "content": answer.content})
            try:
                made = policy.send(answer)
            except StopIteration:
                made = None
        messages.append({"role": "assistant", "content": "Done."})
        call("final message", partial(setattr, environment, "final_message", "Done."))
        reward: float = call("get_reward", partial(reward_of, environment, messages=messages))
        return reward
    return 0.0
