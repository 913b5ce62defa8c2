"""The probe after new weights: what it lets pass, what it stops, and that nothing notices it."""

import re
from functools import partial

import pytest
import torch
from accelerate import Accelerator

from pipeline.common.errors import RunError
from pipeline.config.settings import ModelSettings
from pipeline.models import lora
from pipeline.models.sampling_copy import trained_weights
from pipeline.models.tiny import tiny_model
from pipeline.rollout.samplers.generate import GenerateSampler
from pipeline.rollout.samplers.own import RowSampler
from pipeline.training.agreement import BOUNDS
from pipeline.training.learner import WeightProbe
from pipeline.training.token_logprobs import TokenLogprobs
from tests.support.helpers import chat, tokenizer
from tests.support.messages import says

BF16 = torch.bfloat16
EACH_SAMPLER = pytest.mark.parametrize("kind", [RowSampler, GenerateSampler])
EACH_DTYPE = pytest.mark.parametrize("dtype", list(BOUNDS))
PLAIN_OR_LORA = pytest.mark.parametrize("use_peft", [False, True], ids=["whole", "adapters"])


class Bf16:
    """What a probe needs of an Accelerator with mixed precision."""

    device = torch.device("cpu")

    def autocast(self):
        return torch.autocast("cpu", BF16)


def made(kind, dtype, use_peft):
    model = tiny_model(tokenizer(), 1)
    if use_peft:
        model = lora.attach(model, ModelSettings(), "base", 1, dtype)
    sampler = kind(model, chat().end_of_turn_id, 0.9, dtype)
    sampler.load_weights(trained_weights(model))
    probe, module = WeightProbe(chat(), dtype), TokenLogprobs(model, 1.0)
    accelerator = Bf16() if dtype == BF16 else Accelerator()
    check = partial(probe.check, sampler, module, accelerator, "update airline step 3")
    return model, sampler, check


@torch.no_grad()
def moved(model, seed=5):
    """The model after what could be a long training."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def weights_of(sampler):
    return {name: p.clone() for name, p in sampler.model.named_parameters()}


def put_back(sampler, held):
    """As if nothing had been loaded."""
    for name, parameter in sampler.model.named_parameters():
        parameter.data = held[name]


def stopped(check) -> str:
    with pytest.raises(RunError) as error:
        check()
    said = str(error.value)
    says(said, "weights of the sampler, update airline step 3:", "resume from the last checkpoint")
    assert "\n" not in said
    return said


@EACH_SAMPLER
@EACH_DTYPE
@PLAIN_OR_LORA
def test_weights_that_arrive_pass_and_stale_ones_stop_the_run(kind, dtype, use_peft):
    model, sampler, check = made(kind, dtype, use_peft)
    check()
    for seed in (1, 2):
        moved(model, seed)
        sampler.load_weights(trained_weights(model))
        check()
    held = weights_of(sampler)
    moved(model, seed=3)
    put_back(sampler, held)
    says(stopped(check), "differ from training's by", f"at most {BOUNDS[dtype]:g}, so")


@EACH_DTYPE
@PLAIN_OR_LORA
def test_stale_weights_stop_the_run_also_if_the_update_was_smaller_than_rounding(dtype, use_peft):
    """In bf16, the effect of this update is below the bound."""
    model, sampler, check = made(RowSampler, dtype, use_peft)
    sampler.load_weights(trained_weights(moved(model)))
    check()
    held = weights_of(sampler)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter *= 1.02
    put_back(sampler, held)
    says(stopped(check), "differ from" if dtype == torch.float32 else "have not changed, but")


@EACH_SAMPLER
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_one_parameter_that_is_not_copied_stops_the_run(kind, name):
    model, sampler, check = made(kind, torch.float32, use_peft=False)
    before = dict(sampler.model.named_parameters())[name].clone()
    sampler.load_weights(trained_weights(moved(model)))
    check()
    dict(sampler.model.named_parameters())[name].data = before
    stopped(check)


@torch.no_grad()
def test_a_model_that_rounds_much_in_bf16_passes_and_its_stale_weights_do_not():
    """Large logits have large errors of rounding."""
    model, sampler, check = made(RowSampler, BF16, use_peft=False)
    model.model.norm.weight *= 40
    sampler.load_weights(trained_weights(model))
    check()
    held = weights_of(sampler)
    moved(model)
    put_back(sampler, held)
    bound = re.search("at most ([0-9.]+), so", stopped(check))
    assert bound and float(bound[1]) > BOUNDS[BF16]
