"""What policies can earn at most that never read the record: baselines of the embedded domains.

Such a policy looks the record up, as the policy text asks, but what it does next depends only on
what else it saw: the customer's answers, the phone's fault, flights and variants. Since a reward
takes the steps of the domain's expert and no others, no search has to play: at each step the best
policy does what lets it solve most of the tasks that look alike so far. It is chosen on the same
tasks that it is scored on, so it is an upper bound for policies that were not.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from pipeline.data.tasks import Message, Task
from pipeline.embedded.experts import play_expert

Trace = tuple[tuple[str, str], ...]  # each step, and what the policy saw of its outcome
AN_ID = re.compile(r"\w*\d\w*")


def blind_trace(environment_class: type[Any], task: Task) -> Trace | None:
    """The expert's steps on a task, and what came of each but the lookup of the record.

    What the goal or an earlier outcome names is written as its role: `<record>`, `<free>`. None
    where no expert can earn the reward.
    """
    goal = json.loads(task.payload).get("goal")
    if not goal:
        return None
    environment = environment_class()
    messages, reward = play_expert(environment, environment._serve, task)
    if reward < 1:
        return None
    roles = {value: f"<{key}>" for key, value in goal.items() if key != "family"}
    trace = []
    said: Sequence[Message] = [*messages[len(task.prompt) :], {"role": "user", "content": ""}]
    for message, answer in pairwise(said):
        if message["role"] == "assistant":
            is_record = answer.get("name", "").startswith("get_")
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
