"""The table of memory against bytes that are counted while a model samples."""

import pytest
import torch

from pipeline.config.settings import Config
from pipeline.models.memory import Memory
from pipeline.models.tiny import tiny_model
from pipeline.rollout.samplers.own import RowSampler
from tests.support.helpers import chat, tokenizer


def storages(tensors) -> dict[int, int]:
    """The bytes of each different storage."""
    held = [tensor.untyped_storage() for tensor in tensors]
    return {storage._cdata: storage.nbytes() for storage in held}


@pytest.mark.parametrize(("rows", "max_tokens"), [(8, 128), (4, 256)])
def test_the_cache_of_a_rollout_has_the_bytes_of_the_table(rows, max_tokens):
    rollout = {"tasks_per_step": 1, "num_generations": rows, "max_tokens": max_tokens}
    data = {"eval_tasks_per_domain": 1, "domains": ["airline"]}
    config = Config.model_validate({"rollout": rollout, "data": data})
    sampler = RowSampler(
        tiny_model(tokenizer(), 0), chat().end_of_turn_id, 1.0, torch.float32, max_tokens=max_tokens
    )
    episodes = sampler.open([[1, 2, 3 + n] for n in range(rows)], list(range(rows)))
    sampler.sample(episodes, [2] * rows)
    layers = sampler._cache.layers
    counted = sum(storages([x for layer in layers for x in (layer.keys, layer.values)]).values())
    table = Memory(config).terms()
    assert counted == table["key-value cache"]
