"""Stages: which domains a step's groups come from, and how many steps each stage has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from pipeline.config import Config, UserError
from pipeline.draws import generator
from pipeline.tasks import Source, Task, tasks_for_step


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of the training: `groups` of each domain in every step, over all ranks."""

    index: int
    name: str
    groups: dict[str, int]
    first_step: int  # steps done before the stage
    num_steps: int

    @property
    def last_step(self) -> int:
        """Steps done at its end."""
        return self.first_step + self.num_steps


def make_stages(config: Config, num_tasks: Mapping[str, int]) -> list[Stage]:
    """The stages of a run: one per domain, with earlier ones replayed, or one of all domains.

    A step takes a task at most once, so `groups` of a domain never passes its number of tasks.
    """
    domains, replay = config.data.domains, config.curriculum.replay
    if config.curriculum.curriculum == "mixed":
        if config.rollout.tasks_per_step < len(domains):
            raise UserError(
                f"tasks_per_step: got {config.rollout.tasks_per_step} for {len(domains)} domains; "
                "a mixed step needs at least a group of each"
            )
        names, shares = ["mixed"], [dict.fromkeys(domains, 1 / len(domains))]
    else:
        names = list(domains)
        shares = [{domains[0]: 1.0}]
        for index, domain in enumerate(domains[1:], 1):
            earlier = dict.fromkeys(domains[:index], replay / index)
            shares.append({**{d: s for d, s in earlier.items() if s > 0}, domain: 1 - replay})
    weights = [config.curriculum.stage_weights.get(name, 1.0) for name in names]
    steps = split(config.grpo.max_steps, weights)
    stages, first = [], 0
    for index, (name, share, count) in enumerate(zip(names, shares, steps, strict=True)):
        groups = split(config.rollout.tasks_per_step, list(share.values()))
        capped = {d: min(g, num_tasks[d]) for d, g in zip(share, groups, strict=True) if g > 0}
        stages.append(
            Stage(index=index, name=name, groups=capped, first_step=first, num_steps=count)
        )
        first += count
    return stages


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
    return [
        task
        for domain, count in stage.groups.items()
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


def describe(stages: list[Stage], replay: float) -> dict[str, Any]:
    """What `curriculum.json` holds."""
    keys = ("name", "first_step", "num_steps")
    rows = [
        {**{key: asdict(stage)[key] for key in keys}, "domains": stage.groups} for stage in stages
    ]
    return {"stages": rows, "replay": replay if len(stages) > 1 else 0.0}
