"""The table of memory against bytes that are counted while a model samples and trains."""

import copy

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import Qwen3Config, Qwen3ForCausalLM

from pipeline.config.settings import Config
from pipeline.grpo.micro_batches import make_micro_batches
from pipeline.grpo.prefix_tree import NO_MASK
from pipeline.grpo.token_logprobs import TokenLogprobs
from pipeline.models import lora
from pipeline.models.tiny import tiny_model
from pipeline.preflight.activations import activations_of
from pipeline.preflight.memory import Memory
from pipeline.rollout.row_sampler import RowSampler
from scripts.proofs.grid import make_trajectory
from tests.support.helpers import chat, tokenizer

BF16 = torch.bfloat16
VOCAB = 512


def storages(tensors) -> dict[int, int]:
    """The bytes of each different storage."""
    held = [tensor.untyped_storage() for tensor in tensors]
    return {storage._cdata: storage.nbytes() for storage in held}


@pytest.mark.parametrize(("rows", "max_tokens"), [(8, 128), (5, 250)])
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
    table = Memory(config, tokenizer()).phases()["rollout"]
    assert counted == table["key-value cache"]


def qwen(size: int, dtype: torch.dtype | None) -> Qwen3ForCausalLM:
    """A Qwen3 with `size` layers; with `dtype`, its frozen weights have it, beside adapters."""
    shape = {"vocab_size": VOCAB, "hidden_size": 64 * size, "intermediate_size": 192 * size}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16 * size}
    config = Qwen3Config(**shape, **heads, num_hidden_layers=size, tie_word_embeddings=True)
    model = Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    if dtype is None:
        return model.eval()
    return lora.attach(model, Config().model, "base", 0, dtype)


def kept_by(module: TokenLogprobs, batch, autocast: torch.dtype | None) -> float:
    """The bytes that autograd keeps of a decoder's forward pass, without weights."""
    shapes = {tuple(p.shape) for p in module.parameters()}
    weights = shapes | {shape[::-1] for shape in shapes}
    own, kept = storages(module.parameters()), dict[int, torch.Tensor]()

    def keep(tensor):
        if tensor.untyped_storage()._cdata not in own and tuple(tensor.shape) not in weights:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    tree = {"tree": batch.tree, "attention_mask": NO_MASK} if batch.tree is not None else {}
    with (
        torch.autocast("cpu", autocast, enabled=autocast is not None),
        saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        module.model.get_decoder()(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **tree
        )
    return sum(storages(kept.values()).values())


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("adapted", "autocast"),
    [(None, None), (None, BF16), (torch.float32, None), (BF16, None)],
    ids=["whole", "whole, bf16", "LoRA", "LoRA, bf16"],
)
def test_a_forward_pass_keeps_the_bytes_of_the_table(size, adapted, autocast):
    module = TokenLogprobs(qwen(size, adapted), 1.0)
    rows = [make_trajectory(range(60), range(60 + n, 120 + n)) for n in range(4)]
    items = [(row, 1.0, 1.0) for row in rows]
    table = activations_of(copy.deepcopy(module.model).to("meta"), autocast)
    (batch,) = make_micro_batches(items, 10**6, 0)
    # All rows have the same rotary factors; the table counts them for each token.
    factors = 3 * 120 * 2 * 16 * size * (2 if adapted == BF16 else 4)
    expected = table.saved * 4 * 120 - factors
    assert kept_by(module, batch, autocast) == pytest.approx(expected, rel=0.01)
    (batch,) = make_micro_batches(items, 10**6, 0, share_prefixes=True)
    assert (batch.num_tokens, len(batch.tree.keys)) == (300, 480)
    item = 2 if BF16 in (adapted, autocast) else 4
    copied = (480 - 300) * size * 2 * (2 * 16 * size) * item  # keys and values of the prefix
    expected = table.saved * 300 + copied
    assert kept_by(module, batch, autocast) == pytest.approx(expected, rel=0.1)
