"""Memory: how much a micro-batch holds (at 12,000 tokens, a group), and what a process keeps."""

import pytest

from pipeline.config.recipe import load_recipe
from pipeline.config.settings import Config
from pipeline.models.loading import empty_model
from pipeline.models.rank_memory import (
    bytes_per_token,
    memory_of_rank,
    token_budget,
)
from pipeline.models.tiny import tiny_model
from tests.support.helpers import tokenizer

GIB = 1 << 30


@pytest.fixture(scope="module")
def qwen():
    config = load_recipe("qwen3_4b_8gpu")
    rollout = config.rollout.model_copy(update={"max_tokens": 12_000})
    return config.model_copy(update={"rollout": rollout}), empty_model(config)


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
