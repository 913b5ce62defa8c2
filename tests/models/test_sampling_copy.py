"""The copy that samples: what is trained, by name, is all that it needs to become the model."""

import pytest
import torch
from torch import nn

from pipeline.models import sampling_copy
from pipeline.models.sampling_copy import SamplingCopy, trained_weights
from scripts.proofs.grid import small_model
from tests.models.test_lora import MODELS, attached, logits, moved

EACH_KIND = pytest.mark.parametrize("kind", MODELS)


@EACH_KIND
def test_a_copy_becomes_the_trained_model_by_the_weights_alone(kind):
    trained, base = attached(MODELS[kind]()), MODELS[kind]()
    copied = SamplingCopy(attached(base, seed=8))  # with adapters of other values
    assert torch.equal(logits(copied.model), logits(MODELS[kind]())), "the base until then"
    frozen = [p.clone() for n, p in base.named_parameters() if ".lora_" not in n]
    for seed in (5, 6):
        copied.load(trained_weights(moved(trained, seed)))
        assert torch.equal(logits(copied.model), logits(trained))
    after = [p for n, p in base.named_parameters() if ".lora_" not in n]
    assert all(torch.equal(a, b) for a, b in zip(after, frozen, strict=True))


# Packed weights

EACH_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture(autouse=True)
def small_layers_are_large(monkeypatch):
    monkeypatch.setattr(sampling_copy, "LARGE", 16 * 32)


def copy_of_weights(dtype):
    sampling = SamplingCopy(small_model())
    sampling.cast(dtype)
    return sampling


def packs(dtype):
    """Whether this processor gains something: always in float32, in bf16 with AVX-512."""
    return dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def forwards(model):
    return [vars(m).get("forward") for m in model.modules() if isinstance(m, nn.Linear)]


@EACH_DTYPE
def test_packed_weights_have_the_same_products_until_new_ones_release_them(dtype):
    sampling = copy_of_weights(dtype)
    before, expected = forwards(sampling.model), logits(sampling.model)
    sampling.pack()
    are_new = [new != old for old, new in zip(before, forwards(sampling.model), strict=True)]
    assert all(are_new) if packs(dtype) else not any(are_new)
    assert expected.dtype == torch.float32
    assert float((logits(sampling.model) - expected).abs().max()) < 1e-5
    sampling.load(trained_weights(small_model(seed=1)))
    assert forwards(sampling.model) == before
    fresh = SamplingCopy(small_model(seed=1))
    fresh.cast(dtype)
    assert torch.equal(logits(sampling.model), logits(fresh.model))
