"""Groups of episodes, from the step in which they begin to the step that trains them.

Without `partial_rollout_tokens`, all groups end in the step in which they begin. With it, an
episode samples at most so many tokens in a step, and goes on in the next one under new weights
(partial rollouts: Kimi k1.5, Kimi Team 2025, arXiv 2501.12599, section 2.6.2):

1. A step begins the groups that it would begin anyway, and goes on with all that are open. It
   trains each group whose last episode has ended. So the tasks and draws of a stage are those of a
   stage without partial rollouts, and in the long run as many groups end in a step as begin.
2. A group that began `max_staleness` steps ago is played to its end. So are all groups in the last
   step of a stage, in one that a validation follows, and in the first step of a run, of which the
   start report tells; and groups that no checkpoint can hold, if `save_steps` lets one follow.
3. Counts of tokens and steps decide, never time. An episode that has sampled as many tokens as it
   may ends in a later step, even if its environment has answered meanwhile.

Example: tasks_per_step 2, partial_rollout_tokens 8, max_staleness 2, a later stage of 3 steps. The
longest episodes of the groups a to f sample 5, 12, 30, 7, 3 and 20 tokens.

    step 1 begins a and b; a ends, b has 8 of 12               it trains a
    step 2 begins c and d; b and d end, c has 8 of 30          it trains b and d
    step 3 begins e and f, and is the last, so all groups end  it trains c, e and f
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

from pipeline.config.settings import Config
from pipeline.data.rng import stream_key
from pipeline.data.tasks import Task
from pipeline.distributed.ranks import Ranks
from pipeline.rollout.episode import Episode
from pipeline.rollout.rollout import Rollout, RolloutRequest
from pipeline.rollout.trajectory import Trajectory, Turn


@dataclass(kw_only=True, eq=False)
class Group:
    """`num_generations` episodes of one task."""

    task: Task
    step: int  # number of optimizer steps before the one in which it began
    place: int  # among the groups that began in this step; the ranks play them in turn
    round: int = 0  # of dynamic sampling
    episodes: list[Episode] = field(default_factory=list)  # on the rank that plays them
    trajectories: list[Trajectory] = field(default_factory=list)  # there, once all have ended

    @property
    def key(self) -> tuple[int, int]:
        return self.step, self.place

    @property
    def has_ended(self) -> bool:
        return bool(self.episodes) and all(episode.has_ended for episode in self.episodes)

    @property
    def can_be_replayed(self) -> bool:
        return all(episode.can_be_replayed for episode in self.episodes)


class OpenGroups:
    """The groups of all ranks that are open, in the order in which they began."""

    def __init__(self, rollout: Rollout, ranks: Ranks, config: Config) -> None:
        self.groups = list[Group]()
        self.step = 0  # number of optimizer steps before the one that has begun
        self._ended = list[Group]()  # of `groups`, in this step
        self._rollout = rollout
        self._ranks = ranks
        self._config = config
        self._settings = config.rollout
        self._num_begun = 0  # in this step
        self._drains = False
        self._saves = False

    def begin_step(self, step: int, *, drains: bool = False, saves: bool = False) -> None:
        """Begin step `step` (from 0), in which all groups end if it `drains`.

        `saves` says that a checkpoint follows.
        """
        self.groups = self.open
        self._ended = []
        self.step = step
        self._num_begun = 0
        self._drains = drains
        self._saves = saves

    @property
    def open(self) -> list[Group]:
        """The groups that have not ended."""
        return [group for group in self.groups if group not in self._ended]

    def begin(self, tasks: Sequence[Task], stage: str, round: int) -> list[Group]:
        """Begin a group of each task, in the step that has begun."""
        begun = [
            Group(task=task, step=self.step, place=place, round=round)
            for place, task in enumerate(tasks, self._num_begun)
        ]
        self._num_begun += len(begun)
        for group in begun:
            self._make_episodes(group, stage)
        self.groups += begun
        return begun

    def _make_episodes(self, group: Group, stage: str) -> None:
        if group.place not in self._ranks.shard(group.place + 1):
            return
        key = (self._config.run.seed, "rollout", stage, group.step, *group.task.key)
        group.episodes = self._rollout.begin(
            [
                RolloutRequest(task=group.task, trial=k, key=stream_key(*key, k), begun=group.step)
                for k in range(self._settings.num_generations)
            ]
        )

    def _set_pace(self, group: Group) -> None:
        settings = self._settings
        if not settings.is_partial:
            return
        is_old = self.step - group.step >= settings.max_staleness
        ends = self._drains or is_old or (self._saves and not group.can_be_replayed)
        for episode in group.episodes:
            episode.pace.most = math.inf if ends else settings.partial_rollout_tokens
            episode.pace.version = self.step

    def play(self, groups: Sequence[Group]) -> list[Group]:
        """Play `groups`, each once in a step; return those of all ranks that have ended.

        Every rank must call this function. Raises Interrupted if a signal stops the run; a
        checkpoint then holds the groups as they were when the step began.
        """
        try:
            self._go_on(groups)
            # An episode that has begun may wait for what no checkpoint can hold.
            if self._saves and self._settings.is_partial:
                self._go_on([group for group in groups if not group.can_be_replayed])
            ended = [group for group in groups if group.has_ended]
            episodes = [episode for group in ended for episode in group.episodes]
            trajectories = self._rollout.end(episodes)
            self._ranks.agree("end of rollouts")
        except BaseException:
            self._rollout.drop([episode for group in self.groups for episode in group.episodes])
            raise
        self._rollout.drop(episodes)
        size = self._settings.num_generations
        for place, group in enumerate(ended):
            group.trajectories = trajectories[place * size :][:size]
        if not self._settings.is_partial:
            return [*groups]
        gathered = self._ranks.all_gather_objects([group.key for group in ended], "ended groups")
        keys = {*chain(*gathered)}
        return [group for group in groups if group.key in keys]

    def _go_on(self, groups: Sequence[Group]) -> None:
        for group in groups:
            self._set_pace(group)
        self._rollout.go_on([episode for group in groups for episode in group.episodes])

    def take(self, ended: Sequence[Group]) -> list[Group]:
        """End groups, the step's; return those of this rank, in order.

        If deterministic, they are dealt out anew: the number of ranks decides which rank plays a
        group, and must not decide in which order the update takes the groups.
        """
        self._ended = [*ended]
        if not (self._config.run.deterministic and self._settings.is_partial):
            return [group for group in ended if group.trajectories]
        mine = {group.key: group.trajectories for group in ended}
        gathered = self._ranks.all_gather_objects(mine, "groups")
        for group in ended:
            group.trajectories = next(of[group.key] for of in gathered if of[group.key])
        return [ended[index] for index in self._ranks.shard(len(ended))]

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return the groups that are open after `step` steps, for a checkpoint.

        If step `step` (from 0) has begun, they are those of before. Every rank must call this.
        """
        groups = self.open if step > self.step else self.groups
        kept = [group for group in groups if group.step < step]
        mine = {
            group.key: [e.conversation and e.conversation.record(step) for e in group.episodes]
            for group in kept
            if group.can_be_replayed
        }
        gathered = self._ranks.all_gather_objects(mine, "open groups") if kept else []
        names = ("step", "place", "round")
        return {
            "open_groups": [
                {
                    "task": asdict(group.task),
                    # A text, which takes one line of the checkpoint's file.
                    "turns": json.dumps(
                        [turns for of in gathered for turns in of.get(group.key, [])]
                    ),
                    **{name: getattr(group, name) for name in names},
                }
                for group in kept
            ]
        }

    def load_state_dict(self, state: Mapping[str, Any], stage: str) -> list[str]:
        """Go on with the groups of a checkpoint; return the domains of those that begin anew.

        Those are groups of episodes that cannot be replayed, and groups that other settings than
        those of the checkpoint do not allow.
        """
        anew = dict[str, None]()
        settings = self._settings
        for saved in state["open_groups"]:
            facts: dict[str, Any] = dict(saved)
            recorded = json.loads(facts.pop("turns"))
            is_too_old = state["step"] - facts["step"] > settings.max_staleness
            if is_too_old or not settings.is_partial:
                recorded = []
            task = {**facts.pop("task")}
            task["prompt"] = tuple(task["prompt"])
            group = Group(task=Task(**task), **facts)
            self._make_episodes(group, stage)
            for episode, turns in zip(group.episodes, recorded, strict=False):
                episode.recorded = [Turn(*turn) for turn in turns or ()]
            if not recorded:
                anew[group.task.domain] = None
            self.groups.append(group)
        return [*anew]
