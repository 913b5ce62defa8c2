"""Norms and MLPs that keep less: equal outputs, equal gradients, fewer bytes."""

import copy

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from pipeline.models.ops import keep_less
from scripts.proofs.grid import small_model

IDS = torch.arange(24).view(2, 12) % 15
SIZES = {"vocab_size": 16, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "intermediate_size": 96}


def llama(**fields):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **fields))


def gemma():
    torch.manual_seed(0)
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=8))


def outcome(model):
    """The logits, the gradients, and the bytes that autograd keeps beside the weights."""
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    kept = dict[int, torch.Tensor]()

    def keep(tensor):
        if tensor.untyped_storage()._cdata not in own:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(IDS).logits
    logits.log_softmax(-1)[..., 3].sum().backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return logits, gradients, sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("make", [small_model, llama])
def test_outputs_have_equal_bits_and_gradients_are_equal_up_to_rounding(make):
    plain, less = make(), make()
    keep_less(less)
    assert type(less).__name__ == type(plain).__name__
    (logits, gradients, size), (others, found, smaller) = outcome(plain), outcome(less)
    assert torch.equal(logits, others)
    assert float((gradients - found).norm() / gradients.norm()) < 1e-5
    assert smaller < 0.85 * size


def test_frozen_norms_have_no_gradient():
    model = llama()
    keep_less(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" not in name)
    outcome(model)
    assert all((p.grad is None) == ("norm" in n) for n, p in model.named_parameters())


def test_in_bf16_and_without_gradients_modules_compute_as_before():
    plain, less = llama().bfloat16(), llama().bfloat16()
    keep_less(less)
    norms = [
        model.model.norm(torch.ones(3, 32, dtype=torch.bfloat16) / 3) for model in (plain, less)
    ]
    assert torch.equal(*norms) and norms[0].grad_fn.name() == norms[1].grad_fn.name()
    (logits, gradients, _), (others, found, _) = outcome(plain), outcome(less)
    assert torch.equal(logits, others)
    assert torch.equal(gradients, found)  # those of the MLP have equal bits
    with torch.no_grad():
        assert torch.equal(plain(IDS).logits, less(IDS).logits)


@pytest.mark.parametrize("make", [gemma, lambda: llama(hidden_act="gelu")], ids=["gemma", "gelu"])
def test_other_norms_and_activations_stay_as_they_are(make):
    plain, less = make(), make()
    keep_less(less)
    (logits, gradients, _), (others, found, _) = outcome(plain), outcome(less)
    assert torch.equal(logits, others)
    assert torch.allclose(gradients, found, rtol=1e-4, atol=1e-5)


def test_a_copy_has_weights_of_its_own():
    model = small_model()
    keep_less(model)
    keep_less(model)
    before, other = model(IDS).logits.detach(), copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(other(IDS).logits, before)
