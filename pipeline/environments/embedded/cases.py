"""What the domains airline, retail and telecom share: cases of customer service.

A family is a kind of request, such as a refund, and a branch is one case of the request, such as a
shipped order. Each family and each branch gets a fixed share of the tasks, which are generated from
a random seed. A scripted customer answers one question. A step of an episode is a successful tool
call, such as `refund(K01, card)`, or an answered question, such as `ask(reason)`.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from random import Random
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

from pydantic import BaseModel, Field, TypeAdapter

from pipeline.data.curriculum import quota
from pipeline.data.rng import generator, stream_key
from pipeline.data.tasks import DIFFICULTIES, SPLITS, Task
from pipeline.environments.discovery import tool_schemas
from pipeline.environments.domains import Call
from pipeline.environments.experts import Agent, Expert
from pipeline.environments.tools import ToolError, User

MAX_TASKS = 100_000  # largest number of tasks that one call of `generate` returns
IDS = tuple(f"K{number:02d}" for number in range(60))  # possible ids of a task's records
SAID = ("the one of ", "Done.", ".", "?", "ok", '{"ok": "', "yes")  # words that all domains use


class Case(BaseModel):
    """Records which questions the customer answered, and the customer's transfer to a person."""

    asked: list[str] = []  # topics of the questions that the customer answered
    transferred: str | None = None  # reason for the transfer to a person; None if no transfer


class Database(BaseModel):
    """The records of one task; each domain's subclass adds tables, such as orders."""

    case: Case = Field(default_factory=Case)


_FACTS = TypeAdapter(list[str])
_ANSWER = TypeAdapter[dict[str, str] | None](dict[str, str] | None)
_STEPS: dict[tuple[type, str], tuple[str, ...]] = {}  # the expert's, by class and payload
MAX_STEPS = 1024  # largest number of tasks for which `_STEPS` holds the expert's steps
Tool = TypeVar("Tool", bound=Callable[..., Any])
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
    rule: str = ""  # what the prompt says of this decision; an expert that quotes writes it

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


def tool(function: Tool) -> Tool:
    """Record the successful calls of a tool as steps of the episode."""
    signature = inspect.signature(function)

    @wraps(function)
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(self, *args, **kwargs)
        _, *values = signature.bind(self, *args, **kwargs).arguments.values()
        self._steps.append(f"{function.__name__}({', '.join(map(str, values))})")
        return result

    return cast(Tool, noted)


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

    def reset(self, **row: Any) -> str | None:
        self._row = row
        payload = json.loads(row["payload"])
        self._steps = list[str]()
        self._db: Any = self.database_class.model_validate(payload["database"])
        self._expected = self.database_class.model_validate(payload["expected"])
        self._facts = _FACTS.validate_python(payload["facts"])
        self._goal: dict[str, str] = payload.get("goal") or {}
        self.user: User | None = None
        if answer := _ANSWER.validate_python(payload["answer"]):
            self.user = ScriptedUser(answer["topic"], answer["words"], self._db.case, self._steps)
        self.done = False
        self.final_message = ""
        self.reward_breakdown: dict[str, float] = {}
        self.difference: dict[str, list[str]] = {}
        return None

    def get_reward(self) -> float:
        words = re.findall(r"[a-z0-9_]+", self.final_message.lower())
        steps = self._expert_steps() if self._goal else self._steps
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

    def _expert_steps(self) -> tuple[str, ...]:
        """Let the expert solve this task in a new environment; return the expert's steps."""
        key = type(self), self._row["payload"]  # the key is the same in all episodes of a task
        if key not in _STEPS:
            if len(_STEPS) >= MAX_STEPS:
                _STEPS.clear()
            environment = type(self)()
            environment.reset(**self._row)
            self._expert(Agent(environment, Random(0)), self._goal)
            _STEPS[key] = tuple(environment._steps)
        return _STEPS[key]

    def _transfer(self, reason: str) -> dict[str, str]:
        self._db.case.transferred = reason
        self.done = True
        return {"ok": "yes"}

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
    writes, right = ([s for s in every if not s.startswith(LOOKUPS)] for every in (steps, wanted))
    return all(step in rest for step in wanted) and writes == right


def difference(actual: Any, expected: Any, where: str = "") -> dict[str, list[str]]:
    """Return {path: [actual value, expected value]} for fields with different values."""
    if not (isinstance(actual, dict) and isinstance(expected, dict)):
        return {} if actual == expected else {where: [str(actual), str(expected)]}
    differences: dict[str, list[str]] = {}
    for key in dict.fromkeys([*actual, *expected]):
        path = f"{where}.{key}".lstrip(".")
        differences |= difference(actual.get(key), expected.get(key), path)
    return differences


def expert_of(
    kind: str, families: Sequence[Family], serve: Mapping[str, Serve], reasons: Sequence[str]
) -> Expert:
    """Return an expert that looks up a record, makes a first decision, and serves the request.

    The expert's first decision is a key of `serve`, an element of `reasons` (for a transfer), or
    the name of a tool whose only argument is the record's id.
    """
    branches = {family.name: list(family.branches.values()) for family in families}
    rules = {(f.name, b.choice): b.rule for f in families for b in f.branches.values()}

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
        agent.quote(rules[goal["family"], choice])
        closing = serve[choice](agent, goal, argument, choice) if choice in serve else choice
        if closing in reasons:
            agent.call("transfer", reason=closing)
            return ""
        if choice in serve:
            return closing
        agent.call(choice, **argument)
        return "Done."

    return expert


@dataclass
class Blind(Agent):
    """Lets an expert make the decisions of one case in all cases of a request."""

    choice: str = ""

    def decide(self, right: str, options: Sequence[str], chained: bool = False) -> str:
        return right if chained and self.choice not in options else self.choice


def baselines_of(
    environment: type[CaseEnvironment], families: Sequence[Family]
) -> Callable[[Task], dict[str, list[Call | str]]]:
    """Return a domain's `baselines`: look up, then serve the commonest case of a family."""
    commonest = {
        (level, family.name): family.branches[max(shares, key=lambda name: shares[name])].choice
        for level in DIFFICULTIES
        for family in families
        for shares in [shares_of(family, level)]
    }

    def baselines(task: Task) -> dict[str, list[Call | str]]:
        world = environment()
        world.reset(**task.row())
        # The id of a generated task has its difficulty.
        level = next((level for level in DIFFICULTIES if f"-{level}-" in task.id), "medium")
        agent = Blind(world, Random(0), choice=commonest[level, task.family])
        final = world._expert(agent, json.loads(task.payload)["goal"])
        moves = list[Call | str]()
        for message in agent.messages:
            if message["role"] == "assistant":
                calls = [call["function"] for call in message.get("tool_calls", ())]
                moves += [(function["name"], function["arguments"]) for function in calls] or [
                    message["content"]
                ]
        return {"commonest case": [*moves, final]}

    return baselines


# Tasks


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A task without id and prompt; `expected` is the database after a correct episode."""

    goal: dict[str, str]
    database: Database
    expected: Database
    facts: tuple[str, ...] = ()
    answer: dict[str, str] | None = None
    visible: dict[str, Any] = field(default_factory=dict)  # values that tools return to the expert


# Arguments: random generator, name of the family, name of the branch, branch. Result: a draft.
DraftTask = Callable[[Random, str, str, Branch], Draft]
Record = TypeVar("Record", bound=BaseModel)


def random_record(
    random: Random, kind: type[Record], options: Mapping[str, str], **given: str
) -> Record:
    """Return a record with the values of `given`; the other fields in `options` are random.

    `options` maps a field's name to the field's possible values, separated by spaces.
    """
    values = {name: random.choice(texts.split()) for name, texts in options.items()}
    return kind.model_validate({**values, **given})


def with_title(domain: str, text: str) -> str:
    """Return a policy under its title, the domain's name, with a rule on each line.

    The tiny model's chat template shows the title alone. Calls are in words: how a call is written,
    the chat template says.
    """
    rules = re.sub(r"\n\s*(?!- )", " ", text.strip())
    rules = re.sub(r'transfer\("(\w+)"\)', r"transfer with reason \1", rules)
    return f"{domain}\n{'=' * len(domain)}\n\n{rules}"


def _split_of(text: str) -> str:
    """Return the split for the text of a task: train (70 % of all texts), validation or test."""
    share = stream_key("split", text) / 2**64
    return "train" if share < 0.7 else "validation" if share < 0.85 else "test"


def generate(
    seed: int,
    n: int,
    split: str,
    difficulty: str,
    *,
    domain: str,
    policy: str,
    families: Sequence[Family],
    draft_task: DraftTask,
) -> list[Task]:
    """Return `n` tasks; fixed shares decide how many tasks belong to each family and branch.

    The same arguments give the same tasks in every process. Two tasks of different splits, even
    with different seeds, have different prompts or different results of tools. Raises ValueError if
    fewer than `n` different tasks exist.
    """
    if n > MAX_TASKS:
        raise ValueError(f"got {n}, but at most {MAX_TASKS} are generated; give a task file")
    if split not in SPLITS or difficulty not in DIFFICULTIES:
        raise ValueError(
            f"split {split!r}, difficulty {difficulty!r}; use one of {SPLITS}, {DIFFICULTIES}"
        )
    random = generator(seed, "tasks", domain, split, difficulty)
    tasks: list[Task] = []
    seen: set[str] = set()
    for family, branch in _families_and_branches(families, n, difficulty):
        for _ in range(1000):
            draft = draft_task(random, family.name, branch, family.branches[branch])
            request, goal = _request(family, draft.goal, difficulty, random)
            # The split of a task depends on the policy's text, but not on its line breaks.
            key = {"role": "system", "content": f"{domain}\n\n{policy.strip()}"}
            asked = {"role": "user", "content": request}
            if _split_of(json.dumps([(key, asked), draft.visible], sort_keys=True)) != split:
                continue
            prompt = ({"role": "system", "content": with_title(domain, policy)}, asked)
            if (payload := _payload(replace(draft, goal=goal))) not in seen:
                break
        else:
            raise ValueError(f"{domain}: no {n} different {split} tasks exist; ask for fewer")
        seen.add(payload)
        name = f"{split}-{difficulty}-{seed}-{len(tasks):05d}"
        task = Task(domain=domain, id=name, prompt=prompt, payload=payload)
        tasks.append(replace(task, family=family.name, branch=branch))
    return tasks


def shares_of(family: Family, difficulty: str) -> dict[str, float]:
    """Return each branch's share of the family's tasks at a difficulty; the shares sum to 1."""
    branches = family.branches.items()
    is_easy = difficulty == "easy"
    shares = {name: branch.easy if is_easy else branch.share for name, branch in branches}
    total = sum(shares.values())
    return {name: share / total for name, share in shares.items() if share}


def _families_and_branches(
    families: Sequence[Family], n: int, difficulty: str
) -> Iterator[tuple[Family, str]]:
    per_family = -(-n // len(families))
    branches = [quota(shares_of(family, difficulty), per_family) for family in families]
    for number in range(n):
        row, column = divmod(number, len(families))
        yield families[column], branches[column][row]


def _request(
    family: Family, goal: dict[str, str], difficulty: str, random: Random
) -> tuple[str, dict[str, str]]:
    """Return the text of the customer's request, and the goal for the task's payload.

    At difficulty hard, the request names only the customer, so an expert must call a tool to find
    the record. The request gives the id of the task's record, except at the difficulty hard.
    """
    is_hard = difficulty == "hard"
    name = f"the one of {goal['customer']}" if is_hard else goal["record"]
    hidden = "record" if is_hard else "customer"
    phrasing = family.phrasings[0] if difficulty == "easy" else random.choice(family.phrasings)
    request = phrasing.format(**{**goal, "record": name})
    kept = {key: value for key, value in goal.items() if key != hidden}
    return request, {**kept, "family": family.name}


def _payload(draft: Draft) -> str:
    names = ("goal", "database", "expected", "facts", "answer")
    parts = {name: getattr(draft, name) for name in names}
    return json.dumps(parts, sort_keys=True, default=Database.model_dump)


def words_of(
    name: str,
    environment: type[CaseEnvironment],
    families: Collection[Family],
    said: Collection[str] = (),
    values: Collection[str] = (),
) -> Iterator[str]:
    """Yield a domain's words; each word becomes a token of the tiny model's tokenizer.

    `said` adds texts of messages to the words, and `values` adds values of records.
    """
    yield from (*IDS, *SAID, name, *said)
    database = environment.database_class.model_json_schema()
    objects = [database, *database["$defs"].values()]
    for schema in tool_schemas(environment):
        function = schema["function"]
        yield from (function["name"], f" {function['name']}")
        objects.append(function["parameters"])
    keys = set(values)  # some values are keys in a tool's JSON result, such as {"free": id}
    for properties in (schema["properties"] for schema in objects):
        keys |= set(properties).union(*(field.get("enum", ()) for field in properties.values()))
    yield from keys
    for key in keys:
        yield from (f'", "arguments": {{"{key}": "', f'{{"{key}": "', f'", "{key}": "')
    for family in families:
        yield family.name
        for phrasing in family.phrasings:
            yield from (piece for piece in re.split(r"\{\w+\}", phrasing) if piece)
