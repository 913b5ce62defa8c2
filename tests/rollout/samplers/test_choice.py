"""The calls of a sampler: who answers them, and what they refuse."""

import pytest
import torch

from pipeline.models.sampling_copy import trained_weights
from pipeline.rollout.samplers.generate import GenerateSampler
from pipeline.rollout.samplers.own import RowSampler
from scripts.proofs.grid import small_model

KINDS = (RowSampler, GenerateSampler)


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
