"""Collect the groups of episodes of a training step, and compute their advantages.

All rewards of a zero-std group are equal, so all advantages of the group are 0. With
`dynamic_sampling` (DAPO, Yu et al. 2025, arXiv 2503.14476, section 3.2), a step does not train on
zero-std groups, but replaces zero-std groups by new groups in at most `max_resample_times` rounds.
This pipeline replaces a group by a group of the same domain (and of the same task family, if
families have shares), so that each domain keeps its share of the groups; DAPO samples whole batches
of new tasks. Without partial rollouts, a step never trains on more than `tasks_per_step` groups.

With `task_sampling: signal`, a memory of outcomes chooses these tasks (`data/task_memory.py`).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from pipeline.config.settings import Config
from pipeline.data.curriculum import Stage, replacement_tasks, tasks_of_step
from pipeline.data.rng import stream_key
from pipeline.data.task_memory import OUTCOMES, TaskMemory
from pipeline.data.tasks import Source, Task
from pipeline.distributed.ranks import Ranks
from pipeline.rollout.rollout import Progress, Rollout, RolloutRequest
from pipeline.rollout.trajectory import FAILED, Trajectory, succeeded
from pipeline.training.grpo import group_advantages, in_baseline, zero_std_groups
from pipeline.training.open_groups import Group, OpenGroups


@dataclass(kw_only=True)
class Sample:
    """An episode of a step, and what the update makes of it."""

    trajectory: Trajectory
    index: int  # among the episodes of all ranks
    kept: bool  # whether the step may train on the episode
    advantage: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """This rank's episodes of a step, group by group.

    The groups of a step have an order: first the groups of the tasks of the stage, then the groups
    of each round of replacements. The ranks play them in turn.
    """

    samples: list[Sample]
    num_first: int  # number of this rank's episodes before the first round of replacements
    rounds: list[int]  # [number of the stage's tasks, number of groups in round 1, ...]
    tasks: list[Task]  # one for each group of all ranks
    memory: TaskMemory | None  # after the step; None: tasks are drawn uniformly
    step: int = 0  # number of optimizer steps before this one

    @property
    def trajectories(self) -> list[Trajectory]:
        return [sample.trajectory for sample in self.samples]

    @property
    def first(self) -> list[Trajectory]:
        return self.trajectories[: self.num_first]


def collect_rollouts(
    groups: OpenGroups,
    ranks: Ranks,
    config: Config,
    stage: Stage,
    sources: Mapping[str, Source],
    *,
    memory: TaskMemory | None = None,
) -> RolloutBatch:
    """Play the step that `groups` have begun, and return this rank's groups that have ended.

    All ranks find the same zero-std groups and choose the same replacement tasks. The groups and
    the tasks do not depend on the number of ranks, and are the same after a resume.
    """
    settings = config.grpo
    seed = config.run.seed
    size = config.rollout.num_generations
    step = groups.step
    outcomes = dict[tuple[int, int], str]()  # by key; empty where nothing depends on them
    ended: list[Group] = []  # of all ranks
    waiting = [*groups.groups]  # to be played
    new = tasks_of_step(stage, step, sources, seed)
    if memory is not None:
        new = memory.draw(new, [], sources, stage, seed)
    coming = {0: new}  # tasks by round
    while coming:
        for number, tasks in coming.items():
            waiting += groups.begin(tasks, stage.name, number)
        with ranks.phase("sample", stage.name, step + 1):
            over = groups.play(waiting)
        for group in over:
            group.trajectories = no_gain_by_failing(group.trajectories, size)
        waiting = []
        ended += over
        if memory is None and not settings.dynamic_sampling:
            break
        outcomes |= outcomes_of(over, config, ranks)
        if memory is not None:
            memory.add([g.task for g in over], [outcomes[g.key] for g in over])
        coming = {}
        for number in range(settings.max_resample_times if settings.dynamic_sampling else 0):
            unmixed = (g for g in over if outcomes[g.key] != "mixed")
            replaced = [group.task for group in unmixed if group.round == number]
            # A replacement that goes on is played in the next step, not in the next round.
            played = {g.task.key: g.task for g in (*ended, *groups.groups)}
            played |= {task.key: task for tasks in coming.values() for task in tasks}
            if memory is not None:
                new = memory.draw(replaced, [*played.values()], sources, stage, seed)
            else:
                key = (seed, "replacements", stage.name, step, number + 1)
                new = replacement_tasks(replaced, played, sources, *key)
            coming |= {number + 1: new} if new else {}
    ended.sort(key=lambda group: (group.round, group.key))
    mine = groups.take(ended)
    by_round = Counter(group.round for group in ended)
    place_of = {group.key: place for place, group in enumerate(ended)}
    samples = list[Sample]()
    for group in mine:
        counted = in_baseline(is_left_out(group.trajectories), size).tolist()
        is_kept = not settings.dynamic_sampling or outcomes[group.key] == "mixed"
        first = place_of[group.key] * size
        samples += [
            Sample(trajectory=t, index=first + k, kept=is_counted and is_kept)
            for k, (t, is_counted) in enumerate(zip(group.trajectories, counted, strict=True))
        ]
    return RolloutBatch(
        samples=samples,
        num_first=sum(group.round == 0 for group in mine) * size,
        rounds=[by_round[number] for number in range(max(by_round, default=0) + 1)],
        tasks=[group.task for group in ended],
        memory=memory,
        step=step,
    )


def outcomes_of(
    groups: Sequence[Group], config: Config, ranks: Ranks
) -> dict[tuple[int, int], str]:
    """Return the outcomes of groups that have ended, by key. Every rank must call this."""
    threshold = config.evaluation.success_threshold
    codes = [
        OUTCOMES.index(outcome(group.trajectories, threshold)) if group.trajectories else 0
        for group in groups
    ]
    names = (OUTCOMES[int(code)] for code in ranks.sum(codes))
    return {group.key: name for group, name in zip(groups, names, strict=True)}


def outcome(group: Sequence[Trajectory], threshold: float) -> str:
    """Return the outcome of a group; episodes that are left out of training do not count."""
    rewards = [t.reward for t in group if not t.left_out]
    if len(rewards) < 2:
        return "few"
    if min(rewards) < max(rewards):
        return "mixed"
    return "solved" if succeeded(rewards[0], threshold) else "failed"


def play_groups(
    rollout: Rollout,
    ranks: Ranks,
    tasks: Sequence[Task],
    size: int,
    *stream: int | str,
    progress: Progress | None = None,
) -> list[Trajectory]:
    """Return `size` episodes of each of this rank's `tasks`, task by task.

    Every rank must call this function. `stream` names the streams of random numbers. Raises
    Interrupted if a signal stops the run.
    """
    requests = [
        RolloutRequest(task=task, trial=k, key=stream_key(*stream, *task.key, k))
        for task in tasks
        for k in range(size)
    ]
    trajectories = no_gain_by_failing(rollout(requests, progress=progress), size)
    ranks.agree("end of rollouts")
    return trajectories


def is_left_out(trajectories: Sequence[Trajectory]) -> torch.Tensor:
    """Return True for each episode that training leaves out because the environment failed."""
    return torch.tensor([bool(t.left_out) for t in trajectories], dtype=torch.bool)


def no_gain_by_failing(trajectories: Sequence[Trajectory], size: int) -> list[Trajectory]:
    """Lower the reward of each episode in which the policy may have made the environment fail.

    The lowered reward is the minimum of 0 and the lowest reward in the group of `size` episodes.
    The policy must gain nothing by making an environment fail.
    """
    changed = list(trajectories)
    for i, t in enumerate(trajectories):
        if t.stop_reason in FAILED and not t.left_out:
            group = trajectories[i - i % size :][:size]
            least = min(sibling.reward for sibling in group if not sibling.left_out)
            changed[i] = replace(t, reward=min(0.0, least))
    return changed


def give_advantages(batch: RolloutBatch, ranks: Ranks, config: Config) -> None:
    """Set the advantage of each sample, and whether the update uses it (`kept`).

    Every rank must call this function.
    """
    settings = config.grpo
    size = config.rollout.num_generations
    rewards = torch.tensor([t.reward for t in batch.trajectories], dtype=torch.float64)
    batch_std = None
    if settings.scale_rewards == "batch":
        # The sum of sorted rewards has the same rounding errors for any number of ranks.
        everyone = sorted(kept_rewards(batch, ranks).values())
        batch_std = float(torch.tensor(everyone, dtype=torch.float64).std()) if everyone else 0.0
    counted = in_baseline(is_left_out(batch.trajectories), size)
    advantages = group_advantages(rewards, size, settings.scale_rewards, batch_std, counted)
    kept = counted
    if settings.drop_zero_std_groups:
        kept = counted & ~zero_std_groups(rewards, size, counted)
    for sample, advantage, is_kept in zip(batch.samples, advantages, kept, strict=True):
        scale = settings.domain_advantage_scale.get(sample.trajectory.domain, 1.0)
        sample.advantage = float(advantage) * scale
        sample.kept = bool(is_kept)


def kept_rewards(batch: RolloutBatch, ranks: Ranks) -> dict[float, float]:
    """Return {index of an episode: reward} for the kept episodes of all ranks."""
    kept = [sample for sample in batch.samples if sample.kept]
    mine = [number for sample in kept for number in (sample.index, sample.trajectory.reward)]
    ranks.barrier("rewards")
    shards = ranks.all_gather_numbers(mine)
    return {i: r for shard in shards for i, r in zip(shard[::2], shard[1::2], strict=True)}
