"""Blind baselines: the rewards of fixed policies that make no decision."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import chain
from statistics import fmean
from typing import Any

from pipeline.common.errors import UserError
from pipeline.common.untrusted import is_plain, shown
from pipeline.config.settings import RolloutSettings
from pipeline.data.tasks import Task
from pipeline.environments.calls import Calls
from pipeline.environments.discovery import taken, taken_pairs
from pipeline.environments.domains import Call, Domain, refused
from pipeline.environments.experts import call_message
from pipeline.environments.faults import EnvironmentFault
from pipeline.environments.tools import (
    Judge,
    RandomState,
    answer_call,
    give_judge,
    reply_of,
    reward_of,
    started,
    uses_random_state,
)


def play_baselines(
    domains: Mapping[str, Domain],
    tasks: Mapping[str, Sequence[Task]],
    call_timeout: float = RolloutSettings().call_timeout,
    judge: Judge | None = None,
) -> dict[str, dict[str, float]]:
    """Return the mean reward of each blind policy on the tasks of each domain.

    The policy `nothing` calls no tool. A domain may have policies of its own. An episode earns 0 if
    its environment fails or a call takes more than `call_timeout` seconds. Raises UserError if a
    domain's policies are no lists of calls.
    """
    calls = Calls(call_timeout)
    return {name: _of_domain(calls, domains[name], tasks[name], judge) for name in tasks}


def check_baselines(domains: Mapping[str, Domain], tasks: Mapping[str, Sequence[Task]]) -> None:
    """Raise UserError if the policies of a domain fail on its first task."""
    for name, domain in domains.items():
        if domain.baselines is not None:
            baseline_calls(domain, tasks[name][0])


def baseline_calls(domain: Domain, task: Task) -> dict[str, list[Call | str]]:
    """Return the calls and messages of a domain's own policies.

    Raises UserError if a policy is no list of them.
    """
    assert domain.baselines is not None, f"{domain.name} has no policies"
    where = f"baselines of {domain.name}"
    with refused(f"{where} fail on task {shown(task.id)}"):
        found = domain.baselines(task)
        policies = {str(name): taken(calls) for name, calls in taken_pairs(found).items()}
        if not is_plain(policies):
            raise ValueError("they hold what JSON cannot, such as NaN or half a character")
    for call in chain.from_iterable(policies.values()):
        is_call = isinstance(call, tuple | list) and [type(part) for part in call] == [str, dict]
        if not (is_call or isinstance(call, str)):
            raise UserError(
                f"{where}: task {shown(task.id)} has the call {shown(call)}; give (tool, "
                "arguments), or the text of a message"
            )
    return policies


def _of_domain(
    calls: Calls, domain: Domain, tasks: Sequence[Task], judge: Judge | None
) -> dict[str, float]:
    own: dict[Any, dict[str, list[Call | str]]] = {}
    if domain.baselines is not None:
        own = {task.key: baseline_calls(domain, task) for task in tasks}
    names = dict.fromkeys(["nothing", *chain.from_iterable(own.values())])
    return {
        # A task without the policy has no calls.
        name: fmean(
            _reward(calls, domain, own.get(task.key, {}).get(name, []), task, judge)
            for task in tasks
        )
        for name in names
    }


def _reward(
    calls: Calls,
    domain: Domain,
    moves: Sequence[Call | str],
    task: Task,
    judge: Judge | None,
) -> float:
    is_used = uses_random_state(domain.environment)
    call = partial(calls.here, task.key)
    with suppress(EnvironmentFault), RandomState(task) if is_used else nullcontext():
        environment, addition, _ = call("reset", partial(started, domain.make, task.row()))
        give_judge(environment, judge)
        *rules, request = task.prompt
        messages = [*rules, {**request, "content": request["content"] + addition}]
        final = "Done."
        for move in moves:
            if isinstance(move, str):
                messages.append({"role": "assistant", "content": move})
                reply = call("reply", partial(reply_of, environment, move))
                if reply is None:
                    final = messages.pop()["content"]
                    break
                messages.append({"role": "user", "content": reply})
                continue
            name, arguments = move
            messages.append(call_message(name, arguments))
            answer = call(name, partial(answer_call, environment, name, arguments))
            messages.append({"role": "tool", "name": name, "content": answer.content})
            if answer.is_last:
                break
        messages.append({"role": "assistant", "content": final})
        call("final message", partial(setattr, environment, "final_message", final))
        reward: float = call("get_reward", partial(reward_of, environment, messages=messages))
        return reward
    return 0.0
