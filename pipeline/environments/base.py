"""What an environment is, how its tools are called, and the machinery that the embedded domains
share.

The class convention is TRL's `environment_factory`: `reset(**row) -> str | None`, public methods
with type hints and Google docstrings are the tools, `get_reward() -> float`. Two data attributes
go beyond it: `user` answers messages that hold no tool call, and `done` ends the episode after a
tool call. `final_message` is set before `get_reward`. This module imports neither torch nor the
model.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any, ClassVar, Protocol, TypeVar, get_type_hints

from pydantic import BaseModel, TypeAdapter, ValidationError

from pipeline.draws import choose, generator, stream_key
from pipeline.tasks import DIFFICULTIES, SPLITS, Message, Task

# one pool for every kind of entity, drawn anew for each task
IDS = tuple(f"K{number:02d}" for number in range(60))
Value = TypeVar("Value")


class User(Protocol):
    """Who the policy talks to."""

    def reply(self, message: str) -> str | None:
        """Answer a message; None ends the conversation."""


class ToolError(Exception):
    """What a tool answers when it cannot do what was asked; the model sees the text."""


def _once_a_class(function: Callable[[type[Any]], Value]) -> Callable[[type[Any]], Value]:
    return cache(function)  # type: ignore[return-value]  # mypy holds classes for unhashable


@_once_a_class
def tool_methods(environment_class: type[Any]) -> dict[str, Callable[..., Any]]:
    """The tools of an environment: its class's public functions but `reset` and `get_reward`, as
    in TRL.

    What an instance holds in its attributes is no tool, callable or not.
    """
    return {
        name: member
        for name, member in inspect.getmembers(environment_class, inspect.isfunction)
        if not name.startswith("_") and name not in ("reset", "get_reward")
    }


@_once_a_class
def tool_schemas(environment_class: type[Any]) -> list[dict[str, Any]]:
    """JSON schemas of the tools, from signatures and docstrings, in the form that chat templates
    take.
    """
    from transformers.utils import get_json_schema

    return [get_json_schema(method) for method in tool_methods(environment_class).values()]


@cache
def _validators(
    function: Callable[..., Any],
) -> tuple[inspect.Signature, dict[str, TypeAdapter[Any]]]:
    hints = get_type_hints(function)
    signature = inspect.signature(function)
    return signature, {
        name: TypeAdapter(hints[name]) for name in signature.parameters if name in hints
    }


def call_tool(environment: Any, name: str, arguments: dict[str, Any]) -> str:
    """Call a tool with arguments that a model wrote; what comes back, JSON or text, is what the
    model sees.

    An unknown tool, a wrong argument or a tool that raises is answered with {"error": ...}.
    """
    tools = tool_methods(type(environment))
    if name not in tools:
        return error_result(f"unknown tool {name}")
    signature, validators = _validators(tools[name])
    try:
        signature.bind(environment, **arguments)
    except TypeError:
        wanted = ", ".join(parameter for parameter in signature.parameters if parameter != "self")
        return error_result(f"wrong arguments: {name} takes {wanted}")
    try:
        checked = {
            key: validators[key].validate_python(value) if key in validators else value
            for key, value in arguments.items()
        }
    except ValidationError as error:
        wrong = next(
            key
            for key in arguments
            if key in validators and not _valid(validators[key], arguments[key])
        )
        return error_result(f"wrong arguments: {wrong}: {error.errors()[0]['msg']}")
    try:
        result = settled(tools[name](environment, **checked))
        if not isinstance(result, str):
            result = json.dumps(result, ensure_ascii=False, default=str)
        return result.encode(errors="replace").decode()  # half a character breaks tokenizers
    except Exception as error:  # code that is not ours: the model sees what went wrong
        return error_result(str(error) or type(error).__name__)


def settled(value: Any) -> Any:
    """`value`, awaited if it is awaitable: tools, users and rewards may be sync or async."""
    if not inspect.isawaitable(value):
        return value

    async def wait() -> Any:
        return await value

    return asyncio.run(wait())


def _valid(validator: TypeAdapter[Any], value: Any) -> bool:
    try:
        validator.validate_python(value)
    except ValidationError:
        return False
    return True


def error_result(text: str) -> str:
    return json.dumps({"error": text}, ensure_ascii=False)


# ---- the embedded domains ----


class Case(BaseModel):
    """The case file of one contact, part of every domain's database."""

    asked: list[str] = []  # answers that the customer was asked for
    transferred: str | None = None  # reason code of a transfer to a person


class Database(BaseModel):
    """A domain's records; each domain adds its tables."""

    case: Case = Case()


@dataclass
class ScriptedUser:
    """A customer who answers one question with what the task says, notes it in the case, and else
    says goodbye.
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
    user: ScriptedUser | None
    done: bool
    final_message: str

    def reset(self, **row: Any) -> str | None:
        payload = json.loads(row["payload"])
        self._db: Any = self.database_class.model_validate(payload["database"])
        self._expected = self.database_class.model_validate(payload["expected"])
        self._facts: list[str] = payload["facts"]
        answer = payload["answer"]
        self.user = (
            ScriptedUser(answer["topic"], answer["words"], self._db.case) if answer else None
        )
        self.done = False
        self.final_message = ""
        return None

    def get_reward(self) -> float:
        words = re.findall(r"[a-z0-9_]+", self.final_message.lower())
        told = all(fact in words for fact in self._facts)
        ended = self.done or bool(self.final_message)
        return float(ended and told and self._db == self._expected)

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


# ---- experts and demonstrations ----


class Agent(Protocol):
    """What an expert acts through: the same tools and the same user as the policy."""

    def call(self, tool: str, **arguments: str) -> dict[str, str]: ...

    def ask(self, question: str) -> str: ...

    def decide(self, right: str, options: Sequence[str], chained: bool = False) -> str:
        """The option to take at a decision of the policy text; `chained`: it follows an earlier
        decision.
        """


Expert = Callable[
    [Agent, dict[str, str]], str
]  # (agent, goal) -> final message; "" after a transfer


@dataclass
class ScriptedAgent:
    """Plays an expert in an environment and keeps the conversation.

    With `rule_share` 1 every decision follows the rule. Below it, a first decision does so with
    that probability, else a habit draws it (the first option .35, the others share .65); a chained
    one is right with .6, else any
    option: demonstrations that know tools and formats and leave every branch likely, for GRPO to
    sharpen.
    """

    environment: Any
    random: Random
    rule_share: float = 1.0
    messages: list[Message] = field(default_factory=list)

    def call(self, tool: str, **arguments: str) -> dict[str, str]:
        function = {"name": tool, "arguments": arguments}
        self.messages.append(
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": function}],
            }
        )
        result = call_tool(self.environment, tool, arguments)
        self.messages.append({"role": "tool", "name": tool, "content": result})
        parsed: dict[str, str] = json.loads(result)
        return parsed

    def ask(self, question: str) -> str:
        self.messages.append({"role": "assistant", "content": question})
        answer = self.environment.user.reply(question) if self.environment.user else None
        assert answer is not None, f"nobody answered {question!r}"
        self.messages.append({"role": "user", "content": answer})
        return str(answer)

    def decide(self, right: str, options: Sequence[str], chained: bool = False) -> str:
        if self.rule_share >= 1 or self.random.random() < (0.6 if chained else self.rule_share):
            return right
        rest = len(options) - 1
        weights = [1.0] * len(options) if chained else [0.35] + [0.65 / rest] * rest
        return choose(options, weights, self.random.random())


def named_record(agent: Agent, goal: dict[str, str], find: str, kind: str) -> str:
    """The record that a request is about: named in it, or found through the customer."""
    return goal["record"] if "record" in goal else agent.call(find, customer=goal["customer"])[kind]


def play_expert(
    environment: Any, expert: Expert, task: Task, rule_share: float = 1.0, seed: int = 0
) -> tuple[list[Message], float]:
    """Play one task; returns the whole conversation (prompt first) and the reward."""
    environment.reset(**task.row())
    agent = ScriptedAgent(environment, generator(seed, "expert", *task.key), rule_share)
    final = expert(agent, json.loads(task.payload)["goal"])
    if not environment.done:
        agent.messages.append({"role": "assistant", "content": final})
        environment.final_message = final
    return [*(dict(message) for message in task.prompt), *agent.messages], environment.get_reward()


# ---- generation ----


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A task before it gets its id: what the customer wants, the records, and what must be
    true at the end.
    """

    goal: dict[str, str]
    database: Database
    expected: Database
    facts: tuple[str, ...] = ()
    answer: dict[str, str] | None = None
    # what the tools show to whoever follows the rules, for telling splits apart
    visible: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of request: its phrasings (`{record}` and further slots of the goal) and the
    shares of its branches.
    """

    name: str
    phrasings: tuple[str, ...]
    branches: dict[str, float]
    easy: dict[str, float]  # the shares at difficulty easy: mostly one lookup and one action
    draft: Callable[[Random, str], Draft]  # (random, branch)


def quota(shares: dict[str, float], count: int) -> list[str]:
    """`count` names whose numbers follow the shares as closely as whole numbers can, at every
    length.
    """
    total = sum(shares.values())
    given = dict.fromkeys(shares, 0)
    order = []
    for number in range(1, count + 1):
        name = max(shares, key=lambda key: shares[key] / total * number - given[key])
        given[name] += 1
        order.append(name)
    return order


def _owner(text: str) -> str:
    """The split that owns a task's visible content: 70 % train, 15 % each for the others, so
    that none share any.
    """
    share = stream_key("split", text) / 2**64
    return "train" if share < 0.7 else "validation" if share < 0.85 else "test"


def generate(
    domain: str,
    policy: str,
    families: Sequence[Family],
    seed: int,
    n: int,
    split: str,
    difficulty: str,
) -> list[Task]:
    """`n` tasks with the shares of families and branches kept exactly; the same for the same
    arguments everywhere.

    Splits share no visible content whatever the seeds. Raises ValueError when so many different
    tasks do not exist.
    """
    if split not in SPLITS or difficulty not in DIFFICULTIES:
        raise ValueError(
            f"split {split!r}, difficulty {difficulty!r}; use one of {SPLITS}, {DIFFICULTIES}"
        )
    random = generator(seed, "tasks", domain, split, difficulty)
    tasks: list[Task] = []
    seen: set[str] = set()
    for family, branch in _families_and_branches(families, n, difficulty):
        for _ in range(1000):
            prompt, draft = _draft(domain, policy, family, branch, difficulty, random)
            payload = _payload(draft)
            if (
                payload not in seen
                and _owner(json.dumps([prompt, draft.visible], sort_keys=True)) == split
            ):
                break
        else:
            raise ValueError(f"{domain}: no {n} different {split} tasks exist; ask for fewer")
        seen.add(payload)
        tasks.append(
            Task(
                domain=domain,
                id=f"{split}-{difficulty}-{seed}-{len(tasks):05d}",
                prompt=prompt,
                payload=payload,
                family=family.name,
                branch=branch,
            )
        )
    return tasks


def _families_and_branches(
    families: Sequence[Family], n: int, difficulty: str
) -> Iterator[tuple[Family, str]]:
    counts = {family.name: len(range(i, n, len(families))) for i, family in enumerate(families)}
    orders = {}
    for family in families:
        shares = family.easy if difficulty == "easy" else family.branches
        orders[family.name] = quota(shares, counts[family.name])
    for number in range(n):
        family = families[number % len(families)]
        yield family, orders[family.name][number // len(families)]


def _draft(
    domain: str, policy: str, family: Family, branch: str, difficulty: str, random: Random
) -> tuple[tuple[Message, ...], Draft]:
    draft = family.draft(random, branch)
    goal = {**draft.goal, "family": family.name}
    named = goal["record"]
    if (
        difficulty == "hard"
    ):  # the customer gives a customer number; finding the record is one more call
        named = f"the one of {goal['customer']}"
        del goal["record"]
    else:
        del goal["customer"]
    phrasing = family.phrasings[0] if difficulty == "easy" else random.choice(family.phrasings)
    request = phrasing.format(**{**goal, "record": named})
    prompt = (
        {"role": "system", "content": f"{domain}\n\n{policy.strip()}"},
        {"role": "user", "content": request},
    )
    return prompt, Draft(**{**vars(draft), "goal": goal})


def _payload(draft: Draft) -> str:
    payload = {
        "goal": draft.goal,
        "database": draft.database.model_dump(),
        "expected": draft.expected.model_dump(),
        "facts": list(draft.facts),
        "answer": draft.answer,
    }
    return json.dumps(payload, sort_keys=True)
