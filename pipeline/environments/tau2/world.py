"""What the episodes of one domain share: databases, tools, gold states.

An episode changes a database without a copy of the whole database. A table of the episode's
database is an `Overlay`: an entity is copied when a tool first touches the entity. The episode's
state is the set of entities that differ from the shared database.
"""

import copy
import json
import pickle
import re
from collections.abc import Iterator, MutableMapping
from typing import Any

from pipeline.environments.tau2.checkout import Checkout

STOPPED = "###STOP###"
DONE = {
    "type": "function",
    "function": {
        "name": "done",
        "description": "End the work on the ticket: the problem is solved or transferred.",
        "parameters": {"properties": {}, "title": "parameters", "type": "object"},
    },
}
State = dict[tuple[str, str], str | None]  # (table, key): the entity as JSON; None: deleted


class Overlay(MutableMapping[str, Any]):
    """One table of an episode's database; the entities of the `shared` table never change.

    `table[key]` gives the episode's own copy. Loops over `values()` and `items()` give shared
    entities uncopied while `is_read_only` is True, which is for tools that change nothing.
    """

    def __init__(self, name: str, shared: dict[str, Any]) -> None:
        self._name = name
        self._shared = shared
        self._own: dict[str, Any] = {}
        self._deleted: set[str] = set()
        self.is_read_only = False

    def __getitem__(self, key: str) -> Any:
        if key not in self._own:
            if key in self._deleted or key not in self._shared:
                raise KeyError(key)
            self._own[key] = copy.deepcopy(self._shared[key])
        return self._own[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._own[key] = value
        self._deleted.discard(key)

    def __delitem__(self, key: str) -> None:
        if key not in self:
            raise KeyError(key)
        self._own.pop(key, None)
        self._deleted.add(key)

    def __contains__(self, key: object) -> bool:
        return key in self._own or (key in self._shared and key not in self._deleted)

    def __iter__(self) -> Iterator[str]:
        yield from (key for key in self._shared if key not in self._deleted)
        yield from (key for key in self._own if key not in self._shared)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _seen(self, key: str) -> Any:
        return self._shared[key] if self.is_read_only and key not in self._own else self[key]

    def values(self) -> Any:
        return [self._seen(key) for key in self]

    def items(self) -> Any:
        return [(key, self._seen(key)) for key in self]

    def changes(self) -> State:
        """Return the entities that differ from the shared table."""
        changed: State = dict.fromkeys((self._name, k) for k in self._deleted & self._shared.keys())
        for key, entity in self._own.items():
            text = as_text(entity)
            if key not in self._shared or text != as_text(self._shared[key]):
                changed[self._name, key] = text
        return changed


def overlay_of(database: Any) -> Any:
    """Return a database for one episode."""
    names = type(database).model_fields
    tables = {name: Overlay(name, getattr(database, name)) for name in names}
    return type(database).model_construct(**tables)


def tables_of(database: Any) -> list[Overlay]:
    return [table for table in vars(database).values() if isinstance(table, Overlay)]


def changes_of(database: Any) -> State:
    """Return the state of an episode: two episodes with equal states have equal databases."""
    return {place: text for table in tables_of(database) for place, text in table.changes().items()}


def as_text(entity: Any) -> str:
    """Return an entity as the JSON text whose hash the official evaluator compares."""
    return json.dumps(entity.model_dump(warnings=False), sort_keys=True, default=str)


class World:
    """What the episodes of one domain share: databases, tools, gold states. Nothing changes it."""

    def __init__(self, checkout: Checkout) -> None:
        self.checkout = checkout
        self.package = checkout.package
        self._official = checkout.make_environment()
        self.policy: str = self._official.policy
        self.has_phone = self._official.user_tools is not None
        self.is_solo = self.has_phone and not checkout.is_talking
        kits = [kit for kit in (self._official.tools, self._official.user_tools) if kit is not None]
        tools = [list(kit.get_tools().values()) for kit in kits]
        own, *phone = [[tool.openai_schema for tool in of_kit] for of_kit in tools]
        self.customer_schemas = [schema for of_kit in phone for schema in of_kit]
        self.schemas = [*own, *self.customer_schemas, DONE] if self.is_solo else own
        names = [tool.name for of_kit in tools for tool in of_kit]
        writes = ((kit, n) for kit in kits for n in names if kit.has_tool(n))
        self.writing = {name for kit, name in writes if kit.tool_mutates_state(name)}
        databases = [kit.db for kit in kits]
        self._pickled = pickle.dumps(databases, protocol=5)
        vpn = "default_vpn_details"  # one object of the class, which `break_vpn` changes
        self._vpn = copy.deepcopy(getattr(type(self._official.user_tools), vpn, None))
        self._parsed: dict[str, Any] = {}
        self._gold: dict[str, State] = {}
        self._failing: dict[str, list[str]] = {}  # gold calls that fail, by task

    def task(self, task_id: str) -> Any:
        if task_id not in self._parsed:
            self._parsed[task_id] = self.package.Task.model_validate(self.checkout.tasks[task_id])
        return self._parsed[task_id]

    def start(self, task: Any) -> Any:
        """Return an official environment in the initial state of a task, with its own database."""
        official = self._official
        if not self.has_phone:
            tools = type(official.tools)(overlay_of(official.tools.db))
            environment = type(official)(official.domain_name, self.policy, tools)
        else:
            database, user_database = pickle.loads(self._pickled)
            user_tools = type(official.user_tools)(user_database)
            if self._vpn is not None:
                user_tools.default_vpn_details = copy.deepcopy(self._vpn)
            tools = type(official.tools)(database)
            environment = type(official)(official.domain_name, self.policy, tools, user_tools)
            environment.solo_mode = self.is_solo
        state = task.initial_state
        for action in (state.initialization_actions or ()) if state is not None else ():
            environment.run_env_function_call(action)
        return environment

    def gold_state(self, task: Any) -> State:
        """Return the state of the database after the gold actions of a task."""
        if task.id not in self._gold:
            environment = self.start(task)
            failing = list[str]()
            for action in task.evaluation_criteria.actions or ():
                by = "assistant" if self.is_solo else action.requestor
                if self.call(environment, action.name, action.arguments, by)[1]:
                    failing.append(action.name)
            self._gold[task.id], self._failing[task.id] = changes_of(environment.tools.db), failing
        return self._gold[task.id]

    def failing_gold_calls(self, task: Any) -> list[str]:
        """Return the names of a task's gold calls that fail, and so have no effect."""
        self.gold_state(task)
        return self._failing[task.id]

    def call(
        self, environment: Any, name: str, arguments: dict[str, Any], by: str = "assistant"
    ) -> tuple[str, bool]:
        """Call a tool; return the text of the result, and whether the call failed.

        `by` is "assistant" for the model, or "user" for the customer, who has other tools.
        """
        if name == "calculate" and _is_endless(str(arguments)):
            return "Error: Invalid characters in expression", True
        for table in tables_of(environment.tools.db):
            table.is_read_only = name not in self.writing
        call = self.package.ToolCall(name=name, arguments=arguments, requestor=by)
        answer = environment.get_response(call)
        return answer.content, answer.error


def _is_endless(expression: str) -> bool:
    """Return whether an expression may be a power with more digits than a process can compute."""
    powers = expression.count("**")
    return powers > 1 or (powers == 1 and re.search(r"\d{5}", expression) is not None)
