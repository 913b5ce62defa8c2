"""Memory: how much a micro-batch holds (at 12,000 tokens, a group), and what a process keeps."""

import platform
import resource

import pytest
import torch

from pipeline.config.recipe import load_recipe
from pipeline.config.settings import Config
from pipeline.models.loading import empty_model
from pipeline.models.rank_memory import (
    LARGE,
    bytes_per_token,
    cost_of_a_pair,
    empty_caches,
    keep_freed_memory,
    memory_of_rank,
    token_budget,
)
from pipeline.models.tiny import tiny_model
from pipeline.training.micro_batches import make_micro_batches
from scripts.proofs.grid import make_trajectory
from scripts.proofs.ranks import play_ranks
from tests.support.helpers import tokenizer

GIB = 1 << 30


@pytest.fixture(scope="module")
def qwen():
    config = load_recipe("qwen3_4b_8gpu")
    rollout = config.rollout.model_copy(update={"max_tokens": 12_000})
    return config.model_copy(update={"rollout": rollout}), empty_model(config)


def test_a_group_at_12000_tokens_of_which_7000_are_shared_is_computed_as_one(qwen):
    budget = token_budget(*qwen, memory=80 * GIB)
    rows = [make_trajectory([1] * 7000, [2 + n] * 5000, [1] + [0] * 4999) for n in range(8)]
    items = [(row, 1.0, 1.0) for row in rows]
    batches = make_micro_batches(items, budget, 0, share_prefixes=True)
    assert [batch.num_tokens for batch in batches] == [47_000]
    batches = make_micro_batches(items, 8192, 0, share_prefixes=True)
    assert sum(batch.num_tokens for batch in batches) == 96_000  # a budget of one episode


def test_the_budget_is_a_group_of_full_length_or_what_memory_holds_but_an_episode(qwen):
    assert token_budget(*qwen, memory=80 * GIB) == 96_000
    assert bytes_per_token(*qwen) == 2 * (16 * 2560 + 3 * 9728 + 4 * 32 * 128 + 36 * 2560)
    held = (40 * GIB - 2 * 4_022_468_096) / 2 / bytes_per_token(*qwen)
    assert token_budget(*qwen, memory=40 * GIB) == int(held) == 48_834
    assert token_budget(*qwen, memory=10 * GIB) == 12_000
    given = qwen[0].grpo.model_copy(update={"max_tokens_per_microbatch": 77})
    assert token_budget(qwen[0].model_copy(update={"grpo": given}), qwen[1], 80 * GIB) == 77


def test_the_tiny_recipe_keeps_its_micro_batches():
    model, memory = tiny_model(tokenizer(), 0), memory_of_rank()
    assert token_budget(Config(), model, memory) == 2048


def test_at_12000_tokens_attention_costs_as_much_as_the_layers_of_a_token(qwen):
    assert 12_000 * cost_of_a_pair(qwen[1]) == pytest.approx(0.974, abs=1e-3)


# Freed memory

MB = 1 << 20


def faults_again(num_weights: int) -> float:
    """Make and free 40 tensors of 20 MB twice; return the share of pages that fault again."""
    with torch.device("meta"):
        keep_freed_memory(torch.nn.Linear(num_weights // 1024, 1024, bias=False))
    empty_caches()

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        tensors = [torch.ones(20 * MB // 4) for _ in range(40)]
        tensors.clear()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    first = faults()
    return faults() / first


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_a_process_that_trains_a_large_model_keeps_freed_tensors():
    (small,) = play_ranks(faults_again, 1, LARGE // 16 - 1024)  # in a fresh process
    (large,) = play_ranks(faults_again, 1, LARGE // 16 + 1024)
    assert small > 0.8
    assert large < 0.2
