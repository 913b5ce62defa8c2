"""Layers computed again in the backward pass: less memory, and the same loss to the bit."""

import contextlib
import copy
import io

import pytest
import torch
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from pipeline.config.cli import parse
from pipeline.config.settings import ModelSettings
from pipeline.errors import UserError
from pipeline.grpo.micro_batches import micro_batch
from pipeline.grpo.token_logprobs import TokenLogprobs
from pipeline.grpo.updater import Reference
from pipeline.models import lora
from pipeline.models.capabilities import outer_layers, recompute_layers
from pipeline.models.loading import load_folder
from scripts.proofs.grid import make_episodes, small_model
from scripts.proofs.ranks import play_ranks
from tests.support.helpers import chat, start_unwatched, tokenizer

ROWS, _ = make_episodes(6)
BATCH = micro_batch([(row, 1.0, 1.0) for row in ROWS], 0)
SHAPE = {"vocab_size": 16, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def gpt2(vocab_size=16):
    """Its configuration drops a tenth of embeddings, attention and what layers add."""
    shape = {"vocab_size": vocab_size, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=None, eos_token_id=None))


def mixtral():
    """Its experts and router get noisy inputs in training mode."""
    experts = {"num_key_value_heads": 2, "intermediate_size": 32, "num_local_experts": 4}
    return MixtralForCausalLM(MixtralConfig(**SHAPE, **experts, router_jitter_noise=0.5))


def adapted():
    model = lora.attach(mixtral(), ModelSettings(lora_r=2), "base", 0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


MODELS = {
    "GPT-2, dropout": gpt2,
    "Mixtral, router noise": mixtral,
    "Mixtral, adapters": adapted,
    "Falcon, dropout in the layer": lambda: FalconForCausalLM(
        FalconConfig(**SHAPE, hidden_dropout=0.3, attention_dropout=0.3)
    ),
    "OPT, dropout in the layer": lambda: OPTForCausalLM(
        OPTConfig(**SHAPE, ffn_dim=32, word_embed_proj_dim=32, dropout=0.3)
    ),
}


def outcome(module):
    """Log-probabilities, gradients, and the bytes kept for the backward pass beside parameters."""
    own, kept = {p.data_ptr() for p in module.parameters()}, []

    def keep(tensor):
        if tensor.data_ptr() not in own:
            kept.append(tensor.nbytes)
        return tensor

    module.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs = module(BATCH)[0]
    logprobs.sum().backward()
    gradients = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    return logprobs.detach(), gradients, sum(kept)


@pytest.mark.parametrize("kind", MODELS)
def test_recomputing_layers_changes_no_bit_and_keeps_less(kind):
    torch.manual_seed(0)
    plain = TokenLogprobs(MODELS[kind](), 0.8).eval()
    recomputing = copy.deepcopy(plain)
    recompute_layers(recomputing.model)
    state = torch.get_rng_state()
    expected, expected_gradients, much = outcome(plain)
    found, gradients, little = outcome(recomputing)
    assert torch.equal(found, expected)
    assert len(gradients) == len(expected_gradients) > 0
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected_gradients, strict=True))
    assert little < much / 2
    assert torch.equal(Reference(recomputing).logprobs(BATCH), expected)
    assert torch.equal(torch.get_rng_state(), state), "the global generator is left as it was"


def test_each_layer_is_computed_again_once_for_the_backward_pass():
    model = gpt2().eval()
    calls = []
    for number, layer in enumerate(model.transformer.h):
        layer.mlp.register_forward_pre_hook(lambda *_, number=number: calls.append(number))
    recompute_layers(model)
    logits = model(torch.arange(8)[None], use_cache=False).logits
    assert calls == [0, 1]
    logits.sum().backward()
    assert calls == [0, 1, 1, 0]


def test_layers_are_the_outermost_and_a_model_without_any_is_refused():
    model = small_model()
    assert outer_layers(model) == list(model.model.layers)
    with pytest.raises(UserError, match=r"^gradient_checkpointing: got true, but Linear "):
        recompute_layers(torch.nn.Linear(2, 2))


# In a run


def in_a_run(folder, model):
    """What a run with the switch computes for the update and for the reference."""
    flags = [
        *("--gradient-checkpointing", "--beta", "0.1", "--warm-start-steps", "0"),
        *("--model", str(model), "--report-to", "none", "--output-dir", str(folder)),
        *("--max-tokens", "700", "--max-steps", "1"),
    ]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run = start_unwatched(parse(flags))
        run.begin_grpo()
        updater = run.learner.updater
    calls = []
    for layer in outer_layers(run.learner.model):
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    state = torch.get_rng_state()
    logprobs = updater.module(BATCH)[0]
    logprobs.sum().backward()
    reference = updater.reference.logprobs(BATCH)
    draws = not torch.equal(torch.get_rng_state(), state)
    return logprobs.tolist(), reference.tolist(), draws, calls


def test_the_switch_for_less_memory_turns_no_dropout_on(tmp_path):
    chat()
    gpt2(len(tokenizer())).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (found,) = play_ranks(in_a_run, 1, tmp_path / "run", tmp_path / "model")
    assert isinstance(found, tuple), found
    logprobs, reference, draws, calls = found
    plain = TokenLogprobs(load_folder(tmp_path / "model", ModelSettings()), 1.0).eval()
    with torch.no_grad():
        expected = plain(BATCH)[0].tolist()
    assert logprobs == pytest.approx(expected, abs=1e-6)
    assert reference == pytest.approx(expected, abs=1e-6)
    assert not draws
    assert calls == [True] * 4 + [False] * 2, "two layers forward and again, then the reference"
