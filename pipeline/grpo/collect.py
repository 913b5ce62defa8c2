"""The rollouts of a step: the groups that the stage draws, and others in place of dead ones.

A group whose verified outcomes are all equal is dead: its advantages are zero, it teaches nothing.
With `dynamic_sampling` (DAPO, Yu et al. 2025, arXiv 2503.14476, section 3.2) a step plays another
task for each of them, at most `max_resample_times` times, and trains on the groups that live. DAPO
draws whole batches until one is full; here a group's place goes to a task of its own domain, so
that the curriculum's shares hold, and a step never trains on more than `tasks_per_step` groups.
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
from pipeline.grpo.algorithm import dead_groups, group_advantages, in_baseline
from pipeline.rollout.rollout import Rollout, Start
from pipeline.rollout.trajectory import StopReason, Trajectory


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """What this rank played of a step.

    Groups have places in the step: first the stage's own, then round after round of replacements.
    A rank plays every num_ranks-th place, so its groups stand in the order of places, and turns of
    all ranks one after the other are the order of the step.
    """

    trajectories: list[Trajectory]  # siblings next to each other
    places: list[int]  # of each among all episodes of the step, on any number of ranks the same
    # Of each; False where it is left out, alone in not being so, or of a dead group that had to be
    # replaced.
    kept: list[bool]
    num_first: int  # how many of them belong to the stage's own groups
    rounds: list[int]  # groups over all ranks: the stage's own, then each round of replacements

    @property
    def first(self) -> list[Trajectory]:
        """The episodes of the stage's own groups: all that a step without replacements has."""
        return self.trajectories[: self.num_first]


def collect_rollouts(
    rollout: Rollout,
    ranks: Ranks,
    config: Config,
    stage: Stage,
    step: int,
    sources: Mapping[str, Source],
) -> RolloutBatch:
    """Play this rank's groups of a step; `step` is the number of optimizer steps done before it.

    What is dead is decided on exact outcomes of whole groups, and replacements are drawn by
    counts: both are the same on every rank, for any number of ranks, and after a resume.
    """
    settings, seed, size = config.grpo, config.run.seed, config.rollout.num_generations
    tasks: list[Task] = []
    dead: list[bool] = []  # by place; known of replaceable groups only
    trajectories: list[Trajectory] = []
    rounds: list[int] = []
    fresh = tasks_of_step(stage, step, sources, seed)
    while fresh:
        tasks += fresh
        rounds.append(len(fresh))
        mine = [p for p in ranks.shard(len(tasks)) if p >= len(tasks) - len(fresh)]
        trials = [(tasks[place], k) for place in mine for k in range(size)]
        of_step = (seed, "rollout", stage.name, step)
        starts = [Start(task=t, trial=k, key=stream_key(*of_step, *t.key, k)) for t, k in trials]
        with ranks.phase("sample", stage.name, step + 1):
            found = no_gain_by_failing(rollout(starts), size)
            ranks.agree("end of rollouts")
        trajectories += found
        if not settings.dynamic_sampling:
            break
        dead += _find_dead(ranks, found, size, [place - len(dead) for place in mine], len(fresh))
        if len(rounds) > settings.max_resample_times:
            break
        last = dead[-len(fresh) :]
        domains = [task.domain for task, is_dead in zip(fresh, last, strict=True) if is_dead]
        key = (seed, "replacements", stage.name, step, len(rounds))
        fresh = replacement_tasks(domains, {task.key for task in tasks}, sources, *key)
    groups = ranks.shard(len(tasks))
    places = [group * size + k for group in groups for k in range(size)]
    counted = in_baseline(left_out(trajectories), size).tolist()
    return RolloutBatch(
        trajectories=trajectories,
        places=places,
        kept=[c and not (dead and dead[p // size]) for p, c in zip(places, counted, strict=True)],
        num_first=sum(group < rounds[0] for group in groups) * size,
        rounds=rounds,
    )


def _find_dead(
    ranks: Ranks, trajectories: Sequence[Trajectory], size: int, mine: Sequence[int], count: int
) -> list[bool]:
    """Which of the `count` groups of a round are dead, of which this rank played `mine`."""
    rewards = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)
    dead = dead_groups(rewards, size, ~left_out(trajectories))[::size].tolist()
    flags = [0.0] * count
    for place, is_dead in zip(mine, dead, strict=True):
        flags[place] = float(is_dead)
    return [flag > 0 for flag in ranks.sum(flags)]


def left_out(trajectories: Sequence[Trajectory]) -> torch.Tensor:
    """Bool of each: its environment failed, and not through a call of the policy's."""
    return torch.tensor([bool(t.left_out) for t in trajectories], dtype=torch.bool)


def no_gain_by_failing(trajectories: Sequence[Trajectory], size: int) -> list[Trajectory]:
    """Groups of `size` in which an environment's failure after the policy's call earns least.

    Its reward is 0, or the lowest of its siblings' where that is less: where rewards are negative,
    0 would be a prize for a call that makes the environment fail.
    """
    found = list(trajectories)
    for i, t in enumerate(trajectories):
        if t.stop_reason is StopReason.ENVIRONMENT_ERROR and not t.left_out:
            siblings = trajectories[i - i % size :][:size]
            least = min(s.reward for s in siblings if not s.left_out)
            found[i] = replace(t, reward=min(0.0, least))
    return found


def rewards_of(batch: RolloutBatch, ranks: Ranks, config: Config, step: int) -> torch.Tensor:
    """The rewards that train: the episodes' own; in the control, those of others of the step."""
    rewards = [trajectory.reward for trajectory in batch.trajectories]
    if config.grpo.permute_rewards:
        rewards = _permuted(batch, ranks, rewards, config.run.seed, step)
    return torch.tensor(rewards, dtype=torch.float64)


def advantages_of(
    batch: RolloutBatch, rewards: torch.Tensor, ranks: Ranks, settings: GRPOSettings, size: int
) -> tuple[list[float], list[bool]]:
    """The advantage of each of this rank's episodes, and whether it is trained on."""
    scale, batch_std = settings.scale_rewards, None
    if scale == "batch":
        batch_std = _std_of_step(batch, rewards, ranks)
    counted = in_baseline(left_out(batch.trajectories), size)
    advantages = group_advantages(rewards, size, scale, batch_std, counted).tolist()
    scales = [settings.domain_advantage_scale.get(t.domain, 1.0) for t in batch.trajectories]
    dead = dead_groups(rewards, size, counted)
    kept = (counted & ~dead if settings.drop_dead_groups else counted).tolist()
    return [a * scale for a, scale in zip(advantages, scales, strict=True)], kept


def _permuted(
    batch: RolloutBatch, ranks: Ranks, rewards: Sequence[float], seed: int, step: int
) -> list[float]:
    """The rewards of all ranks' kept episodes, shuffled among these; other episodes keep theirs."""
    known = zip(batch.places, rewards, batch.kept, strict=True)
    mine = [number for place, reward, kept in known if kept for number in (place, reward)]
    ranks.barrier("control")
    shards = ranks.all_gather_numbers(mine)
    found = {p: r for shard in shards for p, r in zip(shard[::2], shard[1::2], strict=True)}
    places = sorted(found)
    order = permutation(len(places), seed, "permuted rewards", step)
    given = {place: found[places[i]] for place, i in zip(places, order, strict=True)}
    return [given.get(p, reward) for p, reward in zip(batch.places, rewards, strict=True)]


def _std_of_step(batch: RolloutBatch, rewards: torch.Tensor, ranks: Ranks) -> float:
    """The deviation (unbiased) of the rewards of all ranks' kept episodes; 0 where none is."""
    mine = [reward for reward, kept in zip(rewards.tolist(), batch.kept, strict=True) if kept]
    ranks.barrier("rewards")
    shards = ranks.all_gather_numbers(mine)
    # Sorted, so that rounding does not depend on the ranks.
    everything = sorted(reward for shard in shards for reward in shard)
    return float(torch.tensor(everything, dtype=torch.float64).std()) if everything else 0.0
