"""Classes that get calls as the model wrote them, tools called `done`, and the stop reason."""

import json
import re
from typing import Any, ClassVar

import pytest

from pipeline.config.settings import Config
from pipeline.environments import Domain, load_domains
from pipeline.environments.discovery import tool_methods, tool_schemas
from pipeline.environments.experts import run_expert
from pipeline.environments.task_checks import try_task
from pipeline.environments.task_sets import undocumented
from pipeline.environments.tools import is_done
from pipeline.evaluation.baselines import play_baselines
from pipeline.rollout.trajectory import StopReason
from tests.rollout.test_rollout import LIMITS
from tests.support import trl_forms
from tests.support.helpers import (
    call,
    make_task,
    played,
    say,
)
from tests.support.messages import refusal


def schema(name, description="Tool."):
    parameters = {"type": "object", "properties": {}}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


class Counter:
    """Notes every call, and answers in words of its own. `done` is one of its tools."""

    schemas = (schema("pay"), schema("done", ""))

    def reset(self, **row):
        self.calls = []

    def helper(self):
        """A public method that is no tool."""

    def call(self, name, arguments):
        self.calls.append([name, arguments])
        if name == "fail":
            raise ValueError("no money")
        if name == "done":
            self.done = True
        return f"Result: {name}", name not in ("pay", "done")

    def get_reward(self):
        self.reward_breakdown = {self.stop_reason: 1.0, json.dumps(self.calls): 0.0}
        return 1.0


class AsyncCounter(Counter):
    async def call(self, name, arguments):
        return super().call(name, arguments)


def play(*messages, limits=LIMITS, environment=Counter):
    return played([messages], {"desk": environment}, limits, [make_task()])[0][0]


def answers(trajectory):
    return [m["content"] for m in trajectory.messages if m["role"] == "tool"]


def calls_of(trajectory):
    return json.loads(list(trajectory.reward_breakdown)[1])


def test_its_schemas_are_its_tools():
    assert tool_schemas(Counter) == [*Counter.schemas]
    assert list(tool_methods(Counter)) == ["pay", "done"]
    assert undocumented(Counter) == ["done"]


NAMELESS = 'has no name: .*; write {"type": "function", "function": {"name": ...'
OF_OBJECT = "has the parameters .*; give a JSON schema of an object"


@pytest.mark.parametrize(
    ("schemas", "problem"),
    [
        *(([of], f"whose schemas[0] {NAMELESS}") for of in (3, None, {}, {"name": "pay"})),
        *(([{"function": of}], f"whose schemas[0] {NAMELESS}") for of in ("pay", {}, {"name": 3})),
        ([schema("pay"), {"function": {"name": ""}}], f"whose schemas[1] {NAMELESS}"),
        *(
            ([{"function": {"name": "pay", "parameters": of}}], f"whose schemas[0] {OF_OBJECT}")
            for of in (None, [], {"properties": None}, {"properties": {"a": 3}})
        ),
        ([schema("pay"), schema("pay")], "whose schemas have 'pay' twice; give each its own name"),
        ({"pay": schema("pay")}, "whose schemas are .*; give a list of JSON schemas in the class"),
        (property(lambda self: ()), "whose schemas are <property .*; give a list of JSON schemas"),
        ([schema("pay", "\ud800")], "ValueError: a schema holds what JSON cannot"),
        ([{"function": {"name": "pay", "x": {1}}}], "TypeError: Object of type set is not JSON"),
    ],
)
def test_schemas_that_no_model_could_get_are_refused_in_one_line(schemas, problem, monkeypatch):
    class Wrong(Counter):
        pass

    Wrong.schemas = schemas
    monkeypatch.setattr(trl_forms, "Wrong", Wrong, raising=False)
    data = {"domains": ["desk"], "environments": {"desk": f"{trl_forms.__name__}:Wrong"}}
    said = refusal(load_domains, Config(data=data))
    pattern = ".*".join(map(re.escape, problem.split(".*")))
    assert re.search(rf"^environments: desk: got '[^']*', .*{pattern}", said), said


@pytest.mark.parametrize("environment", [Counter, AsyncCounter])
def test_a_call_arrives_as_the_model_wrote_it(environment):
    trajectory = play(
        call("pay", amount="2.0"),
        call("pay"),
        call("fly", to=None),
        say("bye"),
        environment=environment,
    )
    assert calls_of(trajectory) == [["pay", {"amount": "2.0"}], ["pay", {}], ["fly", {"to": None}]]
    assert answers(trajectory) == ["Result: pay", "Result: pay", "Result: fly"]
    assert trajectory.tools == {"pay": [2, 0], "unknown": [1, 1]}
    assert trajectory.num_tool_errors == 0


def test_an_exception_of_the_call_is_shown_to_the_model():
    trajectory = play(call("fail"), say("bye"))
    assert answers(trajectory) == [json.dumps({"error": "no money"})]
    assert (trajectory.num_tool_errors, trajectory.tools) == (1, {"unknown": [1, 1]})


def test_a_tool_called_done_ends_the_episode_only_when_it_is_called():
    environment = Counter()
    environment.reset()
    assert not is_done(environment)
    trajectory = play(call("pay"), call("done"), say("never said"))
    assert answers(trajectory) == ["Result: pay", "Result: done"]
    assert trajectory.stop_reason is StopReason.COMPLETED


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([say("bye")], "completed"),
        ([call("pay")] * LIMITS.max_turns, "max_turns"),
        ([say("<tool_call>")], "malformed_call"),
    ],
)
def test_the_reward_is_asked_with_the_stop_reason(messages, reason):
    trajectory = play(*messages, limits=LIMITS.model_copy(update={"max_malformed_calls": 0}))
    assert trajectory.stop_reason == reason
    assert next(iter(trajectory.reward_breakdown)) == reason


def roles_of(environment):
    return [message["role"] for message in environment.messages]


class Talker(Counter):
    """Keeps what the reward was asked with."""

    asked: ClassVar[list[Any]] = []

    def call(self, name, arguments):
        return "long " * 100 if arguments.get("long") else "ok", False

    def get_reward(self):
        self.asked.append(self)
        self.messages[-1]["content"] += "?"  # the record does not change
        return 1.0


def test_the_reward_is_asked_with_the_whole_conversation():
    Talker.asked.clear()
    trajectory = play(call("pay", to="a"), say("bye"), environment=Talker)
    task = make_task(payload=json.dumps({"goal": {"a": 1}}))
    run_expert(Talker(), lambda agent, goal: agent.call("pay") and "bye", task)
    domain = Domain(name="desk", environment=Talker, baselines=lambda _: {"pay": [("pay", {})]})
    play_baselines({"desk": domain}, {"desk": [task]})
    try_task(domain, task, "desk", 5)
    played, shown, nothing, paid, tried = Talker.asked
    whole = ["system", "user", "assistant", "tool", "assistant"]
    assert roles_of(played) == roles_of(shown) == roles_of(paid) == whole
    assert roles_of(nothing) == ["system", "user", "assistant"]
    assert roles_of(tried) == ["system", "user"]
    assert [m["content"] for m in trajectory.messages[2:]] == ["", "ok", "bye"]
    assert played.messages[2]["tool_calls"][0]["function"]["arguments"] == {"to": "a"}


AGAIN = [call("pay", to="a", by=1), call("pay", by=1, to="a")]


@pytest.mark.parametrize("environment", [Counter, AsyncCounter])
@pytest.mark.parametrize(
    ("most", "messages", "reason", "num_calls"),
    [
        (0, [*AGAIN, *AGAIN, say("bye")], "completed", 4),
        (3, [*AGAIN, *AGAIN], "repeated_call", 3),
        (2, [*AGAIN, say("bye")], "repeated_call", 2),
        (2, [AGAIN[0], call("pay", to="a", by="1"), AGAIN[1], say("bye")], "completed", 3),
        (2, [call("fly"), call("fly")], "repeated_call", 2),
        (2, [call("done"), call("done")], "completed", 1),
    ],
)
def test_equal_calls_in_a_row_end_an_episode(most, messages, reason, num_calls, environment):
    limits = LIMITS.model_copy(update={"max_repeated_calls": most})
    trajectory = play(*messages, limits=limits, environment=environment)
    assert trajectory.stop_reason == next(iter(trajectory.reward_breakdown)) == reason
    assert len(calls_of(trajectory)) == len(answers(trajectory)) == num_calls


class Held(Counter):
    """Holds something until it is closed; the model cannot close it."""

    open = 0

    def reset(self, **row):
        super().reset()
        type(self).open += 1

    def close(self):
        type(self).open -= 1
        if "fail" in dict(self.calls):
            raise OSError("the line is dead")


class HeldAsync(Held):
    async def close(self):
        super().close()


@pytest.mark.parametrize("environment", [Held, HeldAsync])
@pytest.mark.parametrize("messages", [[say("bye")], [call("done")], [call("fail"), say("bye")]])
def test_what_an_environment_holds_is_closed_when_its_episode_has_ended(environment, messages):
    trajectory = play(*messages, environment=environment)
    assert environment.open == 0
    assert (trajectory.reward, trajectory.stop_reason) == (1.0, StopReason.COMPLETED)
