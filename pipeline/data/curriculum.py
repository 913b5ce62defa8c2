"""Stages: which domains a step's groups come from, and how many steps each stage has."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from pipeline.config.settings import Config, GRPOSettings
from pipeline.data.rng import generator
from pipeline.data.tasks import Source, Task, tasks_for_step
from pipeline.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of the training: `groups` of each domain in every step, over all ranks.

    If there are `turns`, each step has the groups of one domain only, that of its turn.
    """

    index: int
    name: str
    own: tuple[str, ...]  # the domains that the stage is for; the others are replayed
    difficulty: str
    groups: dict[str, int]
    turns: tuple[str, ...] = ()  # the domain of each step
    first_step: int = 0  # steps done before the stage
    num_steps: int = 0

    @property
    def last_step(self) -> int:
        """Steps done at its end."""
        return self.first_step + self.num_steps


def make_stages(config: Config, num_tasks: Mapping[str, int]) -> list[Stage]:
    """The stages of a run, by its curriculum.

    A step takes a task at most once, so `groups` of a domain is at most its number of tasks.
    """
    curriculum, size = config.curriculum, config.rollout.tasks_per_step
    takes_turns = curriculum.curriculum == "interleaved"
    stages: list[Stage] = []
    for own, shares in _shares(config):
        counts = [size] * len(shares) if takes_turns else split(size, list(shares.values()))
        groups = {d: min(n, num_tasks[d]) for d, n in zip(shares, counts, strict=True) if n > 0}
        for difficulty in curriculum.difficulties or [config.data.difficulty]:
            index, name = len(stages), config.stage_names[len(stages)]
            stage = Stage(index=index, name=name, own=own, difficulty=difficulty, groups=groups)
            stages.append(stage)
    for stage, num_steps in zip(stages, _steps(config, stages), strict=True):
        turns = tuple(quota(shares, num_steps)) if takes_turns else ()
        stages[stage.index] = replace(stage, num_steps=num_steps, turns=turns)
        without_groups = set(stage.own) - set(turns or stage.groups)
        if curriculum.curriculum != "sequential" and without_groups:
            raise UserError(
                f"domain_weights: {min(without_groups)} would have no group in stage {stage.name}; "
                "give it more weight, or raise tasks_per_step or max_steps"
            )
    return one_after_another(stages)


def one_after_another(
    stages: Sequence[Stage], ended: Mapping[str, int] | None = None
) -> list[Stage]:
    """The stages, each beginning where the one before it ends.

    `ended` has the number of steps of stages that ended early.
    """
    moved, first = [], 0
    for stage in stages:
        num_steps = (ended or {}).get(stage.name, stage.num_steps)
        moved.append(replace(stage, first_step=first, num_steps=num_steps))
        first += num_steps
    return moved


def _shares(config: Config) -> list[tuple[tuple[str, ...], dict[str, float]]]:
    """For each stage (before it is cut by difficulty): its own domains, and each domain's share."""
    domains, curriculum = config.data.domains, config.curriculum
    if curriculum.curriculum != "sequential":
        if curriculum.curriculum == "mixed" and config.rollout.tasks_per_step < len(domains):
            raise UserError(
                f"tasks_per_step: got {config.rollout.tasks_per_step} for {len(domains)} domains; "
                "a mixed step needs at least a group of each"
            )
        weights = {domain: curriculum.domain_weights.get(domain, 1.0) for domain in domains}
        total = sum(weights.values())
        return [(tuple(domains), {domain: weight / total for domain, weight in weights.items()})]
    order = curriculum.order or domains
    stages: list[tuple[tuple[str, ...], dict[str, float]]] = []
    for index, domain in enumerate(order):
        earlier = [d for d in dict.fromkeys(order[:index]) if d != domain]
        replay = curriculum.replay if earlier else 0.0
        replayed = {d: replay / len(earlier) for d in earlier if replay > 0}
        stages.append(((domain,), {**replayed, domain: 1 - replay}))
    return stages


def _steps(config: Config, stages: Sequence[Stage]) -> list[int]:
    """Steps of each stage: its own number, or its share of the rest of max_steps."""
    curriculum, max_steps = config.curriculum, config.grpo.max_steps
    steps = dict(curriculum.stage_steps)
    for name, count in curriculum.stage_tasks.items():
        steps[name] = -(-count // config.rollout.tasks_per_step)
    total = sum(steps.values())
    if total > max_steps:
        raise UserError(
            f"stage_steps: the stages have {total} steps, more than max_steps {max_steps}; raise "
            "max_steps or lower theirs"
        )
    rest = [stage for stage in stages if stage.name not in steps]
    if not rest and total < max_steps:
        raise UserError(
            f"stage_steps: all stages have {total} steps, and max_steps is {max_steps}; give "
            f"max_steps {total}"
        )
    weights = []
    for stage in rest:  # the weight of the stage's name, or of its only domain
        domain = stage.own[0] if len(stage.own) == 1 else ""
        weight = curriculum.stage_weights.get(domain, 1.0)
        weights.append(curriculum.stage_weights.get(stage.name, weight))
    shared = split(max_steps - total, weights)
    steps |= {stage.name: count for stage, count in zip(rest, shared, strict=True)}
    return [steps[stage.name] for stage in stages]


def quota(shares: Mapping[str, float], count: int) -> list[str]:
    """`count` names whose numbers follow the shares as closely as whole numbers can.

    The shares sum to 1. Every beginning of the list follows them as well.
    """
    given = dict.fromkeys(shares, 0)
    names: list[str] = []
    for number in range(1, count + 1):
        names.append(max(shares, key=lambda name: shares[name] * number - given[name]))
        given[names[-1]] += 1
    return names


def split(total: int, weights: list[float]) -> list[int]:
    """Whole numbers in proportion to `weights` that sum to `total`, by largest remainders.

    Ties go to the first.
    """
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(number) for number in exact]
    order = sorted(range(len(weights)), key=lambda i: (counts[i] - exact[i], i))
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return counts


def tasks_of_step(stage: Stage, step: int, sources: Mapping[str, Source], seed: int) -> list[Task]:
    """The tasks of a step, one group each, the same on every rank.

    `step` is the number of optimizer steps done before it.
    """
    number = step - stage.first_step
    assert 0 <= number < stage.num_steps, f"step {step} is not in stage {stage.name}"
    groups = stage.groups
    if stage.turns:
        domain = stage.turns[number]
        groups, number = {domain: groups[domain]}, stage.turns[:number].count(domain)
    tasks: list[Task] = []
    for domain, count in groups.items():
        key = (seed, "order", stage.name, domain)
        tasks += tasks_for_step(sources[domain], count, number, *key)
    return tasks


def replacement_tasks(
    domains: Sequence[str],
    played: Collection[tuple[str, str]],
    sources: Mapping[str, Source],
    *key: int | str,
) -> list[Task]:
    """A task for each of `domains`, of that domain, the same on every rank; `key` names the draw.

    None of them is in `played`, the keys of the tasks that the step has had; if a domain has too
    few other tasks, it gives fewer.
    """
    tasks: list[Task] = []
    for domain, count in Counter(domains).items():
        source = sources[domain]
        enough = min(len(source), count + len(played))
        drawn = map(source.__getitem__, generator(*key, domain).sample(range(len(source)), enough))
        tasks += islice((task for task in drawn if task.key not in played), count)
    return tasks


def on_plateau(history: Sequence[float], patience: int, delta: float) -> bool:
    """Whether the last `patience` values are all no better, by `delta`, than the best before them.

    `history` is a stage's held-out success, one value for each validation.
    """
    if not patience or len(history) <= patience:
        return False
    gain = max(history[-patience:]) - max(history[:-patience])
    return gain <= 0 or gain < delta - 1e-9


def describe(stages: Sequence[Stage], config: Config) -> dict[str, Any]:
    """The content of `curriculum.json`."""
    keys = ("name", "own", "difficulty", "first_step", "num_steps")
    has_replay = any(set(stage.groups) - set(stage.own) for stage in stages)
    return {
        "curriculum": config.curriculum.curriculum,
        "stages": [
            {key: getattr(stage, key) for key in keys}
            | {"domains": stage.groups, "in_turns": bool(stage.turns)}
            for stage in stages
        ],
        "replay": config.curriculum.replay if has_replay else 0.0,
    }


def learning_rate_at(done: int, num_steps: int, peak: float, settings: GRPOSettings) -> float:
    """The learning rate of a stage's next step after `done` of `num_steps`.

    Linear warm-up to `peak`, then the decay. Each stage has its own schedule, so that a later
    domain learns as fast as the first.
    """
    warmup = settings.warmup_steps
    if done < warmup:
        return peak * (done + 1) / warmup
    if settings.lr_scheduler_type == "constant":
        return peak
    share = min(1.0, (done - warmup) / max(1, num_steps - warmup))
    if settings.lr_scheduler_type == "cosine":
        share = (1 - math.cos(math.pi * share)) / 2
    return peak * (1 - (1 - settings.min_lr_rate) * share)
