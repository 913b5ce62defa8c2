"""Draws by the outcomes of groups: less of what is always or never solved, and nothing is lost."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from pipeline.data.curriculum import Stage, TaskMixture, tasks_of_step
from pipeline.data.task_memory import FLOOR, NUM_OF_FAMILY, TaskMemory, chance
from tests.support.helpers import make_task

STAGE = Stage(
    index=0, name="all", own=("d",), difficulty="medium", groups={"d": 12}, num_steps=1000
)
OUTCOME = {"easy": "solved", "even": "mixed", "hard": "failed"}
TASKS = [make_task(f"{f}-{n}", domain="d", family=f) for n in range(40) for f in OUTCOME]


def steps_of(memory, number, sources, first=0, outcome=OUTCOME):
    """The tasks of steps whose groups have the outcome of their family."""
    steps = []
    for step in range(first, first + number):
        like = tasks_of_step(STAGE, step, sources, 1)
        steps.append(memory.draw(like, [], sources, STAGE, 1))
        memory.add(steps[-1], [outcome[task.family] for task in steps[-1]])
    return steps


def ids(steps):
    return [task.id for step in steps for task in step]


def families_of(steps):
    return Counter(task.family for step in steps for task in step)


@pytest.mark.parametrize("outcome", ["mixed", "few"])
def test_where_all_groups_have_signal_or_none_can_be_judged_the_draws_are_the_uniform_ones(outcome):
    found = steps_of(TaskMemory(), 20, {"d": TASKS}, outcome=dict.fromkeys(OUTCOME, outcome))
    assert found == [tasks_of_step(STAGE, step, {"d": TASKS}, 1) for step in range(20)]


def test_where_no_group_has_signal_all_families_are_drawn_alike():
    found = steps_of(TaskMemory(), 100, {"d": TASKS}, outcome=dict.fromkeys(OUTCOME, "failed"))
    counts = families_of(found)
    assert min(counts.values()) > 0.8 * max(counts.values())


def test_families_without_signal_are_drawn_less_often_and_all_their_tasks_now_and_then():
    steps = steps_of(TaskMemory(), 300, {"d": TASKS})
    counts = families_of(steps)
    assert counts["even"] > 0.75 * counts.total()
    assert min(counts["easy"], counts["hard"]) > FLOOR / 2 * counts.total()
    assert {*ids(steps)} == {task.id for task in TASKS}
    assert all(len({task.id for task in step}) == 12 for step in steps)


def test_a_family_that_gets_signal_is_drawn_again():
    memory, sources = TaskMemory(), {"d": TASKS}
    steps_of(memory, 30, sources)
    now = {"easy": "solved", "even": "solved", "hard": "mixed"}
    counts = families_of(steps_of(memory, 60, sources, 30, now)[-30:])
    assert counts["hard"] > 0.6 * counts.total()


def test_tasks_of_one_family_are_told_apart_by_their_own_groups():
    memory = TaskMemory()
    tasks = [replace(task, family="") for task in TASKS]
    for step in range(100):
        drawn = memory.draw(tasks_of_step(STAGE, step, {"d": tasks}, 1), [], {"d": tasks}, STAGE, 1)
        memory.add(drawn, [OUTCOME[task.id.partition("-")[0]] for task in drawn])
    now = [memory.draw(drawn, [], {"d": tasks}, STAGE, 1) for _ in range(50)]
    counts = Counter(name.partition("-")[0] for name in ids(now))
    assert counts["even"] > 0.6 * counts.total() and len(counts) == 3
    assert memory.metrics(drawn) == {
        "tasks/always_solved": 40,
        "tasks/mixed": 40,
        "tasks/never_solved": 40,
        "draws/d/": 1.0,
    }


def test_the_memory_has_the_last_outcomes_of_what_was_played_and_nothing_else():
    memory = TaskMemory()
    one, other = TASKS[:2]
    memory.add([one] * 6 + [other], ["failed", *["mixed"] * 3, "solved", "few", "few"])
    assert memory.tasks == {"d/easy-0": "mmms"}
    assert memory.families == {"d/easy": "fmmms"}
    memory.add([one] * 20, ["failed"] * 20)
    assert memory.families == {"d/easy": "f" * NUM_OF_FAMILY}
    assert (chance(""), chance("fs"), chance("mmsf", 0.5)) == (1, 1 / 3, 0.5)


def test_a_memory_read_from_a_checkpoint_draws_alike_and_another_seed_does_not():
    memory, sources = TaskMemory(), {"d": TASKS}
    steps_of(memory, 20, sources)
    read = TaskMemory(**json.loads(json.dumps(vars(memory))))
    assert steps_of(read, 20, sources, 20) == steps_of(memory, 20, sources, 20)
    like = TASKS[:12]
    assert read.draw(like, [], sources, STAGE, 1) != memory.draw(like, [], sources, STAGE, 2)


def test_a_step_may_take_all_tasks_and_replacements_are_those_that_are_left():
    memory, sources = TaskMemory(), {"d": TASKS[:12]}
    for step in steps_of(memory, 20, sources):
        assert sorted(task.id for task in step) == sorted(task.id for task in TASKS[:12])
    played = TASKS[:9]
    found = memory.draw(played, played, sources, STAGE, 1)
    assert sorted(task.id for task in found) == sorted(task.id for task in TASKS[9:12])
    assert memory.draw(played, TASKS[:12], sources, STAGE, 1) == []


@pytest.mark.parametrize("even", [False, True])
def test_shares_of_families_and_even_branches_stay_and_their_tasks_are_chosen(even):
    tasks = [replace(task, branch=str(n % 2)) for n, task in enumerate(TASKS)]
    sources = {"d": TaskMixture(tasks, {"easy": 0.5}, even_branches=even)}
    memory = TaskMemory()
    outcome = {**OUTCOME, "easy": "mixed"}
    for step in range(60):
        like = tasks_of_step(STAGE, step, sources, 1)
        drawn = memory.draw(like, [], sources, STAGE, 1)
        kinds = [Counter(map(sources["d"].part_of, of)) for of in (like, drawn)]
        assert kinds[0] == kinds[1] and kinds[0].total() == 12
        memory.add(drawn, ["mixed" if t.id.endswith("1") else outcome[t.family] for t in drawn])
    assert steps_of(memory, 1, sources, 60) != [tasks_of_step(STAGE, 60, sources, 1)]
