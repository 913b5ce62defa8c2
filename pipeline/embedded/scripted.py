"""What the embedded domains share: a case file, a scripted customer, a verified outcome."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from random import Random
from typing import Any, ClassVar

from pydantic import BaseModel, Field, TypeAdapter

from pipeline.environments.experts import Agent, ScriptedAgent
from pipeline.environments.tools import ToolError, User, started


class Case(BaseModel):
    """The case file of one contact, part of every domain's database."""

    asked: list[str] = []  # answers that the customer was asked for
    transferred: str | None = None  # reason code of a transfer to a person


class Database(BaseModel):
    """A domain's records; each domain adds its tables."""

    case: Case = Field(default_factory=Case)


class Answer(BaseModel):
    """What a task lets its customer answer, and to questions about what."""

    topic: str
    words: str


_FACTS, _ANSWER = TypeAdapter(list[str]), TypeAdapter[Answer | None](Answer | None)
LOOKUPS = ("find_", "get_")  # tools that change nothing
MAX_STEPS = 1024  # tasks whose wanted steps are kept: siblings of a group ask for the same
_STEPS: dict[tuple[type[Any], str], tuple[str, ...]] = {}


@dataclass
class ScriptedUser:
    """A customer who answers one question with what the task says, and else says goodbye.

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


def _noted(tool: Callable[..., Any]) -> Callable[..., Any]:
    """The tool, which notes each call that succeeds as a step: `refund(K01, card)`."""
    signature = inspect.signature(tool)

    @wraps(tool)
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = tool(self, *args, **kwargs)
        _, *given = signature.bind(self, *args, **kwargs).arguments.values()
        self._steps.append(f"{tool.__name__}({', '.join(map(str, given))})")
        return result

    return noted


class CaseEnvironment:
    """An embedded domain: a private database from the task's payload, and a verified outcome.

    Payload: `goal` (what the request says), `database`, `expected` (the database at the end),
    `facts` (words that the final message must hold), `answer` (topic and words of the customer, or
    null). The reward is 1.0 when the episode was brought to its end, the final database equals the
    expected one, every fact was told and the steps were those of the policy text, else 0.0. The
    steps are those of the domain's expert: its lookups, questions and writes in this order, and
    besides nothing but lookups. A payload without a goal, which no expert can serve, leaves them
    open.
    """

    database_class: ClassVar[type[Database]]
    record_tools: ClassVar = ("get_",)  # beginnings of tools that show a request's record
    user: User | None
    done: bool
    final_message: str
    reward_breakdown: dict[str, float]
    difference: dict[str, list[str]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, member in list(vars(cls).items()):
            is_tool = inspect.isfunction(member) and not name.startswith("_")
            if is_tool and name not in ("reset", "get_reward"):
                setattr(cls, name, _noted(member))

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
        told = all(fact in words for fact in self._facts)
        ended = self.done or bool(self.final_message)
        is_right = self._db == self._expected
        wanted = self._expert_steps() if self._goal else tuple(self._steps)
        in_order = follows(self._steps, wanted)
        parts = {"ended": ended, "facts": told, "database": is_right, "steps": in_order}
        self.reward_breakdown, self.difference = {**parts}, {}
        if not in_order:
            self.difference["steps"] = [", ".join(self._steps), ", ".join(wanted)]
        if not is_right:
            self.difference |= difference(self._db.model_dump(), self._expected.model_dump())
        return float(all(parts.values()))

    def _serve(self, agent: Agent, goal: dict[str, str]) -> str:
        """Serve the request by the policy text, which each domain's expert does."""
        raise NotImplementedError

    def _expert_steps(self) -> tuple[str, ...]:
        """The steps of the expert on this task, in an environment of its own."""
        key = type(self), self._row["payload"]
        if key not in _STEPS:
            if len(_STEPS) >= MAX_STEPS:
                _STEPS.clear()
            environment = started(type(self), self._row).environment
            self._serve(ScriptedAgent(environment, Random(0)), self._goal)
            _STEPS[key] = tuple(environment._steps)
        return _STEPS[key]

    def _transfer(self, reason: str) -> dict[str, str]:
        self._db.case.transferred = reason
        self.done = True
        return {"ok": "yes"}

    def _shown(self, table: str, key: str, *fields: str) -> dict[str, str]:
        """What a tool shows of a record."""
        shown: dict[str, str] = self._record(table, key).model_dump(include=set(fields))
        return shown

    def _record(self, table: str, key: str) -> Any:
        records = getattr(self._db, table)
        if key not in records:
            raise ToolError(f"no {key}")
        return records[key]


def follows(steps: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether all wanted steps were taken, in their order, and besides nothing but lookups."""
    rest = iter(steps)
    return all(step in rest for step in wanted) and _acts(steps) == _acts(wanted)


def _acts(steps: Sequence[str]) -> list[str]:
    return [step for step in steps if not step.startswith(LOOKUPS)]


def difference(found: Any, expected: Any, where: str = "") -> dict[str, list[str]]:
    """Where two databases differ: path of a field, what was found, what was expected."""
    if isinstance(found, dict) and isinstance(expected, dict):
        return {
            path: pair
            for key in dict.fromkeys([*found, *expected])
            for path, pair in difference(
                found.get(key), expected.get(key), f"{where}.{key}".lstrip(".")
            ).items()
        }
    return {} if found == expected else {where: [str(found), str(expected)]}


def named_record(agent: Agent, goal: dict[str, str], find: str, kind: str) -> str:
    """The record that a request is about: named in it, or found through the customer."""
    return goal["record"] if "record" in goal else agent.call(find, customer=goal["customer"])[kind]
