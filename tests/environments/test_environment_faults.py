"""What environments do wrong is data: calls that raise or never return, and odd things returned.

A call "hangs" where it waits for an event that the test sets only at its end.
"""

import asyncio
import json
import math
import re
import sys
import threading
from collections import deque
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import BaseModel

from pipeline.config.settings import RolloutSettings
from pipeline.environments.calls import run_here
from pipeline.environments.faults import Outage
from pipeline.environments.tools import ToolError, answer_call
from pipeline.rollout.trajectory import StopReason
from tests.support.helpers import (
    Desk,
    call,
    make_task,
    played,
    say,
)

SHORT_S = 0.2  # the deadline where nothing but the call that hangs has to be faster
DEADLINE_S = 0.5  # where other calls have to be
LIMITS = RolloutSettings(
    max_turns=6, max_tokens_per_turn=500, max_tokens=2000, call_timeout=DEADLINE_S
)


@pytest.fixture
def never():
    """An event that is set when the test is over, so that nothing waits for it any longer."""
    event = threading.Event()
    yield event
    event.set()


def play(environments, scripts, limits=LIMITS):
    """One episode per script: its domain, what its payload holds, its messages."""
    tasks = [
        make_task(f"t{n}", domain=domain, payload=json.dumps(payload))
        for n, (domain, payload, _) in enumerate(scripts)
    ]
    return played([script for _, _, script in scripts], environments, limits, tasks)[0]


def play_one(environment, *messages, **payload):
    return play({"desk": environment}, [("desk", payload, messages)])[0]


class SyncDesk(Desk):
    wait = None  # Desk's async tool: without it calls are made in the thread of the rollout


# Episodes


class Troubled(SyncDesk):
    """Hangs, is down or breaks where its payload says."""

    never: threading.Event

    def __init__(self):
        self.user = SimpleNamespace(reply=lambda message: self._meet("reply"))

    def _meet(self, where):
        if self._payload.get("hangs") == where:
            self.never.wait()
        if self._payload.get("down") == where:
            raise Outage("no connection")
        if self._payload.get("breaks") == where:
            raise OSError("no connection")

    def reset(self, **row):
        addition = super().reset(**row)
        self._meet("reset")
        return addition

    def look(self, item: str) -> str:
        """Look an item up.

        Args:
            item: Its name.
        """
        self._meet("look")
        return item

    def get_reward(self) -> float:
        self._meet("get_reward")
        return super().get_reward()


class TroubledBeside(Troubled):
    concurrent = True


class HangingAsync(Troubled):
    """Hangs as well, but the event loop could go on."""

    async def _meet(self, where):
        if self._payload.get("hangs") == where:
            await asyncio.Event().wait()

    async def reset(self, **row):
        addition = Desk.reset(self, **row)
        await self._meet("reset")
        return addition

    async def look(self, item: str) -> str:
        """Look an item up.

        Args:
            item: Its name.
        """
        await self._meet("look")
        return item

    async def get_reward(self) -> float:
        await self._meet("get_reward")
        return Desk.get_reward(self)


@pytest.mark.parametrize("environment", [Troubled, TroubledBeside, HangingAsync])
def test_an_episode_whose_call_hangs_ends_with_reward_0_and_is_kept(
    environment, never, monkeypatch
):
    monkeypatch.setattr(Troubled, "never", never, raising=False)
    places = ("reset", "look", "reply", "get_reward")
    script = [call("look", item="lamp"), say("done")]
    # A domain each: hanging in a row is another test.
    scripts = [(place, {"hangs": place}, script) for place in places]
    scripts = [pair for n, s in enumerate(scripts) for pair in (s, (places[n], {}, script))]
    trajectories = play(dict.fromkeys(places, environment), scripts)
    assert [t.task_id for t in trajectories] == [f"t{n}" for n in range(8)]
    assert [t.error for t in trajectories[::2]] == [
        f"CallTimeout: {place} took more than 0.5 s" for place in places
    ]
    assert {t.stop_reason for t in trajectories[::2]} == {StopReason.ENVIRONMENT_ERROR}
    assert [t.reward for t in trajectories] == [0.0, 1.0] * 4
    assert [t.left_out for t in trajectories[::2]] == ["reset", "", "reply", ""]
    assert [t.left_out for t in trajectories[1::2]] == [""] * 4
    assert [t.num_turns for t in trajectories[::2]] == [0, 1, 2, 2]
    assert [t.num_tool_errors for t in trajectories] == [0] * 8


class Breaking(SyncDesk):
    """Its tools fail in different ways."""

    def refuse(self) -> str:
        """Refuse, which is what it is to do."""
        raise ToolError("not allowed")

    def crash(self) -> str:
        """Crash."""
        raise KeyError("drawer")

    def leave(self) -> str:
        """Leave."""
        sys.exit("gone home")

    def tangle(self) -> list:
        """Return something that is no JSON."""
        tangled: list = []
        tangled.append(tangled)
        return tangled

    def pour(self) -> str:
        """Return far too much."""
        return "x" * 10_000_001


def test_exceptions_of_a_tools_own_code_are_shown_to_the_model_and_counted():
    names = ("refuse", "crash", "leave", "tangle", "pour", "look", "dance")
    message = call(names[0])
    for name in names[1:]:
        message["tool_calls"] += call(name)["tool_calls"]
    trajectory = play_one(Breaking, message, say("done"))
    assert [m["content"] for m in trajectory.messages if m["role"] == "tool"] == [
        '{"error": "not allowed"}',
        '{"error": "\'drawer\'"}',
        '{"error": "gone home"}',
        '{"error": "Circular reference detected"}',
        '{"error": "returned 10000001 characters, the limit is 10000000"}',
        '{"error": "wrong arguments: look takes item, times"}',
        '{"error": "unknown tool dance"}',
    ]
    assert trajectory.num_tool_errors == trajectory.record().num_tool_errors == 4
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.COMPLETED, 1.0)


def test_the_first_failure_of_each_call_is_told_at_once_with_its_line(capsys):
    scripts = [
        ("desk", {}, [call("refuse"), call("crash"), say("done")]),
        ("desk", {"down": "reset"}, []),
        ("shop", {"breaks": "reset"}, []),
        ("shop", {"breaks": "reset"}, []),
    ]
    play({"desk": type("Both", (Breaking, Troubled), {}), "shop": Troubled}, scripts)
    lines = capsys.readouterr().err.splitlines()
    assert sorted(re.sub(r"line \d+", "line N", line) for line in lines) == [
        "warning: desk: crash failed on task t0: KeyError: 'drawer' "
        '(test_environment_faults.py, line N: raise KeyError("drawer"))',
        "warning: desk: reset failed on task t1: Outage: no connection "
        '(test_environment_faults.py, line N: raise Outage("no connection"))',
        "warning: shop: reset failed on task t2: OSError: no connection "
        '(test_environment_faults.py, line N: raise OSError("no connection"))',
    ]


@pytest.mark.parametrize(
    ("returned", "reward", "error"),
    [
        (True, 1.0, ""),
        (1, 1.0, ""),
        (torch.tensor(0.5), 0.5, ""),
        (-7.2, -7.2, ""),
        (-1e30, -1e30, ""),
        (2e30, 0.0, "ValueError: get_reward returned 2e+30, not a number up to 1e+30"),
        (math.nan, 0.0, "ValueError: get_reward returned nan, not a number up to 1e+30"),
        (-math.inf, 0.0, "ValueError: get_reward returned -inf, not a number up to 1e+30"),
        (
            torch.tensor(math.nan),
            0.0,
            "ValueError: get_reward returned nan, not a number up to 1e+30",
        ),
        ("0.5", 0.0, "TypeError: get_reward returned str, not a number"),
        (bytearray(b"1"), 0.0, "TypeError: get_reward returned bytearray, not a number"),
        (1j, 0.0, "TypeError: get_reward returned complex, not a number"),
        (np.complex128(1), 0.0, "TypeError: get_reward returned complex128, not a number"),
        (10**400, 0.0, "OverflowError: int too large to convert to float"),
        (
            None,
            0.0,
            "TypeError: float() argument must be a string or a real number, not 'NoneType'",
        ),
        ([1.0], 0.0, "TypeError: float() argument must be a string or a real number, not 'list'"),
        (
            torch.ones(2),
            0.0,
            "ValueError: only one element tensors can be converted to Python scalars",
        ),
    ],
)
def test_a_reward_that_is_no_finite_number_is_the_environments_fault(returned, reward, error):
    class Odd(SyncDesk):
        def get_reward(self) -> float:
            return returned

    trajectory = play_one(Odd, say("done"))
    assert type(trajectory.reward) is float
    assert (trajectory.reward, trajectory.error) == (reward, error)
    assert (trajectory.stop_reason is StopReason.ENVIRONMENT_ERROR) == bool(error)


@pytest.mark.parametrize("environment", [Troubled, TroubledBeside])
def test_only_what_the_policys_own_calls_bring_about_is_held_against_it(environment):
    places = ("reset", "look", "reply", "get_reward")
    script = [call("look", item="lamp"), say("done")]
    scripts = [("desk", {kind: at}, script) for at in places for kind in ("down", "breaks")]
    trajectories = play({"desk": environment}, scripts)
    assert [t.left_out for t in trajectories] == [
        *("outage", "reset", "outage", "", "outage", "reply", "outage", "")
    ]
    told, shown = trajectories[2], trajectories[3]  # a tool's outage is not shown to the model
    assert told.stop_reason is StopReason.ENVIRONMENT_ERROR and "outage" in told.record().left_out
    assert told.error.startswith("Outage: no connection")
    assert not any(m["role"] == "tool" for m in told.messages) and told.num_tool_errors == 0
    assert shown.stop_reason is StopReason.COMPLETED and shown.reward == 1.0
    assert trajectories[7].reward == 0.0 and trajectories[7].error.startswith(
        "OSError: no connection (test_environment_faults.py, line "
    )


class Clerk:
    def reply(self, message):
        return None if message == "done" else "half a \ud800"


class Halved(SyncDesk):
    def __init__(self):
        self.user = Clerk()

    def look(self, item: str) -> str:
        """Look an item up.

        Args:
            item: Its name.
        """
        raise ValueError("half a \ud800")


def test_halves_of_characters_never_reach_tokenizers_or_files():
    script = [call("look", item="lamp"), say("which?"), say("done")]
    trajectory = play_one(Halved, *script, addition=", half a \ud800")
    assert [m["content"] for m in trajectory.messages if m["role"] in ("user", "tool")] == [
        "hello, half a ?",
        '{"error": "half a ?"}',
        "half a ?",
    ]


class Shy(SyncDesk):
    @property
    def user(self):
        raise RuntimeError("nobody is there")


class Unmade(SyncDesk):
    def __init__(self):
        raise OSError("no room for a desk")


@pytest.mark.parametrize(
    ("environment", "error"),
    [
        (Shy, RuntimeError("nobody is there")),
        (Unmade, OSError("no room for a desk")),
    ],
)
def test_attributes_and_constructors_that_raise_are_faults_as_well(environment, error):
    trajectory = play_one(environment, call("look", item="lamp"), say("done"))
    assert trajectory.stop_reason is StopReason.ENVIRONMENT_ERROR
    kind = type(error).__name__
    raised = re.escape(f'raise {kind}("{error}")')
    said = rf"{kind}: {error} \(test_environment_faults\.py, line \d+: {raised}\)"
    assert trajectory.left_out and re.fullmatch(said, trajectory.error)


def test_a_domain_that_hangs_again_and_again_is_not_called_any_more(never):
    resets = []

    class Down(SyncDesk):
        def reset(self, **row):
            resets.append(row["id"])
            never.wait()

    scripts = [("down", {}, [])] * 6 + [("up", {}, [say("done")])]
    limits = LIMITS.model_copy(update={"call_timeout": SHORT_S})
    trajectories = play({"down": Down, "up": SyncDesk}, scripts, limits)
    assert resets == ["t0", "t1", "t2"]
    assert [t.stop_reason for t in trajectories[:6]] == [StopReason.ENVIRONMENT_ERROR] * 6
    assert [t.error for t in trajectories[2:4]] == [
        "CallTimeout: reset took more than 0.2 s",
        "CallTimeout: down is not called again in this rollout, after 3 times in a row that took "
        "more than 0.2 s",
    ]
    assert [t.left_out for t in trajectories] == ["reset"] * 3 + ["outage"] * 3 + [""]
    assert trajectories[6].reward == 1.0
    play({"down": Down}, scripts[:1], limits)
    assert resets == ["t0", "t1", "t2", "t0"]


# Progress, and stopping


def test_episodes_that_still_wait_at_the_rollouts_deadline_end_as_if_they_got_no_answer():
    class Slow(HangingAsync):
        async def get_reward(self) -> float:
            if self._payload.get("hangs") == "get_reward":
                await asyncio.sleep(3 * DEADLINE_S)  # scoring has the deadline of a call alone
            return Desk.get_reward(self)

    script = [call("look", item="lamp"), say("done")]
    scripts = [("desk", {"hangs": at}, script) for at in ("reset", "look", "reply", "get_reward")]
    limits = LIMITS.model_copy(update={"call_timeout": 60, "rollout_timeout": 2 * DEADLINE_S})
    trajectories = play({"desk": Slow}, [*scripts, ("desk", {}, script)], limits)
    assert [t.error for t in trajectories] == [
        *(f"CallTimeout: {at} did not end before rollout_timeout" for at in ("reset", "look")),
        *("CallTimeout: reply did not end before rollout_timeout", "", ""),
    ]
    failed, completed = StopReason.ENVIRONMENT_ERROR, StopReason.COMPLETED
    assert [t.stop_reason for t in trajectories] == [failed] * 3 + [completed] * 2
    assert [t.left_out for t in trajectories] == ["reset", "", "reply", "", ""]
    assert [t.reward for t in trajectories] == [0.0, 0.0, 0.0, 1.0, 1.0]


# What tools return


@dataclass
class Ticket:
    number: int
    due: date
    tags: set[str]


class Colour(Enum):
    RED = "red"


class Order(BaseModel):
    ids: set[str]
    at: datetime


class Named:
    def __str__(self):
        return "a lamp"


RESULTS = [
    # as before
    *(("plain é", "plain é"), ({"a": 1, "b": None}, '{"a": 1, "b": null}'), (3, "3")),
    *(([1, 2.5, True, (1,)], "[1, 2.5, true, [1]]"), (None, "null"), ({1: 2}, '{"1": 2}')),
    *((Decimal("1.50"), '"1.50"'), (Path("/a"), '"/a"'), (Named(), '"a lamp"')),
    *((timedelta(days=1), '"1 day, 0:00:00"'), (np.float64(1.5), "1.5")),
    # as JSON
    (
        Ticket(1, date(2024, 5, 1), {"b", "a", "c"}),
        '{"number": 1, "due": "2024-05-01", "tags": ["a", "b", "c"]}',
    ),
    (
        [Order(ids={"b", "a"}, at=datetime(2024, 5, 1, 12))],
        '[{"ids": ["a", "b"], "at": "2024-05-01T12:00:00"}]',
    ),
    *(({10, 9, "a", None}, '[9, 10, "a", null]'), (time(3), '"03:00:00"')),
    (frozenset({frozenset("ab"), frozenset("c")}), '[["a", "b"], ["c"]]'),
    *(({"is": Colour.RED}, '{"is": "red"}'), (datetime(2024, 5, 1), '"2024-05-01T00:00:00"')),
    *((np.float32(0.5), "0.5"), (np.bool_(True), "true"), (np.ones((1, 2)), "[[1.0, 1.0]]")),
    *((torch.tensor([1, 2]), "[1, 2]"), (torch.tensor(3), "3")),
    *((b"text", '"text"'), (MappingProxyType({"a": 1}), '{"a": 1}'), (range(2), "[0, 1]")),
    *((deque([1]), "[1]"), ({"a": 1}.keys(), '["a"]'), ({"a": 1}.items(), '[["a", 1]]')),
]


def answer_of(result, environment=SyncDesk):
    class Answers(environment):
        def look(self, item: str) -> str:
            return result

        def call(self, name, arguments):
            return result, False

    return run_here(answer_call, Answers(), "look", {"item": "lamp"})


class Raw(SyncDesk):
    schemas = ({"type": "function", "function": {"name": "look", "parameters": {}}},)


@pytest.mark.parametrize("environment", [SyncDesk, Raw])
@pytest.mark.parametrize(("result", "text"), RESULTS)
def test_what_a_tool_returns_is_json_where_it_can_be(result, text, environment):
    answer = answer_of(result, environment)
    assert (answer.content, answer.is_error, answer.raised) == (text, False, "")


@pytest.mark.parametrize(
    ("result", "what"),
    [
        (object(), "an object of builtins.object"),
        ({"a": [Desk()]}, "an object of tests.support.helpers.Desk"),
        ((n for n in "ab"), "an object of builtins.generator"),
        (Image.new("RGB", (2, 2)), "an object of PIL.Image.Image"),
        (b"\xff\x00", "2 bytes that are no UTF-8 text"),
    ],
)
def test_no_address_in_memory_reaches_the_model_and_the_user_is_told(result, what):
    answer = answer_of(result)
    told = f" returned {what}; return texts, numbers, lists, dicts or dataclasses"
    assert answer.is_error and answer.raised.endswith(told)
    assert answer.raised.startswith("TypeError: look (test_environment_faults.py, line ")
    assert "0x" not in answer.content
    assert told in json.loads(answer.content)["error"]
