"""Before anything is trained, a run shows that what it samples is what it trains."""

from functools import partial

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.config.cli import parse
from pipeline.models.model_checks import check_positions
from pipeline.preflight import check
from pipeline.rollout.samplers import own as row_cache
from tests.support.helpers import ALONE, tokenizer
from tests.support.messages import refusal, says
from tests.support.trial import trial

SHAPE = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "initializer_range": 0.3},
    **{"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0},
}
LATENT = {
    **{"q_lora_rank": 12, "kv_lora_rank": 10, "v_head_dim": 12},
    **{"qk_rope_head_dim": 4, "qk_nope_head_dim": 6},
}
EXPERTS = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    **{"moe_intermediate_size": 16, "first_k_dense_replace": 1, "num_experts": 4},
}


FEW = ["--domains", "airline", "--tasks-per-domain", "8", "--eval-tasks-per-domain", "2"]


def model_of(kind, **settings):
    config = AutoConfig.for_model(kind, **{**SHAPE, **settings})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config)


def saved(folder, model) -> str:
    model.resize_token_embeddings(len(tokenizer()))
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


TRIED = {
    "qwen3": {"head_dim": 8},
    "gpt2": {"attn_pdrop": 0.5, "resid_pdrop": 0.5},
    "deepseek_v3": LATENT | EXPERTS,
    "glm4_moe_lite": LATENT | EXPERTS,
    "youtu": LATENT,
    "qwen3_moe": EXPERTS,
}
PLAIN, ADAPTERS = (), ("--no-share-prefixes", "--gradient-checkpointing", "--use-peft")
ALIKE = [("glm4_moe_lite", ADAPTERS), ("youtu", PLAIN), ("youtu", ADAPTERS)]  # to deepseek_v3


@pytest.mark.parametrize(
    ("kind", "settings", "flags"),
    [
        pytest.param(
            *(kind, settings, flags),
            marks=pytest.mark.proof if (kind, flags) in ALIKE else (),
            id=f"{kind}-{'adapters' if flags else 'plain'}",
        )
        for kind, settings in TRIED.items()
        for flags in (PLAIN, ADAPTERS)
    ]
    + [("doge", {}, ["--no-share-prefixes"]), ("qwen3", {"head_dim": 8}, ["--padding-free"])],
)
def test_what_these_sample_is_what_they_train(kind, settings, flags):
    before = torch.random.get_rng_state()
    trial(model_of(kind, **settings), *flags)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_adapters_of_a_small_rank_do_not_enlarge_rounding():
    model = model_of("qwen3_moe", **EXPERTS, num_hidden_layers=4, head_dim=8)
    trial(model, "--use-peft", "--lora-r", "1")  # lora_alpha is divided by it


REFUSED = {  # settings, and what the line says
    "deepseek_v3": (
        LATENT | EXPERTS | {"num_key_value_heads": 2},
        ("got DeepseekV3ForCausalLM, which fails in a trial of sampling and",),
    ),
    "doge": ({}, ("got DogeForCausalLM, which fails", "; set share_prefixes")),
    "gpt_neo": (  # whose attention looks back by its own count
        {"attention_types": [[["global", "local"], 1]], "window_size": 4, "num_layers": 2},
        ("got GPTNeoForCausalLM, for which log-prob",),
    ),
    "bert": (
        {"is_decoder": True},
        ("got BertLMHeadModel, whose logits are not those of its",),
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_would_not_train_what_it_samples_is_refused(kind):
    settings, words = REFUSED[kind]
    says(refusal(trial, model_of(kind, **settings)), *words)


def test_a_sampler_that_is_wrong_is_refused_with_the_difference(monkeypatch):
    def ahead(self, rows, positions, *rest):
        return place(self, rows, positions + 1, *rest)

    place = row_cache.RowCache.place
    monkeypatch.setattr(row_cache.RowCache, "place", ahead)
    says(
        refusal(trial, model_of("qwen3", head_dim=8)),
        "log-probabilities of sampled tokens and of training di",
    )


def test_learned_positions_that_do_not_suffice_are_refused_before_anything_runs(tmp_path):
    folder = saved(tmp_path, model_of("gpt2", n_positions=48))
    config = parse(["--model", folder, *FEW, "--max-tokens", "256", "--warm-start-steps", "0"])
    for refuse in (check.main, partial(check.check_and_prepare, ranks=ALONE)):
        says(refusal(refuse, config), "max_tokens: got 256", "48 tokens", "lower max_tokens")


def test_positions_that_are_not_learned_may_be_too_few_as_well():
    model = model_of("gptj", n_positions=48, rotary_dim=4)  # without a table of embeddings
    says(refusal(check_positions, model, 64), "got 64, but the model has positions for 48 tokens")


def test_a_model_without_the_attention_implementation_is_refused_with_the_remedy(tmp_path):
    folder = saved(tmp_path, model_of("gptj", rotary_dim=4))
    says(
        refusal(check.main, parse(["--model", folder, *FEW])),
        "cannot be loaded",
        "; set attn_implementation eager, or",
    )


def test_check_and_a_run_tell_what_the_trial_found(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    folder = saved(tmp_path, model_of("qwen3", head_dim=8, max_position_embeddings=32))
    config = parse(["--model", folder, *FEW])
    assert check.main(config) == 0
    assert "\nmodel: max_tokens is 256, and the model was made for 32" in capsys.readouterr().out
    check.check_and_prepare(config, ALONE)
    assert capsys.readouterr().out.startswith("warning: max_tokens is 256, and the model was")


def test_a_model_that_mixes_joined_sequences_up_is_refused():
    model = model_of("qwen3", head_dim=8)
    decoder = model.model.forward
    model.model.forward = lambda *ids, position_ids=None, **rest: decoder(*ids, **rest)
    says(
        refusal(trial, model, "--padding-free", "--no-share-prefixes"),
        "training differ by",
        "; set padding_free false or use",
    )
