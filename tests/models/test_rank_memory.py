"""Memory: how much a micro-batch holds (at 12,000 tokens, a group), and what a process keeps."""

import pytest

from pipeline.config.recipe import load_recipe
from pipeline.config.settings import Config
from pipeline.models import memory
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
    assert token_budget(*qwen, 80 * GIB, False) == 96_000
    assert bytes_per_token(*qwen) == 2 * (16 * 2560 + 3 * 9728 + 4 * 32 * 128 + 36 * 2560)
    held = (40 * GIB - 2 * 4_022_468_096) / 2 / bytes_per_token(*qwen)
    assert token_budget(*qwen, 40 * GIB, False) == int(held) == 48_834
    assert token_budget(*qwen, 10 * GIB, False) == 12_000
    given = qwen[0].grpo.model_copy(update={"max_tokens_per_microbatch": 77})
    assert token_budget(qwen[0].model_copy(update={"grpo": given}), qwen[1], 80 * GIB, True) == 77


CARDS = {  # GB of a card: tokens of a micro-batch, and GiB that --check adds up
    ("Qwen/Qwen3-0.6B", False, 80): (65_536, 25.7),
    ("Qwen/Qwen3-0.6B", False, 24): (35_410, 20.4),
    ("Qwen/Qwen3-4B", True, 80): (65_536, 45.6),
    ("Qwen/Qwen3-4B", True, 24): (14_820, 18.0),
    ("Qwen/Qwen3-8B", True, 80): (39_770, 50.4),
    ("Qwen/Qwen3-8B", True, 24): (4_714, 22.1),
}


@pytest.mark.parametrize(("model", "use_peft", "card"), CARDS)
def test_a_card_gets_few_micro_batches_and_none_that_it_cannot_hold(
    model, use_peft, card, monkeypatch
):
    """A step of 12 tasks, 8 episodes each, has some 20,000 tokens: one micro-batch or two."""
    monkeypatch.setattr(memory, "on_gpu", lambda: True)
    monkeypatch.setattr(memory, "ELSEWHERE", card * 1e9)
    rollout = {"max_tokens": 2048, "tasks_per_step": 12, "max_concurrent_episodes": 8}
    settings = {"model": model, "use_peft": use_peft, "mixed_precision": "bf16"}
    sections = {"rollout": rollout, "model": settings, "grpo": {"gradient_checkpointing": True}}
    config = Config.model_validate(sections)
    of_card = memory.Memory(config)
    assert (of_card.budget(config), round(of_card.need() / GIB, 1)) == CARDS[model, use_peft, card]
    assert of_card.need() <= card * 1e9


def test_the_tiny_recipe_keeps_its_micro_batches():
    model, memory_here = tiny_model(tokenizer(), 0), memory_of_rank()
    assert token_budget(Config(), model, memory_here, has_gpu=False) == 2048
