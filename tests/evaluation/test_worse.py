"""What training made worse: found over the same tasks, with an interval below 0."""

import pytest

from pipeline.evaluation.worse import worse
from pipeline.report.tables import final_table, worse_in_words, worse_table
from pipeline.tracking.run_files import final_numbers
from tests.support.messages import says

TASKS = [f"t{i}" for i in range(12)]


def evaluation(after, sampled, greedy):
    rates = {"mean": 0.5, "greedy": 0.5, "num_tasks": 12, "num_trials": 2}
    tasks = {task: [float(of), float(of)] for task, of in zip(TASKS, sampled, strict=True)}
    found = {**rates, "tasks": tasks, "greedy_tasks": dict(zip(TASKS, greedy, strict=True))}
    return {"after": after, "step": 0, "success": {"airline": found}}


def results(before, after, greedy=(12 * [1.0], 12 * [1.0]), **changed):
    """Two families of six tasks; the first one has two branches, of which one has one task."""
    return {
        "evaluations": [
            evaluation("warm_start", before, greedy[0]),
            evaluation("airline", after, greedy[1]),
        ],
        "success_threshold": 1.0,
        "task_families": {"airline": {t: "move" if i < 6 else "" for i, t in enumerate(TASKS)}},
        "task_branches": {
            "airline": {
                t: "fare" if i < 5 else "flown" if i == 5 else "" for i, t in enumerate(TASKS)
            }
        },
        **changed,
    }


def names(found):
    return [(row["name"], row["kind"]) for row in found["found"]]


def test_a_fall_of_a_branch_is_found_though_its_domain_rose():
    found = worse(results([1] * 5 + [0] * 7, [0] * 6 + [1] * 6))
    assert names(found) == [("airline/move/fare", "sampled"), ("airline/move", "sampled")]
    row = found["found"][0]
    assert (row["before"], row["after"], row["num_tasks"]) == (1.0, 0.0, 5)
    assert row["change"] == [-1.0, -1.0, -1.0]
    assert found["compared"] == 6  # the domain, the family and the large branch, both kinds


def test_a_fall_of_greedy_episodes_is_found_and_its_interval_is_below_0():
    found = worse(results([0] * 12, [0] * 12, (12 * [1.0], [1.0] * 6 + [0.0] * 6)))
    assert names(found) == [("airline", "greedy")]
    change, low, high = found["found"][0]["change"]
    assert change == -0.5 and -1 < low < change < high < 0


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"evaluations": [evaluation("warm_start", [1] * 12, [1.0] * 12)]},
        {"evaluations": [evaluation(after, [1] * 12, [1.0] * 12) for after in ("a", "b")]},
    ],
)
def test_nothing_is_worse(changed):
    one_of_twelve = [0, *[1] * 11]
    found = worse(results([1] * 12, one_of_twelve, **changed))
    assert found["found"] == []
    assert worse_in_words({"worse": found}) == worse_table({"worse": found}) == []


def test_it_is_told_at_the_end_in_the_report_and_in_the_summary_of_trackers():
    run = results([1] * 5 + [0] * 7, [0] * 6 + [1] * 6)
    run |= {"worse": worse(run), "transfer": {}}
    told = final_table(run)
    says(told, "worse: airline/move/fare, sampled  1.00 -> 0.00, change -1.00 [-1.00, -1.00], 5 ta")
    says(told, "worse in all: 2 of 6 comparisons (domains, families, branches; about 1 by chance)")
    assert worse_table(run)[1][:5] == ["airline/move/fare", "5", "sampled", "1.00", "0.00"]
    assert final_numbers(run)["worse/airline/move/fare/sampled"] == -1.0
