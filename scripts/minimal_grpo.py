"""GRPO in one file: a tiny model learns one domain, in one process and without a launcher.

    python scripts/minimal_grpo.py [--domain airline] [--steps 40] [--warm-start-steps 300]

This file shows the whole training loop, with functions of the package `pipeline`: read it first.
The command `pipeline/run.py` adds ranks, stages, checkpoints, validations, metrics files and a
report (see `docs/architecture.md`). The reward of an episode is 1 if the episode ends in the state
that the customer's request and the domain's rules demand, else 0.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pipeline.config.settings import Config
from pipeline.data.rng import stream_key
from pipeline.data.tasks import Task
from pipeline.environments.domains import Domain, load_domains
from pipeline.models.chat.template import Chat
from pipeline.models.sampling_copy import trained_weights
from pipeline.models.tiny import tiny_model, tiny_tokenizer
from pipeline.rollout.rollout import Rollout, RolloutRequest, SamplerPolicy
from pipeline.rollout.samplers.choice import Sampler, make_sampler
from pipeline.rollout.trajectory import Trajectory
from pipeline.training.grpo import group_advantages, grpo_loss, token_weights, zero_std_groups
from pipeline.training.micro_batches import make_micro_batches
from pipeline.training.sft import IGNORED, encode
from pipeline.training.token_logprobs import TokenLogprobs


def main(argv: Sequence[str] | None = None) -> float:
    """Warm-start, train and evaluate a model. Returns the success rate on held-out tasks."""
    parser = argparse.ArgumentParser(description="GRPO in one file, on one domain")
    parser.add_argument("--domain", default="airline")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warm-start-steps", type=int, default=300)
    options = parser.parse_args(argv)

    # `pipeline/run.py --help` lists all settings with their defaults.
    config = Config.model_validate({"data": {"domains": [options.domain]}})
    domain = load_domains(config)[options.domain]
    tokenizer = tiny_tokenizer([domain])
    model, chat = tiny_model(tokenizer, seed=1), Chat(tokenizer)
    assert domain.generate_tasks, "this domain cannot generate tasks"
    tasks = domain.generate_tasks(0, 800, "train", "medium")
    held_out = domain.generate_tasks(0, 100, "test", "medium")

    warm_start(model, chat, domain, tasks, options.warm_start_steps)
    sampler = make_sampler(model, chat, config.rollout, torch.float32, True)
    sampling = SamplerPolicy(sampler, chat, config.rollout)
    rollout = Rollout(sampling, chat, {domain.name: domain}, config.rollout)
    print(f"after the warm start: success {success(rollout, held_out):.2f}")
    train(model, sampler, rollout, tasks, config, options.steps)
    rate = success(rollout, held_out)
    print(f"after {options.steps} steps of GRPO: success {rate:.2f}")
    return rate


def warm_start(model: Any, chat: Chat, domain: Domain, tasks: list[Task], steps: int) -> None:
    """Train with supervision on conversations of a scripted expert.

    The expert follows the domain's rule in 30 % of its decisions, and else draws an option.
    """
    tools = domain.tools
    talks = (domain.demonstrate(task, 60, rule_share=0.3)[0] for task in tasks)
    rows = [encode(chat, messages, tools) for messages in talks]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    for step in range(steps):
        batch = random.Random(step).sample(rows, 32)
        longest = max(len(row["input_ids"]) for row in batch)
        ids = [row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in batch]
        labels = [row["labels"] + [IGNORED] * (longest - len(row["labels"])) for row in batch]
        loss = model(input_ids=torch.tensor(ids), labels=torch.tensor(labels)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def train(
    model: Any, sampler: Sampler, rollout: Rollout, tasks: list[Task], config: Config, steps: int
) -> None:
    """Train with GRPO.

    Each step samples a group of G episodes per task, computes the advantages of each group from
    its rewards, and updates the policy once.
    """
    limits = config.rollout
    size = limits.num_generations  # G, the number of episodes per task
    policy = TokenLogprobs(model, limits.temperature).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.0)
    for step in range(1, steps + 1):
        chosen = random.Random(step).sample(tasks, limits.tasks_per_step)
        requests = [
            RolloutRequest(task=task, trial=trial, key=stream_key(step, task.id, trial))
            for task in chosen
            for trial in range(size)
        ]
        episodes = rollout(requests)
        rewards = torch.tensor([episode.reward for episode in episodes])
        advantages = group_advantages(rewards, size)
        # Groups with equal rewards have zero advantages, so the update skips these groups.
        is_trained = ~zero_std_groups(rewards, size)
        loss = update(policy, optimizer, episodes, advantages, is_trained, config)
        sampler.load_weights(trained_weights(model))
        print(
            f"step {step}: reward {rewards.mean():.2f}, "
            f"groups with signal {is_trained.float().mean():.0%}, loss {loss:.4f}"
        )


def update(
    policy: TokenLogprobs,
    optimizer: torch.optim.Optimizer,
    episodes: list[Trajectory],
    advantages: torch.Tensor,
    is_trained: torch.Tensor,
    config: Config,
) -> float:
    """Make one optimizer step on the sampled tokens of trained episodes. Returns the loss."""
    lengths = [e.num_sampled_tokens * int(t) for e, t in zip(episodes, is_trained, strict=True)]
    num_tokens = sum(lengths)
    if num_tokens == 0:
        return 0.0
    settings, most = config.grpo, config.rollout.max_tokens
    weights = token_weights(lengths, settings.loss_type, int(is_trained.sum()), num_tokens, most)
    triples = zip(episodes, advantages.tolist(), weights, strict=True)
    items = [item for item, trained in zip(triples, is_trained, strict=True) if trained]
    total = 0.0
    for batch in make_micro_batches(items, settings.max_tokens_per_microbatch or 2048, 0):
        logprobs, entropy = policy(batch)
        loss, _ = grpo_loss(logprobs, entropy, batch, settings, num_tokens)
        loss.backward()
        total += float(loss.detach())
    torch.nn.utils.clip_grad_norm_(policy.parameters(), settings.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return total


def success(rollout: Rollout, tasks: list[Task]) -> float:
    """Return the share of tasks with reward 1 in one sampled episode per task."""
    requests = [
        RolloutRequest(task=task, trial=0, key=stream_key("held out", task.id)) for task in tasks
    ]
    return sum(episode.reward >= 1 for episode in rollout(requests)) / len(tasks)


if __name__ == "__main__":
    main()
