"""Rotary factors that depend on length: one set of them for a run, whoever shares a batch."""

import pytest
import torch
import transformers

from pipeline.errors import UserError
from pipeline.models.rotary import fix_rotary
from pipeline.rollout.row_sampler import RowSampler
from tests.rollout.test_generate_sampler import play, recomputed

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


def model_of(kind, **settings):
    config = getattr(transformers, f"{kind}Config")(
        **{"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3},
        **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
        **settings,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


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
    with pytest.raises(UserError, match="PhimoeForCausalLM with rotary scaling longrope, whose"):
        fix_rotary(model_of("Phimoe", **settings), 30)
