"""Packed weights: equal products, and a model that is as before when they are released."""

import pytest
import torch
from torch import nn

from pipeline.models import packing
from pipeline.models.weights import SamplingCopy, trained_weights
from scripts.proofs.grid import small_model
from tests.models.test_lora import logits

EACH_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture(autouse=True)
def small_layers_are_large(monkeypatch):
    monkeypatch.setattr(packing, "LARGE", 16 * 32)


def sampling_copy(dtype):
    sampling = SamplingCopy(small_model())
    sampling.cast(dtype)
    return sampling


def packs(dtype):
    """Whether this processor gains something: always in float32, in bf16 with AVX-512."""
    return dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def forwards(model):
    return [vars(m).get("forward") for m in model.modules() if isinstance(m, nn.Linear)]


@EACH_DTYPE
def test_packed_weights_have_the_same_products_until_they_are_released(dtype):
    sampling = sampling_copy(dtype)
    before, expected = forwards(sampling.model), logits(sampling.model)
    sampling.pack()
    are_new = [new != old for old, new in zip(before, forwards(sampling.model), strict=True)]
    assert all(are_new) if packs(dtype) else not any(are_new)
    assert expected.dtype == torch.float32
    assert float((logits(sampling.model) - expected).abs().max()) < 1e-5
    sampling.unpack()
    assert forwards(sampling.model) == before
    assert torch.equal(logits(sampling.model), expected)


@EACH_DTYPE
def test_new_weights_release_the_packed_ones(dtype):
    sampling, other = sampling_copy(dtype), small_model(seed=1)
    sampling.pack()
    sampling.load(trained_weights(other))
    fresh = SamplingCopy(other)
    fresh.cast(dtype)
    assert torch.equal(logits(sampling.model), logits(fresh.model))


@EACH_DTYPE
def test_the_size_of_the_copies_is_known_and_bounded(dtype, monkeypatch):
    sampling = sampling_copy(dtype)
    layers, head = packing.large_layers(sampling.model), sampling.model.get_output_embeddings()
    of_head = 0 if dtype == torch.float32 else 4
    sizes = {x: x.weight.numel() * (of_head if x is head else dtype.itemsize) for x in layers}
    assert head in sizes
    assert packing.packed_bytes(sampling.model, dtype) == sum(sizes.values()) * packs(dtype)
    monkeypatch.setattr(packing, "MOST_BYTES", sum(sizes.values()) - 1)
    sampling.cast(dtype)
    before = forwards(sampling.model)
    sampling.pack()
    assert forwards(sampling.model) == before
    assert packing.packed_bytes(sampling.model, dtype) == 0
