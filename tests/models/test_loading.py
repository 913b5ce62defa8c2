"""The policy: what is sampled, its log-probabilities, and the weights that both come from."""

import json
from random import Random

import numpy as np
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from pipeline.checkpoints.resume import load_start
from pipeline.config.settings import Config, ModelSettings
from pipeline.data.rng import stream_key, uniforms
from pipeline.errors import UserError
from pipeline.grpo.micro_batches import make_micro_batches
from pipeline.grpo.token_logprobs import TokenLogprobs
from pipeline.models import loading
from pipeline.models.capabilities import unserved
from pipeline.models.loading import empty_model, load_folder, load_model, load_tokenizer
from pipeline.models.tiny import tiny_model
from pipeline.rollout.row_sampler import RowSampler
from pipeline.rollout.sequences import cumulative, inverse_cdf
from scripts.proofs.grid import make_trajectory, small_model
from tests.support.helpers import tokenizer

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


@pytest.mark.parametrize(
    ("attention", "temperature"), [("sdpa", 1.0), ("sdpa", 0.7), ("eager", 1.0)]
)
def test_sampled_logprobs_are_those_that_training_recomputes(attention, temperature):
    model = small_model()
    model.set_attn_implementation(attention)
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


def test_the_selected_tokens_are_the_sampled_ones():
    trajectory = make_trajectory([1, 2, 3], [4, 5, 6, 7], [1, 0, 1, 1])
    (batch,) = make_micro_batches([(trajectory, 0.0, 1.0)], 100, 0)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    assert batch.targets.tolist() == [4, 6, 7]
    assert batch.columns.tolist() == [2, 4, 5]  # the position before each


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
