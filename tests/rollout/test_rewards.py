"""Reward functions are called as TRL calls them, and what they return becomes the reward."""

import asyncio
import functools
import itertools
import json
import math
import random
import time
from decimal import Decimal
from fractions import Fraction
from functools import partial
from urllib.error import HTTPError

import httpx
import numpy as np
import pytest
import torch

from pipeline.config.rules import check
from pipeline.config.settings import Config
from pipeline.data.tasks import Task
from pipeline.environments import Domain
from pipeline.environments.calls import Calls
from pipeline.environments.single_turn import SingleTurnEnvironment
from pipeline.rollout import rewards as rewards_module
from pipeline.rollout.rewards import (
    RewardFunction,
    RewardFunctions,
    load_reward_functions,
)
from pipeline.rollout.trajectory import StopReason
from tests.rollout.test_rollout import LIMITS
from tests.support.helpers import (
    Desk,
    played,
    say,
)
from tests.support.messages import refusal, says


def task_of(name="0", prompt="2 + 2", **columns):
    is_text = isinstance(prompt, str)
    messages = [{"role": "user", "content": prompt}] if is_text else prompt
    found = {"domain": "sums", "id": name, "prompt": tuple(messages), "payload": "{}"}
    return Task(**found, columns=json.dumps(columns), is_text=is_text)


def play(functions, answers=("4", "5"), tasks=None, weights=None, seconds=5.0, environment=None):
    """Trajectories of one answer per episode, and the RewardFunctions that scored them."""
    tasks = tasks or [task_of(answer=4)] * len(answers)
    weights = weights or [1.0] * len(functions)
    made = [
        RewardFunction(getattr(function, "__name__", f"function{number}"), function, weight)
        for number, (function, weight) in enumerate(zip(functions, weights, strict=True))
    ]
    rewards = RewardFunctions(made, seconds)
    environments = {"sums": environment or SingleTurnEnvironment}
    said = [[say(answer)] for answer in answers]
    return played(said, environments, LIMITS, tasks, rewards=rewards)[0], rewards


def numbers(trajectories):
    return [trajectory.reward for trajectory in trajectories]


# The forms of functions that TRL documents


def by_tokens(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def by_content(completions, **kwargs):
    return [float(completion[0]["content"] == "4") for completion in completions]


def by_reference(completions, answer, **kwargs):
    return [float(text == str(wanted)) for text, wanted in zip(completions, answer, strict=True)]


async def by_judge(prompts, completions, **kwargs):
    await asyncio.sleep(0.001)
    return [float(prompt == "2 + 2") for prompt in prompts]


class Judge:
    """A callable object; `is_strict` is bound by its constructor."""

    def __init__(self, least):
        self.least = least

    def __call__(self, completions, **kwargs):
        return [float(len(text) >= self.least) for text in completions]


def above(limit, completions, **kwargs):
    return [float(int(text) > limit) for text in completions]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (by_tokens, [2.0, 3.0]),
        (by_reference, [1.0, 0.0]),
        (by_judge, [1.0, 1.0]),
        (Judge(2), [0.0, 1.0]),
        (functools.partial(above, 5), [0.0, 1.0]),
        (lambda completions: (float(text) for text in completions), [4.0, 55.0]),
        (lambda completions, **_: np.array([1, 2]), [1.0, 2.0]),
        (lambda completions, **_: torch.tensor([1.5, 2.0]), [1.5, 2.0]),
        (lambda completions, **_: [np.float32(0.5), torch.tensor(2)], [0.5, 2.0]),
        (lambda completions, **_: [True, False], [1.0, 0.0]),
    ],
)
def test_a_function_of_any_form_scores_the_completions(function, expected):
    trajectories, _ = play([function], answers=("4", "55"))
    assert numbers(trajectories) == expected
    assert {t.stop_reason for t in trajectories} == {StopReason.COMPLETED}


def test_conversations_stay_conversations_and_may_be_changed():
    prompt = [{"role": "system", "content": "sums"}, {"role": "user", "content": "2 + 2"}]

    def spoils(prompts, completions, **_):
        prompts[0][1]["content"] = completions[0][0]["content"] = "spoiled"
        return [0.0, 0.0]

    trajectories, _ = play([spoils, by_content], tasks=[task_of(prompt=prompt)] * 2)
    assert numbers(trajectories) == [1.0, 0.0]
    assert trajectories[0].messages[1:] == [prompt[1], say("4")]


def test_a_completion_without_tools_is_the_whole_text():
    text = '<think>so</think><answer>4</answer> <tool_call>{"name": 1'
    seen = []
    trajectories, _ = play([lambda completions: seen.extend(completions) or [1.0]], [text])
    assert (seen, trajectories[0].num_malformed_calls, trajectories[0].num_turns) == ([text], 0, 1)


def test_arguments_are_lists_with_one_entry_per_completion():
    seen = {}

    def watch(**kwargs):
        seen.update(kwargs)
        return [0.0, 0.0]

    (first, _), made = play([watch], tasks=[task_of(answer=4, level={"deep": [1, None]})] * 2)
    assert seen.pop("trainer_state") is made.trainer_state
    assert callable(seen.pop("log_extra"))
    assert callable(seen.pop("log_metric"))
    kinds = {type(environment) for environment in seen.pop("environments")}
    assert kinds == {SingleTurnEnvironment}
    assert seen.pop("completion_ids")[0] == first.completion_ids
    assert seen == {
        **{"prompts": ["2 + 2"] * 2, "completions": ["4", "5"], "answer": [4, 4]},
        **{"level": [{"deep": [1, None]}] * 2, "domain": ["sums"] * 2, "id": ["0"] * 2},
        **{"payload": ["{}"] * 2, "family": [""] * 2, "branch": [""] * 2},
    }


# None, weights, own rewards


def test_none_and_nan_do_not_count_and_weights_do():
    def first(completions, **_):
        return [1.0, None, math.nan]

    def second(completions, **_):
        return [1.0, 1.0, None]

    answers = ("4", "4", "4")
    trajectories, _ = play([first, second], answers, weights=[2.0, -0.5])
    assert numbers(trajectories) == [1.5, -0.5, 0.0]
    assert [t.left_out for t in trajectories] == ["", "", "reward"]
    assert trajectories[2].stop_reason is StopReason.COMPLETED  # TRL gives no advantage either
    says(trajectories[2].error, "every reward function returned None or NaN")
    assert trajectories[1].rewards == {"first": None, "second": 1.0}


def test_a_function_is_called_only_for_tasks_with_its_columns():
    tasks = [task_of("a", task="math"), task_of("b", answer=4)]

    def math_only(completions, task, **_):
        return [3.0 for _ in task]

    trajectories, _ = play([math_only, by_reference], ("4", "4"), tasks)
    assert numbers(trajectories) == [3.0, 1.0]


def test_functions_see_environments_and_add_to_their_rewards():
    def seen(environments, **_):
        return [10.0 * (environment.final_message == "done") for environment in environments]

    trajectories, made = play([seen], ("done", "no"), environment=Desk)
    assert numbers(trajectories) == [11.0, 0.0]
    assert trajectories[0].rewards == {"Desk": 1.0, "seen": 10.0}
    assert made.names([Domain(name="desk", environment=Desk)]) == ["Desk", "seen"]


# Failures


class Endless(list):
    """A list that says that it has two values, and gives values without end."""

    def __len__(self):
        return 2

    def __iter__(self):
        return itertools.count()


class Unreadable:
    """An object of a user's class that can be neither a number nor a text."""

    def __init__(self, error):
        self.error = error

    def __float__(self):
        raise self.error("no number")

    def __repr__(self):
        raise self.error("no text")


NO_TEXT = ("a list that cannot be printed", "no number (test_rewards.py, line ")


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (1.0, ("1.0", "not a list")),
        (np.float64(1.0), ("not a list",)),
        ("ab", ("'ab'", "not a list")),
        ({0: 1.0, 1: 2.0}, ("{0: 1.0", "not a list")),
        ([1.0], ("1 rewards, not a list of 2 numbers",)),
        (itertools.count(), ("3 or more rewards, not a list of 2 numbers",)),
        (Endless(), ("3 or more rewards, not a list of 2 numbers",)),
        (["1", "0"], ("'1'", "not numbers")),
        ([1.0, math.inf], ("inf", "not numbers")),
        ([torch.zeros(2), 1.0], ("tensor", "not numbers")),
        (None, ("None", "not a list of 2")),
        ({1.0, 0.0}, ("{0.0, 1.0}", "not a list of 2")),  # the order of a set is not the answers'
        ([10**400, 1.0], ("not numbers", "int too large to convert to float")),
        ([10**5000, 1.0], ("a list that cannot be printed", "int too large")),
        ([Fraction(10**400), 1.0], ("not numbers", "too large for a float")),
        ([Decimal("1e400"), 1.0], ("Decimal('1E+400')", "not numbers")),
        ([Decimal("sNaN"), 1.0], ("not numbers", "cannot convert signaling NaN")),
        ([1j, 1.0], ("1j", "not numbers", "returned complex")),
        ([np.complex64(1), 1.0], ("not numbers", "returned complex64")),
        ([np.array([True, False]), 1.0], ("array([ True, False])", "not numbers")),
        ([b"1", 1.0], ("b'1'", "not numbers", "returned bytes")),
        ([bytearray(b"1"), 1.0], ("not numbers", "returned bytearray")),
        ([object(), 1.0], ("<object object", "not numbers", "not 'object'")),
        ([Unreadable(ArithmeticError), 1.0], ("ArithmeticError", *NO_TEXT)),
        ([Unreadable(SystemExit), 1.0], ("SystemExit", *NO_TEXT)),
        (Unreadable(KeyError), ("a Unreadable that cannot be printed, not a list of 2",)),
    ],
)
def test_a_wrong_result_is_told_and_leaves_the_task_out(returned, words):
    trajectories, _ = play([lambda completions, **_: returned])
    assert {(t.left_out, t.reward) for t in trajectories} == {("reward", 0.0)}
    assert {t.stop_reason for t in trajectories} == {StopReason.ENVIRONMENT_ERROR}
    says(trajectories[0].error, "reward function", *words)


@pytest.fixture
def waits(monkeypatch):
    """The waits between attempts, which take no time here."""
    found = []

    async def pause(self, seconds):
        found.append(seconds)

    monkeypatch.setattr(Calls, "pause", pause)
    return found


def test_an_exception_leaves_out_its_task_alone_and_is_not_repeated(waits):
    def picky(completions, id, **_):
        if id[0] == "a":
            raise KeyError("ledger")
        return [1.0] * len(completions)

    trajectories, _ = play([picky], ("4", "4"), [task_of("a"), task_of("b")])
    assert [t.left_out for t in trajectories] == ["reward", ""] and waits == []
    says(trajectories[0].error, "reward function picky", "KeyError", "ledger")


@pytest.mark.parametrize(("num_failures", "left_out"), [(2, ""), (3, "reward")])
def test_an_async_call_is_tried_again_and_each_try_is_counted(num_failures, left_out, waits):
    calls = []

    async def shaky(completions, log_extra, log_metric, **_):
        calls.append(completions)
        log_extra(f"call {len(calls)}", completions)
        log_metric("calls", len(calls))
        if len(calls) <= num_failures:
            raise KeyError("verdict")
        return [1.0, 0.0]

    trajectories, made = play([shaky])
    assert (trajectories[0].left_out, made.num_calls) == (left_out, len(calls)) == (left_out, 3)
    assert waits == [1, 2]
    assert trajectories[0].extra == ({} if left_out else {"call 3": "4"})
    assert made.metrics == ({} if left_out else {"calls": [3.0]})


def busy(status=429, **headers):
    """The exception of a client of HTTP whose request gets this answer."""
    request = httpx.Request("POST", "http://judge")
    response = httpx.Response(status, headers=headers, request=request)
    return httpx.HTTPStatusError("busy", request=request, response=response)


class RateLimit(Exception):
    retry_after = "7"


def caused():
    """An error whose cause says what it is."""
    error = RuntimeError("no verdict")
    error.__cause__ = busy(503, **{"retry-after": "7"})
    return error


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (busy, [1, 2, 4, 8]),
        (partial(busy, 503), [1, 2, 4, 8]),
        (partial(ConnectionRefusedError, "away"), [1, 2, 4, 8]),
        (partial(httpx.RemoteProtocolError, "Server disconnected"), [1, 2, 4, 8]),
        (partial(busy, **{"Retry-After": "7"}), [7, 7, 7, 8]),
        (RateLimit, [7, 7, 7, 8]),
        (caused, [7, 7, 7, 8]),
        (lambda: ExceptionGroup("all", [ValueError("x"), RateLimit()]), [7, 7, 7, 8]),
        (partial(HTTPError, "http://judge", 429, "busy", {"Retry-After": "7"}, None), [7, 7, 7, 8]),
    ],
)
def test_a_busy_service_is_asked_after_the_time_that_it_asks_for(
    is_async, made, expected, waits, capsys
):
    fails = [True] * 4

    def scores(completions):
        if fails:
            fails.pop()
            raise made()
        return [1.0] * len(completions)

    async def judge(completions, **_):
        return scores(completions)

    def grader(completions, **_):
        return scores(completions)

    trajectories, _ = play([judge if is_async else grader], seconds=60.0)
    assert (numbers(trajectories), waits) == ([1.0, 1.0], expected)
    (line,) = capsys.readouterr().err.splitlines()
    says(line, "warning: reward function ", "such calls wait", " s")


@pytest.mark.parametrize("asked", ["61", "86400", "Wed, 21 Oct 2115 07:28:00 GMT"])
def test_a_wait_that_is_too_long_leaves_the_task_out_after_one_call(asked, waits):
    calls = []

    async def judge(completions, **_):
        calls.append(completions)
        raise busy(**{"Retry-After": asked})

    trajectories, _ = play([judge], seconds=60.0)
    assert (len(calls), waits) == (1, [60])  # so the next rollout does not ask at once
    assert {t.left_out for t in trajectories} == {"reward"}
    says(trajectories[0].error, "it asks to wait", "and less is left of call_timeout (60 s)")


def test_a_service_that_stays_busy_is_given_up(waits):
    async def judge(completions, **_):
        raise busy()

    trajectories, made = play([judge], seconds=60.0)
    assert waits == [1, 2, 4, 8, 16, 20, 9] and made.num_calls == 8
    assert trajectories[0].left_out == "reward"


@pytest.mark.parametrize("is_async", [False, True])
def test_a_late_function_is_stopped(is_async, monkeypatch):
    monkeypatch.setattr(rewards_module, "ATTEMPTS", 1)

    async def late_judge(completions, **_):
        await asyncio.sleep(60)

    def late(completions, **_):
        time.sleep(60)

    trajectories, _ = play([late_judge if is_async else late], seconds=0.05)
    says(trajectories[0].error, "late", "took more than 0.05 s")


# What functions log, and what they draw


def test_what_a_function_logs_is_kept_beside_the_episode():
    def logs(completions, log_extra=None, log_metric=None, **_):
        log_extra("said", ["x" * 5000, "\ud800"])
        log_extra("few", [None])
        log_extra("endless", itertools.count())
        log_metric("accuracy", np.float32(0.5))
        log_metric("lost", math.nan)
        return [1.0, 0.0]

    (first, second), made = play([logs])
    assert first.extra == {"said": "x" * 2000, "few": "None", "endless": "0"}
    assert second.extra == {"said": "?", "few": "", "endless": "1"}
    assert made.metrics == {"accuracy": [0.5]}


def test_the_task_decides_what_a_function_draws():
    def draws(completions, **_):
        return [random.random() + np.random.random() for _ in completions]

    tasks = [task_of("a"), task_of("a"), task_of("b")]
    random.seed(1)
    before = random.getstate()
    together, _ = play([draws], ("4",) * 3, tasks)
    assert random.getstate() == before
    alone, _ = play([draws], ("4",), tasks[2:])
    assert numbers(together)[2:] == numbers(alone)
    assert len(set(numbers(together))) == 3


# Settings

MODULE = """
import functools
def correct(completions, **kwargs): return [1.0 for _ in completions]
def by_place(completions, /): return [1.0 for _ in completions]
class Judge:
    def __call__(self, completions, **kwargs): return [1.0 for _ in completions]
judge, twice, number = Judge(), functools.partial(correct, weight=2), 3
"""


@pytest.fixture
def modules(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("reward_one", "reward_two"):
        (tmp_path / f"{name}.py").write_text(MODULE)


def test_functions_of_one_name_are_told_apart(modules):
    targets = ["reward_one:correct", "reward_two:correct", "reward_one:judge", "reward_one:twice"]
    config = Config.model_validate(
        {"data": {"reward_funcs": targets, "reward_weights": [1, 2, 3, 4]}}
    )
    made = load_reward_functions(config)
    assert made.names([]) == [*targets[:2], "judge", "twice"]
    assert [function.weight for function in made.functions] == [1.0, 2.0, 3.0, 4.0]
    assert load_reward_functions(Config()) is None


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (["no_such_module:f"], ("No module named", "module:name")),
        (["reward_one:absent"], ("absent", "module:name")),
        (["reward_one:number"], ("which is 3", "name a function")),
        (["reward_one:Judge"], ("class", "name a function or callable object")),
        (["reward_one:by_place"], ("completions cannot be given by name", "/")),
    ],
)
def test_what_is_no_function_is_refused(targets, words, modules):
    config = Config.model_validate({"data": {"reward_funcs": targets}})
    says(refusal(load_reward_functions, config), "reward_funcs", targets[0], *words)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"reward_funcs": ["f"]}, ("'f'", "module:function")),
        ({"reward_funcs": ["m:f", "m:f"]}, ("m:f twice",)),
        ({"reward_funcs": ["m:f"], "reward_weights": [1, 2]}, ("2 weights for 1",)),
    ],
)
def test_contradictory_settings_are_refused(data, words):
    says(refusal(check, Config.model_validate({"data": data})), *words)
