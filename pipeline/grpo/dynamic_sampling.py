"""The groups of a step, played: those that the stage draws, and others in place of dead ones.

A group whose verified outcomes are all equal is dead: its advantages are zero, it teaches nothing.
With `dynamic_sampling` (DAPO, Yu et al. 2025, arXiv 2503.14476, section 3.2) a step plays another
task for each of them, at most `max_resample_times` times, and trains on the groups that live. DAPO
draws whole batches until one is full; here a group's place goes to a task of its own domain, so
that the curriculum's shares hold, and a step never trains on more than `tasks_per_step` groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from pipeline.data.curriculum import Stage, replacement_tasks, tasks_of_step
from pipeline.data.rng import stream_key
from pipeline.data.tasks import Task, shard_tasks
from pipeline.grpo.algorithm import dead_groups, in_baseline
from pipeline.rollout.rollout import Start
from pipeline.rollout.trajectory import StopReason, Trajectory
from pipeline.session import Run


@dataclass(frozen=True, kw_only=True)
class PlayedStep:
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


def play_step(run: Run, stage: Stage, step: int) -> PlayedStep:
    """Play this rank's groups of a step; `step` is the number of optimizer steps done before it.

    What is dead is decided on exact outcomes of whole groups, and replacements are drawn by
    counts: both are the same on every rank, for any number of ranks, and after a resume.
    """
    settings, seed, size = run.config.grpo, run.config.run.seed, run.config.rollout.num_generations
    sources = run.parts.sources(stage)
    tasks: list[Task] = []
    dead: list[bool] = []  # by place; known of replaceable groups only
    trajectories: list[Trajectory] = []
    rounds: list[int] = []
    fresh = tasks_of_step(stage, step, sources, seed)
    while fresh:
        tasks += fresh
        rounds.append(len(fresh))
        mine = _places(run, tasks, fresh)
        found = _play(run, stage, step, [tasks[place] for place in mine])
        trajectories += found
        if not settings.dynamic_sampling:
            break
        dead += _find_dead(run, found, [place - len(dead) for place in mine], len(fresh))
        if len(rounds) > settings.max_resample_times:
            break
        domains = [
            task.domain for task, is_dead in zip(fresh, dead[-len(fresh) :], strict=True) if is_dead
        ]
        played = {task.key for task in tasks}
        key = (seed, "replacements", stage.name, step, len(rounds))
        fresh = replacement_tasks(domains, played, sources, *key)
    groups = shard_tasks(len(tasks), run.ranks.rank, run.ranks.num_ranks)
    places = [group * size + k for group in groups for k in range(size)]
    counted = in_baseline(left_out(trajectories), size).tolist()
    return PlayedStep(
        trajectories=trajectories,
        places=places,
        kept=[c and not (dead and dead[p // size]) for p, c in zip(places, counted, strict=True)],
        num_first=sum(group < rounds[0] for group in groups) * size,
        rounds=rounds,
    )


def _places(run: Run, tasks: Sequence[Task], fresh: Sequence[Task]) -> list[int]:
    """Those of this rank among the last, `fresh`, of a step's tasks."""
    places = shard_tasks(len(tasks), run.ranks.rank, run.ranks.num_ranks)
    return [place for place in places if place >= len(tasks) - len(fresh)]


def _play(run: Run, stage: Stage, step: int, tasks: Sequence[Task]) -> list[Trajectory]:
    seed, size = run.config.run.seed, run.config.rollout.num_generations
    starts = [
        Start(task=task, trial=k, key=stream_key(seed, "rollout", stage.name, step, *task.key, k))
        for task in tasks
        for k in range(size)
    ]
    with run.ranks.phase("sample", stage.name, step + 1):
        trajectories = no_gain_by_failing(run.rollout(starts), size)
        run.ranks.agree("end of rollouts")
    run.records += [trajectory.record() for trajectory in trajectories]
    return trajectories


def _find_dead(
    run: Run, trajectories: Sequence[Trajectory], mine: Sequence[int], count: int
) -> list[bool]:
    """Which of the `count` groups of a round are dead, of which this rank played `mine`."""
    size = run.config.rollout.num_generations
    rewards = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)
    dead = dead_groups(rewards, size, ~left_out(trajectories))[::size].tolist()
    flags = [0.0] * count
    for place, is_dead in zip(mine, dead, strict=True):
        flags[place] = float(is_dead)
    return [flag > 0 for flag in run.ranks.sum(flags)]


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
