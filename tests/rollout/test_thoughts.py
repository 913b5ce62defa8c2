"""A template that drops thoughts of earlier turns: prompts are the template's own, token by token.

The expected ids are those of `apply_chat_template` for the whole history, as servers make them.
"""

import asyncio
import gzip
import json
import threading
from collections import defaultdict

import httpx
import pytest
import torch

from pipeline.checkpoints.transcripts import save_transcripts
from pipeline.config.settings import RolloutSettings
from pipeline.environments import Domain
from pipeline.environments.discovery import tool_schemas
from pipeline.models.chat.text import Parsed
from pipeline.models.tiny import tiny_model
from pipeline.rollout.rollout import RolloutRequest, SamplerPolicy
from pipeline.rollout.samplers.drawing import num_common
from pipeline.rollout.samplers.generate import GenerateSampler
from pipeline.rollout.samplers.own import RowSampler
from pipeline.rollout.trajectory import Said, Sampled
from pipeline.training.micro_batches import make_micro_batches
from tests.models.chat.test_tokens import shipped
from tests.support.helpers import Desk, ScriptedSampler, call, make_task, rollout_of, say

LIMITS = RolloutSettings(max_turns=12, max_tokens_per_turn=400, max_tokens=6000)
TOOLS = tool_schemas(Desk)
ASKED = [{"role": "system", "content": "desk"}, {"role": "user", "content": "hello"}]


class Customer:
    """Says two things more, and then no more."""

    def __init__(self):
        self.heard = []
        self._left = ["and a cup?", "and a pen?"]

    def reply(self, message):
        self.heard.append(message)
        return self._left.pop(0) if self._left else None


class Talking(Desk):
    """A desk with a customer."""

    def reset(self, **row):
        super().reset(**row)
        self.user = Customer()


class Sampler(ScriptedSampler):
    """Says texts; keeps what it saw before each message, and how many numbers were drawn."""

    def __init__(self, made, *texts):
        super().__init__({})
        self.made = made
        self.texts = defaultdict(lambda: list(texts))
        self.prompts = defaultdict(list)
        self.opened = []

    def open(self, prompts, keys, num_drawn=()):
        self.opened += zip(keys, num_drawn, strict=True)
        return super().open(prompts, keys, num_drawn)

    def _say(self, key, room):
        self.prompts[key].append(list(self.contexts[key]))
        ids = self.made._encode(self.texts[key].pop(0) + self.made.end_of_turn)[:room]
        self.contexts[key] += ids
        logprobs = [-1.0 - len(self.prompts[key]) - n / 1000 for n in range(len(ids))]
        return Sampled(ids=ids, logprobs=logprobs, finished=True)


def text_of(made, message):
    """What a model samples to say a message, as the template writes it in the latest turn."""
    text, _ = made._continued(message)
    return text.removesuffix(made.end_of_turn)


def thinking(message, thought):
    return {**message, "reasoning_content": thought}


def rendered(made, history, tools=TOOLS):
    """What a server computes as the ids of a prompt."""
    ids = made.tokenizer.apply_chat_template(
        history, tools=tools, add_generation_prompt=True, return_dict=False, **made._kwargs
    )
    return list(ids)


SAID = [
    thinking(call("look", item="lamp"), "Which lamp?\nThis one."),
    thinking(call("look", item="lamp", times=2), "Again."),
    thinking(say("A lamp."), "That was it."),
    thinking(call("look", item="cup"), "A cup, then."),
    thinking(say("A cup."), "Good."),
    thinking(say("Done."), "A pen: no."),
]


def play_all(made, said=SAID, domain=Talking, limits=LIMITS, sampler=None, trials=1):
    sampler = sampler or Sampler(made, *(text_of(made, message) for message in said))
    rollout = rollout_of(sampler, made, {"desk": domain}, limits)
    task = make_task(prompt=ASKED)
    episodes = rollout([RolloutRequest(task=task, trial=n, key=7 + n) for n in range(trials)])
    assert sampler.num_open == 0
    return episodes, sampler


def play(*given, **options):
    (episode,), sampler = play_all(*given, **options)
    return episode, sampler


def histories(episode):
    """The messages before each message of the model."""
    messages = episode.messages
    return [messages[:n] for n, m in enumerate(messages) if m["role"] == "assistant"]


def sampled_of(sequence):
    tokens = zip(sequence.completion_ids, sequence.logprobs, sequence.loss_mask, strict=True)
    return [(token, logprob) for token, logprob, is_sampled in tokens if is_sampled]


# What drops thoughts


def assert_as_served(made, episode, sampler):
    (prompts,) = sampler.prompts.values()
    for prompt, history in zip(prompts, histories(episode), strict=True):
        assert prompt == rendered(made, history)


@pytest.mark.parametrize(
    "name", ["qwen3", "qwen3_5_think", "qwen3_6", "nemotron_3_nano", "lfm2_2_5"]
)
def test_the_prompt_of_every_turn_is_what_a_server_renders(name):
    made = shipped(name)
    assert made.forgets
    episode, sampler = play(made)
    assert_as_served(made, episode, sampler)
    said = [m for m in episode.messages if m["role"] == "assistant"]
    assert [m["reasoning_content"] for m in said] == [m["reasoning_content"] for m in SAID]
    # A sequence for each turn of the user; each token is trained once, as it was sampled.
    assert [one.begun_by for one in episode.sequences] == ["", "thoughts", "thoughts"]
    assert [len(one.messages) for one in episode.sequences] == [len(episode.messages), 0, 0]
    assert (episode.num_turns, [one.num_turns for one in episode.further]) == (6, [0, 0])
    assert episode.new_sequences == {"thoughts": 2}
    texts = [text_of(made, message) + made.end_of_turn for message in SAID]
    ids = [(i, n) for n, text in enumerate(texts) for i in made._encode(text)]
    trained = [pair for one in episode.sequences for pair in sampled_of(one)]
    assert [(i, int(-1 - logprob) - 1) for i, logprob in trained] == ids
    assert episode.record().num_sampled_tokens == len(ids)


def test_the_environment_gets_no_thoughts():
    heard = []

    class Watched(Talking):
        schemas = TOOLS

        def call(self, name, arguments):  # so that the environment gets the whole conversation
            return "seen"

        def get_reward(self):
            heard.extend([*self.user.heard, self.final_message, *self.messages])
            return 1.0

    episode, sampler = play(shipped("qwen3"), domain=Watched)
    texts = heard[:4]
    assert texts == ["A lamp.", "A cup.", "Done.", "Done."]
    assert [m["role"] for m in heard[4:]] == [m["role"] for m in episode.messages]
    assert not any("reasoning_content" in message for message in heard[4:])
    assert_as_served(shipped("qwen3"), episode, sampler)
    assert (episode.reward, episode.stop_reason) == (1.0, "completed")


def test_no_random_number_is_used_twice():
    """A sampler draws the numbers of a key one after the other."""
    episode, sampler = play(shipped("qwen3"))
    counts = [len(sampled_of(one)) for one in episode.sequences]
    assert sampler.opened == [(7, 0), (7, counts[0]), (7, counts[0] + counts[1])]


class Full(Sampler):
    """Is out of memory at some calls, and then says nothing."""

    num_calls = 0

    def sample(self, *given):
        self.num_calls += 1
        if self.num_calls in (2, 9):
            raise MemoryError
        return super().sample(*given)


def test_where_memory_runs_out_every_sequence_goes_on(capsys):
    made = shipped("qwen3")
    texts = [text_of(made, message) for message in SAID]
    whole, _ = play_all(made, trials=8)
    again, sampler = play_all(made, trials=8, sampler=Full(made, *texts))
    assert again == whole and len(sampler.opened) > 8 * 3
    assert "out of memory in a rollout" in capsys.readouterr().err


def test_a_template_that_drops_thoughts_at_once_begins_anew_after_results_too():
    """As that of DeepSeek R1, which shows a thought in no prompt."""
    made = shipped("deepseek_r1_distill")
    texts = ["one\n</think>\n\nA lamp.", "two\n</think>\n\nA cup.", "three\n</think>\n\nDone."]
    episode, sampler = play(made, sampler=Sampler(made, *texts))
    assert_as_served(made, episode, sampler)
    assert episode.new_sequences == {"thoughts": 2}
    result = {"role": "tool", "name": "look", "content": "a lamp"}
    talk = [ASKED[1], thinking(say("A lamp."), "one"), result]
    assert made.prompt_without_thoughts(talk, [], 1) == made.prompt_ids(talk, [])
    assert shipped("qwen3").prompt_without_thoughts(talk, [], 1) is None


def test_an_empty_thought_is_dropped_when_the_user_speaks():
    made = shipped("qwen3")
    said = [call("look", item="lamp"), say("A lamp."), say("A cup."), say("Done.")]
    assert all(text_of(made, m).startswith("<think>\n\n</think>\n\n") for m in said)
    episode, sampler = play(made, said)
    thoughts = [m["reasoning_content"] for m in episode.messages if m["role"] == "assistant"]
    assert (thoughts, episode.new_sequences) == ([""] * 4, {"thoughts": 2})
    before = histories(episode)
    for turn in (0, 2, 3):  # within a turn, the sampled empty thought stays
        assert sampler.prompts[7][turn] == rendered(made, before[turn])


def test_what_cannot_be_read_as_a_call_goes_on_as_the_text_that_it_is():
    made = shipped("qwen3")
    texts = ["<think>\nhm\n</think>\n\n<tool_call>\n{bad}\n</tool_call>"]
    texts += [text_of(made, message) for message in SAID[2:]]
    episode, sampler = play(made, sampler=Sampler(made, *texts))
    assert (episode.num_malformed_calls, episode.new_sequences) == (1, {"thoughts": 2})
    assert_as_served(made, episode, sampler)


def test_max_tokens_holds_for_each_sequence():
    made = shipped("qwen3")
    whole, _ = play(made)
    sizes = [one.num_tokens for one in whole.sequences]
    roomy, tight = (LIMITS.model_copy(update={"max_tokens": max(sizes) + n}) for n in (1, -1))
    assert play(made, limits=roomy)[0] == whole and sum(sizes) > max(sizes) + 1
    cut, _ = play(made, limits=tight)
    assert cut != whole and all(one.num_tokens < max(sizes) for one in cut.sequences)
    said = [thinking(say(text), "x") for text in ("A lamp.", "A cup.", "Done.")]
    last = len(play(made, said)[0].further[-1].prompt_ids)
    for most, end in ((last, ("max_tokens", 2, 2)), (last + 99, ("completed", 3, 3))):
        cut, _ = play(made, said, limits=LIMITS.model_copy(update={"max_tokens": most}))
        assert (cut.stop_reason, cut.num_turns, len(cut.sequences)) == end


# A loop of the user's own


class Held(Sampler):
    """Waits before a message until it is told to go on."""

    def __init__(self, made, *texts):
        super().__init__(made, *texts)
        self.num_calls = 0
        self.waits, self.goes_on = threading.Event(), threading.Event()

    def sample(self, *given):
        self.num_calls += 1
        if self.num_calls == 2:
            self.waits.set()
            assert self.goes_on.wait(20)
        return super().sample(*given)


@pytest.mark.parametrize("gives_up", [False, True])
def test_a_loop_gives_up_the_message_that_begins_a_sequence_and_asks_again(gives_up):
    made = shipped("qwen3")
    said = [thinking(say(text), f"{text}?") for text in ("one", "two", "two", "three")]
    said = said if gives_up else [said[0], *said[2:]]
    sampler = Held(made, *(text_of(made, message) for message in said))
    answers = []

    async def loop(policy, task):
        messages = [dict(message) for message in ASKED]
        answers.append(await policy.message(messages, TOOLS))
        # As a client that keeps no thoughts.
        messages += [say("one"), {"role": "user", "content": "and?"}]
        asked = asyncio.ensure_future(policy.message(messages, TOOLS))
        while not sampler.waits.is_set():
            await asyncio.sleep(0.001)
        if gives_up:
            asked.cancel()
            await asyncio.sleep(0.01)
        sampler.goes_on.set()
        answer = await (policy.message(messages, TOOLS) if gives_up else asked)
        messages += [say(answer["content"]), {"role": "user", "content": "last?"}]
        answers.extend([answer, await policy.message(messages, TOOLS)])
        return 1.0

    episode, _ = play(made, domain=Domain(name="desk", loop=loop), sampler=sampler)
    assert (episode.reward, episode.error, episode.num_turns) == (1.0, "", 3)
    assert episode.new_sequences == {"thoughts": 2}
    assert [answer["content"] for answer in answers] == ["one", "two", "three"]
    assert answers[1]["reasoning_content"] == "two?"
    for sequence, history in zip(episode.sequences, histories(episode), strict=True):
        assert sequence.prompt_ids == rendered(made, history)
    texts = [text_of(made, said[n]) + made.end_of_turn for n in (0, -2, -1)]
    sampled = [[token for token, _ in sampled_of(one)] for one in episode.sequences]
    assert sampled == [made._encode(text) for text in texts]


@pytest.mark.parametrize("kept", [("role", "content", "tool_calls"), None])
def test_an_agent_at_the_address_sees_what_a_server_renders(kept):
    """Also one whose client sends no thoughts back; three turns of the user, with calls."""
    made = shipped("qwen3")
    prompts, answers = [], []

    async def loop(policy, task):
        talk = [dict(message) for message in ASKED]
        asked = ["and a cup?", "and a pen?"]
        headers = {"Authorization": f"Bearer {policy.api_key}"}
        async with httpx.AsyncClient(timeout=30, headers=headers) as client:
            while talk[-1]["role"] != "assistant":
                body = {"messages": talk, "tools": TOOLS, "return_token_ids": True}
                reply = await client.post(f"{policy.base_url}/chat/completions", json=body)
                prompts.append(reply.json()["prompt_token_ids"])
                answer = reply.json()["choices"][0]["message"]
                answers.append(answer)
                talk.append({k: v for k, v in answer.items() if kept is None or k in kept})
                for one in answer.get("tool_calls") or ():
                    talk.append({"role": "tool", "tool_call_id": one["id"], "content": "seen"})
                if talk[-1]["role"] == "assistant" and asked:
                    talk.append({"role": "user", "content": asked.pop(0)})
        return 1.0

    episode, _ = play(made, domain=Domain(name="desk", loop=loop))
    assert (episode.error, episode.num_turns) == ("", 6)
    assert episode.new_sequences == {"thoughts": 2}
    assert prompts == [rendered(made, history) for history in histories(episode)]
    assert [m["reasoning_content"] for m in answers] == [m["reasoning_content"] for m in SAID]


def test_a_thought_in_a_text_without_tools_is_dropped_as_well():
    """A loop without tools gets messages as they were written."""
    made = shipped("qwen3")
    said = [thinking(say(text), f"{text}?") for text in ("one", "two")]

    async def loop(policy, task):
        talk = [{"role": "user", "content": "hello"}]
        answer = await policy.message(talk)
        assert answer["content"] == "<think>\none?\n</think>\n\none"
        talk += [say("one"), {"role": "user", "content": "and?"}]
        await policy.message(talk)
        return 1.0

    sampler = Sampler(made, *(text_of(made, message) for message in said))
    episode, _ = play(made, domain=Domain(name="desk", loop=loop), sampler=sampler)
    assert (episode.error, episode.new_sequences) == ("", {"thoughts": 1})
    history = [{"role": "user", "content": "hello"}, said[0], {"role": "user", "content": "and?"}]
    assert episode.sequences[1].prompt_ids == rendered(made, history, tools=None)


def test_another_conversation_stands_behind_the_sequences_of_the_first_one(tmp_path):
    made = shipped("qwen3")
    said = [thinking(say("one"), "1"), thinking(say("two"), "2")]

    async def loop(policy, task):
        first = [dict(message) for message in ASKED]
        first.append(await policy.message(first, TOOLS))
        other = [{"role": "user", "content": "other"}]
        other.append(await policy.message(other, TOOLS))
        for talk in (first, other):
            talk.append({"role": "user", "content": "and?"})
            talk.append(await policy.message(talk, TOOLS))
        return 1.0

    sampler = Sampler(made, *(text_of(made, message) for message in said))
    episode, _ = play(made, domain=Domain(name="desk", loop=loop), sampler=sampler)
    assert [one.begun_by for one in episode.sequences] == ["", "thoughts", "new", "thoughts"]
    assert episode.last_conversation is episode.sequences[2]
    text = gzip.decompress(save_transcripts(tmp_path, 1, 0, [episode]).read_bytes())
    line = json.loads(text)
    messages = [m for m in line["messages"] if m["role"] == "assistant"]
    for message, ids in zip(messages, line["ids"], strict=True):
        assert ids == made._encode(text_of(made, message) + made.end_of_turn)
    assert [m["role"] for m in line["messages"]].count("conversation") == 1


# What keeps them


@pytest.mark.parametrize(
    ("name", "options"),
    [("qwen3_8", {}), ("qwen3_6", {"preserve_thinking": True}), ("qwen2_5", {})],
)
def test_a_template_that_keeps_what_it_shows_has_one_sequence(name, options):
    made = shipped(name, **options)
    has_thoughts = name != "qwen2_5"
    said = SAID if has_thoughts else [{**m, "reasoning_content": ""} for m in SAID]
    episode, sampler = play(made, said)
    assert (episode.further, episode.new_sequences, episode.num_turns) == ([], {}, 6)
    assert_as_served(made, episode, sampler)
    told = [m.get("reasoning_content") for m in episode.messages if m["role"] == "assistant"]
    assert told == [m["reasoning_content"] if has_thoughts else None for m in said]


def test_with_thinking_off_a_conversation_is_one_sequence_as_before():
    made = shipped("qwen3", enable_thinking=False)
    said = [{key: m[key] for key in m if key != "reasoning_content"} for m in SAID]
    episode, _ = play(made, said)
    assert (episode.further, episode.num_turns) == ([], 6)
    assert not any("reasoning_content" in message for message in episode.messages)


# With a model


class Thinking(SamplerPolicy):
    """Reads half of whatever was sampled as a thought, and the rest as the message."""

    def _said(self, sampled, conversation):
        half = len(sampled.ids) // 2
        thoughts, text = (
            self.chat.tokenizer.decode(ids) for ids in (sampled.ids[:half], sampled.ids[half:])
        )
        return Said(parsed=Parsed(content=text, thoughts=thoughts))


@pytest.mark.parametrize("kind", [RowSampler, GenerateSampler])
@pytest.mark.parametrize("greedy", [False, True])
def test_log_probabilities_are_those_of_the_sequence_that_is_trained(kind, greedy):
    made = shipped("qwen3")
    limits = LIMITS.model_copy(update={"max_tokens_per_turn": 12, "max_tokens": 4000})
    sampler = kind(tiny_model(made.tokenizer, 1), made.end_of_turn_id, 1.0, torch.float32)
    rollout = rollout_of(sampler, made, {"desk": Talking}, limits)
    rollout.policy = Thinking(sampler, made, limits)
    requests = [RolloutRequest(task=make_task(prompt=ASKED), trial=n, key=40 + n) for n in range(3)]
    for episode in rollout(requests, greedy=greedy):
        assert episode.new_sequences == {"thoughts": 2}
        for sequence, history in zip(episode.sequences, histories(episode), strict=True):
            assert sequence.prompt_ids == made.prompt_ids(history, TOOLS)
            logprobs = sampler.logprobs(sequence.ids)[len(sequence.prompt_ids) - 1 :]
            assert sequence.logprobs == pytest.approx(logprobs.tolist(), abs=1e-4)
        if not greedy:  # the numbers go on: equal ones would often give equal tokens
            assert len({tuple(one.completion_ids) for one in episode.sequences}) == 3


def test_an_update_computes_the_common_beginning_once():
    episode, _ = play(shipped("qwen3"))
    rows = [(one, 1.0, 1.0) for one in episode.sequences]
    (batch,) = make_micro_batches(rows, 10_000, 0, share_prefixes=True)
    first, second, third = episode.sequences
    shared = [num_common(first.ids, second.ids), num_common(second.ids, third.ids)]
    assert shared == [len(first.prompt_ids), len(second.prompt_ids)]  # up to a thought
    assert batch.num_tokens == sum(one.num_tokens for one in episode.sequences) - sum(shared)
    assert sorted(batch.targets.tolist()) == sorted(
        token for one in episode.sequences for token, _ in sampled_of(one)
    )
