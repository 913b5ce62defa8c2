"""A loop of the user's plays an episode: what it asks for is sampled and trained."""

import asyncio
import gc
import json
import threading
import time
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pipeline.config.settings import Config, RolloutSettings
from pipeline.data.rows import with_usual_messages
from pipeline.environments import Domain, load_domains
from pipeline.environments.domains import generated
from pipeline.environments.faults import Outage
from pipeline.models.tiny import tiny_model
from pipeline.rollout.own_loop import EpisodeOver
from pipeline.rollout.reward_checks import check_reward_functions
from pipeline.rollout.rewards import RewardFunction, RewardFunctions, load_reward_functions
from pipeline.rollout.rollout import Rollout, RolloutRequest, SamplerPolicy
from pipeline.rollout.samplers.choice import make_sampler
from pipeline.rollout.trajectory import StopReason
from tests.support.helpers import ScriptedSampler, call, chat, make_task, say, tokenizer
from tests.support.messages import refusal, says

LIMITS = RolloutSettings(max_turns=4, max_tokens_per_turn=100, max_tokens=400, call_timeout=60)
SHORT_S = 0.3
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look an item up.",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}},
    },
}


class Scripts(dict):
    """Each new conversation gets the next script."""

    def __init__(self, scripts):
        super().__init__()
        self.left = list(scripts)

    def __missing__(self, key):
        self[key] = list(self.left.pop(0))
        return self[key]


class Sampler(ScriptedSampler):
    def __init__(self, scripts):
        super().__init__({})
        self.scripts = Scripts(scripts)


def play(
    loop,
    *scripts,
    sampler=None,
    deterministic=False,
    trials=1,
    rewards=None,
    is_text=False,
    **settings,
):
    """The trajectories of episodes of a loop, or of a domain; each conversation has a script."""
    limits = LIMITS.model_copy(update=settings)
    sampler = sampler or Sampler(scripts)
    policy = SamplerPolicy(sampler, chat(), limits)
    domain = loop if isinstance(loop, Domain) else Domain(name="desk", loop=loop)
    rollout = Rollout(policy, chat(), {"desk": domain}, limits, deterministic, rewards=rewards)
    task = make_task(columns=json.dumps({"answer": "blue"}), is_text=is_text)
    requests = [RolloutRequest(task=task, trial=n, key=n) for n in range(trials)]
    trajectories = rollout(requests)
    assert getattr(sampler, "num_open", 0) == policy.num_waiting == 0
    return trajectories


def user(text):
    return {"role": "user", "content": text}


def sampled(trajectory):
    tokens = zip(trajectory.completion_ids, trajectory.loss_mask, strict=True)
    return [token for token, is_sampled in tokens if is_sampled]


def ids_of(*messages):
    return [token for message in messages for token in chat().message_ids(message)]


# Conversations


def test_a_history_that_continues_the_last_one_goes_on_with_its_tokens():
    async def loop(policy, task):
        messages = [user("colour?")]
        messages.append(await policy.message(messages))
        messages.append(user("sure?"))
        messages.append(await policy.message(messages))
        assert [m["content"] for m in messages] == ["colour?", "red", "sure?", "blue"]
        return float(messages[-1]["content"] == task.row()["answer"])

    (episode,) = play(loop, [say("red"), say("blue")])
    assert (episode.reward, episode.stop_reason) == (1.0, StopReason.COMPLETED)
    assert (episode.num_turns, episode.further, episode.error) == (2, [], "")
    assert sampled(episode) == ids_of(say("red"), say("blue"))
    assert episode.prompt_ids == chat().prompt_ids([user("colour?")], [])
    reply = chat().reply_ids([user("sure?")])
    assert episode.completion_ids == [*ids_of(say("red")), *reply, *ids_of(say("blue"))]
    assert [m["role"] for m in episode.messages] == ["user", "assistant"] * 2


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_episode_may_have_more_conversations_than_episodes_are_played_at_once(deterministic):
    async def loop(policy, task):
        talk = [user("plan")]
        talk.append(await policy.message(talk))
        for text in "abc":
            await policy.message([user(text)])
        last = await policy.message([*talk, user("and?")])
        return float(last["content"] == "five")

    scripts = [[say("one"), say("five")], *([say(text)] for text in ("two", "three", "four"))]
    settings = {"max_concurrent_episodes": 2, "max_turns": 5, "deterministic": deterministic}
    (episode,) = play(loop, *scripts, **settings)
    assert (episode.error, episode.reward, episode.num_turns) == ("", 1.0, 5)
    assert len(episode.sequences) == 4


def test_any_other_history_is_a_new_sequence_of_the_same_episode():
    async def loop(policy, task):
        plan = await policy.message([user("plan")])
        other = await policy.message([user("act: " + plan["content"])])
        changed = [user("plan"), {"role": "assistant", "content": "my own words"}, user("and?")]
        last = await policy.message(changed)
        return float([other["content"], last["content"]] == ["two", "three"])

    (episode,) = play(loop, [say("one")], [say("two")], [say("three")])
    assert (episode.reward, episode.num_turns) == (1.0, 3)
    assert [sampled(one) for one in episode.sequences] == [
        ids_of(say(text)) for text in ("one", "two", "three")
    ]
    assert episode.record().num_sampled_tokens == sum(len(sampled(s)) for s in episode.sequences)
    assert all(one.further == [] for one in episode.further)


def test_more_conversations_than_may_be_open_at_once_take_turns():
    async def loop(policy, task):
        talks = [[user("a")], [user("b")], [user("c")]]
        for _ in range(2):
            for talk in talks:
                talk.append(await policy.message(talk))
                talk.append(user("and?"))
        return float(all(talk[1]["content"] == talk[3]["content"] for talk in talks))

    scripts = [[say(text)] * 2 for text in "xyz"]
    for number in (1, 2):
        (episode,) = play(loop, *scripts, max_turns=6, max_concurrent_episodes=number)
        assert (episode.reward, episode.error, episode.num_turns) == (1.0, "", 6)
        assert [sampled(one) for one in episode.sequences] == [
            ids_of(say(text), say(text)) for text in "xyz"
        ]


def test_tool_calls_are_read_where_the_loop_gives_tools():
    async def loop(policy, task):
        messages = [user("look it up")]
        message = await policy.message(messages, [LOOK])
        function = message["tool_calls"][0]["function"]
        assert (function["name"], function["arguments"]) == ("look", {"item": "lamp"})
        result = {"role": "tool", "name": "look", "content": "blue"}
        answer = await policy.message([*messages, message, result], [LOOK])
        again = await policy.message([*messages, message, result], [])  # other tools: a new one
        return float((answer["content"], again["content"]) == ("blue", "green"))

    (episode,) = play(loop, [call("look", item="lamp"), say("blue")], [say("green")])
    assert (episode.reward, episode.error) == (1.0, "")
    assert len(episode.sequences) == 2


def as_a_client_writes_it(message, number):
    """With ids, arguments as text in another order, and a client's further fields."""
    calls = [
        {
            "id": f"call_{time.monotonic_ns()}_{number}",
            "type": "function",
            "index": 0,
            "function": {
                "name": call["function"]["name"],
                "arguments": json.dumps(dict(reversed(call["function"]["arguments"].items()))),
            },
        }
        for call in message.get("tool_calls", ())
    ]
    further = {"name": "agent", "refusal": None, "reasoning_content": "hm", "annotations": []}
    content = message["content"] or None
    content = [{"type": "text", "text": content}] if content and not calls else content
    return {**further, "role": "assistant", "content": content, "tool_calls": calls}


def test_ids_and_arguments_that_a_client_writes_anew_go_on_with_the_same_sequence():
    async def loop(policy, task):
        messages = [user("look it up")]
        for turn in range(3):
            message = await policy.message(messages, [LOOK])
            again = [
                as_a_client_writes_it(m, turn) if "finish_reason" in m else m for m in messages
            ]
            messages = [
                *again,
                message,
                *({"role": "tool", "tool_call_id": c, "content": "blue"} for c in "a"),
            ]
        return float(message["content"] == "blue")

    (episode,) = play(loop, [call("look", item="lamp", colour="red"), say("green"), say("blue")])
    assert (episode.reward, episode.error, episode.num_turns) == (1.0, "", 3)
    assert episode.further == []


def test_several_conversations_at_once_are_sampled_together():
    async def loop(policy, task):
        asked = (policy.message([user(f"question {number}")]) for number in range(3))
        answers = await asyncio.gather(*asked)
        return float(sorted(m["content"] for m in answers) == ["a", "b", "c"])

    for deterministic in (False, True):
        scripts = [[say(text)] for text in "abc" * 4]
        episodes = play(loop, *scripts, trials=4, deterministic=deterministic, max_turns=3)
        assert len(episodes) == 4
        assert [len(episode.sequences) for episode in episodes] == [3] * 4


def test_the_numbers_of_a_conversation_do_not_depend_on_when_it_begins():
    keys = []

    class Watched(Sampler):
        def open(self, prompts, keys_, num_drawn=()):
            keys.extend(keys_)
            return super().open(prompts, keys_, num_drawn)

    def loop_with(order):
        async def loop(policy, task):
            for number in order:
                await policy.message([user(f"question {number}")])
            return 0.0

        return loop

    for order in ((0, 1, 1), (1, 0, 1)):
        play(loop_with(order), sampler=Watched([[say("x")]] * 3))
    first, second = keys[:3], keys[3:]
    assert len(set(first)) == 3
    assert (second[0], second[1], second[2]) == (first[1], first[0], first[2])


@pytest.mark.parametrize("num_words", [1, 120])
def test_the_bits_of_a_deterministic_message_depend_on_no_other_conversation(num_words):
    def loop_beside(others):
        async def loop(policy, task):
            for other in others:
                await policy.message([user(other)])  # stays open
            await policy.message([user("hello " * 50)])
            return 0.0

        return loop

    def bits(others):
        limits = {"max_tokens": 1000, "max_tokens_per_turn": 12}
        settings = LIMITS.model_copy(update=limits)
        sampler = make_sampler(
            tiny_model(tokenizer(), seed=1), chat(), settings, torch.float32, is_main=False
        )
        (episode,) = play(loop_beside(others), sampler=sampler, deterministic=True, **limits)
        last = episode.sequences[-1]
        assert len(episode.sequences) == 1 + len(others) and last.num_tokens > 300
        return last.ids, last.logprobs

    assert bits(["hello " * num_words]) == bits([])


# Messages that a loop gives up


class Held(Sampler):
    """Samples the message number `held` only when `goes_on` is set."""

    def __init__(self, scripts, held=1):
        super().__init__(scripts)
        self.goes_on, self.held, self.opened = threading.Event(), held, []

    def open(self, prompts, keys, num_drawn=()):
        drawn = num_drawn or [0] * len(keys)
        self.opened += zip(keys, drawn, strict=True)
        return super().open(prompts, keys, num_drawn)

    def sample(self, *given):
        self.held -= 1
        assert self.held or self.goes_on.wait(20)
        return super().sample(*given)


def play_held(loop, *scripts, held=1, trials=1, deterministic=False):
    """The first episode, and the sampler, whose event is the loop's third argument."""
    sampler = Held(scripts, held)
    loop = partial(loop, goes_on=sampler.goes_on)
    episodes = play(loop, sampler=sampler, trials=trials, deterministic=deterministic)
    return episodes[0], sampler


async def fails(*_):
    await asyncio.sleep(0.01)
    raise ValueError("no stock")


async def within_wait_for(message):
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(message, 0.01)


async def cancelled(message):
    task = asyncio.ensure_future(message)
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def beside_a_failure(message):
    with pytest.raises(ExceptionGroup):  # noqa: PT012
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(message)
            tasks.create_task(fails())


async def after_another(message):
    for first in asyncio.as_completed([message, asyncio.sleep(0.01)]):
        await first
        break
    others = asyncio.all_tasks() - {asyncio.current_task()}
    mine = [task for task in others if task.get_coro() is message]
    mine[0].cancel()


GIVEN_UP = [within_wait_for, cancelled, beside_a_failure, after_another]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("way", GIVEN_UP)
def test_a_message_that_a_loop_gives_up_is_not_trained_and_its_episode_goes_on(way, deterministic):
    async def loop(policy, task, goes_on):
        await way(policy.message([user("first")]))
        goes_on.set()
        answer = await policy.message([user("second")])
        return float(answer["content"] == "y")

    episode, _ = play_held(loop, *[[say("y")]] * 6, trials=3, deterministic=deterministic)
    assert (episode.reward, episode.error, episode.num_turns) == (1.0, "", 1)
    # A message that is given up before the rollout has taken it leaves no sequence.
    assert [ids for one in episode.sequences if (ids := sampled(one))] == [ids_of(say("y"))]


@pytest.mark.parametrize("way", GIVEN_UP)
def test_a_message_that_is_asked_for_again_has_the_same_draws_in_the_same_sequence(way):
    async def loop(policy, task, goes_on):
        messages = [user("first")]
        messages.append(await policy.message(messages))
        messages.append(user("second"))
        await way(policy.message(messages))
        goes_on.set()
        messages.append(await policy.message(messages))
        return 1.0

    episode, sampler = play_held(loop, [say("a"), say("b"), say("b")], held=2)
    assert (episode.reward, episode.error, episode.num_turns) == (1.0, "", 2)
    assert episode.further == [] and sampled(episode) == ids_of(say("a"), say("b"))
    assert [m["role"] for m in episode.messages] == ["user", "assistant"] * 2
    (key, _), again = sampler.opened[0], sampler.opened[-1]
    assert again == (key, len(ids_of(say("a"))))


@pytest.mark.parametrize("num_said", [0, 1])
def test_a_message_that_is_asked_for_again_at_once_continues_the_same_sequence(num_said):
    async def loop(policy, task, goes_on):
        messages = [user("first")]
        if num_said:
            messages += [await policy.message(messages), user("second")]
        lost = asyncio.ensure_future(policy.message(messages))
        await asyncio.sleep(0.01)
        lost.cancel()
        goes_on.set()
        again = policy.ask(messages=with_usual_messages(messages), tools=[])
        again.answer.result(20)  # the cancelled task cannot end before
        again.has_arrived = True
        return 1.0

    episode, sampler = play_held(loop, [say("a")] * 3, [say("b")] * 3, held=1 + num_said)
    assert (episode.reward, episode.error, episode.num_turns) == (1.0, "", 1 + num_said)
    assert episode.further == [] and sampled(episode) == ids_of(*[say("a")] * (1 + num_said))
    assert len({key for key, _ in sampler.opened}) == 1


@pytest.mark.parametrize("ending", ["gather", "return", "raise"])
def test_a_message_that_is_open_when_the_loop_ends_is_not_trained(ending):
    async def loop(policy, task, goes_on):
        await policy.message([user("first")])
        second = policy.message([user("second")])
        try:
            if ending == "gather":  # leaves the message running
                await asyncio.gather(second, fails())
            task = asyncio.ensure_future(second)
            await asyncio.sleep(0.01)
            if ending == "raise":
                await fails(task)
            return 1.0
        finally:
            asyncio.get_running_loop().call_later(0.01, goes_on.set)

    episode, _ = play_held(loop, [say("a")], [say("b")], held=2)
    assert [sampled(one) for one in episode.sequences] == [ids_of(say("a")), []]
    assert (episode.num_turns, episode.reward) == (1, float(ending == "return"))
    assert ("no stock" in episode.error) == (ending != "return")


def test_the_time_of_a_message_that_is_given_up_is_not_the_loops():
    class Never(Sampler):
        def sample(self, handles, *given):
            time.sleep(0.01)
            return [None] * len(handles)

    async def loop(policy, task):
        message = asyncio.ensure_future(policy.message([user("more")]))
        await asyncio.sleep(0.1)
        begun = time.monotonic()
        message.cancel()
        while not (busy_s := policy.busy_s):
            await asyncio.sleep(0.01)
        return float(busy_s <= time.monotonic() - begun)

    (episode,) = play(loop, sampler=Never([[]]))
    assert (episode.error, episode.reward) == ("", 1.0)


def test_a_loop_that_gives_every_message_up_comes_to_max_turns():
    async def loop(policy, task, goes_on):
        goes_on.set()
        while True:
            task = asyncio.ensure_future(policy.message([user("more")]))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    episode, _ = play_held(loop, [say("a")] * 5)
    assert (episode.stop_reason, episode.num_turns) == (StopReason.MAX_TURNS, 0)


# Limits


def test_a_loop_that_asks_too_often_is_over_with_reward_0_unless_it_catches_that():
    async def asks_on(policy, task):
        while True:
            await policy.message([user("more")])

    async def catches(policy, task):
        with pytest.raises(EpisodeOver) as caught:
            await asks_on(policy, task)
        return float(caught.value.reason is StopReason.MAX_TURNS)

    for loop, reward in ((asks_on, 0.0), (catches, 1.0)):
        (episode,) = play(loop, *[[say("x")]] * 4)
        assert (episode.stop_reason, episode.reward) == (StopReason.MAX_TURNS, reward)
        assert (episode.num_turns, episode.left_out, episode.error) == (4, "", "")


def test_a_message_that_is_cut_off_says_so_and_a_full_conversation_ends():
    async def loop(policy, task):
        messages = [user("write")]
        cut = await policy.message(messages)
        assert cut["finish_reason"] == "length"
        messages = [*messages, cut, user("go on")]  # which is told anew
        whole = await policy.message(messages)
        assert whole["finish_reason"] == "stop"
        await policy.message([user("x " * 900)])
        raise AssertionError("there is no room")

    (episode,) = play(loop, [say("a b c d e f g h i j")], [say("k")], max_tokens_per_turn=4)
    assert (episode.stop_reason, episode.reward, episode.error) == (StopReason.MAX_TOKENS, 0.0, "")
    assert len(sampled(episode)) == 4
    assert len(episode.sequences) == 3


def test_a_loop_whose_conversation_has_no_room_may_tell_it_shorter():
    async def loop(policy, task):
        messages = [user("begin")]
        messages.append(await policy.message(messages))
        with pytest.raises(EpisodeOver, match="max_tokens"):
            await policy.message([*messages, user("x " * 900)])
        answer = await policy.message([*messages, user("short")])
        return float(answer["content"] == "b")

    (episode,) = play(loop, [say("a"), say("b")])
    assert (episode.reward, episode.stop_reason) == (1.0, StopReason.COMPLETED)
    assert (episode.further, sampled(episode)) == ([], ids_of(say("a"), say("b")))


def test_blocking_code_has_a_thread_of_its_own_in_each_episode():
    together = threading.Barrier(24)

    async def loop(policy, task):
        await policy.message([user("first")])
        await asyncio.to_thread(together.wait, 20)
        return 1.0

    episodes = play(loop, *[[say("x")]] * 24, trials=24)
    assert [episode.error for episode in episodes] == [""] * 24


def test_a_loop_that_goes_on_asking_when_it_is_over_has_the_deadline_of_a_call():
    async def loop(policy, task):
        while True:
            with suppress(Exception):
                await policy.message([user("more")])

    (episode,) = play(loop, *[[say("x")]] * 4, call_timeout=SHORT_S)
    assert episode.error == f"CallTimeout: loop took more than {SHORT_S} s"
    assert (episode.num_turns, episode.reward, episode.left_out) == (4, 0.0, "")


@pytest.mark.parametrize("blocks", [False, True], ids=["waits", "blocks"])
def test_a_loop_has_the_deadline_of_a_call_between_messages(blocks, monkeypatch, caplog):
    monkeypatch.setattr("pipeline.environments.calls.GRACE_S", 0.1)

    async def loop(policy, task):
        await policy.message([user("first")])
        await asyncio.sleep(0)
        time.sleep(4 * SHORT_S) if blocks else await asyncio.sleep(60)
        return 1.0

    (episode,) = play(loop, [say("x")], call_timeout=SHORT_S)
    assert (episode.stop_reason, episode.reward) == (StopReason.AGENT_ERROR, 0.0)
    assert episode.error == f"CallTimeout: loop took more than {SHORT_S} s"
    assert episode.left_out == ""  # the model's words may have made it hang
    gc.collect()
    left = [record for record in caplog.records if record.name == "asyncio"]
    assert left == [], "the cancelled task left an exception behind"


def test_the_time_of_the_sampler_does_not_count():
    class Slow(Sampler):
        def sample(self, *given):
            time.sleep(2 * SHORT_S)
            return super().sample(*given)

    async def loop(policy, task):
        await policy.message([user("first")])
        await policy.message([user("second")])
        return 1.0

    (episode,) = play(loop, sampler=Slow([[say("x")]] * 2), call_timeout=SHORT_S)
    assert (episode.reward, episode.error) == (1.0, "")


# Failures


class APIConnectionError(Exception):
    """As the SDK of OpenAI names it."""


class Busy(Exception):
    status_code = 503


@pytest.mark.parametrize(
    ("error", "asks", "left_out"),
    [
        (KeyError("gone"), False, "reset"),
        (KeyError("gone"), True, ""),
        (KeyboardInterrupt(), True, ""),
        (ExceptionGroup("tasks", [KeyError("gone")]), True, ""),
        (Outage("the service is away"), True, "outage"),
        (ConnectionResetError("gone"), True, "outage"),
        (APIConnectionError("gone"), True, "outage"),
        (Busy(), True, "outage"),
        (TimeoutError("timed out"), True, "outage"),  # a socket's
        (ExceptionGroup("tasks", [ConnectionRefusedError()]), True, "outage"),
    ],
)
def test_what_a_loop_raises_ends_its_episode_and_a_lost_connection_is_an_outage(
    error, asks, left_out
):
    async def loop(policy, task):
        if asks:
            await policy.message([user("first")])
        raise error

    (episode,) = play(loop, [say("x")])
    kind = "environment" if left_out else "agent"  # the model's words may have made it fail
    assert (episode.stop_reason, episode.reward) == (f"{kind}_error", 0.0)
    cause = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
    assert (episode.left_out, type(cause).__name__ in episode.error) == (left_out, True)
    assert "(test_own_loop.py, line " in episode.error and "raise error" in episode.error


def test_a_deadline_of_the_loop_itself_is_no_outage():
    async def loop(policy, task):
        await policy.message([user("first")])
        await asyncio.wait_for(asyncio.sleep(60), 0.01)

    (episode,) = play(loop, [say("x")])
    assert (episode.stop_reason, episode.left_out) == (StopReason.AGENT_ERROR, "")
    assert episode.error.startswith("TimeoutError")


@pytest.mark.parametrize(
    "value",
    [
        *(None, "good", float("nan"), float("inf"), -2e30, 10**400, [1.0], 1j, object()),
        *({"a": None}, {"a": 1.0, "b": "2"}, {"a": float("nan")}, {"a": 1e30, "b": 1e30}),
    ],
)
def test_a_value_that_is_no_reward_is_named_with_its_loop(value):
    async def loop(policy, task):
        await policy.message([user("first")])
        return value

    line = loop.__code__.co_firstlineno
    (episode,) = play(loop, [say("x")])
    assert (episode.stop_reason, episode.reward) == (StopReason.AGENT_ERROR, 0.0)
    where = f"loop (test_own_loop.py, line {line}) returned "
    says(episode.error, where, "; return the reward, a number up to 1e+30 or a dict of such")


@pytest.mark.parametrize(
    ("value", "reward"), [(True, 1.0), (np.float32(0.5), 0.5), (torch.tensor(0.25), 0.25), (-3, -3)]
)
def test_a_number_of_any_kind_is_a_reward(value, reward):
    async def loop(policy, task):
        return value

    (episode,) = play(loop)
    assert (episode.reward, episode.error) == (reward, "")


@pytest.mark.parametrize(
    ("value", "reward", "parts"),
    [
        ({"right": 1, "short": -0.25}, 0.75, {"right": 1.0, "short": -0.25}),
        ({"a": 0.1, "b": 0.2, "c": 0.7}, 1.0, {"a": 0.1, "b": 0.2, "c": 0.7}),  # a success
        ({7: np.float32(0.5), "half \ud800": True}, 1.5, {"7": 0.5, "half ?": 1.0}),
        ({}, 0.0, {}),
        (0.5, 0.5, {}),
    ],
)
def test_the_parts_that_a_loop_returns_add_up_to_the_reward(value, reward, parts):
    async def loop(policy, task):
        return value

    (episode,) = play(loop)
    assert (episode.reward, episode.reward_breakdown, episode.error) == (reward, parts, "")
    rewards = RewardFunctions([RewardFunction("two", lambda completions, **_: [2.0])], 5.0)
    (episode,) = play(loop, rewards=rewards)
    assert (episode.reward, episode.rewards) == (reward + 2.0, {"loop": reward, "two": 2.0})


@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        *(([], ()), ([{"role": "nobody", "content": "x"}], ()), ([{"role": "user"}], ())),
        *(("hello", ()), ([None], ()), ([{"role": "user", "content": "half \ud800"}], ())),
        *(([user("x")], [{}]), ([user("x")], LOOK), ([user("x")], [LOOK, LOOK])),
        ([user("x")], [{"function": {"name": "f", "parameters": {"properties": []}}}]),
    ],
)
def test_messages_and_tools_that_are_none_are_shown_with_the_loops_line(messages, tools):
    async def loop(policy, task):
        await policy.message(messages, tools)
        return 1.0

    (episode,) = play(loop)
    assert episode.stop_reason is StopReason.ENVIRONMENT_ERROR
    assert episode.error.startswith("ValueError: policy.message: ")
    assert "test_own_loop.py, line " in episode.error


LAST = [{"role": "assistant", "content": "two"}]


@pytest.mark.parametrize(
    ("returned", "completion", "own"),
    [
        ("my text", [{"role": "assistant", "content": "my text"}], None),
        (None, LAST, None),
        (0.5, LAST, 0.5),
    ],
)
@pytest.mark.parametrize("is_text", [False, True])
def test_reward_functions_score_what_a_loop_returns_or_its_last_conversation(
    returned, completion, own, is_text
):
    seen = []

    def words(prompts, completions, completion_ids, answer, **columns):
        seen.extend([*prompts, *completions, *completion_ids, *answer])
        return [0.25]

    async def loop(policy, task):
        await policy.message([user("first")])
        await policy.message([user("second")])
        return returned

    rewards = RewardFunctions([RewardFunction("words", words)], 5.0)
    (episode,) = play(loop, [say("one")], [say("two")], rewards=rewards, is_text=is_text)
    assert (episode.rewards, episode.left_out) == ({"loop": own, "words": 0.25}, "")
    assert episode.reward == 0.25 + (own or 0.0)
    prompt = [{"role": "system", "content": "desk"}, user("hello")]
    told = ["hello", completion[0]["content"]] if is_text else [prompt, completion]
    assert seen == [*told, ids_of(say("two")), "blue"]


def test_a_loop_that_asks_nothing_has_an_empty_completion():
    def length(completions, **columns):
        return [float(len(completion[-1]["content"])) for completion in completions]

    async def loop(policy, task):
        return None

    rewards = RewardFunctions([RewardFunction("length", length)], 5.0)
    (episode,) = play(loop, rewards=rewards)
    assert (episode.reward, episode.rewards) == (0.0, {"loop": None, "length": 0.0})


def test_a_loop_that_is_over_is_scored_by_the_functions():
    def roles(completions, **columns):
        return [float(len(completion)) for completion in completions]

    async def loop(policy, task):
        messages = [user("again")]
        while True:
            messages += [await policy.message(messages), user("again")]

    rewards = RewardFunctions([RewardFunction("roles", roles)], 5.0)
    (episode,) = play(loop, [say("x")] * 2, rewards=rewards, max_turns=2)
    assert (episode.reward, episode.rewards) == (3.0, {"loop": None, "roles": 3.0})
    assert (episode.stop_reason, episode.error) == (StopReason.MAX_TURNS, "")


def test_a_function_that_lacks_a_loops_columns_is_named_before_the_run(tmp_path, monkeypatch):
    (tmp_path / "talks.py").write_text("def play(policy, task): return 'hello'\n")
    monkeypatch.syspath_prepend(tmp_path)
    data = {
        "domains": ["desk"],
        "environments": {"desk": "talks:play"},
        "reward_funcs": ["tests.rollout.test_own_loop:by_answer"],
    }
    config = Config(data=data)
    domains = load_domains(config)
    rewards = load_reward_functions(config)
    sets = {"desk": SimpleNamespace(train=[make_task()], held_out=[])}
    line = refusal(check_reward_functions, rewards, config, domains, sets)
    says(line, "by_answer applies to no domain", "no answer")
    sets["desk"].train[0] = make_task(columns='{"answer": "blue"}')
    (note,) = check_reward_functions(rewards, config, domains, sets)
    says(note, "what play returns, if it is a number (weight 1) and by_answer (weight 1)")


def by_answer(completions, answer):
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


# Loops that are not async


def test_a_loop_that_is_not_async_plays_in_a_thread_of_its_own_and_waits_for_messages():
    threads = set()
    together = threading.Barrier(20, timeout=30)

    def loop(policy, task):
        threads.add(threading.current_thread())
        messages = [user("colour?")]
        messages.append(policy.wait(policy.message(messages)))
        together.wait()  # all twenty episodes are here at once
        messages.append(user("sure?"))
        messages.append(policy.wait(policy.message(messages)))
        return float([m["content"] for m in messages[1::2]] == ["red", "blue"])

    episodes = play(loop, *[[say("red"), say("blue")]] * 20, trials=20)
    assert [(e.reward, e.error, e.further) for e in episodes] == [(1.0, "", [])] * 20
    assert len(threads) == 20 and threading.main_thread() not in threads


def test_waiting_in_a_loop_that_is_async_is_refused():
    async def loop(policy, task):
        policy.wait(policy.message([user("first")]))

    (episode,) = play(loop)
    says(episode.error, "RuntimeError: policy.wait: this code is async; write await", "line ")


def test_a_loop_that_is_not_async_may_raise_what_no_future_takes():
    def loop(policy, task):
        policy.wait(policy.message([user("first")]))
        return next(iter(()))

    (episode,) = play(loop, [say("x")])
    says(episode.error, "RuntimeError: it raised StopIteration()", "test_own_loop.py, line ")


# Domains


def test_a_coroutine_function_is_a_domain(tmp_path, monkeypatch):
    (tmp_path / "plans.py").write_text(
        "async def play(policy, task, style='short'):\n"
        "    message = await policy.message([{'role': 'user', 'content': style}])\n"
        "    return float(message['content'] == style)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    factory = {"factory": "plans:play", "arguments": {"style": "long"}}
    data = {"domains": ["desk"], "environments": {"desk": factory}, "tasks": {"desk": "x.jsonl"}}
    (episode,) = play(load_domains(Config(data=data))["desk"], [say("long")])
    assert (episode.reward, episode.messages[0]["content"]) == (1.0, "long")


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_function_is_a_loop_if_its_parameters_say_so(kind, tmp_path, monkeypatch):
    name = f"kinds_{kind[0]}"
    (tmp_path / f"{name}.py").write_text(
        f"{kind} play(policy, task):\n    return 1.0\n"
        "class Played:\n"
        f"    {kind} __call__(self, policy, task):\n        return 0.5\n"
        "played = Played()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for target, reward in (("play", 1.0), ("played", 0.5)):
        data = {"domains": ["desk"], "environments": {"desk": f"{name}:{target}"}}
        (episode,) = play(load_domains(Config(data=data))["desk"])
        assert (episode.reward, episode.error) == (reward, "")


@pytest.mark.parametrize(
    ("definition", "words"),
    [
        ("async def play(): return 1.0", ["cannot be called with (policy, task)"]),
        ("async def play(policy, *, task): return 1.0", ["cannot be called with (policy, task)"]),
        ("def play(policy, other): return 1.0", ["which fails", "def play(policy, task)"]),
        ("def play(policy, task): yield 1.0", ["which fails", "def play(policy, task)"]),
        ("def play(policy, task, more): return 1.0", ["cannot be called with (policy, task)"]),
        ("async def play(policy, task): yield 1.0", ["async def play(policy, task)"]),
    ],
)
def test_a_loop_of_another_form_is_refused_with_the_right_one(
    definition, words, tmp_path, monkeypatch
):
    name = f"loop_{abs(hash(definition))}"
    (tmp_path / f"{name}.py").write_text(definition + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = Config(data={"domains": ["desk"], "environments": {"desk": f"{name}:play"}})
    says(refusal(load_domains, config), "async def play(policy, task)", *words)


def test_a_loop_without_tasks_is_refused(tmp_path, monkeypatch):
    (tmp_path / "idle.py").write_text("async def play(policy, task): return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = Config(data={"domains": ["desk"], "environments": {"desk": "idle:play"}})
    assert refusal(generated, config, load_domains(config)["desk"], 3, "train").startswith(
        "tasks of desk: none for its loop in idle; give --tasks"
    )
