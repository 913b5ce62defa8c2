"""Episodes in the format that τ²-bench's own tools load, grade and show.

The format is that of `tau2.data_model` (`message.py`, `simulation.py`): a file of `Results` has the
tasks of one domain and a `SimulationRun` for each episode.
"""

import json
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, takewhile
from typing import Any

from pipeline.environments.language_models.customers import spoken
from pipeline.environments.tau2.world import STOPPED, World

Line = Mapping[str, Any]  # one line of a transcript
Messages = list[dict[str, Any]]
MAX_ERRORS = 10  # as the official orchestrator's default
MALFORMED = "malformed_call"  # the name of a call that could not be read; no tool has this name
ENDS = {
    "max_turns": "max_steps",
    "max_tokens": "context_window_exceeded",
    "environment_error": "infrastructure_error",
}


def results_of(
    world: World, lines: Sequence[Line], info: Mapping[str, Any], about: Mapping[str, Any], at: str
) -> dict[str, Any]:
    """Return the `Results` of the episodes `lines` of one domain, in order of tasks and trials.

    `info` has the entries of the official `Info` that the run knows. `about` goes into each
    simulation's own `info`. `at` is the time in ISO 8601 of the messages, whose own are not kept.
    """
    tasks = list(dict.fromkeys(line["task_id"] for line in lines))
    domain = {"domain_name": world.checkout.name, "policy": world.policy}
    num_trials = max(line["trial"] for line in lines) + 1
    return {
        "timestamp": at,
        "info": {"num_trials": num_trials, "environment_info": domain, **info},
        "tasks": [world.checkout.tasks[task_id] for task_id in tasks],
        "simulations": [_simulation(world, line, about, at) for line in lines],
    }


def _simulation(world: World, line: Line, about: Mapping[str, Any], at: str) -> dict[str, Any]:
    messages = conversation(line["messages"], line.get("customer", ()), world.is_solo)
    end = _end(line, world.is_solo)
    if end == "user_stop" and messages[-1]["role"] != "user":
        messages.append({"role": "user", "content": STOPPED})
    is_graded = end in ("user_stop", "agent_stop")
    parts = {n: v for n, v in line["reward_breakdown"].items() if n != "graded"}
    basis = world.task(line["task_id"]).evaluation_criteria.reward_basis
    name = f"{world.checkout.name}/{line['task_id']}/{line['trial']}"
    return {
        "id": str(uuid.uuid5(uuid.NAMESPACE_URL, name)),
        "task_id": line["task_id"],
        "trial": line["trial"],
        "timestamp": at,
        "start_time": at,
        "end_time": at,
        "duration": 0.0,
        "termination_reason": end,
        "reward_info": {
            "reward": line["reward"],
            "reward_basis": [part.value for part in basis] if is_graded else None,
            "reward_breakdown": parts or None,
        },
        "messages": [
            {**message, "turn_idx": number, "timestamp": at}
            for number, message in enumerate(messages)
        ],
        "info": {**about, "stop_reason": line["stop_reason"]},
    }


def _end(line: Line, is_solo: bool) -> str:
    """Return the official `TerminationReason` of an episode."""
    if (reason := line["stop_reason"]) != "completed":
        return ENDS.get(reason, "agent_error")
    of_agent = [n for name, n in line["tools"].items() if not name.startswith("customer/")]
    if sum(failed for _, failed in of_agent) >= MAX_ERRORS:
        return "too_many_errors"
    if not is_solo:
        return "user_stop"
    return "agent_stop" if "done" in line["tools"] else "agent_error"


def conversation(
    messages: Sequence[Line], customer_messages: Iterable[Line], is_solo: bool
) -> Messages:
    """Return the messages of an episode in the official form.

    The system prompt is left out and, in solo mode, the ticket. `customer_messages` is the
    conversation of the language model that played the customer.
    """
    written = list(messages)
    ids = (f"call_{number}" for number in count())
    customer = deque(customer_messages)
    made = Messages()
    while written:
        message = written.pop(0)
        if message["role"] == "user" and not is_solo:
            made += _phone_calls(customer, message["content"])
            made.append({"role": "user", "content": message["content"]})
        elif message["role"] == "assistant":
            results = list(takewhile(lambda m: m["role"] == "tool", written))
            del written[: len(results)]
            if is_solo and any(result["name"] == "done" for result in results):
                return [*made, {"role": "assistant", "content": STOPPED}]
            made += _turn(message, results, ids)
    return made + list(_rest(customer))


def _turn(message: Line, results: Sequence[Line], ids: Iterator[str]) -> Messages:
    """Return a message of the model with the calls that took place, and their results."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    if results and not functions:
        functions = [{"name": MALFORMED, "arguments": {}}]
    pairs = list(zip(functions, results, strict=False))  # no more calls follow an episode's end
    made = [(next(ids), *pair) for pair in pairs]
    content = spoken(message["content"])
    calls = [
        {"id": i, "name": f["name"], "arguments": f["arguments"], "requestor": "assistant"}
        for i, f, _ in made
    ]
    turn: dict[str, Any] = {
        "role": "assistant",
        "content": content or None,
        "tool_calls": calls or None,
    }
    if content != message["content"]:
        turn["raw_data"] = {"content": message["content"]}  # with the model's thoughts
    return [turn, *(_result(i, result["content"], "assistant") for i, _, result in made)]


def _result(call_id: str, content: str, requestor: str) -> dict[str, Any]:
    result = {"role": "tool", "id": call_id, "content": content, "requestor": requestor}
    return {**result, "error": content.startswith("Error: ")}


def _phone_calls(customer: deque[Line], said: str) -> Messages:
    """Take from a language model's conversation all up to what it said; return the calls."""
    if not any(m["role"] == "assistant" and m["content"] == said for m in customer):
        return []  # words of a script, or the answer to an empty message
    taken = Messages()
    while (message := customer.popleft())["role"] != "assistant" or message["content"] != said:
        taken.append(message)  # type: ignore[arg-type]
    return list(_rest(taken))


def _rest(customer: Iterable[Line]) -> Iterator[dict[str, Any]]:
    """Yield the messages of a language model as the customer, with the results of its calls."""
    for message in customer:
        if message["role"] == "tool":
            yield _result(message["tool_call_id"], message["content"], "user")
        elif message["role"] == "assistant":
            calls = [
                {
                    "id": call["id"],
                    "name": call["function"]["name"],
                    "arguments": json.loads(call["function"]["arguments"]),
                    "requestor": "user",
                }
                for call in message.get("tool_calls") or ()
            ]
            content = message["content"] or None
            yield {"role": "user", "content": content, "tool_calls": calls or None}
