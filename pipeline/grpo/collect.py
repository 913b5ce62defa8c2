"""The rollouts of a step: groups of the stage's tasks, their replacements, advantages.

A zero-std group has equal rewards only, so its advantages are zero and it teaches nothing. With
`dynamic_sampling` (DAPO, Yu et al. 2025, arXiv 2503.14476, section 3.2) a step replaces zero-std
groups in at most `max_resample_times` rounds, and trains on the other groups. DAPO draws whole
batches until one is full; here a task of the same domain replaces each zero-std group, so that the
curriculum's shares hold, and a step never trains on more than `tasks_per_step` groups.
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
    """This rank's episodes of a step.

    The groups of a step are in order: the stage's own, then the rounds of replacements. A rank
    collects every num_ranks-th group.
    """

    trajectories: list[Trajectory]  # siblings next to each other
    places: list[int]  # index of each episode in the step, the same for any number of ranks
    kept: list[bool]  # by episode: `in_baseline`, and with dynamic sampling not of a zero-std group
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

    Zero-std groups depend on exact rewards of whole groups, and replacements are drawn by counts.
    Both are the same on every rank, for any number of ranks, and after a resume.
    """
    settings, seed, size = config.grpo, config.run.seed, config.rollout.num_generations
    tasks: list[Task] = []
    zero_std: list[bool] = []  # by group, with dynamic sampling only
    trajectories: list[Trajectory] = []
    rounds: list[int] = []
    new = tasks_of_step(stage, step, sources, seed)
    while new:
        places = range(len(tasks), len(tasks) + len(new))
        tasks += new
        rounds.append(len(new))
        mine = [place for place in ranks.shard(len(tasks)) if place in places]
        stream = (seed, "rollout", stage.name, step)
        requests = [
            RolloutRequest(task=task, trial=k, key=stream_key(*stream, *task.key, k))
            for task in (tasks[place] for place in mine)
            for k in range(size)
        ]
        with ranks.phase("sample", stage.name, step + 1):
            rollouts = no_gain_by_failing(rollout(requests), size)
            ranks.agree("end of rollouts")
        trajectories += rollouts
        if not settings.dynamic_sampling:
            break
        rewards = torch.tensor([t.reward for t in rollouts], dtype=torch.float64)
        found = zero_std_groups(rewards, size, ~left_out(rollouts))[::size].tolist()
        flags = dict(zip(mine, found, strict=True))
        sums = ranks.sum([float(flags.get(place, False)) for place in places])
        zero_std += [flag > 0 for flag in sums]
        if len(rounds) > settings.max_resample_times:
            break
        domains = [tasks[place].domain for place in places if zero_std[place]]
        key = (seed, "replacements", stage.name, step, len(rounds))
        new = replacement_tasks(domains, {task.key for task in tasks}, sources, *key)
    groups = [group for group in ranks.shard(len(tasks)) for _ in range(size)]  # by episode
    counted = in_baseline(left_out(trajectories), size).tolist()
    return RolloutBatch(
        trajectories=trajectories,
        places=[group * size + i % size for i, group in enumerate(groups)],
        kept=[c and not (zero_std and zero_std[g]) for g, c in zip(groups, counted, strict=True)],
        num_first=sum(group < rounds[0] for group in groups),
        rounds=rounds,
    )


def left_out(trajectories: Sequence[Trajectory]) -> torch.Tensor:
    """True, per episode, if its environment failed without a call of the policy."""
    return torch.tensor([bool(t.left_out) for t in trajectories], dtype=torch.bool)


def no_gain_by_failing(trajectories: Sequence[Trajectory], size: int) -> list[Trajectory]:
    """Groups of `size`; an environment's failure after the policy's call earns the least.

    Its reward is 0, or the lowest of its group if that is negative: among negative rewards, 0
    would reward a call that makes the environment fail.
    """
    changed = list(trajectories)
    for i, t in enumerate(trajectories):
        if t.stop_reason is StopReason.ENVIRONMENT_ERROR and not t.left_out:
            group = trajectories[i - i % size :][:size]
            least = min(sibling.reward for sibling in group if not sibling.left_out)
            changed[i] = replace(t, reward=min(0.0, least))
    return changed


def rewards_of(batch: RolloutBatch, ranks: Ranks, config: Config, step: int) -> torch.Tensor:
    """The rewards for training; `permute_rewards` shuffles the rewards of kept episodes."""
    rewards = [trajectory.reward for trajectory in batch.trajectories]
    if config.grpo.permute_rewards:
        kept = _kept_rewards(batch, rewards, ranks, "control")
        places = sorted(kept)
        order = permutation(len(places), config.run.seed, "permuted rewards", step)
        given = {places[j]: kept[places[i]] for j, i in enumerate(order)}
        rewards = [given.get(p, own) for p, own in zip(batch.places, rewards, strict=True)]
    return torch.tensor(rewards, dtype=torch.float64)


def advantages_of(
    batch: RolloutBatch, rewards: torch.Tensor, ranks: Ranks, settings: GRPOSettings, size: int
) -> tuple[list[float], list[bool]]:
    """The advantage of each of this rank's episodes, and whether the update uses it."""
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
