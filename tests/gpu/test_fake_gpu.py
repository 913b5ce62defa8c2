"""Rollouts and the update's forward pass on a fake GPU: devices, waits and operations.

Each scenario runs in a process of its own, and fails where an operation gets tensors of two devices
or the host needs data that a GPU computes.
"""

import gc
import shutil
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from pipeline.config.recipe import load_recipe
from pipeline.config.settings import Config
from pipeline.distributed.ranks import Ranks
from pipeline.models import lora
from pipeline.models.loading import SHAPES
from pipeline.models.memory import Memory
from pipeline.rollout.rollout import RolloutRequest
from pipeline.rollout.samplers import own
from pipeline.rollout.samplers.choice import make_sampler
from pipeline.rollout.samplers.own import RowSampler
from pipeline.training.grpo import grpo_loss
from pipeline.training.learner import Learner
from pipeline.training.micro_batches import make_micro_batches
from pipeline.training.token_logprobs import TokenLogprobs
from scripts.proofs.grid import make_trajectory
from scripts.proofs.ranks import play_ranks
from tests.support.fake_gpu import DEVICE, build_guard, fake_gpu, operations_of
from tests.support.helpers import chat, embedded, module_of, tokenizer

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

BF16 = torch.bfloat16
QWEN3_4B = {**SHAPES["Qwen/Qwen3-4B"], "num_hidden_layers": 1}
NARROW = {**QWEN3_4B, "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96}
NARROW |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
TOKENS, KEYS = 46_936, 95_936  # of the update: in the row, and in all sequences


@pytest.fixture(scope="module")
def guard(tmp_path_factory):
    return str(build_guard(tmp_path_factory.mktemp("guard")))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """The recipe for Qwen3-4B, with one layer."""
    folder = tmp_path_factory.mktemp("model")
    Qwen3Config(**QWEN3_4B).save_pretrained(folder)
    return load_recipe("qwen3_4b_8gpu").changed("model", model=str(folder))


def on_fake_gpu(function, *arguments):
    """Return what a function finds in a process of its own."""
    (found,) = play_ranks(function, 1, *arguments, timeout_s=600)
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


def play(guard):
    """A rollout after new weights, with half of its episodes at once."""
    names, tag = ("airline", "telecom_chat"), tokenizer().convert_tokens_to_ids("<tool_call>")
    limits = {"max_turns": 2, "max_tokens_per_turn": 2, "max_concurrent_episodes": 4}
    limits["max_malformed_calls"] = 2  # each message is half a call
    model = {"use_peft": True, "mixed_precision": "bf16"}
    config = Config.model_validate({"rollout": limits, "model": model})
    shape = {**NARROW, "vocab_size": len(tokenizer())}
    tasks = [t for name in names for t in module_of(name).generate_tasks(0, 2, "train", "medium")]
    asked = [RolloutRequest(task=task, trial=k, key=k) for task in tasks for k in range(2)]
    gc.disable()
    with fake_gpu(guard, token=tag, end=chat().end_of_turn_id) as gpu:
        accelerator = SimpleNamespace(device=DEVICE, autocast=lambda: torch.autocast("cuda", BF16))
        given = chat(), embedded(*names), config, accelerator, Ranks(0, 1, 60)
        policy = Learner(qwen(shape, True), *given, make_sampler=make_sampler)
        policy.sync_weights()
        held = gpu.allocated
        policy.rollout(asked)
        assert gpu.allocated > held, "the cache stays for the next rollout"
        own.KEPT = 0.0  # as if it was large
        played = policy.rollout(asked)
        return [(t.num_turns, t.stop_reason.value) for t in played], gpu.allocated - held


def test_a_policy_plays_episodes_and_a_large_cache_is_freed_for_the_update(guard):
    played, held = on_fake_gpu(play, guard)
    assert played == [(2, "max_turns")] * 8
    assert held == 0


# The sampler


def sample(guard, max_tokens):
    """32 conversations of up to 8,192 tokens; the last messages have 2 and 10 tokens."""
    with fake_gpu(guard, token=1, end=2) as gpu:
        model = qwen(QWEN3_4B, True)
        sampler = RowSampler(model, 3, 1.0, BF16, max_tokens=max_tokens)
        gpu.forget()
        prompts = [[4] * 6000 + [5 + n // 8] * 1500 for n in range(32)]
        episodes, found = sampler.open(prompts, range(32)), {"open": Counter(gpu.waits)}
        sampler.sample(episodes, [1] * 32)
        for number, result in ((2, 600), (2, 1), (10, 1)):  # the first captures
            for episode in episodes:
                sampler.extend(episode, [6] * result)
            gpu.waits = Counter()
            sampler.sample(episodes, [number] * 32)
            found[number] = gpu.waits
        held = [x for layer in sampler._cache.layers for x in (layer.keys, layer.values)]
        found["largest"] = gpu.largest
        return found | {"cache": sum(x.untyped_storage().nbytes() for x in held)}


def test_the_cache_has_the_bytes_of_the_table_and_tokens_wait_for_nothing(guard, recipe):
    found = on_fake_gpu(sample, guard, recipe.rollout.max_tokens)
    assert found["cache"] == Memory(recipe).terms()["key-value cache"] == 2**30
    assert found["largest"] == 2**29  # the keys of a layer
    assert found["open"] == {"own._feed": 6, "own.copy_rows": 1}
    assert found[2] == found[10]
    assert found[2].total() == 5  # of the pass over the results of tools


@pytest.mark.parametrize(
    ("family", "use_peft", "options", "inside"),
    [
        ("SmolLM2-135M", False, {}, 1460),
        pytest.param("Qwen3-0.6B", False, {}, 1510, marks=pytest.mark.proof),
        ("Qwen2", True, {"top_k": 5, "top_p": 0.9}, 400),
        ("GPT-2", True, {}, 400),
        *(
            pytest.param(family, False, {}, 400, marks=pytest.mark.proof)
            for family in (
                *("Mistral", "Qwen2", "Phi3", "SmolLM3", "Granite", "GPT-2", "Gemma3"),
                *("Qwen3-MoE", "Mixtral", "Laguna"),
            )
        ),
    ],
)
def test_a_token_costs_the_host_few_operations_and_no_wait(
    guard, family, use_peft, options, inside
):
    found = on_fake_gpu(operations_of, guard, family, use_peft, options)
    assert found["graphs"] > 0
    assert found["inside"] <= inside
    assert found["outside"] <= 4
    assert not found["waits"]


def test_a_model_that_waits_in_each_step_is_decoded_without_graphs(guard):
    found = on_fake_gpu(operations_of, guard, "Falcon")
    assert found["graphs"] == 0
    assert found["given_up"]
    assert found["waits"] > 48


# The update


def forward(guard, shape, use_peft, computes_in_bf16):
    """The forward pass and the loss of a group of 8 episodes of 12,000 tokens, 7,000 shared."""
    mask = ([1] * 150 + [0] * 162) * 16
    rows = [make_trajectory([1] * 7000, [2 + n] * len(mask), mask) for n in range(8)]
    items = [(row, 1.0, 1.0) for row in rows]
    (batch,) = make_micro_batches(items, 10**6, 0, share_prefixes=True)
    assert (batch.num_tokens, len(batch.tree.keys)) == (TOKENS, KEYS)
    with fake_gpu(guard) as gpu:
        module, there = TokenLogprobs(qwen(shape, use_peft), 1.0).eval(), batch.to(DEVICE)
        gpu.forget()
        with torch.autocast("cuda", BF16, enabled=computes_in_bf16):
            logprobs, entropy = module(there)
        found = {"largest": gpu.largest}
        loss, stats = grpo_loss(logprobs, entropy, there, Config().grpo, 1)
        kinds = {(x.device, x.dtype) for x in (loss, *vars(stats).values())}
        assert kinds == {(DEVICE, torch.float32)}
        return found | {"waits": gpu.waits}


def test_no_tensor_holds_all_pairs_of_tokens(guard):
    found = on_fake_gpu(forward, guard, NARROW, False, False)
    assert found["largest"] == 7 * 11_992 * 4 * 64  # keys of seven episodes, for each query head


def test_the_forward_pass_and_the_loss_of_a_micro_batch_do_not_wait(guard):
    found = on_fake_gpu(forward, guard, NARROW, True, True)
    assert not found["waits"]
