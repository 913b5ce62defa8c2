"""Sampling through generate: models without one cache over all turns are served as exactly."""

import json
import sys
from io import StringIO
from random import Random

import numpy as np
import pytest
import torch
import transformers
from transformers import GenerationConfig

from pipeline import train
from pipeline.config.cli import parse
from pipeline.config.settings import Config, RolloutSettings
from pipeline.data.rng import stream_key
from pipeline.models import capabilities
from pipeline.preflight import check
from pipeline.rollout.samplers.choice import make_sampler
from pipeline.rollout.samplers.generate import GenerateSampler
from pipeline.rollout.samplers.own import RowSampler
from pipeline.training.micro_batches import make_micro_batches
from pipeline.training.token_logprobs import TokenLogprobs
from scripts.proofs.grid import make_trajectory, small_model
from scripts.proofs.ranks import play_ranks
from tests.support.helpers import chat, tokenizer
from tests.support.messages import refusal, says

END, VOCABULARY = 0, 32
SHAPE = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "head_dim": 16},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.1},
    **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
}
LINEAR = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
EXPERTS = {
    **{"num_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
}
SLIDING, FULL, RECURRENT = "sliding_attention", "full_attention", "linear_attention"
# Of each kind its layers and further settings; windows are shorter than conversations.
KINDS = {
    "Mistral": ((SLIDING, SLIDING), {"sliding_window": 6}),
    "Gemma3Text": ((SLIDING, FULL, SLIDING), {"sliding_window": 6}),
    "Qwen3Next": ((RECURRENT, FULL), LINEAR | EXPERTS),
    "Lfm2": (("conv", FULL), {}),
    "Mamba": ((RECURRENT, RECURRENT), {"state_size": 8}),
    "MiniMax": ((RECURRENT, FULL), {"num_local_experts": 2, "block_size": 4}),
}
PADDING_CHANGES = {"MiniMax"}  # whose linear attention computes padding as well
EACH_KIND = pytest.mark.parametrize("kind", KINDS)


def built(kind: str, **values):
    """A model of another family, whose weights are the same each time."""
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **values})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).eval()


def model_of(kind: str, **settings):
    layers, special = KINDS[kind]
    values = {**special, "num_hidden_layers": len(layers), **settings}
    if kind not in ("Mistral", "Mamba"):  # which list no kinds, or derive them
        values["layer_types"] = list(layers)
    return built(kind, **values)


def sampler_of(model, temperature=1.0, **settings) -> GenerateSampler:
    return GenerateSampler(model, END, temperature, torch.float32, **settings)


def play(sampler, numbers, vocabulary=VOCABULARY):
    """Conversations of one to four turns side by side, each given by its number alone.

    Returns their trajectories.
    """
    played, live = [], []
    for number in numbers:
        random = Random(number)
        texts = [
            [random.randrange(1, vocabulary) for _ in range(random.randint(2, 20))]
            for _ in range(random.randint(1, 4))
        ]
        (episode,) = sampler.open([texts[0]], [stream_key("test", number)])
        limits = [random.randint(1, 9) for _ in texts]
        live.append((episode, texts, limits, ([], [], [])))
    played = list(live)
    for turn in range(4):
        live = [conversation for conversation in live if turn < len(conversation[1])]
        if turn:
            for episode, texts, _, (ids, mask, logprobs) in live:
                sampler.extend(episode, texts[turn])
                ids += texts[turn]
                mask += [0] * len(texts[turn])
                logprobs += [0.0] * len(texts[turn])
        limits = [conversation[2][turn] for conversation in live]
        messages = sampler.sample([conversation[0] for conversation in live], limits)
        for message, (_, _, _, (ids, mask, logprobs)) in zip(messages, live, strict=True):
            ids += message.ids
            mask += [1] * len(message.ids)
            logprobs += message.logprobs
    for episode, *_ in played:
        sampler.close(episode)
    return [
        make_trajectory(texts[0], ids, mask, logprobs=logprobs)
        for _, texts, _, (ids, mask, logprobs) in played
    ]


def recomputed(model, trajectories, temperature=1.0):
    """(log-probabilities by TokenLogprobs, those of the sampler), over all micro-batches."""
    batches = make_micro_batches([(t, 1.0, 1.0) for t in trajectories], 400, 0)
    with torch.no_grad():
        ours = [TokenLogprobs(model, temperature)(batch)[0] for batch in batches]
    return torch.cat(ours), torch.cat([batch.old_logprobs for batch in batches])


# What is sampled


@EACH_KIND
@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.proof), 0.7])
def test_sampled_logprobs_are_those_that_training_recomputes(kind, temperature):
    model = model_of(kind)
    trajectories = play(sampler_of(model, temperature), range(16))
    ours, theirs = recomputed(model, trajectories, temperature)
    assert len(ours) > 100
    assert float(ours.std()) > 0.1
    assert float((ours - theirs).abs().max()) < 1e-5


@pytest.mark.parametrize("kind", ["Mistral", "Qwen3Next", "MiniMax"])
def test_what_is_sampled_does_not_depend_on_who_shares_the_batch(kind):
    sampler = sampler_of(model_of(kind))
    assert sampler.pads == (kind not in PADDING_CHANGES)
    together = play(sampler, range(5))
    alone = [play(sampler, [number])[0] for number in range(5)]
    for a, b in zip(together, alone, strict=True):
        assert a.completion_ids == b.completion_ids
        assert np.allclose(a.logprobs, b.logprobs, rtol=0, atol=1e-5)


def test_a_model_that_both_can_serve_says_the_same_through_generate():
    model = small_model()
    (ours, theirs) = (
        play(make(model, END, 0.8, torch.float32), range(64), vocabulary=16)
        for make in (GenerateSampler, RowSampler)
    )
    same = [
        (a, b) for a, b in zip(ours, theirs, strict=True) if a.completion_ids == b.completion_ids
    ]
    assert len(same) >= 63
    for a, b in same:
        assert np.allclose(a.logprobs, b.logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("make", [RowSampler, GenerateSampler])
def test_another_stop_ends_a_message_as_the_end_of_turn_does(make):
    model, stops = small_model(), (3, 5)
    prompts, limits = [[1 + i % 15, 2] for i in range(48)], [5, 40] * 24

    def said(**settings):
        sampler = make(model, END, 1.0, torch.float32, **settings)
        return sampler.sample(sampler.open(prompts, list(range(48))), limits)

    ends = set()
    for plain, stopped in zip(said(), said(other_stops=stops), strict=True):
        places = [place for place, token in enumerate(plain.ids) if token in (END, *stops)]
        length = places[0] + 1 if places else len(plain.ids)
        assert stopped.ids == plain.ids[:length]
        assert stopped.logprobs == pytest.approx(plain.logprobs[:length], abs=1e-5)
        assert stopped.finished == bool(places)
        ends.add(stopped.ids[-1] if places else None)
    assert ends == {END, *stops, None}


def test_a_checkpoints_own_way_to_sample_changes_nothing():
    model = model_of("Mistral")
    expected = play(sampler_of(model), range(6))
    model.generation_config = GenerationConfig(
        do_sample=True, top_k=1, repetition_penalty=9.0, eos_token_id=3, max_new_tokens=2
    )
    assert play(sampler_of(model), range(6)) == expected
    assert model.generation_config.top_k == 1


# Windows that no episode exceeds

WINDOW = 160  # no conversation of `play` is longer
PLAIN = {
    **dict.fromkeys(("Mistral", "Ministral", "Mixtral", "Olmo3", "Phi3", "SmolLM3", "Starcoder2")),
    **dict.fromkeys(("Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "Gemma3Text")),
}


def windowed(name: str, window: int = WINDOW):
    """A model of an architecture in PLAIN_WINDOWS whose first and last layers have windows."""
    text = {"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": window}
    experts = EXPERTS if "Moe" in name else {}
    return built(name, num_hidden_layers=3, use_sliding_window=True, **text, **experts)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            n, marks=() if n in ("Mistral", "Qwen2Moe", "Gemma3Text") else pytest.mark.proof
        )
        for n in PLAIN
    ],
)
def test_episodes_within_the_window_are_sampled_and_trained_as_with_full_attention(name):
    model = windowed(name)
    assert model.config.get_text_config().sliding_window == WINDOW
    sampler = made(model, max_tokens=WINDOW)
    assert type(sampler) is RowSampler
    trajectories = play(sampler, range(12))
    assert max(len(t.prompt_ids) + len(t.completion_ids) for t in trajectories) <= WINDOW
    ours, theirs = recomputed(windowed(name), trajectories)  # the model's own masks
    assert float(ours.std()) > 0.1
    assert float((ours - theirs).abs().max()) < 1e-5
    module = TokenLogprobs(model, 1.0, max_tokens=WINDOW)
    assert module.shares_prefixes
    assert not TokenLogprobs(model, 1.0, max_tokens=WINDOW + 1).shares_prefixes
    (batch,) = make_micro_batches([(t, 1.0, 1.0) for t in trajectories], 10**6, 0, False, True)
    shared = module(batch)[0].detach()
    assert float((shared - batch.old_logprobs).abs().max()) < 1e-5


def test_every_architecture_with_plain_windows_is_tried():
    assert {windowed(name).config.model_type for name in PLAIN} == capabilities.PLAIN_WINDOWS


# Which sampler a model gets


def made(model, is_main=True, **limits):
    settings = RolloutSettings(top_k=0 if limits else 5, **limits)
    return make_sampler(model, chat(), settings, torch.float32, is_main)


def test_a_model_gets_the_sampler_that_can_serve_it_and_the_slower_is_told_once(capsys):
    assert type(made(small_model())) is RowSampler
    assert capsys.readouterr().err == ""
    sampler = made(model_of("Mistral"))
    assert type(sampler) is GenerateSampler
    assert (sampler.top_k, sampler.top_p, sampler.temperature) == (5, 1.0, 1.0)
    assert sampler.end_of_turn_id == chat().end_of_turn_id
    says(capsys.readouterr().err, "MistralForCausalLM", "slower", "sliding_attention")
    made(model_of("Mistral"), is_main=False)
    assert capsys.readouterr().err == ""


def test_a_model_that_hides_what_it_carries_on_is_refused():
    config = transformers.RwkvConfig(vocab_size=8, hidden_size=16, num_hidden_layers=2)
    says(
        refusal(capabilities.why_generate, transformers.RwkvForCausalLM(config)),
        "got RwkvForCausalLM, which is recurrent and names no",
    )


def saved(folder, kind: str, **settings) -> str:
    """A model folder with the embedded tokenizer."""
    ids = {"eos_token_id": tokenizer().eos_token_id, "pad_token_id": tokenizer().pad_token_id}
    model_of(kind, vocab_size=len(tokenizer()), **ids, **settings).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


SMALL = {"tasks_per_domain": 8, "eval_tasks_per_domain": 2}


def test_check_says_that_a_model_is_sampled_through_generate(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    model = {"model": saved(tmp_path, "Mistral")}
    assert check.main(Config.model_validate({"model": model, "data": SMALL})) == 0
    said = capsys.readouterr().out
    assert (
        "\nsampling: through generate, every message from the start again (slower): its layers are "
        "sliding_attention; with max_tokens up to its window of 6, one cache would do\n" in said
    )
    assert "that a rank has here: fits\n" in said


def run_on_this_rank(argv):
    """The pipeline's `main`; returns what it printed."""
    sys.stderr = StringIO()
    train.main(parse(argv))
    return sys.stderr.getvalue()


@pytest.mark.whole_run
def test_a_whole_run_of_a_model_with_sliding_windows(tmp_path):
    """Two real ranks: sampling, an update, evaluations; and one warning."""
    flags = [
        *("--model", saved(tmp_path / "model", "Mistral"), "--domains", "airline"),
        *("--warm-start-steps", "0", "--max-steps", "1", "--tasks-per-step", "2"),
        *("--num-generations", "2", "--eval-tasks-per-domain", "1", "--eval-trials", "1"),
        *("--max-turns", "2", "--max-tokens-per-turn", "8", "--tasks-per-domain", "8"),
        *("--validation-steps", "0", "--report-to", "none", "--output-dir", str(tmp_path / "out")),
        *("--num-gpus", "2", "--temperature", "0.5", "--no-drop-zero-std-groups"),
    ]
    printed = play_ranks(run_on_this_rank, 2, flags, timeout_s=300)
    assert [text.count("is sampled through generate") for text in printed] == [1, 0], printed
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    steps = [step for step in map(json.loads, lines) if step["kind"] == "train"]
    assert [step["train/sampling_logp_difference_max"] < 1e-5 for step in steps] == [True]
