"""Rollouts and the update's forward pass on a fake GPU: devices, waits, operations and bytes.

Each scenario runs in a process of its own, and fails where an operation gets tensors of two devices
or the host needs data that a GPU computes.
"""

import gc
import shutil
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from pipeline.config.recipe import load_recipe
from pipeline.config.settings import Config
from pipeline.distributed.ranks import Ranks
from pipeline.environments.domains import environments_of
from pipeline.grpo.algorithm import grpo_loss
from pipeline.grpo.micro_batches import make_micro_batches
from pipeline.grpo.policy import Policy
from pipeline.grpo.token_logprobs import TokenLogprobs
from pipeline.models import lora
from pipeline.models.capabilities import recompute_layers
from pipeline.models.loading import SHAPES
from pipeline.preflight.memory import Memory
from pipeline.rollout.rollout import RolloutRequest
from pipeline.rollout.row_sampler import RowSampler
from pipeline.rollout.sampler import make_sampler
from scripts.proofs.grid import make_trajectory
from scripts.proofs.ranks import play_ranks
from tests.support.fake_gpu import DEVICE, build_guard, fake_gpu
from tests.support.helpers import chat, embedded, module_of, tokenizer

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

BF16 = torch.bfloat16
QWEN3_4B = {**SHAPES["Qwen/Qwen3-4B"], "num_hidden_layers": 2}
NARROW = {**QWEN3_4B, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96}
NARROW |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
WHOLE_OR_LORA = pytest.mark.parametrize("use_peft", [False, True], ids=["whole", "LoRA"])


@pytest.fixture(scope="module")
def guard(tmp_path_factory):
    return str(build_guard(tmp_path_factory.mktemp("guard")))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """The recipe for Qwen3-4B with fewer layers."""
    folder = tmp_path_factory.mktemp("model")
    Qwen3Config(**QWEN3_4B).save_pretrained(folder)
    config = load_recipe("qwen3_4b_8gpu")
    return config.model_copy(update={"model": config.model.model_copy(update={"model": str(folder)})})


def on_fake_gpu(function, *arguments):
    """Return what a function finds in a process of its own."""
    (found,) = play_ranks(function, 1, *arguments)
    assert not isinstance(found, str), found
    return found


def qwen(shape, use_peft):
    """A Qwen3 on the fake GPU: with LoRA its frozen weights are bf16, else all are fp32."""
    with DEVICE:
        dtype = BF16 if use_peft else torch.float32
        options = {"attn_implementation": "sdpa", "dtype": dtype}
        model = Qwen3ForCausalLM._from_config(Qwen3Config(**shape), **options)
        return lora.attach(model, Config().model, "base", 0, dtype) if use_peft else model


# A rollout


def play(guard, use_peft):
    """A rollout after new weights, with half of its episodes at once."""
    names, tag = ("airline", "telecom_chat"), tokenizer().convert_tokens_to_ids("<tool_call>")
    limits = {"max_turns": 2, "max_concurrent_episodes": 4}
    model = {"use_peft": use_peft, "mixed_precision": "bf16"}
    config = Config.model_validate({"rollout": limits, "model": model})
    shape = {**NARROW, "vocab_size": len(tokenizer()), "num_hidden_layers": 1}
    tasks = [t for name in names for t in module_of(name).generate_tasks(0, 2, "train", "medium")]
    asked = [RolloutRequest(task=task, trial=k, key=k) for task in tasks for k in range(2)]
    gc.disable()
    with fake_gpu(guard, token=tag, end=chat().end_of_turn_id) as gpu:
        accelerator = SimpleNamespace(device=DEVICE, autocast=lambda: torch.autocast("cuda", BF16))
        given = chat(), environments_of(embedded(*names)), config, accelerator, Ranks(0, 1, 60)
        policy = Policy(qwen(shape, use_peft), *given, make_sampler)
        policy.give_weights()
        held = gpu.allocated
        played = policy.rollout(asked)
        return [(t.num_turns, t.stop_reason.value) for t in played], gpu.allocated - held, gpu.operations


@WHOLE_OR_LORA
def test_a_policy_plays_episodes_and_its_cache_is_freed(guard, use_peft):
    import time; t=time.time()
    played, held, n = on_fake_gpu(play, guard, use_peft)
    print(held, n, time.time()-t)
    assert played == [(2, "max_turns")] * 8
    assert held == 0


# The sampler


def sample(guard, max_tokens):
    """32 rows of up to 8,192 tokens: prompts, tool results, then messages of 9 and 17 tokens."""
    found, rows = {}, 32
    with fake_gpu(guard, token=1, end=2) as gpu:
        sampler = RowSampler(qwen(QWEN3_4B, True), 3, 1.0, BF16, max_tokens=max_tokens)
        prompts = [[4] * 1000 + [5 + n // 8] * 2000 for n in range(rows)]
        episodes = sampler.open(prompts, range(rows))
        for result in (1250, 1250, 1250, 1250, 2, 2):
            sampler.sample(episodes, [1] * rows)
            for episode in episodes:
                sampler.extend(episode, [6] * result)
        found["peak"], found["largest"] = gpu.peak, gpu.largest
        for number in (9, 17):
            gpu.forget()
            sampler.sample(episodes, [number] * rows)
            found[number] = dict(gpu.waits), gpu.operations
            for episode in episodes:
                sampler.extend(episode, [6])
        held = [x for layer in sampler._cache.layers for x in (layer.keys, layer.values)]
        found["cache"] = sum(x.untyped_storage().nbytes() for x in held)
        found["len"] = episodes[0].slot.length
    return found


def test_the_sampler(guard, recipe):
    import time; t=time.time()
    found = on_fake_gpu(sample, guard, recipe.rollout.max_tokens)
    print(found, time.time()-t)
    m = Memory(recipe)
    print(m.phases()["rollout"], sum(m.phases()["rollout"].values()))
    assert 0


# The update


def forward(guard, shape, use_peft, recomputes):
    """The forward pass and the loss of a group of 8 episodes of 12,000 tokens, 7,000 shared."""
    mask = ([1] * 150 + [0] * 162) * 16
    rows = [make_trajectory([1] * 7000, [2 + n] * len(mask), mask) for n in range(8)]
    items = [(row, 1.0, 1.0) for row in rows]
    (batch,) = make_micro_batches(items, 10**6, 0, share_prefixes=True)
    with fake_gpu(guard) as gpu:
        model = qwen(shape, use_peft)
        if recomputes:
            recompute_layers(model)
        module, held = TokenLogprobs(model, 1.0).eval(), gpu.allocated
        gpu.forget()
        there = batch.to(DEVICE)
        gpu.waits.clear()
        with torch.autocast("cuda", BF16):
            logprobs, entropy = module(there)
        loss, stats = grpo_loss(logprobs, entropy, there, Config().grpo, 1)
        where = {(x.device, x.dtype) for x in (loss, *vars(stats).values())}
        return where, dict(gpu.waits), gpu.largest, gpu.allocated - held, gpu.operations, batch.num_tokens, len(batch.tree.keys)


def test_the_update(guard, recipe):
    import time; t=time.time()
    m = Memory(recipe)
    print(m._kept)
    for a in ((QWEN3_4B, True, False), (QWEN3_4B, False, False),(NARROW, False, True), (NARROW, True, True)):
        print(on_fake_gpu(forward, guard, *a), time.time()-t)
    assert 0
