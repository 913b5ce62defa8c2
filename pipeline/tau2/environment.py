"""Episodes of τ²-bench: the checkout's tools on a database of the episode, and exact rewards.

The reward is the product over the task's `reward_basis`, by the rules of the official evaluator
(`tau2.evaluator`). The official evaluator replays the recorded calls on new databases; an episode
here is scored on its own live database, which is the same by construction.

The oddities of the official rules are the same here; `docs/tau2.md` lists them.
"""

import copy
import json
import pickle
import re
from itertools import takewhile
from typing import Any, ClassVar

from pipeline.customers import Scenario, ScriptedCustomer, spoken
from pipeline.tau2.checkout import Checkout
from pipeline.tau2.overlay import Base, State, changes_of, tables_of

MAX_ERRORS = 10  # as the official orchestrator's default
STOPPED = "###STOP###"
DONE = {
    "type": "function",
    "function": {
        "name": "done",
        "description": "End the work on the ticket: the problem is solved or transferred.",
        "parameters": {"properties": {}, "title": "parameters", "type": "object"},
    },
}


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
        self._base = None if self.has_phone else Base(databases[0])
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
        if self._base is not None:
            tools = type(official.tools)(self._base.overlay())
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


def parts_of(task: Any, has_judge: bool = False) -> list[str]:
    """Return the parts of a task's reward that need no judge.

    Without a judge, COMMUNICATE stands in for NL_ASSERTION.
    """
    criteria = task.evaluation_criteria
    basis = {part.value for part in criteria.reward_basis} if criteria is not None else set()
    if "NL_ASSERTION" in basis and criteria.nl_assertions and not has_judge:
        basis.add("COMMUNICATE")
    return [part for part in ("DB", "ENV_ASSERTION", "ACTION", "COMMUNICATE") if part in basis]


class Tau2Environment:
    """An episode. `domain.py` makes a subclass for each domain, with `world` and `schemas`."""

    uses_random_state = has_judge = False
    world: ClassVar[World]
    schemas: ClassVar[list[dict[str, Any]]]
    reward_parts: ClassVar[dict[str, str]] = {
        "graded": "the episode ended by itself, with fewer than 10 errors of tools",
        "DB": "the database equals that after the gold actions",
        "ENV_ASSERTION": "all assertions about line and phone hold",
        "ACTION": "every gold action was called",
        "COMMUNICATE": "the model told the customer every expected text",
    }

    stop_reason = ""
    messages: tuple[dict[str, Any], ...] | list[dict[str, Any]] = ()

    def reset(self, payload: str, **row: Any) -> None:
        task_id = json.loads(payload)["id"]
        self.done = False
        self._num_errors = 0
        self._calls: list[tuple[str, dict[str, Any]]] = []
        self._task = self.world.task(task_id)
        self._environment = self.world.start(self._task)

    def call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        if name == "done" and self.world.is_solo:
            self.done = True
            return STOPPED, False
        self._calls.append((name, arguments))
        text, is_error = self.world.call(self._environment, name, arguments)
        self._num_errors += is_error
        self.done = self._num_errors >= MAX_ERRORS
        return text, is_error

    def get_reward(self) -> float:
        self._take_back_calls_beside_done()
        self.reward_breakdown: dict[str, float] = {"graded": float(self._is_graded)}
        self.difference: dict[str, list[str]] = {}
        if not self._is_graded:
            return 0.0
        criteria = self._task.evaluation_criteria
        reward = 1.0
        for part in parts_of(self._task, self.has_judge):
            self.reward_breakdown[part] = float(getattr(self, f"_{part.lower()}")(criteria))
            reward *= self.reward_breakdown[part]
        return reward

    @property
    def _is_graded(self) -> bool:
        if self._num_errors >= MAX_ERRORS:
            return False
        return self.done if self.world.is_solo else self.stop_reason == "completed"

    def _take_back_calls_beside_done(self) -> None:
        results = list(takewhile(lambda message: message["role"] == "tool", self.messages[::-1]))
        written = self.messages[-len(results) - 1 : len(self.messages) - len(results)]
        names = [call["function"]["name"] for m in written for call in m.get("tool_calls") or ()]
        count = sum(message["name"] != "done" for message in results)
        if self.world.is_solo and count and "done" in names:
            self._calls = self._calls[:-count]
            self.done = True
            self._environment = start = self.world.start(self._task)
            self._num_errors = sum(self.world.call(start, *call)[1] for call in self._calls)

    def _db(self, criteria: Any) -> bool:
        if criteria.actions is None and criteria.env_assertions is None:
            return True
        ours = changes_of(self._environment.tools.db)
        gold = self.world.gold_state(self._task)
        for place in sorted(ours.keys() | gold.keys()):
            mine = ours.get(place, "unchanged")
            theirs = gold.get(place, "unchanged")
            if mine != theirs:
                self.difference["/".join(place)] = [mine or "deleted", theirs or "deleted"]
        return ours == gold

    def _env_assertion(self, criteria: Any) -> bool:
        failed = [a for a in criteria.env_assertions or () if not self._holds(a)]
        for assertion in failed:
            expected = f"{assertion.assert_value} for {assertion.arguments}"
            self.difference[assertion.func_name] = [str(not assertion.assert_value), expected]
        return not failed

    def _holds(self, assertion: Any) -> bool:
        try:
            check = self._environment.run_env_assertion
            return bool(check(assertion, raise_assertion_error=False))
        except Exception:  # tools store any argument, such as a number for the phone's APN settings
            return False

    def _action(self, criteria: Any) -> bool:
        calls = [self.world.package.ToolCall(name=n, arguments=a) for n, a in self._calls]
        missing = [
            action
            for action in criteria.actions or ()
            if not any(action.compare_with_tool_call(call) for call in calls)
        ]
        self.difference |= {a.name: ["not called", f"called with {a.arguments}"] for a in missing}
        return not missing

    def _communicate(self, criteria: Any) -> bool:
        said = [m["content"] for m in self.messages if m["role"] == "assistant" and m["content"]]
        texts = [spoken(text).lower().replace(",", "") for text in said]
        missing = [
            info
            for info in criteria.communicate_info or ()
            if not any(info.lower() in text for text in texts)
        ]
        self.difference |= {f"said {info!r}": ["no", "yes"] for info in missing}
        return not missing


class TalkingEnvironment(Tau2Environment):
    """An episode with a customer who talks. The customer ends the episode.

    The customer is a ScriptedCustomer until other code replaces `user`, by the `scenario`. The
    customer's own tools are those of the phone, in telecom.
    """

    def reset(self, payload: str, **row: Any) -> str:  # type: ignore[override]
        super().reset(payload, **row)
        self.user = ScriptedCustomer(self.world.checkout.instructions(self._task.id))
        return self.user.first_words

    @property
    def scenario(self) -> Scenario:
        checkout = self.world.checkout
        return Scenario(
            system=checkout.customer_prompt(str(self._task.user_scenario)),
            greeting=checkout.greeting,
            schemas=self.world.customer_schemas,
            call=self.call_of_customer,
        )

    def call_of_customer(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        self._calls.append((name, arguments))
        return self.world.call(self._environment, name, arguments, "user")
