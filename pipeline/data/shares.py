"""Draws domains and task families in proportion to shares."""

from array import array
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from pipeline.data.rng import permutation
from pipeline.data.tasks import Source, Task
from pipeline.errors import UserError
from pipeline.files.untrusted import shown

TINY = 1e-9  # largest error of rounding in a sum of shares


def quota(shares: Mapping[str, float], count: int) -> list[str]:
    """Return `count` names in proportion to `shares`, which sum to 1.

    The proportions in each prefix of the list are also as close to `shares` as possible.
    """
    given = Counter[str]()
    names = list[str]()
    while len(names) < count:
        names.append(_next(shares, given, shares))
        given[names[-1]] += 1
    return names


def _next(shares: Mapping[str, float], given: Counter[str], names: Collection[str]) -> str:
    """Return the one of `names` of which most draws are missing after the draws `given`."""
    number = given.total() + 1
    return max(names, key=lambda name: shares[name] * number - given[name])


class TaskMixture(Sequence[Task]):
    """Tasks whose families have shares of the draws; `shares` has the share of each family.

    A family with the share 0 is never drawn. In each pass over a family, each of the family's tasks
    is drawn once, in a random order. No step holds a task twice, so a step never has more groups of
    a family than the family has tasks; later steps make up for these groups as far as they can.
    """

    def __init__(self, tasks: Source, named: Mapping[str, float]) -> None:
        self._tasks = tasks
        self.indices: dict[str, array[int]] = {}  # by family
        for index, task in enumerate(tasks):
            self.indices.setdefault(task.family, array("Q")).append(index)
        named = {family: share for family, share in named.items() if family in self.indices}
        others = {f: len(of) for f, of in self.indices.items() if f not in named}
        rest = max(0.0, round(1 - sum(named.values()), ndigits=9))
        shares = {**named, **{f: rest * n / sum(others.values()) for f, n in others.items()}}
        total = sum(shares.values())  # not 1 if a named family has no tasks here
        self.shares = {family: share / total for family, share in shares.items() if share}
        self._steps: dict[tuple[int | str, ...], tuple[list[list[int]], Iterator[list[int]]]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: Any) -> Any:
        return self._tasks[index]

    def draw(self, count: int, step: int, *key: int | str) -> list[Task]:
        """Return the `count` tasks of step `step` (from 0), family by family."""
        most = num_drawn(self)
        assert 0 < count <= most, f"a step of {count} tasks cannot come from {most}"
        made, further = self._steps.setdefault((count, *key), ([], self._draws(count, *key)))
        while len(made) <= step:
            made.append(next(further))
        return [self._tasks[index] for index in made[step]]

    def _draws(self, count: int, *key: int | str) -> Iterator[list[int]]:
        """Yield the indices of the tasks of each step."""
        queues = {family: deque[int]() for family in self.shares}
        given = Counter[str]()
        passes = Counter[str]()
        while True:
            drawn: dict[str, list[int]] = {family: [] for family in self.shares}
            for _ in range(count):
                free = [f for f, of in drawn.items() if len(of) < len(self.indices[f])]
                family = _next(self.shares, given, free)
                given[family] += 1
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
    return (task.domain, *([task.family] if isinstance(source, TaskMixture) else []))


def indices_of(source: Source, kind: tuple[str, ...]) -> Sequence[int]:
    """Return the indices of the tasks of a kind from `kind_of`."""
    return source.indices[kind[1]] if isinstance(source, TaskMixture) else range(len(source))


def mixtures(
    domain: str, sources: Mapping[str, Source], shares: Mapping[str, float], is_strict: bool = True
) -> tuple[dict[str, TaskMixture], list[str]]:
    """Return the sources of a domain as mixtures, and notes about families without tasks.

    The keys of `sources` stand in messages. If `is_strict`, raises UserError for shares that do not
    fit the tasks. Else, shares of families that the tasks do not have make no mixture.
    """
    made = {name: TaskMixture(tasks, shares) for name, tasks in sources.items()}
    families = sorted({family for mixture in made.values() for family in mixture.indices})
    where = f"family_shares: {domain}"
    known = ", ".join(families)
    missing = [family for family in shares if family not in families]
    if missing and is_strict:
        hint = f"families of the training tasks are {shown(known)}"
        raise UserError(f"{where}: got {shown(missing[0])}, which has no tasks; {hint}")
    if len(missing) == len(shares):
        return {}, [f"{where}: no task has the family {' or '.join(shares)}, so all count alike"]
    total = sum(shares.values())
    if is_strict and shares.keys() == {*families} and total < 1 - TINY:
        given = f"got shares of all families with the sum {total:g}"
        raise UserError(f"{where}: {given}; give the sum 1, or leave out a family")
    notes = []
    for name, mixture in made.items():
        if not mixture.shares:
            raise UserError(f"{where}: all tasks ({name}) have the share 0; give a family more")
        if without := [family for family in shares if family not in mixture.indices]:
            what = f"the tasks ({name}) have none of {', '.join(without)}"
            notes.append(f"{where}: {what}; the other families get the share")
    return made, notes
