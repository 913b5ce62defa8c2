"""The policy: what is sampled, its log-probabilities, and the weights that both come from."""

import json
from random import Random

import numpy as np
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from pipeline.chat.template import Chat
from pipeline.checkpoints.resume import load_start
from pipeline.config.settings import Config, ModelSettings
from pipeline.data.rng import stream_key, uniforms
from pipeline.errors import UserError
from pipeline.grpo import token_logprobs
from pipeline.grpo.micro_batches import make_micro_batches
from pipeline.grpo.token_logprobs import TokenLogprobs
from pipeline.models import loading
from pipeline.models.capabilities import unserved
from pipeline.models.loading import empty_model, load_folder, load_model, load_tokenizer
from pipeline.models.tiny import tiny_model
from pipeline.rollout.row_sampler import RowSampler
from pipeline.rollout.sequences import cumulative, inverse_cdf
from scripts.proofs.grid import make_trajectory, small_model
from tests.support.helpers import chat, tokenizer

END = 0  # the end of turn of the small models
VOCABULARY = 16


def with_max_length(folder, most) -> ModelSettings:
    """The settings of a model in a folder whose tokenizer has this `model_max_length`."""
    tokenizer().save_pretrained(folder)
    tiny_model(tokenizer(), 0).config.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": most}))
    return ModelSettings(model=str(folder))


@pytest.mark.parametrize("most", ["abc", "512", -1, True, [1], {"a": 1}, float("nan")])
def test_a_wrong_model_max_length_is_refused_by_name(tmp_path, most):
    with pytest.raises(UserError, match=r"model_max_length .* in its tokenizer_config\.json; give"):
        load_tokenizer(with_max_length(tmp_path, most))


@pytest.mark.parametrize("most", [None, 512, 1e30, 10**40])
def test_a_model_max_length_may_be_any_number_or_null(tmp_path, most):
    assert load_tokenizer(with_max_length(tmp_path, most))("a")["input_ids"]


def sampler_of(model, temperature=1.0, dtype=torch.float32) -> RowSampler:
    return RowSampler(model, END, temperature, dtype)


class Conversation:
    """One conversation whose prompt, replies and limits depend on its number alone."""

    def __init__(self, number: int) -> None:
        random = Random(number)
        self.key = stream_key("test", number)
        self.prompt = self._ids(random, random.randint(2, 30))
        self.replies = [
            self._ids(random, random.randint(1, 20)) for _ in range(random.randint(0, 4))
        ]
        self.limits = [random.randint(1, 15) for _ in range(5)]
        self.completion: list[int] = []
        self.mask: list[int] = []
        self.logprobs: list[float] = []

    @staticmethod
    def _ids(random: Random, count: int) -> list[int]:
        return [random.randrange(1, VOCABULARY) for _ in range(count)]

    def take(self, ids, mask, logprobs) -> None:
        self.completion += ids
        self.mask += [mask] * len(ids)
        self.logprobs += logprobs

    def trajectory(self):
        return make_trajectory(self.prompt, self.completion, self.mask, logprobs=self.logprobs)


def play(sampler, numbers) -> list[Conversation]:
    """Conversations of up to five turns, side by side, each closed when its replies are used up."""
    conversations = [Conversation(number) for number in numbers]
    handles = sampler.open([c.prompt for c in conversations], [c.key for c in conversations])
    live, turn = list(zip(conversations, handles, strict=True)), 0
    while live:
        sampled = sampler.sample([h for _, h in live], [c.limits[turn] for c, _ in live])
        for (conversation, handle), message in zip(live, sampled, strict=True):
            conversation.take(message.ids, 1, message.logprobs)
            if turn == len(conversation.replies):
                sampler.close(handle)
                continue
            reply = conversation.replies[turn]
            conversation.take(reply, 0, [0.0] * len(reply))
            sampler.extend(handle, reply)
        live = [(c, h) for c, h in live if turn < len(c.replies)]
        turn += 1
    return conversations


def recomputed(model, trajectories, max_tokens=400, temperature=1.0):
    """(log-probabilities by TokenLogprobs, those of the sampler), over all micro-batches."""
    batches = make_micro_batches([(t, 1.0, 1.0) for t in trajectories], max_tokens, 0)
    with torch.no_grad():
        ours = [TokenLogprobs(model, temperature)(batch)[0] for batch in batches]
    return torch.cat(ours), torch.cat([batch.old_logprobs for batch in batches])


def distribution(model, ids, temperature=1.0) -> np.ndarray:
    """Probabilities of the next token after `ids`, straight from the model's logits."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1]
    return (logits.double() / temperature).softmax(-1).numpy()


# Sampling


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_logprobs_are_those_that_training_recomputes(temperature):
    model = small_model()
    conversations = play(sampler_of(model, temperature), range(96))
    lengths = {c.trajectory().num_tokens for c in conversations}
    ours, theirs = recomputed(
        model, [c.trajectory() for c in conversations], temperature=temperature
    )
    assert len(ours) > 900 and len(lengths) > 30
    assert float((ours - theirs).abs().max()) < 1e-5


def test_what_is_sampled_does_not_depend_on_who_shares_the_batch():
    sampler = sampler_of(small_model())
    together = play(sampler, range(22))
    alone = [play(sampler, [number])[0] for number in range(22)]
    by_fives = [
        c for first in range(0, 22, 5) for c in play(sampler, range(first, min(first + 5, 22)))
    ]
    for others in (alone, by_fives):
        same = [a.completion == b.completion for a, b in zip(together, others, strict=True)]
        assert sum(same) >= 0.99 * len(
            same
        )  # a tie of the cumulative distribution may fall either way
        for a, b in zip(together, others, strict=True):
            if a.completion == b.completion:
                assert np.allclose(a.logprobs, b.logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_token_is_the_inverse_of_the_cumulative_distribution_at_its_draw(temperature):
    model, key, reply = small_model(), stream_key("a stream"), [3, 4]
    sampler = sampler_of(model, temperature)
    (episode,) = sampler.open([[1, 2, 3]], [key])
    first = sampler.sample([episode], [20])[0].ids
    sampler.extend(episode, reply)
    second = sampler.sample([episode], [20])[0].ids
    context, drawn = [1, 2, 3], 0
    for turn in (first, second):
        for token in turn:
            cumulative = distribution(model, context, temperature).cumsum()
            number = uniforms(np.array([key], dtype=np.uint64), np.array([drawn]))[0]
            assert token == int(np.searchsorted(cumulative, number * cumulative[-1], side="right"))
            context.append(token)
            drawn += 1
        context += reply
    assert drawn >= 10


def test_a_draw_on_a_boundary_takes_the_next_possible_token():
    impossible, half = float("-inf"), -0.6931471805599453
    logprobs = torch.tensor([[impossible, half, impossible, half, impossible]] * 4)
    draws = torch.tensor([0.0, 0.25, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    assert inverse_cdf(cumulative(logprobs), draws).tolist() == [1, 1, 3, 3]


def test_two_keys_give_two_conversations_and_one_key_the_same_again():
    sampler = sampler_of(small_model())

    def ids(key):
        (episode,) = sampler.open([[1, 2, 3]], [key])
        sampled = sampler.sample([episode], [20])[0].ids
        sampler.close(episode)
        return sampled

    assert ids(7) == ids(7)
    assert ids(7) != ids(8)


def test_a_model_with_eager_attention_is_sampled_as_it_is_trained():
    model = small_model()
    model.set_attn_implementation("eager")
    sampler = sampler_of(model)
    (first, second) = sampler.open([[5, 6, 7], [5, 6, 7, 8, 9]], [1, 2])
    sampled = sampler.sample([first, second], [6, 6])
    for prompt, message in zip(([5, 6, 7], [5, 6, 7, 8, 9]), sampled, strict=True):
        for place, logprob in enumerate(message.logprobs):
            context = prompt + message.ids[:place]
            probability = distribution(model, context)[message.ids[place]]
            assert logprob == pytest.approx(np.log(probability), abs=1e-5)


def test_greedy_takes_the_most_likely_token():
    model = small_model()
    sampler = sampler_of(model, temperature=0.7)
    (episode,) = sampler.open([[5, 6, 7]], [1])
    sampled = sampler.sample([episode], [12], greedy=True)[0]
    context = [5, 6, 7]
    for token, logprob in zip(sampled.ids, sampled.logprobs, strict=True):
        probabilities = distribution(model, context, temperature=0.7)
        assert token == int(probabilities.argmax())
        assert logprob == pytest.approx(np.log(probabilities[token]), abs=1e-5)
        context.append(token)


def test_a_message_ends_at_the_end_of_turn_or_at_its_limit():
    sampler = sampler_of(small_model())
    limits = [1, 2, 3, 50] * 16
    episodes = sampler.open([[1 + i % 15, 2] for i in range(64)], list(range(64)))
    sampled = sampler.sample(episodes, limits)
    for message, limit in zip(sampled, limits, strict=True):
        assert 1 <= len(message.ids) <= limit
        assert len(message.ids) == len(message.logprobs)
        assert END not in message.ids[:-1]
        assert message.finished == (message.ids[-1] == END)
        assert message.finished or len(message.ids) == limit
    assert {message.finished for message in sampled} == {True, False}


def test_some_of_the_open_conversations_can_be_sampled_in_any_order():
    sampler = sampler_of(small_model())
    prompts = [[1 + i, 2, 3] for i in range(6)]

    def alone(number):
        (episode,) = sampler.open([prompts[number]], [number])
        said = [sampler.sample([episode], [9])[0].ids]
        sampler.extend(episode, [4, 5])
        said.append(sampler.sample([episode], [9])[0].ids)
        sampler.close(episode)
        return said

    expected = [alone(number) for number in range(6)]
    episodes = sampler.open(prompts, list(range(6)))
    said = {}
    for order in ([5, 2], [0, 4, 3], [1]):
        sampled = sampler.sample([episodes[i] for i in order], [9] * len(order))
        said |= {i: [message.ids] for i, message in zip(order, sampled, strict=True)}
    for episode in episodes:
        sampler.extend(episode, [4, 5])
    sampler.close(episodes[1])
    for order in ([3], [4, 0, 5, 2]):
        sampled = sampler.sample([episodes[i] for i in order], [9] * len(order))
        for i, message in zip(order, sampled, strict=True):
            assert [*said[i], message.ids] == expected[i]


def test_equal_prompts_are_computed_once():
    sampler = sampler_of(small_model())
    fed = []
    sampler.model.model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    episodes = sampler.open([[1, 2, 3, 4]] * 8 + [[5, 6]] * 8, list(range(16)))
    assert fed == [(2, 3)]  # two different prompts, without their last token
    shared = [message.ids for message in sampler.sample(episodes, [9] * 16)]
    for episode in episodes:
        sampler.close(episode)
    for number in (0, 7, 8, 15):
        (episode,) = sampler.open([[1, 2, 3, 4] if number < 8 else [5, 6]], [number])
        assert sampler.sample([episode], [9])[0].ids == shared[number]
        sampler.close(episode)


def test_a_bf16_sampler_keeps_its_rotary_frequencies_in_fp32():
    model = small_model()
    sampler = sampler_of(model, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in sampler.model.parameters()} == {torch.bfloat16}
    assert torch.equal(sampler.model.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    ours, theirs = recomputed(model, [play(sampler, [1])[0].trajectory()])
    assert float((ours - theirs).abs().mean()) < 0.1


def sliding_qwen3():
    shape = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=8, use_sliding_window=True, sliding_window=4, max_window_layers=0, **shape
        )
    )


def sliding_mistral():  # whose configuration lists no kinds of layers
    shape = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    return MistralForCausalLM(
        MistralConfig(vocab_size=8, sliding_window=4, num_key_value_heads=2, **shape)
    )


@pytest.mark.parametrize("make", [sliding_qwen3, sliding_mistral])
def test_a_model_with_sliding_windows_is_not_served(make):
    assert "sliding_attention" in unserved(make().config)
    assert unserved(small_model().config) is None


def test_a_window_that_no_episode_exceeds_is_full_attention():
    config = sliding_mistral().config
    assert unserved(config, 4) is None
    assert unserved(config, 5).endswith("with max_tokens up to its window of 4, one cache would do")
    config.model_type = "gemma2"  # with soft caps
    assert unserved(config, 4) == "its layers are sliding_attention"


# Log-probabilities for training


def some_trajectories():
    random = Random(3)
    return [
        make_trajectory(
            [random.randrange(16) for _ in range(random.randint(1, 9))],
            [random.randrange(16) for _ in range(length)],
            [1] + [random.randrange(2) for _ in range(length - 1)],
        )
        for length in (3, 11, 7, 20, 1)
    ]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_logprobs_are_the_log_softmax_of_the_full_logits(temperature):
    model = small_model(dtype=torch.float64)
    (batch,) = make_micro_batches([(t, 0.0, 1.0) for t in some_trajectories()], 1000, 9)
    logprobs, entropy = TokenLogprobs(model, temperature)(batch)
    full = (model(batch.input_ids).logits / temperature).log_softmax(-1)
    brute = [
        full[row, column, target]
        for row, column, target in zip(batch.rows, batch.columns, batch.targets, strict=True)
    ]
    assert torch.allclose(logprobs, torch.stack(brute), rtol=0, atol=1e-12)
    at = full[batch.rows, batch.columns]
    assert torch.allclose(entropy, -(at.exp() * at).sum(-1), rtol=0, atol=1e-12)


def test_the_selected_tokens_are_the_sampled_ones():
    trajectory = make_trajectory([1, 2, 3], [4, 5, 6, 7], [1, 0, 1, 1])
    (batch,) = make_micro_batches([(trajectory, 0.0, 1.0)], 100, 0)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    assert batch.targets.tolist() == [4, 6, 7]
    assert batch.columns.tolist() == [2, 4, 5]  # the position before each


def test_chunks_change_neither_values_nor_gradients(monkeypatch):
    (batch,) = make_micro_batches([(t, 0.0, 1.0) for t in some_trajectories()], 1000, 0)

    def values_and_gradients():
        model = small_model(dtype=torch.float64)
        logprobs, entropy = TokenLogprobs(model, 1.0)(batch)
        (logprobs.sum() + 0.1 * entropy.square().sum()).backward()
        return logprobs, entropy, [parameter.grad for parameter in model.parameters()]

    whole = values_and_gradients()
    monkeypatch.setattr(token_logprobs, "LOGITS_PER_CHUNK", 3 * VOCABULARY)
    chunked = values_and_gradients()
    assert torch.allclose(whole[0], chunked[0], rtol=0, atol=1e-12)
    assert torch.allclose(whole[1], chunked[1], rtol=0, atol=1e-12)
    for a, b in zip(whole[2], chunked[2], strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-10)


def test_padding_on_the_right_does_not_matter():
    model, trajectories = small_model(), some_trajectories()
    together, _ = recomputed(model, trajectories, max_tokens=1000)
    order = sorted(trajectories, key=lambda trajectory: -trajectory.num_tokens)
    alone = torch.cat([recomputed(model, [trajectory])[0] for trajectory in order])
    assert torch.allclose(together, alone, rtol=0, atol=1e-5)


# Loading


def test_a_saved_folder_loads_with_the_same_logprobs(tmp_path):
    model = tiny_model(tokenizer(), seed=1)
    model.save_pretrained(tmp_path)
    loaded = load_folder(tmp_path, ModelSettings())
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    trajectory = make_trajectory(range(20), range(100, 140))
    assert torch.equal(recomputed(model, [trajectory])[0], recomputed(loaded, [trajectory])[0])


def test_weights_are_read_to_the_device_of_the_rank(tmp_path, monkeypatch):
    tiny_model(tokenizer(), seed=1).save_pretrained(tmp_path)
    loaded, placed = (load_folder(tmp_path, ModelSettings(), device) for device in (None, "cpu"))
    pairs = zip(loaded.parameters(), placed.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not hasattr(placed, "hf_device_map")
    asked: list[str | None] = []
    monkeypatch.setattr(loading, "load_folder", lambda *arguments: asked.append(arguments[2]))
    config = Config.model_validate({"model": {"model": str(tmp_path)}})
    for device in ("cuda:1", "cpu"):
        load_start(config, None, None, torch.device(device))
    assert asked == ["cuda:1", None]


def test_a_folder_can_be_the_model_of_a_recipe(tmp_path):
    tiny_model(tokenizer(), seed=1).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    settings = ModelSettings(model=str(tmp_path))
    own_tokenizer = load_tokenizer(settings)
    own_chat = Chat(own_tokenizer)
    messages = [{"role": "system", "content": "airline"}, {"role": "user", "content": "cancel K07"}]
    ids = own_chat.prompt_ids(messages, [])
    assert ids == chat().prompt_ids(messages, [])
    sampler = RowSampler(
        load_model(settings, own_tokenizer, seed=5), own_chat.end_of_turn_id, 1.0, torch.float32
    )
    (episode,) = sampler.open([ids], [1])
    assert 1 <= len(sampler.sample([episode], [5])[0].ids) <= 5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_attn_implementation", "eager"),
        ("_attn_implementation", "kernels-community/flash-attn2"),
        ("_experts_implementation", "kernels-community/experts"),
        ("output_attentions", True),
        ("return_dict", False),
    ],
)
def test_the_settings_choose_the_kernels_and_not_the_folder(tmp_path, name, value):
    small_model(1).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))
    settings = ModelSettings(model=str(tmp_path))
    for model in (load_folder(tmp_path, settings), empty_model(Config(model=settings))):
        assert model.config._attn_implementation == "sdpa"
        assert getattr(model.config, "_experts_implementation", None) in (None, "eager")
        assert (model.config.output_attentions, model.config.return_dict) == (False, True)


def test_a_number_in_the_configuration_cannot_take_all_memory(tmp_path):
    small_model(1).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_labels": 50_000_000}))
    settings = ModelSettings(model=str(tmp_path))
    with pytest.raises(UserError, match=r"^model: its config.json takes more than .* mend it, or"):
        empty_model(Config(model=settings))


def test_the_tiny_model_has_the_attention_that_is_set():
    settings = ModelSettings(attn_implementation="eager")
    assert load_model(settings, tokenizer(), 0).config._attn_implementation == "eager"
    assert load_model(ModelSettings(), tokenizer(), 0).config._attn_implementation == "sdpa"


def test_the_tiny_model_depends_on_its_seed_alone():
    torch.manual_seed(1)
    first = load_model(ModelSettings(), tokenizer(), seed=1)
    torch.manual_seed(2)
    again = load_model(ModelSettings(), tokenizer(), seed=1)
    other = load_model(ModelSettings(), tokenizer(), seed=2)
    assert torch.equal(first.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


@pytest.mark.parametrize("what", ["tokenizer", "model"])
def test_a_folder_without_a_model_is_refused_in_one_line(tmp_path, what):
    settings = ModelSettings(model=str(tmp_path))
    with pytest.raises(UserError) as refused:
        load_tokenizer(settings) if what == "tokenizer" else load_model(settings, None, seed=1)
    message = str(refused.value)
    assert "\n" not in message
    assert message.startswith(f"model: got '{tmp_path}', but its {what} cannot be loaded")
