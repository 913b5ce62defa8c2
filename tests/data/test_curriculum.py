"""Stages: how many steps each has, and whose tasks a step holds."""

from collections import Counter

import pytest

from pipeline.common.errors import UserError
from pipeline.config.settings import Config
from pipeline.data.curriculum import (
    TaskMixture,
    describe_stages,
    make_stages,
    mixtures,
    on_plateau,
    one_after_another,
    replacement_tasks,
    tasks_of_step,
)
from tests.support.helpers import make_task
from tests.support.messages import refusal, says

PLENTY = {"airline": 800, "retail": 800, "telecom": 800}


def config(
    max_steps=120, tasks_per_step=24, domains=("airline", "retail", "telecom"), **curriculum
):
    return Config.model_validate(
        {
            "data": {"domains": list(domains)},
            "grpo": {"max_steps": max_steps},
            "rollout": {"tasks_per_step": tasks_per_step},
            "curriculum": {"preview": 0.0, **curriculum},
        }
    )


STAGES = {  # settings, numbers of tasks, and of each stage: name, groups, number of steps
    "earlier domains are replayed": (
        {"replay": 0.3},
        PLENTY,
        [
            ("airline", {"airline": 24}, 40),
            ("retail", {"airline": 7, "retail": 17}, 40),
            ("telecom", {"airline": 4, "retail": 3, "telecom": 17}, 40),
        ],
    ),
    "a preview of later domains takes groups": (
        {"replay": 0.3, "preview": 0.08},
        PLENTY,
        [
            ("airline", {"retail": 1, "telecom": 1, "airline": 22}, 40),
            ("retail", {"airline": 7, "telecom": 2, "retail": 15}, 40),
            ("telecom", {"airline": 4, "retail": 3, "telecom": 17}, 40),
        ],
    ),
    "a preview of less than a group is none": (
        {"tasks_per_step": 4, "preview": 0.08, "replay": 0.0},
        PLENTY,
        [
            ("airline", {"airline": 4}, 40),
            ("retail", {"retail": 4}, 40),
            ("telecom", {"telecom": 4}, 40),
        ],
    ),
    "stage weights share out the steps": (
        {"max_steps": 10, "stage_weights": {"retail": 2}, "replay": 0.0},
        PLENTY,
        [
            ("airline", {"airline": 24}, 3),
            ("retail", {"retail": 24}, 5),
            ("telecom", {"telecom": 24}, 2),
        ],
    ),
    "no more tasks of a domain than there are": (
        {"replay": 0.3},
        {"airline": 2, "retail": 10, "telecom": 800},
        [
            ("airline", {"airline": 2}, 40),
            ("retail", {"airline": 2, "retail": 10}, 40),
            ("telecom", {"airline": 2, "retail": 3, "telecom": 17}, 40),
        ],
    ),
    "a domain comes again": (
        {"order": ["airline", "retail", "airline"], "replay": 0.5},
        PLENTY,
        [
            ("airline", {"airline": 24}, 40),
            ("retail", {"airline": 12, "retail": 12}, 40),
            ("airline-2", {"retail": 12, "airline": 12}, 40),
        ],
    ),
    "experts, and a last stage without steps that merges them": (
        {"curriculum": "separate", "replay": 0.3, "stage_weights": {"retail": 2}},
        PLENTY,
        [
            ("airline", {"airline": 24}, 30),
            ("retail", {"retail": 24}, 60),
            ("telecom", {"telecom": 24}, 30),
            ("merge", {}, 0),
        ],
    ),
    "experts, and a last stage in which they teach": (
        {
            **{"curriculum": "separate", "merge_method": "distillation", "max_steps": 10},
            **{"order": ["retail", "airline"], "domain_weights": {"airline": 2}},
            "stage_weights": {"distill": 3},
        },
        PLENTY,
        [
            ("retail", {"retail": 24}, 2),
            ("airline", {"airline": 24}, 2),
            ("distill", {"retail": 8, "airline": 16}, 6),
        ],
    ),
    "mixed by the weights of domains": (
        {"curriculum": "mixed", "domain_weights": {"telecom": 2}},
        PLENTY,
        [("mixed", {"airline": 6, "retail": 6, "telecom": 12}, 120)],
    ),
    "parts of rising difficulty": (
        {
            **{"max_steps": 8, "domains": ["airline", "retail"], "replay": 0.0},
            **{"difficulties": ["easy", "hard"], "stage_weights": {"airline": 3}},
        },
        PLENTY,
        [
            *(("airline-easy", {"airline": 24}, 3), ("airline-hard", {"airline": 24}, 3)),
            *(("retail-easy", {"retail": 24}, 1), ("retail-hard", {"retail": 24}, 1)),
        ],
    ),
    "steps and tasks of a stage's own leave the rest to the others": (
        {
            "max_steps": 100,
            "stage_steps": {"airline": 10},
            "stage_tasks": {"retail": 25},
            "replay": 0.0,
        },
        PLENTY,
        [
            ("airline", {"airline": 24}, 10),
            ("retail", {"retail": 24}, 2),
            ("telecom", {"telecom": 24}, 88),
        ],
    ),
}


@pytest.mark.parametrize("case", STAGES)
def test_the_stages_of_a_curriculum(case):
    settings, counts, expected = STAGES[case]
    stages = make_stages(config(**settings), counts)
    assert [(stage.name, stage.groups, stage.num_steps) for stage in stages] == expected
    firsts = [sum(of for *_, of in expected[:number]) for number in range(len(expected))]
    assert [stage.first_step for stage in stages] == firsts
    for stage in stages:
        assert stage.name.startswith(("-".join(stage.own), "mixed", "distill"))
        assert stage.difficulty in (*stage.name.split("-"), "medium")


@pytest.mark.parametrize("curriculum", ["sequential", "mixed"])
def test_all_steps_and_all_groups_are_handed_out(curriculum):
    for max_steps in (0, 1, 2, 7, 119):
        for tasks_per_step in (1, 2, 5, 24, 31) if curriculum == "sequential" else (3, 5, 24, 31):
            for replay in (0.0, 0.1, 0.3, 0.9):
                made = config(max_steps, tasks_per_step, curriculum=curriculum, replay=replay)
                stages = make_stages(made, PLENTY)
                assert sum(stage.num_steps for stage in stages) == max_steps
                assert [stage.index for stage in stages] == list(range(len(stages)))
                for stage in stages:
                    assert sum(stage.groups.values()) == tasks_per_step
                    assert min(stage.groups.values()) > 0


# The tasks of a step


SOURCES = {
    domain: [make_task(f"{n}", domain=domain) for n in range(count)]
    for domain, count in {"airline": 12, "retail": 30, "telecom": 7}.items()
}


def keys(stage, step, seed=1):
    return [task.key for task in tasks_of_step(stage, step, SOURCES, seed)]


def stages_of_24():
    counts = {domain: len(tasks) for domain, tasks in SOURCES.items()}
    return make_stages(config(max_steps=30, tasks_per_step=10, replay=0.4), counts)


def test_a_step_holds_the_groups_of_its_stage_each_task_once():
    for stage in stages_of_24():
        for step in range(stage.first_step, stage.last_step):
            found = keys(stage, step)
            assert len(set(found)) == len(found)
            counts = {d: sum(domain == d for domain, _ in found) for d in stage.groups}
            assert counts == stage.groups


def test_replacements_are_other_tasks_of_the_same_domains_as_many_as_there_are():
    played = {("telecom", f"{n}") for n in range(5)} | {("airline", "0")}
    names = ["airline", "telecom", "airline", "telecom", "telecom"]
    wanted = [make_task(domain=name) for name in names]
    found = [task.key for task in replacement_tasks(wanted, played, SOURCES, 1, "stage", 3, 1)]
    assert [domain for domain, _ in found] == ["airline", "airline", "telecom", "telecom"]
    assert set(found[2:]) == {("telecom", "5"), ("telecom", "6")}
    assert len(set(found)) == 4 and not set(found) & played
    others = [task.key for task in replacement_tasks(wanted, played, SOURCES, 1, "stage", 3, 2)]
    assert set(found[:2]) != set(others[:2])
    assert replacement_tasks([], played, SOURCES, 1) == []


# Shares of task families


def of_families(**counts):
    """Tasks of telecom; the families take turns as long as they have tasks."""
    numbers = ((n, family) for family, count in counts.items() for n in range(count))
    made = [make_task(f"{f}-{n}", family=f, domain="telecom") for n, f in sorted(numbers)]
    return made


def drawn(mixture, count, steps, *key):
    return [[task.id for task in mixture.draw(count, step, *key)] for step in steps]


@pytest.mark.parametrize("count", [1, 5, 24])
def test_after_each_step_the_draws_have_the_shares_and_no_step_has_a_task_twice(count):
    mixture = TaskMixture(of_families(mms=60, data=30, service=10), {"service": 0.38, "mms": 0.4})
    assert mixture.shares == pytest.approx({"service": 0.38, "mms": 0.4, "data": 0.22})
    seen, total = Counter(), 0
    for ids in drawn(mixture, count, range(60), 1, "order"):
        assert len(set(ids)) == len(ids) == count
        seen.update(name.partition("-")[0] for name in ids)
        total += count
        assert all(abs(seen[f] - share * total) < 1 for f, share in mixture.shares.items())


def test_each_pass_over_a_family_has_each_of_its_tasks_once_in_another_order():
    mixture = TaskMixture(of_families(a=7, b=5), {"a": 0.5})
    ids = [name for step in drawn(mixture, 5, range(28), 1, "order") for name in step]
    of_a = [name for name in ids if name[0] == "a"]
    passes = [of_a[start : start + 7] for start in range(0, 70, 7)]
    assert {tuple(sorted(found)) for found in passes} == {tuple(f"a-{n}" for n in range(7))}
    assert len({tuple(found) for found in passes}) > 5


def test_the_draws_depend_on_seed_stage_and_step_alone():
    tasks, shares = of_families(a=20, b=4), {"b": 0.5}
    one = TaskMixture(tasks, shares)
    steps = drawn(one, 6, range(9), 1, "order", "x")
    assert drawn(TaskMixture(tasks, shares), 6, [8, 2], 1, "order", "x") == [steps[8], steps[2]]
    assert drawn(one, 6, range(9), 2, "order", "x") != steps != drawn(one, 6, range(9), 1, "y")


def test_the_others_share_the_rest_by_their_numbers_and_a_share_of_0_draws_nothing():
    tasks = of_families(a=10, b=30, c=10, d=5)
    assert TaskMixture(tasks, {"d": 0.2}).shares == pytest.approx(
        {"d": 0.2, "a": 0.16, "b": 0.48, "c": 0.16}
    )
    assert TaskMixture(tasks, {"a": 0.3, "b": 0.6, "c": 0.1}).shares.keys() == {*"abc"}
    assert TaskMixture(tasks, {"b": 0}).shares.keys() == {*"acd"}


def test_a_family_with_few_tasks_gives_all_it_has_and_no_task_twice():
    mixture = TaskMixture(of_families(a=20, b=3), {"b": 0.5})
    for ids in drawn(mixture, 10, range(20), 1):
        assert sorted(name for name in ids if name[0] == "b") == ["b-0", "b-1", "b-2"]
        assert len(set(ids)) == 10


def test_a_stage_draws_and_replaces_by_family():
    sources = {**SOURCES, "telecom": TaskMixture(of_families(a=9, b=4), {"b": 0.5})}
    stages = make_stages(config(max_steps=9, tasks_per_step=6), {**PLENTY, "telecom": 13})
    for step in range(6, 9):
        tasks = tasks_of_step(stages[2], step, sources, 1)
        assert Counter(t.family for t in tasks if t.domain == "telecom") == {"a": 2, "b": 2}
        plain = [t.key for t in tasks_of_step(stages[2], step, SOURCES, 1) if t.domain == "airline"]
        assert [task.key for task in tasks if task.domain == "airline"] == plain
        first, *_ = replaced = [task for task in tasks if task.family == "b"]
        found = replacement_tasks([*replaced, *replaced], {t.key for t in tasks}, sources, 1, step)
        assert {task.family for task in found} == {"b"} and len(found) == 2
        assert first.key not in {task.key for task in found}


def of_branches(**counts):
    """Tasks of telecom by family and branch, such as `loan_grant=9`."""
    return [
        make_task(f"{name}-{n}", family=family, branch=branch, domain="telecom")
        for name, count in counts.items()
        for family, branch in [name.split("_")]
        for n in range(count)
    ]


@pytest.mark.parametrize(
    ("shares", "tasks", "each_step"),
    [
        ({}, {"_gold": 90, "_silver": 30, "_basic": 5}, {"": (2, 3)}),
        ({"a": 0.5}, {"a_x": 40, "a_y": 8, "b_x": 9, "b_y": 90}, {"a": (2, 2), "b": (2, 2)}),
        ({"a": 1}, {"a_x": 40, "a_y": 8, "b_x": 9}, {"a": (4, 4), "b": (0, 0)}),
    ],
    ids=["no families", "two families", "one left out"],
)
def test_each_step_has_each_branch_of_a_family_equally_often(shares, tasks, each_step):
    made = of_branches(**tasks)
    mixture = TaskMixture(made, shares, even_branches=True)
    for step in range(40):
        found = mixture.draw(8, step, 1, "order")
        assert len({task.id for task in found}) == 8
        counts = Counter((task.family, task.branch) for task in found)
        for task in made:
            least, most = each_step[task.family]
            assert least <= counts[task.family, task.branch] <= most
    assert TaskMixture(made, {}).shares.keys() == {task.family for task in made}  # as before


def test_a_replacement_has_the_branch_of_the_replaced_task():
    mixture = TaskMixture(of_branches(a_x=9, a_y=9, b_x=9), {}, even_branches=True)
    replaced = mixture.draw(3, 0, 1)
    found = replacement_tasks(replaced, {t.key for t in replaced}, {"telecom": mixture}, 1)
    branches = [sorted((t.family, t.branch) for t in tasks) for tasks in (replaced, found)]
    assert branches[0] == branches[1] == [("a", "x"), ("a", "y"), ("b", "x")]


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ({"c": 0.5}, ("telecom: got 'c', which has no tasks", "'a, b'")),
        ({"a": 0.5, "b": 0.25}, ("sum 0.75", "leave out a family")),
        ({"a": 0, "b": 1}, ("all tasks (hard) have the share 0",)),
    ],
)
def test_shares_that_fit_no_tasks_are_refused(shares, words):
    sources = {"easy": of_families(a=2, b=2), "hard": of_families(a=2)}
    says(refusal(mixtures, "telecom", sources, shares), "family_shares", *words)


def test_a_family_that_one_difficulty_lacks_is_told():
    sources = {"easy": of_families(a=2, b=2), "hard": of_families(a=2)}
    made, notes = mixtures("telecom", sources, {"b": 0.5})
    assert made["hard"].shares == {"a": 1.0}
    assert notes == [
        "family_shares: telecom: the tasks (hard) have none of b; the other families get the share"
    ]


def test_interleaved_steps_take_the_domains_in_turns_by_their_weights():
    (stage,) = make_stages(
        config(8, 2, curriculum="interleaved", domain_weights={"telecom": 2}), PLENTY
    )
    assert (stage.name, stage.num_steps) == ("interleaved", 8)
    assert list(stage.schedule) == ["telecom", "airline", "retail", "telecom"] * 2
    steps = [keys(stage, step) for step in range(8)]
    assert [{domain for domain, _ in step} for step in steps] == [{d} for d in stage.schedule]
    seen = [key for step in steps if step[0][0] == "telecom" for key in step]
    assert len(set(seen[:6])) == 6  # a pass over 7 tasks goes on at the domain's next turn


def test_a_stage_that_ended_early_brings_the_later_ones_forward():
    stages = one_after_another(make_stages(config(30), PLENTY), {"airline": 4})
    assert [(s.name, s.first_step, s.num_steps) for s in stages] == [
        ("airline", 0, 4),
        ("retail", 4, 10),
        ("telecom", 14, 10),
    ]


@pytest.mark.parametrize(
    ("values", "patience", "expected"),
    [
        ([0.5, 0.5], 2, False),  # nothing before them
        ([0.5, 0.5, 0.4], 2, True),
        ([0.5, 0.5, 0.52], 2, False),
        ([0.5, 0.5, 0.505], 2, True),
        ([0.5, 0.6, 0.5], 2, False),  # the better one is recent
        ([0.5] * 9, 0, False),
        ([1.0] * 4, 3, True),
        ([0.5, 0.5, 0.51], 2, False),  # a gain of exactly one in a hundred counts
    ],
)
def test_a_plateau_is_so_many_values_no_better_than_the_best_before_them(
    values, patience, expected
):
    assert on_plateau(values, patience) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stage_steps": {"airline": 1, "retail": 1, "telecom": 1}}, "have 3 steps, and max_steps"),
        ({"stage_steps": {"airline": 60, "retail": 61}}, "have 121 steps, and max_steps is 120"),
        (
            {"curriculum": "mixed", "domain_weights": {"telecom": 100}},
            "airline would have no group",
        ),
        (
            {"curriculum": "interleaved", "domain_weights": {"telecom": 1000}},
            "airline would have no group in stage interleaved",
        ),
        ({"curriculum": "separate", "max_steps": 2}, "got 2, so stage telecom has no step"),
        (
            {
                **{"curriculum": "separate", "merge_method": "distillation", "max_steps": 3},
                "stage_steps": {"airline": 1, "retail": 1, "telecom": 1},
            },
            "got 3, so stage distill has no step",
        ),
    ],
)
def test_curricula_that_would_leave_something_out_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        make_stages(config(**settings), PLENTY)


def test_an_expert_begins_anew_and_its_parts_of_rising_difficulty_go_on():
    settings = {"curriculum": "separate", "difficulties": ["easy", "hard"], "max_steps": 8}
    stages = make_stages(config(domains=["airline", "retail"], **settings), PLENTY)
    assert {stage.name: stage.anew for stage in stages} == {
        **{"airline-easy": False, "airline-hard": False},  # the first begins with what is there
        **{"retail-easy": True, "retail-hard": False, "merge": True},
    }
    assert stages[-1].difficulty == "hard"
    # The last validation of a stage is at the step at which the next stage begins.
    last = {"stage": "airline-hard", "step": 4}
    assert [stage.has(last) for stage in stages] == [True, True, False, False, False]


def test_what_curriculum_json_holds():
    made = config(max_steps=4, domains=["retail", "airline"], replay=0.3)
    assert describe_stages(make_stages(made, PLENTY), made) == {
        "curriculum": "sequential",
        "stages": [
            {
                "name": "retail",
                "own": ("retail",),
                "difficulty": "medium",
                "first_step": 0,
                "num_steps": 2,
                "domains": {"retail": 24},
                "in_turns": False,
            },
            {
                "name": "airline",
                "own": ("airline",),
                "difficulty": "medium",
                "first_step": 2,
                "num_steps": 2,
                "domains": {"retail": 7, "airline": 17},
                "in_turns": False,
            },
        ],
        "replay": 0.3,
        "preview": 0.0,
    }
    mixed = config(curriculum="mixed")
    assert describe_stages(make_stages(mixed, PLENTY), mixed)["replay"] == 0.0
    few = config(tasks_per_step=4, preview=0.08)
    assert describe_stages(make_stages(few, PLENTY), few)["preview"] == 0.0  # less than a group
