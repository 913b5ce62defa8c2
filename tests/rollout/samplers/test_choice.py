"""The calls of a sampler: who answers them, and what they refuse."""

import inspect

import pytest
import torch

from pipeline.models.sampling_copy import trained_weights
from pipeline.rollout.samplers.choice import Sampler
from pipeline.rollout.samplers.generate import GenerateSampler
from pipeline.rollout.samplers.own import RowSampler
from pipeline.rollout.samplers.vllm import VLLMSampler
from scripts.proofs.grid import small_model
from scripts.proofs.runs import ForcedSampler
from tests.support.helpers import ScriptedSampler

CALLS = ("load_weights", "logprobs", "open", "extend", "sample", "close", "rest", "end")
KINDS = (RowSampler, GenerateSampler)


def taken(kind, call):
    """What callers may write: names of arguments, their kinds and defaults."""
    parameters = inspect.signature(getattr(kind, call)).parameters.values()
    return [(p.name, p.kind, p.default) for p in parameters]


def test_the_protocol_is_eight_calls_and_two_counts():
    methods = [name for name, _ in inspect.getmembers(Sampler, inspect.isfunction)]
    assert sorted(name for name in methods if name[0] != "_") == sorted(CALLS)
    assert inspect.get_annotations(Sampler) == {"num_tokens": int, "num_padded_tokens": int}


@pytest.mark.parametrize("kind", [*KINDS, ForcedSampler, ScriptedSampler, VLLMSampler])
def test_every_sampler_takes_what_the_protocol_says(kind):
    for call in CALLS:
        assert taken(kind, call) == taken(Sampler, call), call
    if kind is VLLMSampler:  # made in test_vllm_sampler.py
        return
    sampler = (
        ScriptedSampler({})
        if kind is ScriptedSampler
        else kind(small_model(), 0, 1.0, torch.float32)
    )
    assert (sampler.num_tokens, sampler.num_padded_tokens) == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_another_model_are_refused_by_name(kind):
    sampler = kind(small_model(), 0, 1.0, torch.float32)
    whole = dict(trained_weights(small_model(seed=1)))
    name = "model.layers.1.mlp.up_proj.weight"
    assert name in whole

    def refused(weights):
        with pytest.raises(ValueError, match=r"^weights: ") as caught:
            sampler.load_weights(weights)
        return str(caught.value)

    lacking = {key: tensor for key, tensor in whole.items() if key != name}
    assert f"{name} is missing" in refused(lacking.items())
    assert f"{list(whole)[-6]} is missing" in refused(list(whole.items())[:-6])
    assert "lm_head.bias is not one of" in refused([*whole.items(), ("lm_head.bias", whole[name])])
    assert f"{name} is given twice" in refused([*whole.items(), (name, whole[name])])
    assert f"{name} has the shape [32, 64]" in refused({**whole, name: whole[name].T}.items())
    sampler.load_weights(whole.items())
