"""What the embedded domains share: a case file, a scripted customer, a verified outcome."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, TypeAdapter

from pipeline.environments.base import ToolError, User


class Case(BaseModel):
    """The case file of one contact, part of every domain's database."""

    asked: list[str] = []  # answers that the customer was asked for
    transferred: str | None = None  # reason code of a transfer to a person


class Database(BaseModel):
    """A domain's records; each domain adds its tables."""

    case: Case = Case()


class Answer(BaseModel):
    """What a task lets its customer answer, and to questions about what."""

    topic: str
    words: str


_FACTS, _ANSWER = TypeAdapter(list[str]), TypeAdapter[Answer | None](Answer | None)


@dataclass
class ScriptedUser:
    """A customer who answers one question with what the task says, and else says goodbye.

    The answer is noted in the case.
    """

    topic: str
    answer: str
    case: Case

    def reply(self, message: str) -> str | None:
        if "?" not in message or self.topic in self.case.asked:
            return None
        self.case.asked.append(self.topic)
        return self.answer


class CaseEnvironment:
    """An embedded domain: a private database from the task's payload, and a verified outcome.

    Payload: `goal` (what the request says), `database`, `expected` (the database at the end),
    `facts` (words that the final message must hold), `answer` (topic and words of the customer, or
    null). The reward is 1.0 when the episode was brought to its end, the final database equals the
    expected one and every fact was told, else 0.0.
    """

    database_class: ClassVar[type[Database]]
    user: User | None
    done: bool
    final_message: str
    reward_breakdown: dict[str, float]
    difference: dict[str, list[str]]

    def reset(self, **row: Any) -> str | None:
        payload = json.loads(row["payload"])
        self._db: Any = self.database_class.model_validate(payload["database"])
        self._expected = self.database_class.model_validate(payload["expected"])
        self._facts = _FACTS.validate_python(payload["facts"])
        answer = _ANSWER.validate_python(payload["answer"])
        self.user = ScriptedUser(answer.topic, answer.words, self._db.case) if answer else None
        self.done = False
        self.final_message = ""
        self.reward_breakdown, self.difference = {}, {}
        return None

    def get_reward(self) -> float:
        words = re.findall(r"[a-z0-9_]+", self.final_message.lower())
        told = all(fact in words for fact in self._facts)
        ended = self.done or bool(self.final_message)
        is_right = self._db == self._expected
        self.reward_breakdown = {"ended": ended, "facts": told, "database": is_right}
        if not is_right:
            self.difference = difference(self._db.model_dump(), self._expected.model_dump())
        return float(ended and told and is_right)

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
