"""From `results.json` to transfer numbers: which evaluation is which row, which task which cell."""

import pytest

from pipeline.errors import UserError
from pipeline.evaluation.transfer import differences, points_of, rate, summary

TASKS = [f"t{i}" for i in range(8)]


def evaluation(after, step, **shares):
    """Tasks of two trials each; of each domain the first `share` of 8 solved in both."""
    success = {
        domain: {
            "mean": solved / 8,
            "greedy": solved / 8,
            "num_tasks": 8,
            "num_trials": 2,
            "tasks": {task: [float(i < solved)] * 2 for i, task in enumerate(TASKS)},
            "tools": {"find": {"t0": [4, 1], "t1": [2, 1]}} if domain == "airline" else {},
        }
        for domain, solved in shares.items()
    }
    return {"after": after, "step": step, "success": success}


def results(end=4, seed=1):
    return {
        "seed": seed,
        "evaluations": [
            evaluation("start", 0, airline=0, retail=0),
            evaluation("warm_start", 0, airline=2, retail=2),
            evaluation("airline", 5, airline=6, retail=3),
            evaluation("retail", 10, airline=end, retail=8),
        ],
        "validations": [
            {"step": 0, "stage": "airline", "success": {"airline": {"v0": 0.0, "v1": 0.0}}},
            {"step": 10, "stage": "retail", "success": {"airline": {"v0": 1.0, "v1": 0.0}}},
        ],
        "training": {"airline": {"episodes": 500}, "retail": {"episodes": 1500}},
        "task_families": {
            d: {t: "ab"[i % 2] for i, t in enumerate(TASKS)} for d in ("airline", "retail")
        },
        "curriculum": {
            "stages": [
                {"name": "airline", "own": ["airline"]},
                {"name": "retail", "own": ["retail"]},
            ]
        },
    }


def values(numbers):
    return [None if number is None else number[0] for number in numbers]


def graded(threshold=None):
    """The same run, whose solved trials earn 7.2, and others -3.5."""
    found = results() | ({} if threshold is None else {"success_threshold": threshold})
    for entry in found["evaluations"]:
        for of in entry["success"].values():
            of["tasks"] = {t: [10.7 * r - 3.5 for r in rs] for t, rs in of["tasks"].items()}
    for entry in found["validations"]:
        entry["success"]["airline"]["v0"] *= 7.2
    return found


def test_success_is_the_share_of_trials_that_reach_the_threshold():
    plain = summary([results()])
    assert plain["rewards"] == {}
    for threshold in (None, 1.0, 7.2):
        found = summary([graded(threshold)])
        rewards = found.pop("rewards")
        assert found == {key: value for key, value in plain.items() if key != "rewards"}
        assert values(rewards["airline"]) == pytest.approx([-0.825, 4.525, 1.85])
        for value, low, high in rewards["airline"]:
            assert -3.5 <= low < value < high <= 7.2
    low = summary([graded(-3.5)])
    assert values(low["domains"]["matrix"][0]) == [1.0, 1.0]


def test_runs_with_other_thresholds_are_not_put_together():
    with pytest.raises(UserError, match=r"other success thresholds \(1, 2\) cannot be put"):
        summary([graded(), graded(2)])
    with pytest.raises(UserError, match="other success thresholds"):
        differences([graded(0.5)], [graded()])


def test_the_matrix_begins_with_the_last_evaluation_before_grpo():
    assert [entry["after"] for entry in points_of(results())] == ["warm_start", "airline", "retail"]
    found = summary([results()])["domains"]
    assert found["names"] == ["airline", "retail"]
    assert [values(row) for row in found["matrix"]] == [[0.25, 0.25], [0.75, 0.375], [0.5, 1.0]]
    assert [values(row) for row in found["effects"]] == [[0.5, 0.125], [-0.25, 0.625]]


def test_the_numbers_of_a_run():
    found = summary([results()])
    metrics = {name: number[0] for name, number in found["metrics"].items()}
    assert metrics == {
        "average_accuracy": 0.75,
        "total_gain": 0.5,
        "stage_gain": pytest.approx((0.5 + 0.625) / 2),
        "backward_transfer": -0.25,
        "forward_transfer": 0.125,
        "forgetting": 0.25,
        "learning_efficiency": 0.25,  # half of all tasks in 2,000 episodes
        "area_under_curve": 0.25,
    }
    assert found["episodes"] == 2000
    assert [(s["name"], s["own"], s["gain"][0], s["efficiency"][0]) for s in found["stages"]] == [
        ("airline", ["airline"], 0.5, 1.0),
        ("retail", ["retail"], 0.625, pytest.approx(0.625 / 1.5)),
    ]


def test_every_number_has_an_interval_around_it():
    def walk(node):
        if isinstance(node, dict):
            for value in node.values():
                yield from walk(value)
        elif isinstance(node, list) and len(node) == 3 and isinstance(node[0], float):
            yield node
        elif isinstance(node, list):
            for value in node:
                yield from walk(value)

    numbers = list(walk(summary([results()])))
    assert len(numbers) > 50
    for value, low, high in numbers:
        assert low <= value <= high
    assert sum(high > low for _, low, high in numbers) > len(numbers) / 2


def test_families_and_tools_have_matrices_of_their_own():
    found = summary([results(end=3)])
    families = found["families"]
    assert families["names"] == ["airline/a", "airline/b", "retail/a", "retail/b"]
    # 6 of 8 solved: t0 to t5, three of each family; 3 of 8: t0, t1, t2
    assert values(families["matrix"][1])[:2] == [0.75, 0.75]
    assert values(families["matrix"][2])[:2] == [0.5, 0.25]
    assert {k: v[0] for k, v in families["backward_transfer"].items()} == {
        "airline/a": -0.25,
        "airline/b": -0.5,
    }
    assert found["tools"]["names"] == ["airline/find"]
    assert values(found["tools"]["matrix"][0]) == [pytest.approx(4 / 6, abs=1e-6)]


def test_pass_at_k_and_pass_hat_k_up_to_the_number_of_trials():
    one = results()
    one["evaluations"][-1]["success"]["retail"]["tasks"] = {t: [1.0, 0.0] for t in TASKS}
    passes = summary([one])["passes"]["retail"]
    assert list(passes) == ["pass@1", "pass@2", "pass^1", "pass^2"]
    assert {name: points[-1][0] for name, points in passes.items()} == {
        "pass@1": 0.5,
        "pass@2": 1.0,
        "pass^1": 0.5,
        "pass^2": 0.0,
    }
    _, low, high = passes["pass^2"][-1]
    assert low == 0 and 0.2 < high < 0.6  # Wilson's interval of 0 of the tasks


def test_seeds_are_averaged_and_compared_in_pairs():
    some, others = [results(4), results(5)], [results(2), results(3)]
    assert summary(some)["metrics"]["backward_transfer"][0] == pytest.approx(-0.1875)
    found = differences(some, others)
    assert found["backward_transfer"][0] == pytest.approx(0.25)
    assert found["forward_transfer"] == [0.0, 0.0, 0.0]  # equal runs, task by task


def test_runs_that_cannot_be_put_together_are_refused():
    other_tasks, other_stages = results(), results()
    other_tasks["evaluations"][2]["success"]["airline"]["tasks"].pop("t0")
    with pytest.raises(UserError, match="other held-out tasks of airline"):
        summary([results(), other_tasks])
    other_stages["evaluations"].pop()
    with pytest.raises(UserError, match="runs with other stages"):
        summary([results(), other_stages])


def test_differences_need_the_same_tasks():
    other = results()
    for entry in other["evaluations"]:
        success = entry["success"]["airline"]
        success["tasks"] = {f"other-{task}": of for task, of in success["tasks"].items()}
    with pytest.raises(UserError, match="other held-out tasks of airline"):
        differences([results()], [other])


def test_settings_that_were_changed_on_a_resume_leave_out_what_they_make_undefined():
    changed = results()
    changed["validations"][1]["success"]["airline"] = {"v7": 1.0}
    assert "area_under_curve" not in summary([changed])["metrics"]
    changed["curriculum"]["stages"].pop()
    with pytest.raises(UserError, match="stage retail was evaluated but is not in the curriculum"):
        summary([changed])


def test_a_cell_where_all_tasks_came_out_alike_has_wilsons_interval():
    matrix = summary([results()])["domains"]["matrix"]
    assert matrix[2][1] == pytest.approx([1.0, 0.675592, 1.0], abs=1e-5)  # 8 of 8
    assert matrix[2][0][1] < 0.5 < matrix[2][0][2]


def test_a_rate_of_any_evaluation_has_the_intervals_of_the_matrix():
    run = results()
    found = summary([run])
    for row, entry in zip(found["domains"]["matrix"], points_of(run), strict=True):
        assert row == [rate(entry, domain, "mean", 1.0) for domain in ("airline", "retail")]
    last = run["evaluations"][-1]
    assert rate(last, "mean", "mean", 1.0) == found["metrics"]["average_accuracy"]
    value, low, high = rate(last, "airline", "greedy", 1.0)
    assert (value, low < 0.5 < high) == (0.5, True)
    assert rate(last, "retail", "greedy", 1.0) == found["domains"]["matrix"][2][1]  # Wilson's
    assert rate(last, "bank", "mean", 1.0) is None


def test_a_family_of_one_task_has_no_interval():
    one = results()
    one["task_families"]["airline"] = {task: "a" if task == "t0" else "b" for task in TASKS}
    families = summary([one])["families"]
    assert families["names"][0] == "airline/a"
    assert families["matrix"][1][0] == [1.0, None, None]
    assert families["matrix"][1][1][0] < families["matrix"][1][1][2]


def test_a_run_that_was_interrupted_has_what_it_came_to():
    early = results()
    del early["evaluations"][1:]
    found = summary([early])
    assert found["points"] == ["start"]
    assert list(found["metrics"]) == ["average_accuracy", "area_under_curve"]
    early["evaluations"] = []
    assert summary([early]) == {}
