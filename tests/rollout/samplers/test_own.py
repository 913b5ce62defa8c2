"""The sampler's batch: rows that come and go, prefixes that prompts share, weights, looks."""

from functools import cache
from random import Random

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from pipeline.models.sampling_copy import trained_weights
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


@pytest.mark.parametrize(("large", "is_kept"), [(10**6, True), (1000, False)])
def test_a_large_cache_is_freed_after_the_last_conversation(monkeypatch, large, is_kept):
    monkeypatch.setattr("pipeline.rollout.samplers.own.LARGE", large)
    sampler = sampler_of()
    one, other = sampler.open([prompt_of(1), prompt_of(2)], [1, 2])
    sampler.sample([one, other], [3, 3])
    size = sampler._cache.num_bytes
    assert 1000 < size < 10**6
    sampler.close(one)
    assert sampler._cache.num_bytes == size
    sampler.close(other)
    assert sampler._cache.num_bytes == size * is_kept
    (again,) = sampler.open([prompt_of(1)], [1])
    (first,) = sampler.sample([again], [12])
    assert first.ids == alone(1)[0].ids


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


def test_looking_at_tokens_rarely_as_on_a_gpu_changes_none_of_them():
    found = []
    for steps in (1, 5):
        sampler = sampler_of()
        sampler.steps_per_check, sampler.shares_rows = steps, steps == 1
        episodes = sampler.open([prompt_of(n) for n in range(32)], range(32))
        turns = [sampler.sample(episodes, [3 + n % 20 for n in range(32)])]
        for number, episode in enumerate(episodes):
            sampler.extend(episode, replies_of(number)[0])
        found.append([*turns[0], *sampler.sample(episodes, [11] * 32)])
    assert all_close(found[0], found[1])


PREFIX = [1 + i % 15 for i in range(80)]


@pytest.mark.parametrize(("few", "size"), [(10**9, 80), (1, 20)], ids=["small", "large"])
def test_what_prompts_begin_with_is_computed_once(monkeypatch, few, size):
    """A large model shares short beginnings, too."""
    monkeypatch.setattr("pipeline.rollout.samplers.own.FEW_WEIGHTS", few)
    sampler, fed = sampler_of(), []
    sampler.model.model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    prompts = [[*PREFIX[:size], 1, 2, 3], [*PREFIX[:size], 4, 5], [6, 7]]
    episodes = sampler.open(prompts, [1, 2, 3])
    assert fed == [(1, size), (3, 2)]
    said = sampler.sample(episodes, [9] * 3)
    for key, (prompt, message) in enumerate(zip(prompts, said, strict=True), start=1):
        by_itself = sampler_of()
        (episode,) = by_itself.open([prompt], [key])
        assert all_close(by_itself.sample([episode], [9]), [message])


def test_a_common_prefix_may_hold_a_longer_one():
    sampler, short = sampler_of(), PREFIX[:70]
    prompts = [[*PREFIX, 9, 1, 2], [*PREFIX, 9, 3, 4], [*short, 7, 7, 7], [*short, 8, 8]]
    said = sampler.sample(sampler.open(prompts, range(4)), [9] * 4)
    for key, prompt in enumerate(prompts):
        by_itself = sampler_of()
        episodes = by_itself.open([prompt], [key])
        assert all_close(by_itself.sample(episodes, [9]), [said[key]])


def test_weights_of_equal_type_are_shared_and_others_are_copied_when_told():
    model = small_model(seed=0)
    shared, copied = sampler_of(model), sampler_of(model, torch.bfloat16)
    own = [sampler.model.model.layers[0].mlp.up_proj.weight for sampler in (shared, copied)]
    trained = model.model.layers[0].mlp.up_proj.weight
    assert trained.requires_grad and not own[0].requires_grad
    with torch.no_grad():
        trained.fill_(0.5)
    assert own[0].data_ptr() == trained.data_ptr()
    assert not (own[1] == 0.5).all()
    other = small_model(seed=1)
    for sampler in (shared, copied):
        sampler.load_weights(trained_weights(other))
    assert own[0].data_ptr() == other.model.layers[0].mlp.up_proj.weight.data_ptr()
    assert torch.equal(own[1], other.model.layers[0].mlp.up_proj.weight.bfloat16())
    episode = shared.open([[1, 2, 3]], [1])[0]
    expected = sampler_of(small_model(seed=1))
    assert all_close(
        shared.sample([episode], [9]), expected.sample(expected.open([[1, 2, 3]], [1]), [9])
    )


def test_rows_that_wait_and_padding_stay_within_learned_positions():
    shape = {"vocab_size": 16, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 40}
    never = 16  # a message that is not cut short ends at no token of the model's
    sampler = RowSampler(GPT2LMHeadModel(GPT2Config(**shape)), never, 1.0, torch.float32)
    episodes = sampler.open([[1] * 34, [2, 3]], range(2))
    assert [len(m.ids) for m in sampler.sample(episodes, [2, 9], greedy=True)] == [2, 9]
    for episode, reply in zip(episodes, ([4], [5] * 20), strict=True):
        sampler.extend(episode, reply)
    assert [len(m.ids) for m in sampler.sample(episodes, [3, 8], greedy=True)] == [3, 8]


def test_the_tokens_that_the_model_is_fed_are_counted():
    sampler = sampler_of()
    episodes = sampler.open([[1, 2, 3, 4]] * 3 + [[5, 6]], range(4))
    assert (sampler.num_tokens, sampler.num_padded_tokens) == (4, 6)
    sampler.sample(episodes, [1] * 4)
    assert (sampler.num_tokens, sampler.num_padded_tokens) == (6, 8)  # three share a row


def test_conversations_of_the_same_tokens_are_one_row_until_their_draws_or_replies_part_them():
    sampler, fed = sampler_of(), []
    episodes = sampler.open([[1, 2, 3]] * 6, [7, 7, 7, 7, 8, 9])
    sampler.model.model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    greedy = sampler.sample(episodes, [5] * 6, greedy=True)
    assert {tuple(message.ids) for message in greedy} == {tuple(greedy[0].ids)}
    assert len({episode.slot for episode in episodes}) == 1
    assert set(fed) <= {1, 4}  # one row, beside those that fill the batch up
    for number, episode in enumerate(episodes):
        sampler.extend(episode, [1, 2 + number // 3])
    said = sampler.sample(episodes, [5] * 6)
    assert said[0].ids == said[1].ids == said[2].ids
    assert episodes[0].slot is episodes[1].slot is episodes[2].slot
    assert episodes[3].slot not in (
        episodes[0].slot,
        episodes[4].slot,
    )  # another reply, another key
    for episode in episodes[1:]:
        sampler.close(episode)
    apart = sampler_of()
    apart.shares_rows = False
    others = apart.open([[1, 2, 3]] * 6, [7, 7, 7, 7, 8, 9])
    assert all_close(apart.sample(others, [5] * 6, greedy=True), greedy)
    for number, episode in enumerate(others):
        apart.extend(episode, [1, 2 + number // 3])
    assert len({episode.slot for episode in others}) == 6
    assert all_close(apart.sample(others, [5] * 6), said)


def test_the_cache_is_made_once_for_as_many_rows_and_tokens_as_conversations_may_have():
    sampler = RowSampler(small_model(), END, 1.0, torch.float32, max_tokens=70)
    sampler.shares_rows, sizes = False, set()
    sampler.model.model.register_forward_hook(
        lambda *_: sizes.add(tuple(sampler._cache.layers[0].keys.shape[::2]))
    )
    prompts = [[1 + i % 15 for i in range(number)] for number in (3, 20, 20, 40, 41)]
    episodes = sampler.open(prompts, range(5))
    sampler.sample(episodes, [70 - len(prompt) for prompt in prompts])
    for episode in episodes[:3]:
        sampler.close(episode)
    sampler.sample(sampler.open(prompts[:3], range(5, 8)), [70 - len(p) for p in prompts[:3]])
    assert sizes == {(8, 80)}  # multiples of ROWS and LENGTHS


@pytest.mark.parametrize("entries", [1, 40])
def test_long_inputs_are_fed_in_pieces_whose_mask_is_small(entries, monkeypatch):
    prompts = [[*PREFIX, *prompt_of(number)] for number in range(5)]
    whole = sampler_of()
    expected = whole.sample(whole.open(prompts, range(5)), [9] * 5)
    monkeypatch.setattr("pipeline.rollout.samplers.own.MASK", entries)
    pieces, masks = sampler_of(), []
    pieces.model.model.register_forward_pre_hook(
        lambda _, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
    )
    said = pieces.sample(pieces.open(prompts, range(5)), [9] * 5)
    assert all_close(said, expected)
    assert pieces.num_tokens == whole.num_tokens
    assert all(mask.shape[2] == 1 or mask.numel() <= 2 * entries for mask in masks)
