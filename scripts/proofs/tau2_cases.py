"""Cases for `tau2_conformance.py`: sequences of calls that a model could write, for official tasks.

A case is {"domain", "task", "kind", "messages"}; a message is {"content", "calls"}.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

Call = dict[str, Any]
Message = dict[str, Any]
Case = dict[str, Any]
DOMAINS = ("airline", "retail", "telecom")
TRANSFER = {"name": "transfer_to_human_agents", "arguments": {"summary": "a customer needs help"}}
DONE = {"name": "done", "arguments": {}}
# Names of no tool. Most are attributes of the toolkits, which a careless adapter would call.
UNKNOWN = (
    *("", "no_such_tool", "Get_User_Details", "tools", "db", "use_tool", "get_tools", "update_db"),
    *("__init__", "__class__", "get_db_hash", "sync_tools", "break_vpn", "turn_roaming_off"),
    *("set_user_location", "assert_mobile_data_status", "_get_user", "think ", "reset", "call"),
)
EXTRA = ("self", "requestor", "tool_name", "kwargs", "message", "reason")


@dataclass
class Maker:
    """Makes the cases of one domain of the checkout at `path` with one random generator."""

    path: Path
    domain: str
    schemas: list[dict[str, Any]]
    rng: random.Random = field(default_factory=random.Random)

    @cached_property
    def tasks(self) -> dict[str, dict[str, Any]]:
        folder = self.path / "data" / "tau2" / "domains" / self.domain
        return {task["id"]: task for task in json.loads((folder / "tasks.json").read_text("utf-8"))}

    @cached_property
    def splits(self) -> dict[str, list[str]]:
        folder = self.path / "data" / "tau2" / "domains" / self.domain
        splits: dict[str, list[str]] = json.loads((folder / "split_tasks.json").read_text("utf-8"))
        return splits

    @cached_property
    def parameters(self) -> dict[str, list[str]]:
        """The names of each tool's parameters, without those of `done`."""
        functions = [schema["function"] for schema in self.schemas]
        return {
            of["name"]: list(of["parameters"].get("properties", {}))
            for of in functions
            if of["name"] != "done"
        }

    @cached_property
    def pools(self) -> dict[str, list[Any]]:
        """The different values of each argument in the gold calls of all tasks."""
        found: dict[str, dict[str, Any]] = {
            "expression": {text: text for text in ("2 ** 3", "1 / 0", "", "(2", "1e3", "07 + 1")}
        }
        for task in self.tasks.values():
            for call in self.gold(task["id"]):
                for key, value in call["arguments"].items():
                    found.setdefault(key, {})[json.dumps(value)] = value
        return {key: list(values.values()) for key, values in found.items()}

    def gold(self, task: str) -> list[Call]:
        """Return new copies of the gold calls of a task."""
        actions = self.tasks[task]["evaluation_criteria"]["actions"] or []
        copied: list[dict[str, Any]] = json.loads(json.dumps(actions))
        return [{"name": action["name"], "arguments": action["arguments"]} for action in copied]

    def said(self, task: str) -> list[str]:
        return list(self.tasks[task]["evaluation_criteria"].get("communicate_info") or [])

    def case(
        self, kind: str, task: str, calls: list[Call], end: list[Message] | None = None
    ) -> Case:
        """Return a case with one message for each call; the default end says what is expected."""
        messages = [{"content": None, "calls": [call]} for call in calls]
        messages += self.end("; ".join(self.said(task))) if end is None else end
        return {"domain": self.domain, "task": task, "kind": kind, "messages": messages}

    def end(self, text: str = "") -> list[Message]:
        if self.domain == "telecom":
            return [{"content": None, "calls": [dict(DONE)]}]
        return [{"content": text or "Goodbye.", "calls": []}]

    def floors(self, split: str) -> Iterator[Case]:
        """Yield the cases of a model that does nothing, and of one that transfers at once."""
        for task in self.splits[split]:
            yield self.case("nothing", task, [], self.end())
            yield self.case("transfer", task, [dict(TRANSFER)], self.end())

    def plausible(self, name: str) -> Call:
        """Return a call of a tool with arguments that gold calls have."""
        keys = [key for key in self.parameters[name] if self.rng.random() < 0.95]
        found = {key: self.rng.choice(self.pools.get(key, ["x", 1, 2.0])) for key in keys}
        return {"name": name, "arguments": json.loads(json.dumps(found))}

    def random_call(self) -> Call:
        return self.plausible(self.rng.choice(sorted(self.parameters)))


def mutating() -> set[str]:
    """Return the names of the checkout's tools that change a database, of the imported domains."""
    classes = [
        value
        for name, module in sys.modules.items()
        if name.startswith("tau2.domains.")
        for value in vars(module).values()
        if isinstance(value, type)
    ]
    return {
        name
        for kind in classes
        for name, function in vars(kind).items()
        if getattr(function, "__mutates_state__", False)
    }


def wrong(value: Any, rng: random.Random) -> Any:
    """Return a value of another type, or the value with a flaw inside."""
    others: list[Any] = [None, [], {}, [value], "", 7, -1.5, True]
    if isinstance(value, bool | int | float):
        others += [str(value), str(value), -value, value + 1, float(value), 10**9]
    elif isinstance(value, str):
        others += [value.upper(), value + " ", value[:-1], {"value": value}, f"#{value}"]
    elif isinstance(value, list):
        others += [json.dumps(value), value[:-1], value * 2, value[::-1], [*value, None]]
        others += [[wrong(value[0], rng), *value[1:]]] * 3 if value else []
    elif isinstance(value, dict) and value:
        key = rng.choice(sorted(value))
        others += [{k: v for k, v in value.items() if k != key}, {**value, "more": 1}]
        others += [{**value, key: wrong(value[key], rng)}] * 3
    return rng.choice(others)


# Each function changes the gold calls of a task, and returns None where that is not possible.
def shuffled(maker: Maker, calls: list[Call]) -> list[Call] | None:
    maker.rng.shuffle(calls)
    return calls if len(calls) > 1 else None


def repeated(maker: Maker, calls: list[Call]) -> list[Call] | None:
    if not calls:
        return None
    calls.insert(maker.rng.randrange(len(calls) + 1), maker.rng.choice(calls))
    return calls


def _with_arguments(maker: Maker, calls: list[Call]) -> Call | None:
    writing = [call for call in calls if call["arguments"] and call["name"] in mutating()]
    some = writing or [call for call in calls if call["arguments"]]
    return maker.rng.choice(some) if some else None


def argument(maker: Maker, calls: list[Call]) -> list[Call] | None:
    if (call := _with_arguments(maker, calls)) is None:
        return None
    key = maker.rng.choice(sorted(call["arguments"]))
    call["arguments"][key] = maker.rng.choice(maker.pools[key])
    return calls


def wrong_type(maker: Maker, calls: list[Call]) -> list[Call] | None:
    if (call := _with_arguments(maker, calls)) is None:
        return None
    key = maker.rng.choice(sorted(call["arguments"]))
    call["arguments"][key] = wrong(call["arguments"][key], maker.rng)
    return calls


def missing(maker: Maker, calls: list[Call]) -> list[Call] | None:
    if (call := _with_arguments(maker, calls)) is None:
        return None
    del call["arguments"][maker.rng.choice(sorted(call["arguments"]))]
    if maker.rng.random() < 0.3:
        call["arguments"] = {}
    return calls


def extra(maker: Maker, calls: list[Call]) -> list[Call] | None:
    if not calls:
        return None
    maker.rng.choice(calls)["arguments"][maker.rng.choice(EXTRA)] = maker.rng.choice(["x", None, 1])
    return calls


def unknown(maker: Maker, calls: list[Call]) -> list[Call] | None:
    for _ in range(maker.rng.choice([1, 2, 8, 9, 10, 11])):
        arguments = maker.random_call()["arguments"] if maker.rng.random() < 0.5 else {}
        call = {"name": maker.rng.choice(UNKNOWN), "arguments": arguments}
        calls.insert(maker.rng.randrange(len(calls) + 1), call)
    return calls


def noise(maker: Maker, calls: list[Call]) -> list[Call] | None:
    for _ in range(maker.rng.randint(1, 6)):
        calls.insert(maker.rng.randrange(len(calls) + 1), maker.random_call())
    return calls


def foreign(maker: Maker, calls: list[Call]) -> list[Call] | None:
    return calls + maker.gold(maker.rng.choice(sorted(maker.tasks)))


def of_other_task(maker: Maker, calls: list[Call]) -> list[Call] | None:
    return maker.gold(maker.rng.choice(sorted(maker.tasks)))


def plausible(maker: Maker, calls: list[Call]) -> list[Call] | None:
    return [maker.random_call() for _ in range(maker.rng.randint(1, 12))]


def implausible(maker: Maker, calls: list[Call]) -> list[Call] | None:
    made = [maker.random_call() for _ in range(maker.rng.randint(1, 9))]
    for call in made:
        for key in call["arguments"]:
            if maker.rng.random() < 0.4:
                call["arguments"][key] = wrong(call["arguments"][key], maker.rng)
    return made


CHANGES: tuple[Callable[[Maker, list[Call]], list[Call] | None], ...] = (
    *(shuffled, repeated, argument, wrong_type, missing, extra, unknown),
    *(noise, foreign, of_other_task, plausible, implausible),
)


def minus(maker: Maker) -> Iterator[Case]:
    """Yield the gold calls of each task of `base` without one call that changes a database."""
    for task in maker.splits["base"]:
        calls = maker.gold(task)
        for place, call in enumerate(calls):
            if call["name"] in mutating():
                yield maker.case("minus", task, calls[:place] + calls[place + 1 :])


def changed(maker: Maker, number: int, kinds: Sequence[str] = ()) -> Iterator[Case]:
    """Yield `number` cases of each kind of change, or of `kinds`.

    Some tasks allow no change of a kind, so up to 20 * `number` tasks are drawn.
    """
    for change in CHANGES:
        if kinds and change.__name__ not in kinds:
            continue
        made = 0
        for _ in range(20 * number):
            task = maker.rng.choice(maker.splits["base"])
            if made < number and (calls := change(maker, maker.gold(task))) is not None:
                made += 1
                yield maker.case(change.__name__, task, calls)


def texts(maker: Maker, number: int) -> Iterator[Case]:
    """Yield cases that differ in what the model says; half have tasks with expected texts."""
    rng, speaking = maker.rng, [task for task in maker.splits["base"] if maker.said(task)]
    for _ in range(number):
        task = rng.choice(speaking if speaking and rng.random() < 0.7 else maker.splits["base"])
        said, calls = maker.said(task), maker.gold(task)
        forms = [text.upper() for text in said], [f"{text[:1]},{text[1:]}" for text in said]
        finals = ["", "; ".join(said[:-1]), " ".join(said), *map(" ".join, forms)]
        case = maker.case("texts", task, calls, maker.end(rng.choice(finals)))
        if calls and rng.random() < 0.5:  # a text beside a call is a message as well
            rng.choice(case["messages"][:-1])["content"] = " ".join(said) or "One moment."
        if rng.random() < 0.15:  # the episode ends at the first text
            case["messages"].insert(0, {"content": "Hello.", "calls": []})
        yield case


def together(maker: Maker, number: int) -> Iterator[Case]:
    """Yield cases with several calls in a message, with `done` among them, or with no end."""
    for _ in range(number):
        task = maker.rng.choice(maker.splits["base"])
        calls, end = maker.gold(task), maker.end("; ".join(maker.said(task)))
        place = maker.rng.randrange(len(calls) + 1)
        head, tail = calls[:place], calls[place:]
        many = [{"content": None, "calls": tail}] if tail else []
        kinds = ["several calls", "cut", *["calls beside done"] * (maker.domain == "telecom")]
        kind = maker.rng.choice(kinds)
        if kind == "calls beside done":
            if maker.rng.random() < 0.3:  # with the dropped error there are 10
                head += [{"name": "no_such_tool", "arguments": {}}] * maker.rng.choice([8, 9])
                tail.insert(0, {"name": "no_such_tool", "arguments": {}})
            tail.insert(maker.rng.randrange(len(tail) + 1), dict(DONE, arguments={"x": 1}))
            many, end = [{"content": None, "calls": tail}], []
        elif kind == "cut":
            end = []
        yield maker.case(kind, task, head, [*many, *end])


def cases_of(maker: Maker, number: int) -> Iterator[Case]:
    """Yield the cases of a domain: gold of all tasks, the floors of test, and drawn cases.

    All cases of `minus` come in telecom, whose official score is fast, and 4 * `number` elsewhere.
    """
    for task in maker.tasks:
        yield maker.case("gold", task, maker.gold(task))
    yield from maker.floors("test")
    removed = list(minus(maker))
    most = len(removed) if maker.domain == "telecom" else min(4 * number, len(removed))
    yield from maker.rng.sample(removed, most)
    yield from changed(maker, number)
    yield from texts(maker, number)
    yield from together(maker, 2 * number)
