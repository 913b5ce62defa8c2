"""Weights as they travel: what is trained, by name, is all that a copy needs to become it."""

import pytest
import torch
from safetensors.torch import load_file

from pipeline.models import lora
from pipeline.models.weights import SamplingCopy, has_adapters, trained_weights
from scripts.proofs.grid import small_model
from tests.models.test_lora import IDS, MODELS, attached, logits, moved

EACH_KIND = pytest.mark.parametrize("kind", MODELS)


@EACH_KIND
def test_of_a_plain_model_every_parameter_is_given_once_and_not_copied(kind):
    model = MODELS[kind]()
    given = dict(trained_weights(model))
    own = dict(model.named_parameters())
    assert list(given) == list(own)
    assert all(given[name].data_ptr() == own[name].data_ptr() for name in own)
    assert not any(tensor.requires_grad for tensor in given.values())


@EACH_KIND
def test_of_a_model_with_lora_the_adapters_are_given_under_the_names_of_their_file(kind, tmp_path):
    model = moved(attached(MODELS[kind]()))
    given = dict(trained_weights(model))
    lora.save(model, tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert given.keys() == saved.keys()
    assert all(torch.equal(given[name], saved[name]) for name in saved)
    own = {p.data_ptr() for p in model.parameters() if p.requires_grad}
    assert {tensor.data_ptr() for tensor in given.values()} == own


@EACH_KIND
def test_a_copy_becomes_the_trained_model_by_the_weights_alone(kind):
    trained, base = attached(MODELS[kind]()), MODELS[kind]()
    copied = SamplingCopy(attached(base, seed=8))  # with adapters of other values
    assert torch.equal(logits(copied.model), logits(MODELS[kind]())), "the base until then"
    before = [p.clone() for p in base.parameters()]
    for seed in (5, 6):
        copied.load(trained_weights(moved(trained, seed)))
        merged = dict(lora.merged_parameters(trained))
        own = dict(copied.model.named_parameters())
        assert list(own) == list(merged) == [n for n, _ in MODELS[kind]().named_parameters()]
        assert all(torch.equal(own[name], merged[name]) for name in merged)
        assert torch.allclose(logits(copied.model), logits(trained), rtol=0, atol=1e-4)
    assert all(torch.equal(a, b) for a, b in zip(base.parameters(), before, strict=True))


def test_weights_are_shared_where_they_need_no_other_type():
    model = attached()
    copied = SamplingCopy(model)
    own, frozen = dict(copied.model.named_parameters()), dict(model.named_parameters())
    up = "model.layers.1.mlp.up_proj"
    base = frozen[f"base_model.model.{up}.base_layer.weight"]
    assert own[f"{up}.weight"].data_ptr() == base.data_ptr()
    copied.load(trained_weights(moved(model)))
    assert own[f"{up}.weight"].data_ptr() != base.data_ptr()
    norm = frozen["base_model.model.model.norm.weight"]
    assert own["model.norm.weight"].data_ptr() == norm.data_ptr()
    before = own[f"{up}.weight"].clone()
    moved(model, seed=9)  # an update: adapters of the copy are its own
    assert torch.equal(own[f"{up}.weight"], before)


def test_every_parameter_is_cast_and_products_are_added_before():
    model = moved(attached())
    copied = SamplingCopy(model)
    copied.cast(torch.bfloat16)
    copied.load(trained_weights(model))
    merged = dict(lora.merged_parameters(model))
    own = dict(copied.model.named_parameters())
    assert all(torch.equal(own[name], merged[name].bfloat16()) for name in merged)
    assert copied.model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_adapters_of_other_layers_are_refused_by_name():
    copied = SamplingCopy(attached())
    given = dict(trained_weights(moved(attached())))
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    fewer = {key: tensor for key, tensor in given.items() if key != name}
    with pytest.raises(ValueError, match=f"^weights: {name} is missing"):
        copied.load(fewer.items())
    with pytest.raises(ValueError, match=r"^weights: lm_head\.lora_A is not one of"):
        copied.load([("lm_head.lora_A", given[name]), *given.items()])
    wider = trained_weights(attached(lora_r=4))
    with pytest.raises(ValueError, match=r"lora_A.weight has the shape \[4, 32\]"):
        copied.load(wider)
    with pytest.raises(ValueError, match=r"^weights: model.embed_tokens.weight is not one of"):
        copied.load(trained_weights(small_model(4)))


def test_a_copy_of_a_plain_model_takes_no_adapters():
    with pytest.raises(ValueError, match=r"lora_A.weight is not one of"):
        SamplingCopy(small_model(4)).load(trained_weights(attached()))


def test_the_copy_computes_alone():
    """It is no model with adapters inside, and the trained one stays such a model."""
    model = moved(attached())
    expected = logits(model)
    copied = SamplingCopy(model)
    assert not has_adapters(copied.model)
    assert not [name for name, _ in copied.model.named_modules() if "lora" in name]
    assert torch.equal(logits(model), expected)
    with model.disable_adapter(), torch.no_grad():
        assert torch.equal(copied.model(IDS).logits, model(IDS).logits)
