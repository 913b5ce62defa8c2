"""A domain with an environment and a loop: the loop acts in the environment, which scores."""

import asyncio
import json
from types import SimpleNamespace
from typing import ClassVar

import pytest

from pipeline.commands.chat import ConversationView
from pipeline.config.settings import Config
from pipeline.environments import Domain, load_domains
from pipeline.environments.domains import generated
from pipeline.environments.faults import Outage
from pipeline.environments.task_checks import try_task
from pipeline.rollout.own_loop import EpisodeOver
from pipeline.rollout.rewards import RewardFunction, RewardFunctions
from pipeline.rollout.rollout import Rollout, RolloutRequest, SamplerPolicy
from pipeline.rollout.trajectory import StopReason
from tests.environments.test_raw_calls import Counter
from tests.rollout.test_own_loop import LIMITS, SHORT_S, Sampler, user
from tests.support.helpers import Desk, call, chat, embedded, make_task, played, say
from tests.support.messages import refusal, says


async def act(policy, task):
    """A plain agent: it calls what the model calls, and tells the customer what else it says."""
    messages = list(task.prompt)
    while True:
        message = await policy.message(messages, policy.tools)
        messages.append(message)
        for function in (one["function"] for one in message.get("tool_calls", ())):
            messages.append(await policy.call(function["name"], function["arguments"]))
        if not message.get("tool_calls"):
            answer = await policy.reply(message["content"])
            if answer is None:
                return message["content"]
            messages.append(user(answer))


def act_in_a_thread(policy, task):
    """The same, without async, and with arguments as text."""
    messages = list(task.prompt)
    while True:
        message = policy.wait(policy.message(messages, policy.tools))
        messages.append(message)
        for function in (one["function"] for one in message.get("tool_calls", ())):
            text = json.dumps(function["arguments"])
            messages.append(policy.wait(policy.call(function["name"], text)))
        if not message.get("tool_calls"):
            answer = policy.wait(policy.reply(message["content"]))
            if answer is None:
                return None
            messages.append(user(answer))


def play(loop, environment, *said, task=None, limits=LIMITS, hooks=None, rewards=None, **settings):
    """An episode of a loop in an environment, whose model says messages, in conversations."""
    limits = limits.model_copy(update=settings)
    scripts = said if said and isinstance(said[0], list) else [list(said)]
    domain = environment
    if not isinstance(environment, Domain):
        domain = Domain(name="desk", environment=environment, loop=loop)
    policy = SamplerPolicy(Sampler(scripts), chat(), limits)
    task = task or make_task()
    rollout = Rollout(policy, chat(), {task.domain: domain}, limits, rewards=rewards, **hooks or {})
    (episode,) = rollout([RolloutRequest(task=task, trial=0, key=0)])
    return episode


class Customer:
    def reply(self, message):
        return {"which one?": "the lamp", "sure?": "yes"}.get(message)


class Shop(Desk):
    """Its customer answers two questions; buying ends the episode."""

    def reset(self, **row):
        self.user = Customer()
        self.bought = []
        super().reset(**row)
        return " (now)"

    def buy(self, item: str) -> str:
        """Buy an item.

        Args:
            item: Name of the item.
        """
        self.bought.append(item)
        self.done = item == "lamp"
        return "bought"

    def get_reward(self):
        self.reward_breakdown = {self.final_message: 1.0, "bought " + ",".join(self.bought): 0.5}
        return 0.5 + len(self.bought)


OF_ALL_KINDS = [
    say("which one?"),
    call("look", item="lamp"),
    call("look", item=7),
    call("jam"),
    call("sell", item="lamp"),
    call("look", item="lamp", times=90),
    call("buy", item="chair"),
    say("it is done"),
]


@pytest.mark.parametrize("loop", [act, act_in_a_thread])
@pytest.mark.parametrize("environment", [Shop, Desk, Counter])
def test_a_plain_agent_has_the_episode_that_a_domain_has_without_one(loop, environment):
    limits = LIMITS.model_copy(update={"max_turns": 9, "max_tokens": 4000})
    limits = limits.model_copy(update={"max_tool_result_tokens": 64})
    (alone,), _ = played([OF_ALL_KINDS], {"desk": environment}, limits, [make_task()])
    episode = play(loop, environment, *OF_ALL_KINDS, limits=limits)
    said = [{k: m[k] for k in ("role", "content")} for m in episode.messages]
    assert said == [{k: m[k] for k in ("role", "content")} for m in alone.messages][: len(said)]
    assert len(said) >= len(alone.messages) - 1  # the agent does not show itself a last result
    assert episode.record() == alone.record()
    assert episode.reward_breakdown == alone.reward_breakdown
    assert episode.prompt_ids == alone.prompt_ids
    ids = alone.completion_ids
    assert episode.completion_ids == ids[: len(episode.completion_ids)]
    assert episode.further == []


def test_a_tool_that_ends_the_episode_ends_it_for_the_agent():
    async def loop(policy, task):
        assert task.prompt[-1]["content"] == "hello (now)"
        assert [tool["function"]["name"] for tool in policy.tools] == ["buy", "jam", "look", "wait"]
        answers = [await policy.call("buy", {"item": "lamp"})]
        further = [policy.call("look", {"item": "x"}), policy.reply("and?")]
        for ask in (*further, policy.message(task.prompt)):
            with pytest.raises(EpisodeOver):
                await ask
        assert answers == [{"role": "tool", "name": "buy", "content": "bought", "is_error": False}]
        return "bye"

    episode = play(loop, Shop)
    assert (episode.reward, episode.error) == (1.5, "")
    assert (episode.stop_reason, episode.tools) == (StopReason.COMPLETED, {"buy": [1, 0]})
    assert episode.reward_breakdown == {"bye": 1.0, "bought lamp": 0.5}


def test_the_customer_who_has_no_answer_ends_the_episode():
    async def loop(policy, task):
        assert await policy.reply("which one?") == "the lamp"
        assert await policy.reply("then good bye") is None
        await policy.call("buy", {"item": "chair"})

    episode = play(loop, Shop)
    assert (episode.reward, episode.tools) == (0.5, {})
    assert episode.reward_breakdown == {"then good bye": 1.0, "bought ": 0.5}


def test_calls_at_once_come_one_after_the_other_and_none_after_the_last():
    class Slow(Shop):
        async def buy(self, item: str) -> str:
            """Buy an item.

            Args:
                item: Name of the item.
            """
            self.bought.append(f"{item} begun")
            await asyncio.sleep(0.01)
            self.bought.append(f"{item} ended")
            self.done = item == "lamp"
            return "bought"

    async def loop(policy, task):
        calls = [policy.call("buy", {"item": item}) for item in ("chair", "lamp", "bed")]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(a) for a in answers] == [dict, dict, EpisodeOver]

    episode = play(loop, Slow)
    assert episode.error == ""
    assert "bought chair begun,chair ended,lamp begun,lamp ended" in episode.reward_breakdown


def test_a_call_that_is_open_when_the_loop_ends_is_given_up():
    async def loop(policy, task):
        open_call = asyncio.create_task(policy.call("wait", {"minutes": 5}))
        await asyncio.sleep(0)
        assert not open_call.done()
        return "done"

    class Waiting(Desk):
        async def wait(self, minutes: int) -> str:
            """Wait for a while.

            Args:
                minutes: How long.
            """
            await asyncio.sleep(60 * minutes)
            return "waited"

    episode = play(loop, Waiting)
    assert (episode.reward, episode.error) == (1.0, "")


class Down(Shop):
    def look(self, item: str) -> str:
        """Look an item up.

        Args:
            item: Name of the item.
        """
        raise Outage("no shop")


class Late(Shop):
    async def look(self, item: str) -> str:
        """Look an item up.

        Args:
            item: Name of the item.
        """
        await asyncio.sleep(60)
        return "late"


class Mute(Shop):
    def reset(self, **row):
        super().reset(**row)
        self.user = SimpleNamespace(reply=lambda message: 7)


@pytest.mark.parametrize(
    ("environment", "left_out", "words"),
    [
        (Down, "outage", "Outage: no shop"),
        (Late, "", "CallTimeout: look took more than 0.3 s"),
        (Mute, "reply", "the user replied int, not text or None"),
    ],
)
def test_a_fault_of_the_environment_ends_the_episode_whatever_the_agent_does(
    environment, left_out, words
):
    async def loop(policy, task):
        await policy.message(task.prompt)
        ask = policy.reply("hm") if environment is Mute else policy.call("look", {"item": "x"})
        for further in (ask, policy.call("buy", {"item": "lamp"})):
            with pytest.raises(EpisodeOver) as over:
                await further
            assert over.value.reason is StopReason.ENVIRONMENT_ERROR
        raise RuntimeError("the agent's own")

    episode = play(loop, environment, say("x"), call_timeout=SHORT_S)
    assert (episode.stop_reason, episode.left_out) == (StopReason.ENVIRONMENT_ERROR, left_out)
    says(episode.error, words)
    assert episode.reward == 0.0


def test_the_time_of_the_environment_is_not_the_loops():
    class Slow(Desk):
        async def wait(self, minutes: int) -> str:
            """Wait for a while.

            Args:
                minutes: How long.
            """
            await asyncio.sleep(0.6 * SHORT_S)
            return "waited"

    async def loop(policy, task):
        for _ in range(3):
            await policy.call("wait", {"minutes": 1})
        return "done"

    episode = play(loop, Slow, call_timeout=SHORT_S)
    assert (episode.reward, episode.error) == (1.0, "")


@pytest.mark.parametrize("value", [1.0, True, ["x"]])
def test_a_number_beside_get_reward_is_refused(value):
    async def loop(policy, task):
        await policy.message(task.prompt)
        return value

    episode = play(loop, Shop, say("x"))
    says(episode.error, "return the final message, a text, or None; get_reward scores")


@pytest.mark.parametrize(
    ("name", "arguments"), [("look", "half {"), ("look", "[1]"), ("look", 7), ("look", {"a": {1}})]
)
def test_arguments_that_are_none_are_the_agents_fault(name, arguments):
    async def loop(policy, task):
        await policy.call(name, arguments)

    episode = play(loop, Shop)
    says(episode.error, "test_agents.py, line ")
    assert episode.error.startswith(("ValueError: policy.call: look needs", "TypeError: Object of"))


def test_reward_functions_see_the_environment_and_count_beside_get_reward():
    seen = []

    def bought(completions, environments, **columns):
        seen.append((completions, [environment.bought for environment in environments]))
        return [0.25]

    async def loop(policy, task):
        await policy.call("buy", {"item": "chair"})
        return "bye"

    rewards = RewardFunctions([RewardFunction("bought", bought)], 5.0)
    episode = play(loop, Shop, rewards=rewards)
    assert episode.rewards == {"Shop": 1.5, "bought": 0.25}
    assert episode.reward == 1.75
    assert seen == [([[{"role": "assistant", "content": "bye"}]], [["chair"]])]


def test_a_class_that_gets_raw_calls_sees_what_was_called_and_said():
    class Told(Counter):
        messages: ClassVar[list] = []

        def get_reward(self):
            Told.messages = self.messages
            return 1.0

    async def loop(policy, task):
        await policy.call("pay", {"amount": 3})
        await policy.reply("Paid.")

    assert play(loop, Told).reward == 1.0
    calls = call("pay", amount=3)
    result = {"role": "tool", "name": "pay", "content": "Result: pay"}
    assert Told.messages == [*make_task().prompt, calls, result, say("Paid.")]


def test_a_person_types_the_request_of_an_agents_chat_and_sees_each_message_once():
    told = []
    typed = iter(["the lamp, please", "the red one", ""])
    place = SimpleNamespace(tell=lambda *line: told.append(line), typed=lambda: next(typed))
    view = ConversationView(True, chat(), place)
    said = [say("Which one?"), call("look", item="lamp"), say("Here.")]
    hooks = {"watch": view.watch, "reply": view.reply}
    episode = play(act, Shop, *said, hooks=hooks, max_tokens=900)
    prompt = [{"role": "system", "content": "desk"}, user("the lamp, please")]
    assert episode.messages[:4] == [*prompt, said[0], user("the red one")]
    assert episode.further == []
    names = [name for name, _ in told]
    assert (names.count("rules"), names.count("agent"), names.count("tool")) == (1, 3, 1)


# Settings


def with_agent(target, **data):
    return Config(data={"domains": ["airline"], "agents": {"airline": target}, **data})


@pytest.mark.parametrize("loop", ["act", "act_in_a_thread"])
def test_an_expert_that_plays_an_embedded_domain_as_an_agent_earns_the_reward(loop):
    domain = load_domains(with_agent(f"tests.rollout.test_agents:{loop}"))["airline"]
    own = embedded("airline")["airline"]
    assert (domain.tools, domain.own_reward) == (own.tools, "AirlineEnvironment")
    tasks = generated(Config(), domain, 6, "train")
    assert tasks == generated(Config(), own, 6, "train")
    limits = LIMITS.model_copy(update={"max_turns": 9, "max_tokens": 2000})
    for task in tasks:
        try_task(domain, task, "here", 5.0, success=1.0)
        messages, reward = domain.demonstrate(task, 5.0)
        said = [message for message in messages if message["role"] == "assistant"]
        episode = play(None, domain, *said, task=task, limits=limits)
        assert (episode.reward, episode.error, reward) == (1.0, "", 1.0)
        told = [m["content"] for m in episode.messages]
        assert told == [m["content"] for m in messages][: len(told)]
        assert len(told) >= len(messages) - 1  # a last result is not told to the model


def test_a_dataset_with_an_agent_needs_no_reward_function():
    data = {"domains": ["sums"], "tasks": {"sums": "x.jsonl"}}
    agents = {"sums": "tests.rollout.test_agents:act"}
    (domain,) = load_domains(Config(data={**data, "agents": agents})).values()
    assert (domain.is_loop_alone, domain.own_reward) == (True, "act")


@pytest.mark.parametrize(
    ("target", "data", "words"),
    [
        ("nowhere:play", {}, ["nowhere"]),
        ("tests.rollout.test_agents:Shop", {}, ["def play(policy, task)"]),
        ("tests.rollout.test_agents:user", {}, ["def play(policy, task)"]),
        (
            "tests.rollout.test_agents:act",
            {"domains": ["own"], "environments": {"own": "tests.rollout.test_agents:act"}},
            ["a loop itself", "take one of the two out"],
        ),
    ],
)
def test_an_agent_that_is_none_is_refused(target, data, words):
    domains = data.get("domains", ["airline"])
    config = Config(data={"domains": domains, "agents": {domains[0]: target}, **data})
    says(refusal(load_domains, config), f"agents: {domains[0]}: got '{target}'", *words)
