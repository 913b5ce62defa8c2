"""The outcomes of the last groups of tasks, and draws of tasks by them (`task_sampling: signal`).

A group teaches only if its rewards differ: it has *signal*. So tasks that are always or never
solved are drawn less often, as in the difficulty pools of prime-rl, in Prioritized Level Replay
(Jiang et al. 2021, arXiv 2010.03934) and by learnability (Rutherford et al. 2024, arXiv
2408.15099):

1. The memory has the outcomes of the last NUM_OF_TASK groups of each task that was played, and of
   the last NUM_OF_FAMILY groups of each task family.
2. The chance of signal is the share of these groups with signal. A family's groups are counted with
   one more that has signal, so that new families are tried; a task's groups with one more that has
   its family's share, so that a family says what to expect of tasks that were not played.
3. All tasks come one by one, pass after pass, in a random order. A task is taken with a
   probability, its chance divided by the highest chance of a family of the domain; otherwise its
   turn is over until the next pass.
4. This probability is at least FLOOR, so that no task is forgotten, and what has become easier or
   harder since is found.

The memory depends on counts of groups, not on time, and is equal on all ranks.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.data.curriculum import Stage, indices_of, kind_of
from pipeline.data.rng import generator
from pipeline.data.tasks import Source, Task, random_order

OUTCOMES = ("few", "failed", "mixed", "solved")  # few: fewer than two episodes count
NUM_OF_TASK = 4
NUM_OF_FAMILY = 16
FLOOR = 0.1  # least probability of taking a task
MAX_FAMILIES = 50  # most families with a metric of their own


@dataclass(kw_only=True)
class TaskMemory:
    """What is known of the tasks that were played: plain data, as saved.

    Outcomes are first letters (`m` for mixed rewards), the newest last.
    """

    tasks: dict[str, str] = field(default_factory=dict)  # DOMAIN/ID -> outcomes
    families: dict[str, str] = field(default_factory=dict)  # DOMAIN/FAMILY -> outcomes
    passed: dict[str, int] = field(default_factory=dict)  # STAGE/DOMAIN -> number that came

    def add(self, tasks: Sequence[Task], outcomes: Sequence[str]) -> None:
        """Add the outcomes of groups of episodes of `tasks`."""
        for task, outcome in zip(tasks, outcomes, strict=True):
            for known, name, most in (
                (self.tasks, f"{task.domain}/{task.id}", NUM_OF_TASK),
                (self.families, f"{task.domain}/{task.family}", NUM_OF_FAMILY),
            ):
                if outcome != "few":
                    known[name] = (known.get(name, "") + outcome[0])[-most:]

    def draw(
        self,
        like: Sequence[Task],
        played: Sequence[Task],
        sources: Mapping[str, Source],
        stage: Stage,
        seed: int,
    ) -> list[Task]:
        """Return a task for each of the tasks `like`, or fewer if all others are in `played`.

        A task has the domain of the task in `like` and, where families have shares, also the
        family. It is none of `played`, and no task is returned twice. Every rank returns the same.
        """
        drawn = list[Task]()
        used = {task.key for task in played}
        num_used = Counter(kind_of(sources[task.domain], task) for task in played)
        for kind, wanted in Counter(kind_of(sources[t.domain], t) for t in like).items():
            source = sources[kind[0]]
            indices = indices_of(source, kind)
            key = [seed, "order", stage.name, *kind]
            order = "/".join([stage.name, *kind])
            known = (o for name, o in self.families.items() if name.startswith(f"{kind[0]}/"))
            highest = max(map(chance, known), default=1.0)
            enough = len(drawn) + min(wanted, len(indices) - num_used[kind])
            while len(drawn) < enough:
                number = self.passed.get(order, 0)
                self.passed[order] = number + 1
                places = random_order(len(indices), *key, "pass", number // len(indices))
                task = source[indices[places[number % len(indices)]]]
                weight = max(FLOOR, self.chance_of(task) / highest)
                if task.key not in used and generator(*key, "taken", number).random() < weight:
                    used.add(task.key)
                    drawn.append(task)
        return drawn

    def chance_of(self, task: Task) -> float:
        """Return the chance that the next group of a task has signal."""
        of_family = chance(self.families.get(f"{task.domain}/{task.family}", ""))
        return chance(self.tasks.get(f"{task.domain}/{task.id}", ""), of_family)

    def metrics(self, tasks: Sequence[Task]) -> dict[str, float]:
        """Return the numbers of tasks by their outcomes, and each family's share of `tasks`."""
        found = Counter("m" if len({*o}) > 1 else o[0] for o in self.tasks.values())
        names = {"always_solved": "s", "mixed": "m", "never_solved": "f"}
        drawn = Counter(f"{task.domain}/{task.family}" for task in tasks)
        families = self.families if len(self.families) <= MAX_FAMILIES else ()
        return {
            **{f"tasks/{name}": float(found[letter]) for name, letter in names.items()},
            **{f"draws/{f}": drawn[f] / len(tasks) for f in families if tasks},
        }


def chance(outcomes: str, of_one_more: float = 1.0) -> float:
    """Return the chance of signal after these outcomes; one more group counts as `of_one_more`."""
    return (outcomes.count("m") + of_one_more) / (len(outcomes) + 1)
