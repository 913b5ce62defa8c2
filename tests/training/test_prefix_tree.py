"""Common beginnings: each once in the row, and nothing but rounding different for it."""

from random import Random

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from pipeline.config.settings import ModelSettings
from pipeline.models import lora
from pipeline.models.layers import recompute_layers
from pipeline.training.micro_batches import make_micro_batches
from pipeline.training.prefix_tree import attend_to_tree, follow_prefixes, shared_row
from pipeline.training.token_logprobs import TokenLogprobs
from scripts.proofs.grid import in_float64, make_trajectory, small_model
from tests.support.messages import refusal, says


def episodes(seed=0, num_groups=5, size=4):
    """Groups with prompts of their own, whose members part at some token, or not at all."""
    random, rows = Random(seed), []
    for _ in range(num_groups):
        prompt = [random.randrange(16) for _ in range(random.randint(1, 12))]
        first = [random.randrange(16) for _ in range(20)]
        for _ in range(size):
            same = random.randint(1, 20)
            own = [random.randrange(16) for _ in range(random.choice([0, 0, 3, 30]))]
            completion = first[:same] + own
            mask = [1] + [random.randrange(2) for _ in completion[1:]]
            rows.append(make_trajectory(prompt, completion, mask))
    return rows


def llama():
    shape = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads))


def gpt2():  # positions are learned, and each head has its own keys
    return GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=32, n_layer=2, n_head=4)).eval()


def adapted():
    model = lora.attach(small_model(), ModelSettings(lora_r=4), "base", 0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    return model


def recomputing():
    model = small_model()
    recompute_layers(model)
    return model


def outcome(model, rows, max_tokens, share_prefixes):
    """Log-probabilities and entropies by sequence and token, and the gradient of a sum of them."""
    module, found = TokenLogprobs(model, 0.7), []
    module.zero_grad()
    items = [(row, 0.0, 1.0 + number) for number, row in enumerate(rows)]
    for batch in make_micro_batches(items, max_tokens, 0, share_prefixes=share_prefixes):
        assert (batch.tree is not None) == share_prefixes
        logprobs, entropy = module(batch)
        ((logprobs + 0.1 * entropy) * batch.weights).sum().backward()
        columns = (batch.weights, batch.targets, logprobs, entropy)
        found += zip(*(column.tolist() for column in columns), strict=True)
    gradient = torch.cat([p.grad.flatten() for p in module.parameters() if p.requires_grad])
    return torch.tensor(sorted(found), dtype=torch.float64), gradient


@pytest.mark.parametrize("max_tokens", [10_000, 60], ids=["together", "cut"])
@pytest.mark.parametrize("make", [small_model, llama, gpt2, adapted, recomputing])
def test_log_probabilities_and_gradients_are_those_of_whole_sequences(make, max_tokens):
    torch.manual_seed(0)
    model, rows = in_float64(make()), episodes()
    values, gradient = outcome(model, rows, max_tokens, share_prefixes=True)
    others, exact = outcome(model, rows, 10_000, share_prefixes=False)
    assert torch.allclose(values, others, rtol=0, atol=1e-11)
    assert float((gradient - exact).norm() / exact.norm()) < 1e-12


@pytest.mark.parametrize("shared", [300, 0])
def test_long_paths_are_computed_in_chunks_and_attend_as_each_alone(shared):
    """Two paths of 1,500 tokens; with a common prefix, the second one has fewer queries."""
    torch.manual_seed(0)
    row = shared_row([[1] * shared + [own] * (1500 - shared) for own in (2, 3)])
    states = torch.randn(3, 1, 2, len(row.ids), 4, dtype=torch.float64)
    output, _ = attend_to_tree(torch.nn.Module(), *states, None, tree=row.tree)
    for path in row.paths:
        alone = [x[:, :, path] for x in states]
        expected = scaled_dot_product_attention(*alone, is_causal=True)[0].transpose(0, 1)
        assert torch.allclose(output[0, path], expected, rtol=0, atol=1e-12)


def test_other_attention_is_left_as_it_is(tmp_path):
    eager, windows, model = small_model(), small_model(), small_model()
    eager.set_attn_implementation("eager")
    windows.config.layer_types = ["full_attention", "sliding_attention"]
    assert not follow_prefixes(eager) and eager.config._attn_implementation == "eager"
    assert not follow_prefixes(windows) and windows.config._attn_implementation == "sdpa"
    assert follow_prefixes(model) and follow_prefixes(model)  # a second wrapper changes nothing
    model.save_pretrained(tmp_path)
    assert "prefixes" not in (tmp_path / "config.json").read_text()


def test_a_model_that_does_not_tell_its_layers_of_the_tree_is_refused():
    model = small_model()
    decoder = model.model.forward
    model.model.forward = lambda tree=None, **rest: decoder(**rest)
    says(
        refusal(outcome, model, episodes(), 1000, share_prefixes=True),
        "share_prefixes: the layers of this model get no tree",
    )


def test_attention_with_more_to_it_is_refused():
    states, tree = torch.zeros(1, 2, 1, 4), shared_row([[1]]).tree
    says(
        refusal(
            attend_to_tree, torch.nn.Module(), states, states, states, None, tree=tree, softcap=50.0
        ),
        "this model's attention has softcap; set it false",
    )
