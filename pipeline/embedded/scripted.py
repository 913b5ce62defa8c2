"""Shared code of the domains airline, retail and telecom: scripted customer, rewards and experts.

A step of an episode is a successful tool call, such as `refund(K01, card)`, or an answered
question, such as `ask(reason)`.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from random import Random
from typing import Any, ClassVar, NamedTuple, TypeVar

from pydantic import BaseModel, Field, TypeAdapter

from pipeline.environments.customers import User
from pipeline.environments.experts import Agent, Expert
from pipeline.environments.tools import ToolError, run_here, started


class Case(BaseModel):
    """Records which questions the customer answered, and the customer's transfer to a person."""

    asked: list[str] = []  # topics of the questions that the customer answered
    transferred: str | None = None  # reason for the transfer to a person; None if no transfer


class Database(BaseModel):
    """The records of one task; each domain's subclass adds tables, such as orders."""

    case: Case = Field(default_factory=Case)


class Answer(BaseModel):
    """The answer of the scripted customer to a question about `topic`."""

    topic: str
    words: str


Tool = TypeVar("Tool", bound=Callable[..., Any])
_FACTS = TypeAdapter(list[str])
_ANSWER = TypeAdapter[Answer | None](Answer | None)
MAX_STEPS = 1024  # largest number of tasks for which `_STEPS` holds the expert's steps
_STEPS: dict[tuple[type[Any], str], tuple[str, ...]] = {}  # (class, payload) -> expert's steps
LOOKUPS = ("find_", "get_")  # name prefixes of lookups (tools that only read the database)
PARTS = {  # the meaning of the reward's parts; a part is 0 or 1
    "reward": "1 if every part is 1, else 0",
    "ended": "the agent ended the episode, by a last message or a transfer",
    "facts": "the last message contains every fact that the customer must be told",
    "database": "the database at the end is the expected one",
    "steps": "the steps are the expert's, in the same order; more look-ups are allowed",
}
# Arguments: agent, goal, {kind of record: the record's id}, the expert's first decision. Result:
# the final message, or the reason for a transfer to a person.
Serve = Callable[[Agent, dict[str, str], dict[str, str], str], str]


class Branch(NamedTuple):
    """One case of a request, such as a shipped order; the policy text has a rule for each case."""

    share: float  # this branch's share of the family's tasks at difficulty medium or hard
    easy: float  # this branch's share of the family's tasks at difficulty easy
    record: dict[str, str]  # name of a field -> possible values, separated by spaces
    choice: str  # the first decision that the policy text requires for the branch

    def sample_fields(self, random: Random) -> dict[str, str]:
        """Draw each field in `record` at random from the first two possible values of the field."""
        options = {name: values.split()[:2] for name, values in self.record.items()}
        return {k: v[0] if len(v) == 1 else random.choice(v) for k, v in options.items()}


class Family(NamedTuple):
    """A kind of request, such as a refund; `branches` maps a branch's name to the branch."""

    name: str
    phrasings: tuple[str, ...]  # texts with placeholders for values of the goal, such as {record}
    branches: dict[str, Branch]


@dataclass
class ScriptedUser:
    """A customer who answers one question, and ends the conversation at any other message.

    `reply` adds the question's topic to `case.asked`, and the step `ask(topic)` to `steps`.
    """

    topic: str
    answer: str
    case: Case
    steps: list[str] = field(default_factory=list)

    def reply(self, message: str) -> str | None:
        if "?" not in message or self.topic in self.case.asked:
            return None
        self.case.asked.append(self.topic)
        self.steps.append(f"ask({self.topic})")
        return self.answer


def tool(text: str, **arguments: str) -> Callable[[Tool], Tool]:
    """Return a decorator that gives a tool a docstring, and records the tool's successful calls.

    `text` describes the tool. `arguments` maps an argument's name to a description. Without
    an entry in `arguments`, an argument such as `order` gets the description "Order id.".
    """

    def decorate(function: Any) -> Any:
        signature = inspect.signature(function)

        @wraps(function)
        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = function(self, *args, **kwargs)
            _, *values = signature.bind(self, *args, **kwargs).arguments.values()
            self._steps.append(f"{function.__name__}({', '.join(map(str, values))})")
            return result

        _, *names = signature.parameters
        lines = [f"    {name}: {arguments.get(name, f'{name.capitalize()} id.')}" for name in names]
        noted.__doc__ = "\n".join([text, "", "Args:", *lines])
        return noted

    return decorate


class CaseEnvironment:
    """Base class of environments in which tools change a database and code verifies the outcome.

    A task's payload has `goal` (what the customer wants), `database`, `expected` (the database
    after a correct episode), `facts` (words that the final message must contain) and `answer`
    (topic and words of the customer's answer, or null). PARTS says what the reward is. If a
    task has no goal, `get_reward` does not check the steps.
    """

    uses_random_state: ClassVar[bool] = False
    database_class: ClassVar[type[Database]]
    reward_parts: ClassVar[dict[str, str]] = PARTS
    _expert: ClassVar[staticmethod[[Agent, Any], str]]
    user: User | None
    done: bool
    final_message: str
    reward_breakdown: dict[str, float]
    difference: dict[str, list[str]]

    def reset(self, **row: Any) -> str | None:
        self._row = row
        self._steps = list[str]()
        payload = json.loads(row["payload"])
        self._db: Any = self.database_class.model_validate(payload["database"])
        self._expected = self.database_class.model_validate(payload["expected"])
        self._facts = _FACTS.validate_python(payload["facts"])
        answer = _ANSWER.validate_python(payload["answer"])
        case = self._db.case
        steps = self._steps
        self.user = ScriptedUser(answer.topic, answer.words, case, steps) if answer else None
        self._goal: dict[str, str] = payload.get("goal") or {}
        self.done = False
        self.final_message = ""
        self.reward_breakdown = {}
        self.difference = {}
        return None

    def get_reward(self) -> float:
        words = re.findall(r"[a-z0-9_]+", self.final_message.lower())
        steps = self._expert_steps() if self._goal else tuple(self._steps)
        parts = {
            "ended": self.done or bool(self.final_message),
            "facts": all(fact in words for fact in self._facts),
            "database": self._db == self._expected,
            "steps": follows(self._steps, steps),
        }
        self.reward_breakdown = {**parts}
        self.difference = {}
        if not parts["steps"]:
            self.difference["steps"] = [", ".join(self._steps), ", ".join(steps)]
        if not parts["database"]:
            self.difference |= difference(self._db.model_dump(), self._expected.model_dump())
        return float(all(parts.values()))

    def _transfer(self, reason: str) -> dict[str, str]:
        self._db.case.transferred = reason
        self.done = True
        return {"ok": "yes"}

    def _expert_steps(self) -> tuple[str, ...]:
        """Let the expert solve this task in a new environment; return the expert's steps."""
        key = type(self), self._row["payload"]  # the key is the same in all episodes of a task
        if key not in _STEPS:
            if len(_STEPS) >= MAX_STEPS:
                _STEPS.clear()
            environment = run_here(started, type(self), self._row).environment
            self._expert(Agent(environment, Random(0)), self._goal)
            _STEPS[key] = tuple(environment._steps)
        return _STEPS[key]

    def _found(self, table: str, kind: str, customer: str) -> dict[str, str]:
        """Return {kind: id of the customer's record}; raises ToolError if the customer has none."""
        for key, record in getattr(self._db, table).items():
            if record.customer == customer:
                return {kind: key}
        raise ToolError(f"no {customer}")

    def _shown(self, table: str, key: str, *fields: str) -> dict[str, str]:
        shown: dict[str, str] = self._record(table, key).model_dump(include=set(fields))
        return shown

    def _changed(self, table: str, key: str, **fields: Any) -> dict[str, str]:
        record = self._record(table, key)
        for name, value in fields.items():
            setattr(record, name, value)
        return {"ok": "yes"}

    def _record(self, table: str, key: str) -> Any:
        records = getattr(self._db, table)
        if key not in records:
            raise ToolError(f"no {key}")
        return records[key]


def follows(steps: Sequence[str], wanted: Sequence[str]) -> bool:
    """Return whether `steps` has all of `wanted` in order, and each additional step is a lookup."""
    rest = iter(steps)
    writes, right = ([s for s in of if not s.startswith(LOOKUPS)] for of in (steps, wanted))
    return all(step in rest for step in wanted) and writes == right


def difference(found: Any, expected: Any, where: str = "") -> dict[str, list[str]]:
    """Return {path: [actual value, expected value]} for fields with different values."""
    if not (isinstance(found, dict) and isinstance(expected, dict)):
        return {} if found == expected else {where: [str(found), str(expected)]}
    differences: dict[str, list[str]] = {}
    for key in dict.fromkeys([*found, *expected]):
        path = f"{where}.{key}".lstrip(".")
        differences |= difference(found.get(key), expected.get(key), path)
    return differences


def expert_of(
    kind: str, families: Sequence[Family], serve: Mapping[str, Serve], reasons: Sequence[str]
) -> Expert:
    """Return an expert that looks up a record, makes a first decision, and serves the request.

    The expert's first decision is a key of `serve`, an element of `reasons` (for a transfer), or
    the name of a tool whose only argument is the record's id.
    """
    branches = {family.name: list(family.branches.values()) for family in families}

    def expert(agent: Agent, goal: dict[str, str]) -> str:
        if "record" in goal:
            argument = {kind: goal["record"]}
        else:
            argument = {kind: agent.call(f"find_{kind}", customer=goal["customer"])[kind]}
        record = agent.call(f"get_{kind}", **argument)
        cases = branches[goal["family"]]
        right = next(
            branch.choice
            for branch in cases
            if all(record[field] in values.split() for field, values in branch.record.items())
        )
        choice = agent.decide(right, list(dict.fromkeys(branch.choice for branch in cases)))
        closing = serve[choice](agent, goal, argument, choice) if choice in serve else choice
        if closing in reasons:
            agent.call("transfer", reason=closing)
            return ""
        if choice in serve:
            return closing
        agent.call(choice, **argument)
        return "Done."

    return expert
