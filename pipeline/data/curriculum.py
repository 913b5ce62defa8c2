"""The curriculum: the stages of a run, and the tasks that each step of a stage draws.

A stage says which domains its steps train. Domains and task families may have shares of the draws.
"""

import math
from array import array
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice
from typing import Any, NamedTuple

from pipeline.common.errors import UserError
from pipeline.common.untrusted import shown
from pipeline.config.settings import DISTILL, MERGE, Config, GRPOSettings
from pipeline.data.rng import generator, permutation
from pipeline.data.tasks import Source, Task, tasks_for_step

TINY = 1e-9  # largest error of rounding in a sum of shares
GAIN = 0.01  # least increase of success that is progress
BEFORE_GRPO = ("start", "warm_start", "rft")  # names of evaluations that belong to no stage


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Consecutive optimizer steps with tasks of the same domains and of one difficulty."""

    index: int
    name: str
    own: tuple[str, ...]  # the stage's own domains; `groups` also has replay and preview
    difficulty: str
    groups: dict[str, int]  # number of groups of each domain in a step, over all ranks
    schedule: tuple[str, ...] = ()  # the domain of each step; empty if steps mix domains
    first_step: int = 0  # number of steps before the stage
    num_steps: int = 0
    family_shares: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # by domain
    anew: bool = False  # begins with the weights from before the first stage, or merged ones

    @property
    def last_step(self) -> int:
        """The number of steps from the start of the run to the end of the stage."""
        return self.first_step + self.num_steps

    def has(self, validation: Mapping[str, Any]) -> bool:
        """Whether a validation is of the stage's policy, or of the policy that it goes on with."""
        is_later = validation["step"] >= self.first_step
        return is_later and (not self.anew or validation["stage"] == self.name)


def make_stages(config: Config, num_tasks: Mapping[str, int]) -> list[Stage]:
    """Return the stages of a run. Raises UserError if a domain would have no group in a stage."""
    curriculum = config.curriculum
    size = config.rollout.tasks_per_step
    difficulties = curriculum.difficulties or [config.data.difficulty]
    parts = [
        (shares, difficulty)
        for shares in STAGES[curriculum.curriculum](config)
        for difficulty in difficulties
    ]
    if curriculum.is_separate:
        is_taught = curriculum.last_stage == DISTILL
        last = mixed(config)[0] if is_taught else Shares((), {})
        parts.append((last, difficulties[-1]))
    names = config.stage_names
    num_steps = _steps(config, [shares.own for shares, _ in parts])
    stages: list[Stage] = []
    for index, ((own, shares, takes_turns), difficulty) in enumerate(parts):
        name = names[index]
        steps = num_steps[index]
        counts = [size] * len(shares) if takes_turns else split(size, list(shares.values()))
        groups = {d: min(n, num_tasks[d]) for d, n in zip(shares, counts, strict=True) if n > 0}
        schedule = tuple(quota(shares, steps)) if takes_turns else ()
        without_groups = set(own) - set(schedule or groups)
        if len(own) > 1 and without_groups:
            why = f"{min(without_groups)} would have no group in stage {name}"
            raise UserError(f"domain_weights: {why}; give it more weight, or raise tasks_per_step")
        stage = Stage(index=index, name=name, own=own, difficulty=difficulty, groups=groups)
        anew = curriculum.is_separate and index > 0 and index % len(difficulties) == 0
        stages.append(replace(stage, schedule=schedule, num_steps=steps, anew=anew))
    return one_after_another(stages)


class Shares(NamedTuple):
    """The domains of a stage: its own, and the share of each in the groups of its steps."""

    own: tuple[str, ...]
    by_domain: dict[str, float]
    takes_turns: bool = False  # a step has groups of one domain


def sequential(config: Config) -> list[Shares]:
    """A stage for each domain, with groups of earlier domains (replay) and later ones (preview)."""
    curriculum = config.curriculum
    order = curriculum.order or config.data.domains
    stages: list[Shares] = []
    for index, domain in enumerate(order):
        earlier = [d for d in dict.fromkeys(order[:index]) if d != domain]
        later = [d for d in dict.fromkeys(order[index:]) if d not in (domain, *earlier)]
        shares = dict[str, float]()
        for others, share in ((earlier, curriculum.replay), (later, curriculum.preview)):
            shares |= {d: share / len(others) for d in others if share > 0}
        stages.append(Shares((domain,), {**shares, domain: 1 - sum(shares.values())}))
    return stages


def separate(config: Config) -> list[Shares]:
    """A stage for each domain, with groups of this domain alone; they train experts."""
    return [Shares((d,), {d: 1.0}) for d in config.curriculum.order or config.data.domains]


def mixed(config: Config) -> list[Shares]:
    """One stage with groups of all domains in each step; of `separate`, of those with experts."""
    domains = config.curriculum.order or config.data.domains
    weights = {domain: config.curriculum.domain_weights.get(domain, 1.0) for domain in domains}
    total = sum(weights.values())
    return [Shares(tuple(domains), {domain: weight / total for domain, weight in weights.items()})]


def interleaved(config: Config) -> list[Shares]:
    """One stage whose steps have groups of one domain each."""
    return [shares._replace(takes_turns=True) for shares in mixed(config)]


STAGES = {
    "sequential": sequential,
    "separate": separate,
    "mixed": mixed,
    "interleaved": interleaved,
}


def one_after_another(
    stages: Sequence[Stage], ended: Mapping[str, int] | None = None
) -> list[Stage]:
    """Return the stages with `first_step` set: each stage begins where the previous stage ends.

    `ended` has, for each stage that ended early, the number of steps that the stage took.
    """
    counts = [(ended or {}).get(stage.name, stage.num_steps) for stage in stages]
    firsts = accumulate(counts, initial=0)
    return [
        replace(stage, first_step=first, num_steps=count)
        for stage, first, count in zip(stages, firsts, counts, strict=False)
    ]


def _steps(config: Config, owns: Sequence[tuple[str, ...]]) -> list[int]:
    """Return the step count by stage. Stages without a set number share the remaining steps."""
    curriculum = config.curriculum
    max_steps = config.grpo.max_steps
    size = config.rollout.tasks_per_step
    steps = curriculum.stage_steps | {n: -(-c // size) for n, c in curriculum.stage_tasks.items()}
    names = config.stage_names
    steps |= {MERGE: 0} if MERGE in names else {}
    total = sum(steps.values())
    rest = {name: own for name, own in zip(names, owns, strict=True) if name not in steps}
    if total > max_steps or (not rest and total < max_steps):
        given = f"the stages have {total} steps, and max_steps is {max_steps}"
        raise UserError(f"stage_steps: {given}; give max_steps {total}, or change theirs")
    weights = list[float]()
    known = curriculum.stage_weights
    for name, own in rest.items():  # A stage with one domain may get the domain's weight.
        weights.append(known.get(name, known.get(own[0] if len(own) == 1 else "", 1.0)))
    steps |= dict(zip(rest, split(max_steps - total, weights), strict=True))
    idle = [name for name in names if not steps[name] and name != MERGE]
    if curriculum.is_separate and max_steps and idle:
        raise UserError(
            f"max_steps: got {max_steps}, so stage {idle[0]} has no step; give more: each expert "
            "and distillation need steps of their own"
        )
    return [steps[name] for name in names]


def split(total: int, weights: list[float]) -> list[int]:
    """Return integers with the sum `total` in proportion to `weights`, by largest remainders."""
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(number) for number in exact]
    order = sorted(range(len(weights)), key=lambda i: (counts[i] - exact[i], i))
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return counts


def tasks_of_step(stage: Stage, step: int, sources: Mapping[str, Source], seed: int) -> list[Task]:
    """Return one task for each group of step `step` (from 0). Every rank returns the same tasks."""
    number = step - stage.first_step
    assert 0 <= number < stage.num_steps, f"step {step} is not in stage {stage.name}"
    groups = stage.groups
    if stage.schedule:
        domain = stage.schedule[number]
        groups = {domain: groups[domain]}
        number = stage.schedule[:number].count(domain)
    tasks = list[Task]()
    for domain, count in groups.items():
        source = sources[domain]
        tasks += tasks_of_source(source, count, number, seed, "order", stage.name, domain)
    return tasks


def tasks_of_source(source: Source, count: int, step: int, *key: int | str) -> list[Task]:
    """Return the `count` tasks of step `step` (from 0). Every rank returns the same tasks."""
    if isinstance(source, TaskMixture):
        return source.draw(count, step, *key)
    return tasks_for_step(source, count, step, *key)


def replacement_tasks(
    replaced: Sequence[Task],
    played: Collection[tuple[str, str]],
    sources: Mapping[str, Source],
    *key: int | str,
) -> list[Task]:
    """Return a random task for each of the tasks `replaced`. Every rank returns the same tasks.

    A task has the domain of the replaced task and, where families have shares, also the family.
    Tasks whose keys are in `played` are left out, so fewer tasks may be returned. `key` names the
    stream of random numbers.
    """
    tasks: list[Task] = []
    for kind, count in Counter(kind_of(sources[t.domain], t) for t in replaced).items():
        source = sources[kind[0]]
        of_kind = indices_of(source, kind)
        enough = min(len(of_kind), count + len(played))
        indices = generator(*key, *kind).sample(of_kind, enough)
        tasks += islice((t for t in map(source.__getitem__, indices) if t.key not in played), count)
    return tasks


def on_plateau(history: Sequence[float], patience: int) -> bool:
    """Return whether the last `patience` values are less than GAIN above the earlier maximum."""
    if not patience or len(history) <= patience:
        return False
    gain = max(history[-patience:]) - max(history[:-patience])
    return gain < GAIN - TINY


def describe_stages(stages: Sequence[Stage], config: Config) -> dict[str, Any]:
    """Return the content of `curriculum.json`."""
    keys = ("name", "own", "difficulty", "first_step", "num_steps")
    described = list[dict[str, Any]]()
    seen = set[str]()
    shares = {"replay": 0.0, "preview": 0.0}
    for stage in stages:
        further = {key: getattr(stage, key) for key in keys}
        further |= {"family_shares": stage.family_shares} if stage.family_shares else {}
        described.append(further | {"domains": stage.groups, "in_turns": bool(stage.schedule)})
        for domain in stage.groups.keys() - stage.own:
            name = "replay" if domain in seen else "preview"
            shares[name] = getattr(config.curriculum, name)
        seen |= {*stage.own}
    return {"curriculum": config.curriculum.curriculum, "stages": described, **shares}


def learning_rate_at(done: int, num_steps: int, peak: float, settings: GRPOSettings) -> float:
    """Return the learning rate after `done` steps of a stage: linear warm-up, then decay."""
    warmup = settings.stage_warmup_steps
    if done < warmup:
        return peak * (done + 1) / warmup
    if settings.stage_lr_decay == "constant":
        return peak
    share = min(1.0, (done - warmup) / max(1, num_steps - warmup))
    if settings.stage_lr_decay == "cosine":
        share = (1 - math.cos(math.pi * share)) / 2
    return peak * (1 - (1 - settings.min_lr_rate) * share)


# Shares of domains and task families


def quota(shares: Mapping[str, float], count: int) -> list[str]:
    """Return `count` names in proportion to `shares`, which sum to 1.

    The proportions in each prefix of the list are also as close to `shares` as possible.
    """
    counts = Counter[str]()
    names = list[str]()
    while len(names) < count:
        names.append(_next(shares, counts, shares))
        counts[names[-1]] += 1
    return names


def _next(shares: Mapping[str, float], counts: Counter[str], names: Collection[str]) -> str:
    """Return the one of `names` of which most draws are missing after the draws in `counts`."""
    number = counts.total() + 1
    return max(names, key=lambda name: shares[name] * number - counts[name])


class TaskMixture(Sequence[Task]):
    """Tasks whose families have shares of the draws; `shares` has the share of each family.

    A family with the share 0 is never drawn. In each pass over a family, each of the family's tasks
    is drawn once, in a random order. No step holds a task twice, so a step never has more groups of
    a family than the family has tasks; later steps make up for these groups as far as they can.

    With `even_branches`, each branch of a family, `FAMILY/BRANCH`, counts as a family here, and the
    branches of a family have equal shares.
    """

    def __init__(
        self, tasks: Source, named: Mapping[str, float], even_branches: bool = False
    ) -> None:
        self._tasks = tasks
        self._even_branches = even_branches
        self.indices: dict[str, array[int]] = {}  # by family
        counts = Counter[str]()  # of the tasks of families
        parts: dict[str, set[str]] = {}  # of families: themselves, or their branches
        for index, task in enumerate(tasks):
            self.indices.setdefault(self.part_of(task), array("Q")).append(index)
            counts[task.family] += 1
            parts.setdefault(task.family, set()).add(self.part_of(task))
        self.families = {*counts}
        named = {family: share for family, share in named.items() if family in counts}
        others = {f: n for f, n in counts.items() if f not in named}
        rest = max(0.0, round(1 - sum(named.values()), ndigits=9))
        shares = {**named, **{f: rest * n / sum(others.values()) for f, n in others.items()}}
        total = sum(shares.values())  # not 1 if a named family has no tasks here
        self.shares = {
            part: share / total / len(parts[family])
            for family, share in shares.items()
            if share
            for part in sorted(parts[family])
        }
        self._steps: dict[tuple[int | str, ...], tuple[list[list[int]], Iterator[list[int]]]] = {}

    def part_of(self, task: Task) -> str:
        """Return the family of a task, or its branch where branches are even."""
        return f"{task.family}/{task.branch}" if self._even_branches else task.family

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: Any) -> Any:
        return self._tasks[index]

    def draw(self, count: int, step: int, *key: int | str) -> list[Task]:
        """Return the `count` tasks of step `step` (from 0), family by family."""
        most = num_drawn(self)
        assert 0 < count <= most, f"a step of {count} tasks cannot come from {most}"
        steps, further = self._steps.setdefault((count, *key), ([], self._draws(count, *key)))
        while len(steps) <= step:
            steps.append(next(further))
        return [self._tasks[index] for index in steps[step]]

    def _draws(self, count: int, *key: int | str) -> Iterator[list[int]]:
        """Yield the indices of the tasks of each step."""
        queues = {family: deque[int]() for family in self.shares}
        counts = Counter[str]()
        passes = Counter[str]()
        while True:
            drawn: dict[str, list[int]] = {family: [] for family in self.shares}
            for _ in range(count):
                free = [f for f, of in drawn.items() if len(of) < len(self.indices[f])]
                family = _next(self.shares, counts, free)
                counts[family] += 1
                queue = queues[family]
                own = self.indices[family]
                if not queue:
                    order = permutation(len(own), *key, "family", family, passes[family])
                    queue.extend(own[position] for position in order)
                    passes[family] += 1
                index = next(index for index in queue if index not in drawn[family])
                queue.remove(index)
                drawn[family].append(index)
            yield [index for of in drawn.values() for index in of]


def num_drawn(source: Source) -> int:
    """Return the number of tasks that may be drawn."""
    if isinstance(source, TaskMixture):
        return sum(len(source.indices[family]) for family in source.shares)
    return len(source)


def kind_of(source: Source, task: Task) -> tuple[str, ...]:
    """Return the task's domain and, if the families of `source` have shares, also the family."""
    return (task.domain, *([source.part_of(task)] if isinstance(source, TaskMixture) else []))


def indices_of(source: Source, kind: tuple[str, ...]) -> Sequence[int]:
    """Return the indices of the tasks of a kind in their source."""
    return source.indices[kind[1]] if isinstance(source, TaskMixture) else range(len(source))


def mixtures(
    domain: str,
    sources: Mapping[str, Source],
    shares: Mapping[str, float],
    is_strict: bool = True,
    even_branches: bool = False,
) -> tuple[dict[str, TaskMixture], list[str]]:
    """Return the sources of a domain as mixtures, and notes about families without tasks.

    The keys of `sources` stand in messages. If `is_strict`, raises UserError for shares that do not
    fit the tasks. Else, shares of families that the tasks do not have make no mixture.
    """
    mixes = {name: TaskMixture(tasks, shares, even_branches) for name, tasks in sources.items()}
    families = sorted({family for mixture in mixes.values() for family in mixture.families})
    if even_branches and not shares:
        return mixes, []
    where = f"family_shares: {domain}"
    known = ", ".join(families)
    missing = [family for family in shares if family not in families]
    if missing and is_strict:
        hint = f"families of the training tasks are {shown(known)}"
        raise UserError(f"{where}: got {shown(missing[0])}, which has no tasks; {hint}")
    if len(missing) == len(shares):
        mixes = mixes if even_branches else {}
        return mixes, [f"{where}: no task has the family {' or '.join(shares)}, so all count alike"]
    total = sum(shares.values())
    if is_strict and shares.keys() == {*families} and total < 1 - TINY:
        given = f"got shares of all families with the sum {total:g}"
        raise UserError(f"{where}: {given}; give the sum 1, or leave out a family")
    notes = []
    for name, mixture in mixes.items():
        if not mixture.shares:
            raise UserError(f"{where}: all tasks ({name}) have the share 0; give a family more")
        if without := [family for family in shares if family not in mixture.families]:
            what = f"the tasks ({name}) have none of {', '.join(without)}"
            notes.append(f"{where}: {what}; the other families get the share")
    return mixes, notes
