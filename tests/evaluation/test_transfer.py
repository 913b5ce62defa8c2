"""Transfer numbers: metrics by hand, estimators by enumeration, intervals by what they must cover.

Which evaluation is which row, which task which cell; and what training made worse.
"""

from itertools import combinations

import numpy as np
import pytest

from pipeline.evaluation.transfer import (
    area_under_curve,
    column_metrics,
    differences,
    estimate,
    matrix_metrics,
    pass_at_k,
    pass_hat_k,
    points_of,
    rate,
    resampled,
    summary,
    wilson,
    worse,
)
from pipeline.report.run_files import final_numbers
from pipeline.report.write import final_table
from pipeline.rollout.trajectory import succeeded
from tests.support.messages import refusal, says

# A row for each point (before, after stages 1 to 3), a column for each of three domains.
MATRIX = np.array(
    [[[0.30, 0.40, 0.50], [0.80, 0.40, 0.60], [0.70, 0.90, 0.60], [0.65, 0.85, 0.95]]]
)
IN_ORDER = [{0}, {1}, {2}]  # the column that each stage trains


def test_a_trial_succeeds_at_the_threshold_up_to_the_rounding_of_a_sum():
    assert 0.7 + 0.2 + 0.1 < 1 and succeeded(0.7 + 0.2 + 0.1, 1.0)
    assert [succeeded(reward, -3.5) for reward in (-3.6, -3.5, 0, 1e30)] == [False, *[True] * 3]
    assert not succeeded(0.999, 1.0) and not succeeded(-1e-12, 0.0)


PEAK = MATRIX.copy()
PEAK[0, 2, 0] = 0.99  # better after another domain's stage than after its own
BETTER = MATRIX.copy()
BETTER[0, 3, 0] = 0.90


@pytest.mark.parametrize(
    ("matrix", "own", "backward", "forward", "forgetting"),
    [
        # The last domain has nothing after it, the first one nothing before it.
        (MATRIX, IN_ORDER, {0: -0.15, 1: -0.05}, {1: 0.0, 2: 0.10}, {0: 0.15, 1: 0.05}),
        (PEAK, IN_ORDER, {0: -0.15, 1: -0.05}, {1: 0.0, 2: 0.10}, {0: 0.34, 1: 0.05}),
        (BETTER, IN_ORDER, {0: 0.10, 1: -0.05}, {1: 0.0, 2: 0.10}, {0: -0.10, 1: 0.05}),
        (MATRIX[..., :2], [{0}, {0}, {1}], {0: -0.05}, {1: 0.50}, {0: 0.15}),  # in parts
        (MATRIX[..., :2], [{0}, {1}, {0}], {1: -0.05}, {1: 0.0}, {1: 0.05}),  # comes again
        (MATRIX[:, :3], [{0}, {1}], {0: -0.10}, {1: 0.0, 2: 0.10}, {0: 0.10}),  # 2: never trained
        (MATRIX[:, [0, 3]], [{0, 1, 2}], {}, {}, {}),  # one stage of all domains
    ],
)
def test_transfer_of_each_domain_is_that_of_the_formulas(
    matrix, own, backward, forward, forgetting
):
    found = column_metrics(matrix, own)
    assert {name: {c: round(v[0], 6) for c, v in of.items()} for name, of in found.items()} == {
        "backward_transfer": backward,
        "forward_transfer": forward,
        "forgetting": forgetting,
    }


def test_gains_and_accuracy():
    found = {name: float(of[0]) for name, of in matrix_metrics(MATRIX, IN_ORDER, 5000).items()}
    assert found == pytest.approx(
        {
            "average_accuracy": (0.65 + 0.85 + 0.95) / 3,
            "total_gain": (0.35 + 0.45 + 0.45) / 3,
            "stage_gain": (0.50 + 0.50 + 0.35) / 3,
            "backward_transfer": -0.10,
            "forward_transfer": 0.05,
            "forgetting": 0.10,
            "learning_efficiency": 1.25 / 3 / 5,
        }
    )
    assert "learning_efficiency" not in matrix_metrics(MATRIX, IN_ORDER, 0)
    assert list(matrix_metrics(MATRIX, [], 0)) == ["average_accuracy"]


def test_the_area_under_a_curve_weights_points_by_their_steps():
    curve = np.array([[0.2, 0.6, 0.8]])
    # (.2 + .6) / 2 over 10 steps, (.6 + .8) / 2 over 30
    assert area_under_curve(curve, [0, 10, 40]) == pytest.approx([(4 + 21) / 40])


@pytest.mark.parametrize("num_trials", range(1, 9))
def test_pass_estimators_equal_the_enumeration_of_all_draws(num_trials):
    for num_successes in range(num_trials + 1):
        trials = [True] * num_successes + [False] * (num_trials - num_successes)
        for k in range(1, num_trials + 1):
            draws = list(combinations(trials, k))
            assert pass_at_k(num_successes, num_trials, k) == pytest.approx(
                sum(map(any, draws)) / len(draws), abs=1e-12
            )
            assert pass_hat_k(num_successes, num_trials, k) == pytest.approx(
                sum(map(all, draws)) / len(draws), abs=1e-12
            )


def test_the_interval_of_a_mean_is_that_of_the_normal_approximation():
    totals = np.random.default_rng(1).random((1, 1, 400))
    value, low, high = estimate(resampled(totals, np.ones_like(totals), "desk")[:, 0])
    half = 1.96 * totals.std() / 20
    assert value - low == pytest.approx(half, rel=0.1)
    assert high - value == pytest.approx(half, rel=0.1)


def test_seeds_that_disagree_widen_the_interval():
    close, far = np.full((3, 1, 40), 0.5), np.full((3, 1, 40), 0.5)
    far[0], far[2] = 0.2, 0.8
    for totals, width in ((close, 0.0), (far, 0.5)):
        value, low, high = estimate(resampled(totals, np.ones_like(totals), "desk")[:, 0])
        assert value == pytest.approx(0.5)
        assert high - low >= width
        these = estimate(resampled(totals, np.ones_like(totals), "desk", over_seeds=False)[:, 0])
        assert these == pytest.approx([0.5, 0.5, 0.5])


def test_ratios_are_of_sums_and_undefined_without_a_call():
    # two tasks: 3 good calls of 4, 1 of 1; at the second point none at all
    totals = np.array([[[3.0, 1.0], [0.0, 0.0]]])
    counts = np.array([[[4.0, 1.0], [0.0, 0.0]]])
    samples = resampled(totals, counts, "desk")
    assert samples[0, 0] == pytest.approx(4 / 5)
    assert np.isnan(samples[0, 1])
    assert estimate(samples[:, 1]) is None


def test_the_interval_is_wilsons():
    assert wilson(0.5, 100) == pytest.approx((0.40383, 0.59617), abs=1e-5)
    assert wilson(0.0, 10) == pytest.approx((0.0, 0.27753), abs=1e-5)
    assert wilson(1.0, 10) == pytest.approx((0.72247, 1.0), abs=1e-5)


# From `results.json` to numbers

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


def separate_results():
    """Experts of both domains from one start, and what was merged of them."""
    found = results()
    found["evaluations"].append(evaluation("merge", 10, airline=5, retail=7))
    found["curriculum"]["stages"].append({"name": "merge", "own": []})
    found["curriculum"]["curriculum"] = "separate"
    return found


def test_an_expert_is_compared_with_the_start_and_the_merged_model_with_each_expert():
    found = summary([separate_results()])
    assert {name: number[0] for name, number in found["metrics"].items()} == {
        "average_accuracy": 0.75,
        "total_gain": 0.5,
        "stage_gain": pytest.approx((0.5 + 0.75) / 2),
        "backward_transfer": pytest.approx(-0.125),  # of both: 6 -> 5 and 8 -> 7 of 8
        "forgetting": pytest.approx(0.125),
        "learning_efficiency": 0.25,
    }  # no forward transfer and no area: no expert goes on from another one
    domains = found["domains"]
    assert [values(row) for row in domains["effects"]] == [
        [0.5, 0.125],
        [0.25, 0.75],
        [0.375, 0.625],
    ]
    assert list(domains["backward_transfer"]) == ["airline", "retail"]
    last = found["stages"][-1]
    assert (last["name"], last["own"], last["gain"], last["efficiency"]) == (
        "merge",
        [],
        None,
        None,
    )


@pytest.mark.parametrize("num_experts", [1, 2])
def test_experts_that_are_not_merged_yet_have_no_transfer(num_experts):
    found = separate_results()
    del found["evaluations"][2 + num_experts :]
    names = {*summary([found])["metrics"]}
    assert names == {"average_accuracy", "total_gain", "stage_gain"}


def test_parts_of_rising_difficulty_of_an_expert_go_on_from_each_other():
    found = separate_results()
    found["evaluations"].insert(3, evaluation("airline-hard", 7, airline=7, retail=3))
    found["curriculum"]["stages"].insert(1, {"name": "airline-hard", "own": ["airline"]})
    gains = [stage["gain"] for stage in summary([found])["stages"]]
    assert values(gains) == [0.5, 0.125, 0.75, None]


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
    assert "other held-out tasks of airline" in refusal(summary, [results(), other_tasks])
    assert "other held-out tasks of airline" in refusal(differences, [results()], [other_tasks])
    other_stages["evaluations"].pop()
    assert "runs with other stages" in refusal(summary, [results(), other_stages])
    assert "other success thresholds (1, 2) cannot" in refusal(summary, [graded(), graded(2)])
    assert "other success thresholds" in refusal(differences, [graded(0.5)], [graded()])


@pytest.mark.parametrize("solved", [0.0, 1.0])
def test_one_rate_has_one_interval_wherever_it_stands(solved):
    run = results()
    for entry in run["evaluations"]:
        for of in entry["success"].values():
            of["tasks"] = {task: [solved for _ in rewards] for task, rewards in of["tasks"].items()}
            of["greedy"] = solved
    for entry in run["validations"]:
        for of in entry["success"].values():
            of.update(dict.fromkeys(of, solved))
    found = summary([run])
    metrics = found["metrics"]
    assert metrics["average_accuracy"] == rate(run["evaluations"][-1], "mean", "mean", 1.0)
    areas = [metrics["area_under_curve"], *found["area_under_curve"].values()]
    for value, low, high in [metrics["average_accuracy"], *areas]:
        assert value == solved
        assert low < high


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


# What training made worse

TWELVE = [f"t{i}" for i in range(12)]


def two_kinds(after, sampled, greedy):
    rates = {"mean": 0.5, "greedy": 0.5, "num_tasks": 12, "num_trials": 2}
    tasks = {task: [float(of), float(of)] for task, of in zip(TWELVE, sampled, strict=True)}
    found = {**rates, "tasks": tasks, "greedy_tasks": dict(zip(TWELVE, greedy, strict=True))}
    return {"after": after, "step": 0, "success": {"airline": found}}


def families(before, after, greedy=(12 * [1.0], 12 * [1.0]), **changed):
    """Two families of six tasks; the first one has two branches, of which one has one task."""
    return {
        "evaluations": [
            two_kinds("warm_start", before, greedy[0]),
            two_kinds("airline", after, greedy[1]),
        ],
        "success_threshold": 1.0,
        "task_families": {"airline": {t: "move" if i < 6 else "" for i, t in enumerate(TWELVE)}},
        "task_branches": {
            "airline": {
                t: "fare" if i < 5 else "flown" if i == 5 else "" for i, t in enumerate(TWELVE)
            }
        },
        **changed,
    }


def names(found):
    return [(row["name"], row["kind"]) for row in found["found"]]


def test_a_fall_of_a_branch_is_found_though_its_domain_rose():
    found = worse(families([1] * 5 + [0] * 7, [0] * 6 + [1] * 6))
    assert names(found) == [("airline/move/fare", "sampled"), ("airline/move", "sampled")]
    row = found["found"][0]
    assert (row["before"], row["after"], row["num_tasks"]) == (1.0, 0.0, 5)
    assert row["change"] == [-1.0, -1.0, -1.0]
    assert found["compared"] == 6  # the domain, the family and the large branch, both kinds


def test_a_fall_of_greedy_episodes_is_found_and_its_interval_is_below_0():
    found = worse(families([0] * 12, [0] * 12, (12 * [1.0], [1.0] * 6 + [0.0] * 6)))
    assert names(found) == [("airline", "greedy")]
    change, low, high = found["found"][0]["change"]
    assert change == -0.5 and -1 < low < change < high < 0


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"evaluations": [two_kinds("warm_start", [1] * 12, [1.0] * 12)]},
        {"evaluations": [two_kinds(after, [1] * 12, [1.0] * 12) for after in ("a", "b")]},
    ],
)
def test_nothing_is_worse(changed):
    one_of_twelve = [0, *[1] * 11]
    run = families([1] * 12, one_of_twelve, **changed)
    found = worse(run)
    assert found["found"] == []
    assert "worse" not in final_table({**run, "worse": found})


def test_it_is_told_at_the_end_in_the_report_and_in_the_summary_of_trackers():
    run = families([1] * 5 + [0] * 7, [0] * 6 + [1] * 6)
    run |= {"worse": worse(run), "transfer": {}}
    told = final_table(run)
    says(told, "worse: airline/move/fare, sampled  1.00 -> 0.00, change -1.00 [-1.00, -1.00], 5 ta")
    says(told, "worse in all: 2 of 6 comparisons (domains, families, branches; about 1 by chance)")
    assert final_numbers(run)["worse/airline/move/fare/sampled"] == -1.0
