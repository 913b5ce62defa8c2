"""Classes that get calls as the model wrote them, tools called `done`, and the stop reason."""

import json

import pytest

from pipeline.environments.experts import run_expert
from pipeline.environments.tools import (
    call_tool,
    is_done,
    tool_methods,
    tool_schemas,
)
from pipeline.errors import UserError
from pipeline.preflight.tasks import undocumented
from pipeline.rollout.rollout import Rollout, RolloutRequest
from pipeline.rollout.trajectory import StopReason
from scripts.bench.trl_adapter import factories
from tests.rollout.test_rollout import LIMITS
from tests.support.helpers import ScriptedSampler, call, chat, make_task, say


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
    rollout = Rollout(ScriptedSampler({0: messages}), chat(), {"desk": environment}, limits)
    return rollout([RolloutRequest(task=make_task(payload="{}"), trial=0, key=0)])[0]


def answers(trajectory):
    return [m["content"] for m in trajectory.messages if m["role"] == "tool"]


def calls_of(trajectory):
    return json.loads(list(trajectory.reward_breakdown)[1])


def test_its_schemas_are_its_tools():
    assert tool_schemas(Counter) == [*Counter.schemas]
    assert list(tool_methods(Counter)) == ["pay", "done"]
    assert undocumented(Counter) == ["done"]


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


def test_a_result_that_is_no_pair_is_an_error_of_the_tool():
    class Wrong(Counter):
        def call(self, name, arguments):
            return 3

    environment = Wrong()
    environment.reset()
    assert "error" in json.loads(call_tool(environment, "pay", {}))


def test_a_tool_called_done_ends_the_episode_only_when_it_is_called():
    environment = Counter()
    environment.reset()
    assert not is_done(environment)
    trajectory = play(call("pay"), call("done"), say("never said"))
    assert answers(trajectory) == ["Result: pay", "Result: done"]
    assert trajectory.stop_reason is StopReason.COMPLETED


class Lamp:
    """`done` is a method, so a tool."""

    def reset(self, **row):
        self.final_message = ""

    def done(self):
        """Say that the work is done."""
        self.done = True
        return "ok"

    def get_reward(self):
        return float(self.final_message == "bye")


def test_an_expert_ends_with_its_message_where_a_tool_is_called_done():
    task = make_task(payload=json.dumps({"goal": {"a": 1}}))
    messages, reward = run_expert(Lamp(), lambda agent, goal: "bye", task)
    assert (messages[-1]["content"], reward) == ("bye", 1.0)


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


def test_trl_cannot_make_raw_calls():
    with pytest.raises(UserError, match="takes raw calls"):
        factories({"desk": Counter})
