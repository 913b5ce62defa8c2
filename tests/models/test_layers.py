"""Layers of ours: the output layer in bf16, norms and MLPs that keep less, layers that are computed
again, and rotary factors that depend on length.
"""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import FalconConfig, FalconForCausalLM, GPT2Config, GPT2LMHeadModel

from pipeline.config.settings import ModelSettings
from pipeline.models import lora
from pipeline.models.layers import (
    fix_rotary,
    keep_less,
    logits_of,
    outer_layers,
    recompute_layers,
    use_fp32_logits,
    weight_of_logits,
)
from pipeline.rollout.samplers.own import RowSampler
from pipeline.training import token_logprobs
from pipeline.training.micro_batches import make_micro_batches, micro_batch
from pipeline.training.token_logprobs import TokenLogprobs
from pipeline.training.updater import Reference
from scripts.proofs.grid import make_episodes, small_model
from tests.rollout.samplers.test_generate import built, play, recomputed
from tests.support.messages import refusal, says

# Layers computed again in the backward pass

ROWS, _ = make_episodes(6)
BATCH = micro_batch([(row, 1.0, 1.0) for row in ROWS], 0)


def model_of(kind, **settings):
    few = {"num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.3}
    return built(kind, **few, head_dim=8, **settings)


mixtral = partial(model_of, "Mixtral", num_local_experts=4, router_jitter_noise=0.5)


def adapted():
    model = lora.attach(mixtral(), ModelSettings(lora_r=2), "base", 0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


FALCON = {"vocab_size": 16, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT2 = {"vocab_size": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}  # it drops a tenth
MODELS = {
    "GPT-2, dropout": lambda: GPT2LMHeadModel(
        GPT2Config(**GPT2, bos_token_id=None, eos_token_id=None)
    ),
    "Mixtral, router noise": mixtral,
    "Mixtral, adapters": adapted,
    "Falcon, dropout in the layer": lambda: FalconForCausalLM(
        FalconConfig(**FALCON, hidden_dropout=0.3, attention_dropout=0.3)
    ),
    "OPT, dropout in the layer": partial(
        model_of, "OPT", ffn_dim=32, word_embed_proj_dim=32, dropout=0.3
    ),
}


def outcome(module, compute):
    """What is computed, the gradients of its sum, and the bytes kept for them beside weights."""
    own = {p.untyped_storage()._cdata for p in module.parameters()}
    kept = dict[int, torch.Tensor]()

    def keep(tensor):
        if tensor.untyped_storage()._cdata not in own:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    module.zero_grad()
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        found = compute(module)
    found.sum().backward()
    gradients = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
    return found.detach(), gradients, sum(x.untyped_storage().nbytes() for x in kept.values())


def logprobs_of(module):
    return module(BATCH)[0]


@pytest.mark.parametrize("kind", MODELS)
def test_recomputing_layers_changes_no_bit_and_keeps_less(kind):
    torch.manual_seed(0)
    plain = TokenLogprobs(MODELS[kind](), 0.8).eval()
    recomputing = copy.deepcopy(plain)
    recompute_layers(recomputing.model)
    state = torch.get_rng_state()
    expected, expected_gradients, much = outcome(plain, logprobs_of)
    found, gradients, little = outcome(recomputing, logprobs_of)
    assert torch.equal(found, expected)
    assert torch.equal(gradients, expected_gradients) and gradients.any()
    assert little < much / 2
    assert torch.equal(Reference(recomputing).logprobs(BATCH), expected)
    assert torch.equal(torch.get_rng_state(), state), "the global generator is left as it was"


def test_layers_are_the_outermost_and_a_model_without_any_is_refused():
    model = small_model()
    assert outer_layers(model) == list(model.model.layers)
    assert refusal(recompute_layers, torch.nn.Linear(2, 2)).startswith(
        "gradient_checkpointing: got true, but Linear "
    )


# The output layer

BF16 = torch.bfloat16
HIDDEN = torch.randn(3, 7, 32, generator=torch.Generator().manual_seed(0))


def head(dtype=torch.float32, bias=False):
    torch.manual_seed(1)
    return nn.Linear(32, 50, bias=bias, dtype=dtype)


@pytest.mark.parametrize("bias", [False, True])
def test_logits_are_sums_in_float32_of_products_of_bf16_numbers(bias):
    layer = head(bias=bias)
    with torch.autocast("cpu", BF16):
        weight = weight_of_logits(layer)
        logits = logits_of(layer, HIDDEN, weight)
        rounded = layer(HIDDEN)
    expected = HIDDEN.to(BF16).double() @ layer.weight.to(BF16).double().T
    expected = expected + layer.bias.double() if bias else expected
    assert (weight.dtype, logits.dtype, rounded.dtype) == (BF16, torch.float32, BF16)
    assert float((logits - expected).detach().abs().max()) < 1e-6
    assert float((rounded - expected).detach().abs().max()) > 1e-3
    frozen = head(BF16, bias)
    use_fp32_logits(frozen)  # as in a sampler
    assert frozen(HIDDEN.to(BF16)).dtype == torch.float32


@pytest.mark.parametrize(("rows_of_a_chunk", "rows_in_cache"), [(1, 1), (7, 2), (10**6, 10**6)])
@pytest.mark.parametrize(("temperature", "coefficient"), [(1.0, 0.1), (0.7, 0.0)])
def test_values_and_gradients_are_those_of_log_softmax_in_chunks_of_any_size(
    temperature, coefficient, rows_of_a_chunk, rows_in_cache, monkeypatch
):
    """In chunks of several rows of the cache, of which the last keeps its logits."""
    monkeypatch.setattr(token_logprobs, "LOGITS_PER_CHUNK", rows_of_a_chunk * 40)
    monkeypatch.setattr(token_logprobs, "IN_CACHE", rows_in_cache * 40)
    episodes, _ = make_episodes(6)
    (batch,) = make_micro_batches([(e, 1.0, 1.0) for e in episodes], 10**6, 0)
    model = small_model(vocab_size=40).double()
    rows = model(batch.input_ids).logits.flatten(0, 1)[batch.predictors[batch.which]] / temperature
    logprobs = rows.log_softmax(-1)
    expected = (
        logprobs.gather(1, batch.targets[:, None])[:, 0],
        torch.special.entr(logprobs.exp()).sum(1),
    )
    found = TokenLogprobs(model, temperature, coefficient > 0)(batch)
    weights = torch.linspace(-1, 2, len(rows), dtype=torch.float64)
    gradients = []
    for one, other in (expected, found):
        model.zero_grad()
        (weights * one + coefficient * other).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    for one, other in [*zip(expected, found, strict=True), gradients]:
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)


# Norms and MLPs that keep less

IDS = torch.arange(24).view(2, 12) % 15


def of_one_token(model):
    return model(IDS).logits.log_softmax(-1)[..., 3]


@pytest.mark.parametrize("make", [small_model, partial(model_of, "Llama")])
def test_outputs_have_equal_bits_and_gradients_are_equal_up_to_rounding(make):
    plain, less = make(), make()
    keep_less(less)
    assert type(less).__name__ == type(plain).__name__
    logits, gradients, size = outcome(plain, of_one_token)
    others, found, smaller = outcome(less, of_one_token)
    assert torch.equal(logits, others)
    assert float((gradients - found).norm() / gradients.norm()) < 1e-5
    assert smaller < 0.85 * size


@pytest.mark.parametrize(
    "make",
    [partial(model_of, "Gemma2"), partial(model_of, "Llama", hidden_act="gelu")],
    ids=["gemma", "gelu"],
)
def test_other_norms_and_activations_stay_as_they_are(make):
    plain, less = make(), make()
    keep_less(less)
    logits, gradients, _ = outcome(plain, of_one_token)
    others, found, _ = outcome(less, of_one_token)
    assert torch.equal(logits, others)
    assert torch.allclose(gradients, found, rtol=1e-4, atol=1e-5)


# Rotary factors

BORDER = 24  # tokens; the conversations that `play` makes have up to 88
LONGROPE = {
    **{"max_position_embeddings": 256, "original_max_position_embeddings": BORDER},
    "rope_parameters": {
        **{"rope_type": "longrope", "rope_theta": 10000.0, "factor": 8.0},
        **{"long_factor": [4.0] * 4, "short_factor": [1.0] * 4},
        "original_max_position_embeddings": BORDER,
    },
}
DYNAMIC = {
    "max_position_embeddings": BORDER,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
}


def gap_of(model, numbers):
    """The largest difference in nats of conversations that are sampled beside each other."""
    sampler = RowSampler(model, 0, 1.0, torch.float32)
    ours, theirs = recomputed(model, play(sampler, numbers))
    return float((ours - theirs).abs().max())


@pytest.mark.parametrize("kind", ["Phi3", "Llama"])
@pytest.mark.parametrize("settings", [LONGROPE, DYNAMIC], ids=["longrope", "dynamic"])
@pytest.mark.parametrize("max_tokens", [BORDER - 8, 96])
def test_what_is_sampled_is_what_is_trained_on_both_sides_of_the_border(kind, settings, max_tokens):
    if kind == "Phi3" and settings is DYNAMIC:
        pytest.skip("Phi-3 knows longrope alone")
    model = model_of(kind, **settings)
    assert gap_of(model, range(8)) > 1  # the fault, in nats
    fix_rotary(model, max_tokens)
    assert gap_of(model, range(8)) < 5e-5


@pytest.mark.parametrize("settings", [LONGROPE, DYNAMIC], ids=["longrope", "dynamic"])
def test_the_factors_are_those_of_the_longest_episode(settings):
    ids = torch.arange(1, 31)[None]
    model = model_of("Llama", **settings)
    whole = model(ids).logits  # 30 tokens, beyond the border
    said = fix_rotary(model, 30)
    kind = settings["rope_parameters"]["rope_type"]
    assert said.startswith(f"rotary scaling {kind}: the factors of 30 tokens (max_tokens) hold")
    torch.testing.assert_close(model(ids).logits, whole, rtol=0, atol=0)
    short = model(ids[:, :4]).logits
    torch.testing.assert_close(short, whole[:, :4], rtol=0, atol=1e-5)


def test_within_the_border_nothing_changes_and_nothing_is_said():
    model, ids = model_of("Llama", **LONGROPE), torch.arange(1, 9)[None]
    before = model(ids).logits
    assert fix_rotary(model, BORDER) == ""
    assert torch.equal(model(ids).logits, before)
    linear = {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}
    assert fix_rotary(model_of("Llama", **linear), 9999) == ""


def test_a_model_that_decides_by_length_elsewhere_is_refused():
    scaled = LONGROPE["rope_parameters"] | {"short_mscale": 1.1, "long_mscale": 1.3}
    settings = LONGROPE | {"rope_parameters": scaled, "num_local_experts": 2}
    says(
        refusal(fix_rotary, model_of("Phimoe", **settings), 30),
        "PhimoeForCausalLM with rotary scaling longrope, whose",
    )
