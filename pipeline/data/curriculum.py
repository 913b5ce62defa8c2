"""Stages: which domains a step's groups come from, and how many steps each stage has."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

from pipeline.config.settings import Config, GRPOSettings
from pipeline.data.rng import generator
from pipeline.data.tasks import Source, Task, tasks_for_step
from pipeline.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of the training: `groups` of each domain in every step, over all ranks.

    Where there are `turns`, each step has the groups of one domain, the one whose turn it is.
    """

    index: int
    name: str
    own: tuple[str, ...]  # the domains that it is for; the others are replayed
    difficulty: str
    groups: dict[str, int]
    turns: tuple[str, ...] = ()  # a domain for each step
    first_step: int = 0  # steps done before the stage
    num_steps: int

    @property
    def last_step(self) -> int:
        """Steps done at its end."""
        return self.first_step + self.num_steps


def make_stages(config: Config, num_tasks: Mapping[str, int]) -> list[Stage]:
    """The stages of a run, by its curriculum.

    A step takes a task at most once, so `groups` of a domain never passes its number of tasks.
    """
    curriculum, size = config.curriculum, config.rollout.tasks_per_step
    difficulties: Sequence[str] = curriculum.difficulties or [config.data.difficulty]
    stages: list[Stage] = []
    for own, share in _shares(config):
        counts = [size] * len(share) if _takes_turns(config) else split(size, list(share.values()))
        groups = {d: min(n, num_tasks[d]) for d, n in zip(share, counts, strict=True) if n > 0}
        for difficulty in difficulties:
            stages.append(
                Stage(
                    index=len(stages),
                    name=config.stage_names[len(stages)],
                    own=own,
                    difficulty=difficulty,
                    groups=groups,
                    num_steps=0,
                )
            )
    steps = _steps(config, stages)
    stages = [replace(stage, num_steps=n) for stage, n in zip(stages, steps, strict=True)]
    if _takes_turns(config):
        shares = _domain_shares(config)
        stages = [replace(s, turns=tuple(_turns(shares, s.num_steps))) for s in stages]
    for stage in stages if config.curriculum.curriculum != "sequential" else ():
        in_use = set(stage.turns) if stage.turns else set(stage.groups)
        if left_out := sorted(set(stage.own) - in_use):
            raise UserError(
                f"domain_weights: {left_out[0]} would have no group in stage {stage.name}; give it "
                "more weight, or raise tasks_per_step or max_steps"
            )
    return one_after_another(stages)


def one_after_another(
    stages: Sequence[Stage], ended: Mapping[str, int] | None = None
) -> list[Stage]:
    """The stages, each beginning where the one before it ends.

    `ended` has the number of steps of stages that ended early.
    """
    found, first = [], 0
    for stage in stages:
        num_steps = (ended or {}).get(stage.name, stage.num_steps)
        found.append(replace(stage, first_step=first, num_steps=num_steps))
        first += num_steps
    return found


def _takes_turns(config: Config) -> bool:
    return config.curriculum.curriculum == "interleaved"


def _domain_shares(config: Config) -> dict[str, float]:
    weights = {d: config.curriculum.domain_weights.get(d, 1.0) for d in config.data.domains}
    return {domain: weight / sum(weights.values()) for domain, weight in weights.items()}


def _shares(config: Config) -> list[tuple[tuple[str, ...], dict[str, float]]]:
    """Of each stage (before it is cut by difficulty): its own domains, and every domain's share."""
    domains, curriculum = config.data.domains, config.curriculum
    if curriculum.curriculum != "sequential":
        if curriculum.curriculum == "mixed" and config.rollout.tasks_per_step < len(domains):
            raise UserError(
                f"tasks_per_step: got {config.rollout.tasks_per_step} for {len(domains)} domains; "
                "a mixed step needs at least a group of each"
            )
        return [(tuple(domains), _domain_shares(config))]
    order = curriculum.order or domains
    found: list[tuple[tuple[str, ...], dict[str, float]]] = []
    for index, domain in enumerate(order):
        earlier = [d for d in dict.fromkeys(order[:index]) if d != domain]
        replay = curriculum.replay if earlier else 0.0
        shares = {d: replay / len(earlier) for d in earlier if replay > 0}
        found.append(((domain,), {**shares, domain: 1 - replay}))
    return found


def _steps(config: Config, stages: Sequence[Stage]) -> list[int]:
    """Steps of each stage: its own number, or its share of what is left of max_steps."""
    curriculum, max_steps = config.curriculum, config.grpo.max_steps
    fixed = dict(curriculum.stage_steps)
    for name, count in curriculum.stage_tasks.items():
        fixed[name] = -(-count // config.rollout.tasks_per_step)
    known = {stage.index: fixed[stage.name] for stage in stages if stage.name in fixed}
    if sum(known.values()) > max_steps:
        raise UserError(
            f"stage_steps: the stages have {sum(known.values())} steps, more than max_steps "
            f"{max_steps}; raise max_steps or lower theirs"
        )
    rest = [stage for stage in stages if stage.index not in known]
    if not rest and sum(known.values()) < max_steps:
        raise UserError(
            f"stage_steps: all stages have {sum(known.values())} steps, and max_steps is "
            f"{max_steps}; give max_steps {sum(known.values())}"
        )
    weights = [_weight(curriculum.stage_weights, stage) for stage in rest]
    shared = split(max_steps - sum(known.values()), weights) if rest else []
    known |= {stage.index: count for stage, count in zip(rest, shared, strict=True)}
    return [known[stage.index] for stage in stages]


def _weight(weights: Mapping[str, float], stage: Stage) -> float:
    """That of the stage's name, or of its domain."""
    of_domain = weights.get(stage.own[0], 1.0) if len(stage.own) == 1 else 1.0
    return weights.get(stage.name, of_domain)


def _turns(shares: Mapping[str, float], num_steps: int) -> Iterator[str]:
    """Whose turn it is at each step, so that shares are kept as closely as can be at all times."""
    given = dict.fromkeys(shares, 0)
    for number in range(1, num_steps + 1):
        domain = max(shares, key=lambda d: shares[d] * number - given[d])
        given[domain] += 1
        yield domain


def split(total: int, weights: list[float]) -> list[int]:
    """Whole numbers that sum to `total` in proportion to `weights`.

    By largest remainders; ties go to the first.
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
    return [
        task
        for domain, count in groups.items()
        for task in tasks_for_step(
            sources[domain], count, number, seed, "order", stage.name, domain
        )
    ]


def replacement_tasks(
    domains: Sequence[str],
    played: Collection[tuple[str, str]],
    sources: Mapping[str, Source],
    *key: int | str,
) -> list[Task]:
    """A task for each of `domains`, of that domain, the same on every rank; `key` names the draw.

    None of them is among `played`, the keys of the tasks that the step has had; a domain without
    enough others gives fewer.
    """
    found: list[Task] = []
    for domain, count in Counter(domains).items():
        source = sources[domain]
        enough = min(len(source), count + len(played))
        indices = generator(*key, domain).sample(range(len(source)), enough)
        tasks = (source[index] for index in indices)
        found += islice((task for task in tasks if task.key not in played), count)
    return found


def on_plateau(history: Sequence[float], patience: int, delta: float) -> bool:
    """Whether the last `patience` values are all no better, by `delta`, than the best before them.

    `history` is a stage's held-out success, one value for each validation.
    """
    if not patience or len(history) <= patience:
        return False
    gain = max(history[-patience:]) - max(history[:-patience])
    return gain <= 0 or gain < delta - 1e-9


def describe(stages: Sequence[Stage], config: Config) -> dict[str, Any]:
    """What `curriculum.json` holds."""
    keys = ("name", "own", "difficulty", "first_step", "num_steps")
    rows = [
        {
            **{key: asdict(stage)[key] for key in keys},
            "domains": stage.groups,
            "in_turns": bool(stage.turns),
        }
        for stage in stages
    ]
    has_replay = any(set(stage.groups) - set(stage.own) for stage in stages)
    return {
        "curriculum": config.curriculum.curriculum,
        "stages": rows,
        "replay": config.curriculum.replay if has_replay else 0.0,
    }


def learning_rate_at(done: int, num_steps: int, peak: float, settings: GRPOSettings) -> float:
    """The learning rate of a stage's next step after `done` of `num_steps`.

    Linear warm-up to `peak`, then the decay. Each stage has a schedule of its own, so that a later
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
    return peak * (1 - (1 - settings.lr_end_share) * share)
