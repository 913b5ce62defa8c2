"""The rollouts of a step: groups of the stage's tasks, replacements of zero-std groups, advantages.

A zero-std group has equal rewards only: its advantages are zero, and nothing is learned from it.
With `dynamic_sampling` (DAPO, Yu et al. 2025, arXiv 2503.14476, section 3.2) a step takes another
task for each zero-std group, in at most `max_resample_times` rounds, and trains on the other
groups. DAPO draws whole batches until one is full; here a task of the same domain replaces each
zero-std group, so that the curriculum's shares hold, and a step never trains on more than
`tasks_per_step` groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from pipeline.config.settings import Config, GRPOSettings
from pipeline.data.curriculum import Stage, replacement_tasks, tasks_of_step
from pipeline.data.rng import permutation, stream_key
from pipeline.data.tasks import Source, Task
from pipeline.distributed.ranks import Ranks
from pipeline.grpo.algorithm import group_advantages, in_baseline, zero_std_groups
from pipeline.rollout.rollout import Rollout, RolloutRequest
from pipeline.rollout.trajectory import StopReason, Trajectory


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """The episodes of a step that this rank collected.

    The groups of a step are in order: the stage's own, then the rounds of replacements. A rank
    collects every num_ranks-th group.
    """

    trajectories: list[Trajectory]  # siblings next to each other
    places: list[int]  # index of each episode in the step, the same for any number of ranks
    # False if the episode or all of its siblings are left out, or if its group has a standard
    # deviation of zero and dynamic sampling is on.
    kept: list[bool]
    num_first: int  # number of episodes of the stage's own groups
    rounds: list[int]  # groups over all ranks: the stage's own, then each round of replacements

    @property
    def first(self) -> list[Trajectory]:
        """The episodes of the stage's own groups, without replacements."""
        return self.trajectories[: self.num_first]


def collect_rollouts(
    rollout: Rollout,
    ranks: Ranks,
    config: Config,
    stage: Stage,
    step: int,
    sources: Mapping[str, Source],
) -> RolloutBatch:
    """Collect this rank's groups of a step; `step` is the number of optimizer steps before it.

    Zero-std groups depend on exact rewards of whole groups, and replacements are drawn by counts:
    both are the same on every rank, for any number of ranks, and after a resume.
    """
    settings, seed, size = config.grpo, config.run.seed, config.rollout.num_generations
    tasks: list[Task] = []
    zero_std: list[bool] = []  # by group, with dynamic sampling only
    trajectories: list[Trajectory] = []
    rounds: list[int] = []
    fresh = tasks_of_step(stage, step, sources, seed)
    while fresh:
        tasks += fresh
        rounds.append(len(fresh))
        mine = [p for p in ranks.shard(len(tasks)) if p >= len(tasks) - len(fresh)]
        trials = [(tasks[place], k) for place in mine for k in range(size)]
        of_step = (seed, "rollout", stage.name, step)
        requests = [
            RolloutRequest(task=t, trial=k, key=stream_key(*of_step, *t.key, k)) for t, k in trials
        ]
        with ranks.phase("sample", stage.name, step + 1):
            rollouts = no_gain_by_failing(rollout(requests), size)
            ranks.agree("end of rollouts")
        trajectories += rollouts
        if not settings.dynamic_sampling:
            break
        zero_std += _find_zero_std(
            ranks, rollouts, size, [place - len(zero_std) for place in mine], len(fresh)
        )
        if len(rounds) > settings.max_resample_times:
            break
        last = zero_std[-len(fresh) :]
        domains = [
            task.domain for task, is_zero_std in zip(fresh, last, strict=True) if is_zero_std
        ]
        key = (seed, "replacements", stage.name, step, len(rounds))
        fresh = replacement_tasks(domains, {task.key for task in tasks}, sources, *key)
    groups = ranks.shard(len(tasks))
    places = [group * size + k for group in groups for k in range(size)]
    counted = in_baseline(left_out(trajectories), size).tolist()
    return RolloutBatch(
        trajectories=trajectories,
        places=places,
        kept=[
            c and not (zero_std and zero_std[p // size])
            for p, c in zip(places, counted, strict=True)
        ],
        num_first=sum(group < rounds[0] for group in groups) * size,
        rounds=rounds,
    )


def _find_zero_std(
    ranks: Ranks, trajectories: Sequence[Trajectory], size: int, mine: Sequence[int], count: int
) -> list[bool]:
    """Which of the `count` groups of a round are zero-std; this rank has those at `mine`."""
    rewards = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)
    zero_std = zero_std_groups(rewards, size, ~left_out(trajectories))[::size].tolist()
    flags = [0.0] * count
    for place, is_zero_std in zip(mine, zero_std, strict=True):
        flags[place] = float(is_zero_std)
    return [flag > 0 for flag in ranks.sum(flags)]


def left_out(trajectories: Sequence[Trajectory]) -> torch.Tensor:
    """True, per episode, if its environment failed without a call of the policy."""
    return torch.tensor([bool(t.left_out) for t in trajectories], dtype=torch.bool)


def no_gain_by_failing(trajectories: Sequence[Trajectory], size: int) -> list[Trajectory]:
    """Groups of `size` in which an environment's failure after the policy's call earns least.

    Its reward is 0, or its siblings' lowest if that is less: among negative rewards, 0 would reward
    a call that makes the environment fail.
    """
    changed = list(trajectories)
    for i, t in enumerate(trajectories):
        if t.stop_reason is StopReason.ENVIRONMENT_ERROR and not t.left_out:
            siblings = trajectories[i - i % size :][:size]
            least = min(s.reward for s in siblings if not s.left_out)
            changed[i] = replace(t, reward=min(0.0, least))
    return changed


def rewards_of(batch: RolloutBatch, ranks: Ranks, config: Config, step: int) -> torch.Tensor:
    """The rewards for training: the episodes' own; with `permute_rewards`, shuffled kept ones."""
    rewards = [trajectory.reward for trajectory in batch.trajectories]
    if config.grpo.permute_rewards:
        kept = _kept_rewards(batch, rewards, ranks, "control")
        places = sorted(kept)
        order = permutation(len(places), config.run.seed, "permuted rewards", step)
        given = {place: kept[places[i]] for place, i in zip(places, order, strict=True)}
        rewards = [given.get(p, own) for p, own in zip(batch.places, rewards, strict=True)]
    return torch.tensor(rewards, dtype=torch.float64)


def advantages_of(
    batch: RolloutBatch, rewards: torch.Tensor, ranks: Ranks, settings: GRPOSettings, size: int
) -> tuple[list[float], list[bool]]:
    """The advantage of each of this rank's episodes, and whether it is trained on."""
    batch_std = None
    if settings.scale_rewards == "batch":
        # Sorted, so that rounding does not depend on the ranks.
        everyone = sorted(_kept_rewards(batch, rewards.tolist(), ranks, "rewards").values())
        batch_std = float(torch.tensor(everyone, dtype=torch.float64).std()) if everyone else 0.0
    counted = in_baseline(left_out(batch.trajectories), size)
    advantages = group_advantages(rewards, size, settings.scale_rewards, batch_std, counted)
    scales = [settings.domain_advantage_scale.get(t.domain, 1.0) for t in batch.trajectories]
    zero_std = zero_std_groups(rewards, size, counted)
    kept = (counted & ~zero_std if settings.drop_zero_std_groups else counted).tolist()
    return [a * scale for a, scale in zip(advantages.tolist(), scales, strict=True)], kept


def _kept_rewards(
    batch: RolloutBatch, rewards: Sequence[float], ranks: Ranks, name: str
) -> dict[float, float]:
    """The rewards of all ranks' kept episodes, by place."""
    rows = zip(batch.places, rewards, batch.kept, strict=True)
    mine = [number for place, reward, kept in rows if kept for number in (place, reward)]
    ranks.barrier(name)
    shards = ranks.all_gather_numbers(mine)
    return {p: r for shard in shards for p, r in zip(shard[::2], shard[1::2], strict=True)}
