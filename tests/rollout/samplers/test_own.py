"""The sampler's batch: rows that come and go, prefixes that prompts share, weights, looks."""

from functools import cache
from random import Random

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from pipeline.rollout.samplers import own
from pipeline.rollout.samplers.own import RowSampler
from scripts.proofs.grid import small_model

END = 0


def sampler_of(model=None, dtype=torch.float32):
    return RowSampler(model or small_model(), END, 1.0, dtype)


def prompt_of(number):
    random = Random(number)
    return [random.randrange(1, 16) for _ in range(random.randint(1, 9))]


def replies_of(number):
    random = Random(f"reply {number}")
    return [[random.randrange(16) for _ in range(random.randint(1, 30))] for _ in range(3)]


@cache
def alone(number):
    """What a conversation says, turn by turn, when it has the sampler to itself."""
    sampler = sampler_of()
    (episode,) = sampler.open([prompt_of(number)], [number])
    said = []
    for reply in replies_of(number):
        said += sampler.sample([episode], [12])
        sampler.extend(episode, reply)
    return said


def all_close(one, other):
    return [m.ids for m in one] == [m.ids for m in other] and all(
        a.logprobs == pytest.approx(b.logprobs, abs=1e-5) for a, b in zip(one, other, strict=True)
    )


BEGINNING = [1 + i % 15 for i in range(80)]
PROMPTS = [  # with common beginnings of several lengths; two are equal but for their draws
    *([*BEGINNING, 9, 1, 2], [*BEGINNING, 9, 3, 4], [*BEGINNING, 9, 3, 4]),
    *([*BEGINNING[:70], 7], [*BEGINNING[:20], 8], [6, 7]),
]
BOUNDS = [
    *({}, {"LARGE": 1000}, {"FEW_WEIGHTS": 1}, {"MASK": 1}, {"MASK": 4000}),
]


def talk(sampler, numbers):
    """Two messages of each of these conversations, which are open together."""
    episodes = sampler.open([PROMPTS[number] for number in numbers], numbers)
    said = sampler.sample(episodes, [3 + 4 * number for number in numbers])
    for number, episode in zip(numbers, episodes, strict=True):
        sampler.extend(episode, replies_of(number // 2)[0])
    said += sampler.sample(episodes, [11] * len(numbers))
    for episode in episodes:
        sampler.close(episode)
    return said


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_no_bound_that_saves_work_or_memory_changes_what_is_said(bounds, monkeypatch):
    every = range(len(PROMPTS))
    expected = [talk(sampler_of(), [number]) for number in every]
    for name in bounds.keys() & vars(own).keys():
        monkeypatch.setattr(own, name, bounds[name])
    sampler = sampler_of()
    for _ in range(2):  # the second time with what the first has left
        said = talk(sampler, every)
        assert all(all_close([said[n], said[n + len(PROMPTS)]], expected[n]) for n in every)


def test_what_prompts_begin_with_is_computed_once():
    sampler, fed = sampler_of(), []
    sampler.model.model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    sampler.open([[*BEGINNING, 1, 2, 3], [*BEGINNING, 4, 5], [6, 7]], [1, 2, 3])
    assert fed == [(1, 80), (3, 2)]


@pytest.mark.parametrize("until", [pytest.param(1, marks=pytest.mark.proof), 3])
def test_rows_come_and_go_without_a_trace_in_what_others_say(until):
    sampler, waiting, live = sampler_of(), list(range(16)), {}
    said = {number: [] for number in waiting}
    while waiting or live:
        joining = [waiting.pop() for _ in range(min(len(waiting), 10 - len(live)))]
        if joining:
            live |= dict(
                zip(joining, sampler.open([prompt_of(n) for n in joining], joining), strict=True)
            )
        messages = sampler.sample(list(live.values()), [12] * len(live), until=until)
        assert sum(message is not None for message in messages) >= min(until, len(live))
        for (number, episode), message in zip(list(live.items()), messages, strict=True):
            if message is not None:
                said[number].append(message)
                sampler.extend(episode, replies_of(number)[len(said[number]) - 1])
            if len(said[number]) == 3:
                sampler.close(live.pop(number))
    assert all(all_close(messages, alone(number)) for number, messages in said.items())


def test_rows_that_wait_and_padding_stay_within_learned_positions():
    shape = {"vocab_size": 16, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 40}
    never = 16  # a message that is not cut short ends at no token of the model's
    sampler = RowSampler(GPT2LMHeadModel(GPT2Config(**shape)), never, 1.0, torch.float32)
    episodes = sampler.open([[1] * 34, [2, 3]], range(2))
    assert [len(m.ids) for m in sampler.sample(episodes, [2, 9], greedy=True)] == [2, 9]
    for episode, reply in zip(episodes, ([4], [5] * 20), strict=True):
        sampler.extend(episode, reply)
    assert [len(m.ids) for m in sampler.sample(episodes, [3, 8], greedy=True)] == [3, 8]
