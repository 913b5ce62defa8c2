"""The best policies that never read the record of a request, on tasks of the embedded domains."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from pipeline.data.tasks import Task
from pipeline.environments.domains import Domain
from pipeline.environments.experts import goal_of, run_expert

ID = re.compile(r"\w*\d\w*")  # a word with a digit
RECORD_TOOLS = "get_"  # the prefix of tools that show the record of a request
Trace = tuple[tuple[str, str], ...]  # each step of the expert, and its outcome for the policy


def unread(domain: Domain, tasks: Sequence[Task]) -> float:
    """Return the mean reward of the best policy that acts alike on all requests."""
    return most_solved([_trace(domain, task) for task in tasks]) / len(tasks)


def unread_by_family(domain: Domain, tasks: Sequence[Task]) -> float:
    """Return the mean reward of the best policy that acts alike on all requests of a family."""
    families: dict[str, list[Trace]] = defaultdict(list)
    for task in tasks:
        families[task.family].append(_trace(domain, task))
    return sum(map(most_solved, families.values())) / len(tasks)


def _trace(domain: Domain, task: Task) -> Trace:
    """Return the expert's steps on a task and their outcomes.

    A tool that shows the record has an empty outcome. Ids that the goal or an earlier outcome
    names are replaced by roles such as `<record>`.
    """
    messages, reward = run_expert(domain.make(), domain.expert, task)
    assert reward == 1, task
    roles = {value: f"<{key}>" for key, value in goal_of(task).items() if key != "family"}

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
        if not answer.get("name", "").startswith(RECORD_TOOLS):
            text = answer["content"]
            values = json.loads(text) if text.startswith("{") else {"answer": text}
            for key, value in sorted(values.items()):
                for an_id in ID.findall(value):
                    roles.setdefault(an_id, f"<{key}>")
            outcome = json.dumps({key: by_role(of) for key, of in sorted(values.items())})
        trace.append((step, outcome))
    return tuple(trace)


def most_solved(traces: Sequence[Trace], at: int = 0) -> int:
    """Return the most tasks that one policy solves, if they share their first `at` steps."""
    nexts: dict[str, dict[str, list[Trace]]] = defaultdict(lambda: defaultdict(list))
    for trace in traces:
        if at < len(trace):
            step, outcome = trace[at]
            nexts[step][outcome].append(trace)
    solved = [
        sum(most_solved(of, at + 1) for of in outcomes.values()) for outcomes in nexts.values()
    ]
    return max([sum(len(trace) == at for trace in traces), *solved])
