"""Shared parts of the embedded domains: case file, scripted customer, verified outcome, expert."""

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

from pipeline.environments.experts import Agent, Expert, ScriptedAgent
from pipeline.environments.tools import ToolError, User, run_steps, started


class Case(BaseModel):
    """The case file of one contact, a part of every domain's database."""

    asked: list[str] = []  # answers that the customer was asked for
    transferred: str | None = None  # reason code of a transfer to a person


class Database(BaseModel):
    """A domain's records; each domain adds its tables."""

    case: Case = Field(default_factory=Case)


class Answer(BaseModel):
    """The customer's answer to questions about one topic."""

    topic: str
    words: str


Tool = TypeVar("Tool", bound=Callable[..., Any])
_FACTS, _ANSWER = TypeAdapter(list[str]), TypeAdapter[Answer | None](Answer | None)
LOOKUPS = ("find_", "get_")  # tools that change nothing
MAX_STEPS = 1024  # tasks whose expert steps are kept: all episodes of a group have the same task
_STEPS: dict[tuple[type[Any], str], tuple[str, ...]] = {}
# (agent, goal, id of the record, the first decision) -> the final message, or a transfer's reason
Serve = Callable[[Agent, dict[str, str], str, str], str]


class Branch(NamedTuple):
    """A case of a family: its share of the tasks, and the rule of the policy for its records."""

    share: float
    easy: float  # its share of tasks at difficulty easy
    record: dict[str, str]  # of each field the possible values, separated by spaces
    choice: str  # the right first decision for such a record

    def draw(self, random: Random) -> dict[str, str]:
        """Fields of a record; of several values, one of the first two."""
        options = {name: values.split()[:2] for name, values in self.record.items()}
        return {k: v[0] if len(v) == 1 else random.choice(v) for k, v in options.items()}


class Family(NamedTuple):
    """A kind of request: its phrasings, with slots of the goal, and its branches."""

    name: str
    phrasings: tuple[str, ...]
    branches: dict[str, Branch]


@dataclass
class ScriptedUser:
    """A customer who answers one question, and ends the conversation at any other message.

    The answer is noted in the case, and the question among the steps of the episode.
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
    """Make a method a tool with a docstring of `text` and `arguments`, by default ids.

    Each successful call is noted as a step: `refund(K01, card)`.
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
    """An embedded domain: a database from the task's payload, and a verified outcome.

    Payload: `goal` (of the request), `database`, `expected` (the database at the end), `facts`
    (words that the final message must contain), `answer` (topic and words of the customer, or
    null). The reward is 1.0 if the episode has ended, the database equals the expected one, the
    final message contains every fact and the steps are right, else 0.0. Right steps are the
    expert's lookups, questions and writes in their order; only further lookups may be added.
    The steps of a task without a goal are not checked.
    """

    database_class: ClassVar[type[Database]]
    _expert: ClassVar[staticmethod[[Agent, Any], str]]
    user: User | None
    done: bool
    final_message: str
    reward_breakdown: dict[str, float]
    difference: dict[str, list[str]]

    def reset(self, **row: Any) -> str | None:
        self._row, self._steps = row, list[str]()
        payload = json.loads(row["payload"])
        self._db: Any = self.database_class.model_validate(payload["database"])
        self._expected = self.database_class.model_validate(payload["expected"])
        self._facts = _FACTS.validate_python(payload["facts"])
        answer = _ANSWER.validate_python(payload["answer"])
        case, steps = self._db.case, self._steps
        self.user = ScriptedUser(answer.topic, answer.words, case, steps) if answer else None
        self._goal: dict[str, str] = payload.get("goal") or {}
        self.done = False
        self.final_message = ""
        self.reward_breakdown, self.difference = {}, {}
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
        self.reward_breakdown, self.difference = {**parts}, {}
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
        """The steps of the expert on this task, in an environment of its own."""
        key = type(self), self._row["payload"]
        if key not in _STEPS:
            if len(_STEPS) >= MAX_STEPS:
                _STEPS.clear()
            environment = run_steps(started(type(self), self._row)).environment
            self._expert(ScriptedAgent(environment, Random(0)), self._goal)
            _STEPS[key] = tuple(environment._steps)
        return _STEPS[key]

    def _found(self, table: str, kind: str, customer: str) -> dict[str, str]:
        """The id of a customer's record; ToolError if there is none."""
        for key, record in getattr(self._db, table).items():
            if record.customer == customer:
                return {kind: key}
        raise ToolError(f"no {customer}")

    def _shown(self, table: str, key: str, *fields: str) -> dict[str, str]:
        """These fields of a record."""
        shown: dict[str, str] = self._record(table, key).model_dump(include=set(fields))
        return shown

    def _changed(self, table: str, key: str, **fields: Any) -> dict[str, str]:
        """Set these fields of a record."""
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
    """Whether `steps` holds all wanted ones in their order, and besides them only lookups."""
    rest = iter(steps)
    return all(step in rest for step in wanted) and _acts(steps) == _acts(wanted)


def _acts(steps: Sequence[str]) -> list[str]:
    return [step for step in steps if not step.startswith(LOOKUPS)]


def difference(found: Any, expected: Any, where: str = "") -> dict[str, list[str]]:
    """The differences of two databases: path of a field, its value, the expected value."""
    if isinstance(found, dict) and isinstance(expected, dict):
        return {
            path: pair
            for key in dict.fromkeys([*found, *expected])
            for path, pair in difference(
                found.get(key), expected.get(key), f"{where}.{key}".lstrip(".")
            ).items()
        }
    return {} if found == expected else {where: [str(found), str(expected)]}


def expert_of(
    kind: str, families: Sequence[Family], serve: Mapping[str, Serve], reasons: Sequence[str]
) -> Expert:
    """An expert that looks up the record of a request, decides by it and serves the family."""
    branches = {family.name: list(family.branches.values()) for family in families}

    def expert(agent: Agent, goal: dict[str, str]) -> str:
        if "record" in goal:
            key = goal["record"]
        else:
            key = agent.call(f"find_{kind}", customer=goal["customer"])[kind]
        record, family = agent.call(f"get_{kind}", **{kind: key}), goal["family"]
        options = list(dict.fromkeys(branch.choice for branch in branches[family]))
        right = next(
            branch.choice
            for branch in branches[family]
            if all(record[field] in values.split() for field, values in branch.record.items())
        )
        choice = agent.decide(right, options)
        closing = choice if choice in reasons else serve[family](agent, goal, key, choice)
        if closing not in reasons:
            return closing
        agent.call("transfer", reason=closing)
        return ""

    return expert
