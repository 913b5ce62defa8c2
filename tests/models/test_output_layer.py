"""Logits of a model in bf16: products and gradients in float32, and one cast of the weight."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.grpo import token_logprobs
from pipeline.grpo.micro_batches import make_micro_batches
from pipeline.grpo.token_logprobs import TokenLogprobs
from pipeline.models.ops import PART, logits_of, use_fp32_logits, weight_of_logits
from scripts.proofs.grid import make_episodes, small_model

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


def test_a_wide_layer_is_converted_in_parts_and_leaves_float32_products_as_they_are():
    torch.manual_seed(0)
    hidden, precision = torch.randn(5, 64), torch.backends.mkldnn.matmul.fp32_precision
    for width in (PART - 1, 2 * PART + 3):
        wide = nn.Linear(64, width, bias=False, dtype=BF16)
        use_fp32_logits(wide)
        with LargestTensor() as largest:
            logits = wide(hidden.to(BF16))
        expected = hidden.to(BF16).double() @ wide.weight.double().T
        assert float((logits - expected).detach().abs().max()) < 1e-5
        assert largest.size <= max(64 * PART, 5 * width)
    assert torch.backends.mkldnn.matmul.fp32_precision == precision
    product = hidden @ hidden.T  # would be wrong by 0.1 in bf16
    assert float((product - hidden.double() @ hidden.double().T).abs().max()) < 1e-4


class LargestTensor(TorchDispatchMode):
    """Notes the largest number of entries of a new float32 tensor."""

    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dtype == torch.float32:
            self.size = max(self.size, made.numel())
        return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_precisions_use_the_layer_as_it_is(dtype):
    layer = head(dtype)
    assert weight_of_logits(layer) is None
    use_fp32_logits(layer)
    assert "forward" not in vars(layer)
    assert torch.equal(logits_of(layer, HIDDEN.to(dtype), None), layer(HIDDEN.to(dtype)))


class Casts(TorchDispatchMode):
    """Counts casts of the output layer's weight to bf16."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") == BF16:
            self.count += args[0].shape == self.shape
        return function(*args, **(kwargs or {}))


def test_chunks_share_one_cast_and_their_gradients_are_summed_in_float32(monkeypatch):
    model = small_model(vocab_size=40)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    module = TokenLogprobs(model, 1.0)
    rows, _ = make_episodes(40)
    (batch,) = make_micro_batches([(row, 1.0, 1.0) for row in rows], 10**6, 0)
    gradients = []
    for rows_of_a_chunk in (10**6, 3):
        monkeypatch.setattr(token_logprobs, "LOGITS_PER_CHUNK", rows_of_a_chunk * 40)
        module.zero_grad()
        with Casts(model.lm_head.weight.shape) as casts:
            with torch.autocast("cpu", BF16):
                logprobs, entropy = module(batch)
            (logprobs + 0.1 * entropy).sum().backward()
        assert casts.count == 1
        gradients.append(model.lm_head.weight.grad.double())
    whole, chunked = gradients
    assert model.lm_head.weight.grad.dtype == torch.float32
    assert float((whole - chunked).norm() / whole.norm()) < 1e-6


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("coefficient", [0.0, 0.1])
def test_values_and_gradients_are_those_of_log_softmax(temperature, coefficient, monkeypatch):
    """In chunks of several rows of the cache, of which the last keeps its logits."""
    monkeypatch.setattr(token_logprobs, "LOGITS_PER_CHUNK", 7 * 40)
    monkeypatch.setattr(token_logprobs, "IN_CACHE", 2 * 40)
    episodes, _ = make_episodes(6)
    (batch,) = make_micro_batches([(e, 1.0, 1.0) for e in episodes], 10**6, 0)
    model = small_model(vocab_size=40).double()
    rows = model(batch.input_ids).logits[batch.rows, batch.columns] / temperature
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
