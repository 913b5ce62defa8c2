"""The algorithm in one file does what a run does, and learns."""

import re

import pytest
import torch
from accelerate import Accelerator

from pipeline.config.settings import Config
from pipeline.distributed.ranks import Ranks
from pipeline.training.token_logprobs import TokenLogprobs
from pipeline.training.updater import Updater
from scripts import minimal_grpo
from scripts.proofs.grid import make_episodes, small_model
from scripts.proofs.ranks import play_ranks

RATE = 1e-3


def first_updates(factor: float) -> float:
    """How far the steps of both differ, as a share of the step; the other's advantages times."""
    (episodes, advantages), config = make_episodes(16), Config()
    minimal, whole, before = (TokenLogprobs(small_model(), 1.0).eval() for _ in range(3))
    optimizer = torch.optim.AdamW(minimal.parameters(), lr=RATE, weight_decay=0.0)
    alive = torch.ones(16, dtype=torch.bool)
    minimal_grpo.update(minimal, optimizer, episodes, torch.tensor(advantages), alive, config)
    updater = Updater(Accelerator(), whole, Ranks(0, 1, 60), config)
    updater.update_policy(episodes, [factor * advantage for advantage in advantages], RATE)
    mine, other, start = (
        torch.cat([p.detach().flatten() for p in module.parameters()])
        for module in (minimal, whole, before)
    )
    return float((mine - other).norm() / (mine - start).norm())


def test_its_optimizer_step_is_that_of_a_run():
    assert play_ranks(first_updates, 1, 1.0)[0] < 1e-3
    assert play_ranks(first_updates, 1, -1.0)[0] > 1


def test_it_plays_and_trains(capsys, monkeypatch):
    rollout = {"tasks_per_step": 2, "num_generations": 2, "max_turns": 2, "max_tokens_per_turn": 8}
    small = {"data": {"domains": ["airline"]}, "rollout": rollout}
    config = Config.model_validate(small)
    monkeypatch.setattr(minimal_grpo.Config, "model_validate", lambda _: config)
    assert minimal_grpo.main(["--warm-start-steps", "1", "--steps", "2"]) == 0
    steps = re.findall(r"^step (\d): reward 0.00, groups", capsys.readouterr().out, re.M)
    assert steps == ["1", "2"]


@pytest.mark.proof
def test_it_learns(capsys):
    rate = minimal_grpo.main(["--domain", "airline", "--steps", "30"])
    (start,) = re.findall(r"warm start: success (\S+)", capsys.readouterr().out)
    assert rate > float(start) + 0.15
