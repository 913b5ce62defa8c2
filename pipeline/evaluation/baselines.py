"""Blind baselines: the rewards of fixed policies that make no decision."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import chain
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
    uses_random_state,
)
from pipeline.errors import UserError
from pipeline.files.untrusted import is_plain, shown

Play: TypeAlias = Generator[Call, ToolAnswer, None]  # yields calls and gets the tools' answers


def baselines(
    domains: Mapping[str, Domain],
    tasks: Mapping[str, Sequence[Task]],
    call_timeout: float = RolloutSettings().call_timeout,
) -> dict[str, dict[str, float]]:
    """Return the mean reward of each blind policy on the tasks of each domain.

    The policy `nothing` calls no tool. A domain may have policies of its own. An episode earns 0 if
    its environment fails or a call takes more than `call_timeout` seconds. Raises UserError if a
    domain's policies are no lists of calls.
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
    own: dict[Any, dict[str, list[Call]]] = {}
    if domain.baselines is not None:
        own = {task.key: baseline_calls(domain, task) for task in tasks}
    names = dict.fromkeys(["nothing", *chain.from_iterable(own.values())])
    return {
        name: fmean(
            _reward(calls, domain.environment, _in_order(own, name, task), task) for task in tasks
        )
        for name in names
    }


def _in_order(own: Mapping[Any, Mapping[str, Sequence[Call]]], name: str, task: Task) -> Play:
    """Make a task's calls of the domain's policy `name`; a task without the policy has no calls."""
    for call in own.get(task.key, {}).get(name, ()):
        if (yield call).is_last:
            return


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
