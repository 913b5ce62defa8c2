"""The start report: what the first step's groups and the evaluation before it say."""

import json

import pytest

from pipeline.config.settings import Config
from pipeline.distributed.ranks import Ranks
from pipeline.evaluation.start_report import StartReport, start_report
from pipeline.report.tables import start_block
from pipeline.rollout.trajectory import RunRecord, StopReason
from tests.support.messages import says

BASELINES = {"airline": {"nothing": 0.0, "every_tool": 0.25}}


def config(**curriculum):
    return Config.model_validate(
        {
            "data": {"domains": ["airline", "retail"]},
            "rollout": {"num_generations": 4},
            "curriculum": curriculum,
        }
    )


def episodes(domain, task, *rewards, reason=StopReason.COMPLETED, left_out=""):
    return [
        RunRecord(domain=domain, task_id=task, reward=r, stop_reason=reason, left_out=left_out)
        for r in rewards
    ]


def evaluated(**rewards):
    """An evaluation with these rewards of the trials of each task."""
    success = {
        domain: {"tasks": {f"t{i}": of for i, of in enumerate(tasks)}, "greedy": 0.0}
        for domain, tasks in rewards.items()
    }
    return {"after": "warm_start", "step": 0, "success": success}


def report(played, settings=None, baselines=BASELINES, **rewards):
    held_out = {"airline": [[0, 0]] * 4, "retail": [[1, 0]] * 4, **rewards}
    gathered = StartReport()
    gathered.add(played, 4)
    groups = gathered.gathered(Ranks(0, 1, 5))
    return start_report(groups, evaluated(**held_out), settings or config(), baselines)


def test_rates_come_from_the_groups_and_the_evaluation():
    played = [
        *episodes("airline", "a", 1, 0, 0, 0),
        *episodes("airline", "b", 0, 0, 0, 0),
        *episodes("retail", "a", 1, 1, 1, 1),
    ]
    found = report(played)
    airline, retail = found["domains"]["airline"], found["domains"]["retail"]
    assert (airline["pass@1"][0], airline["pass@4"][0]) == (0.125, 0.5)
    assert (airline["groups"], airline["groups_with_signal"]) == (2, 1)
    assert airline["held_out"][0] == 0 and airline["held_out"][2] > 0.3  # Wilson's interval
    assert airline["baseline"] == ["every_tool", 0.25] and retail["baseline"] is None
    assert (retail["pass@1"], retail["held_out"][0]) == ([1.0, None, None], 0.5)
    assert found["lines"] == []  # held-out trials of retail differ
    assert start_block(found).splitlines() == [
        "start of GRPO    held-out pass@1             pass@1             pass@4  with signal"
        "    best baseline",
        "airline        0.00 [0.00, 0.49]  0.12 [0.00, 0.25]  0.50 [0.00, 1.00]       1 of 2"
        "  0.25 every tool",
        "retail         0.50 [0.50, 0.50]               1.00               1.00       0 of 1"
        "                -",
        "held-out: after the warm start; then: groups of the first step; "
        "in brackets: 95 % intervals",
    ]


def test_left_out_episodes_count_in_no_rate_and_their_groups_not_in_pass_at_the_group_size():
    failed = episodes("airline", "a", 0, reason=StopReason.ENVIRONMENT_ERROR, left_out="reset")
    played = [*episodes("airline", "a", 1, 1, 0), *failed, *episodes("airline", "b", 0, 0, 0, 1)]
    airline = report(played)["domains"]["airline"]
    assert airline["pass@1"][0] == pytest.approx((2 / 3 + 1 / 4) / 2)
    assert airline["pass@4"] == [1.0, None, None]
    all_failed = report(failed * 4)
    assert all_failed["domains"]["airline"]["pass@1"] is None
    says(all_failed["lines"][0], "airline", "pass@4 is -", "environment_error: mend the environ")


@pytest.mark.parametrize(
    ("groups", "trials", "words"),
    [
        ([[0] * 4] * 3, [[0, 0]], ["none of 3 groups has signal and pass@4 is 0.00", "max_turns"]),
        ([[0.5] * 4], [[0.5, 0.5]], ["the only group has no signal and pass@4 is 0.00"]),
        ([[1] * 4] * 2, [[1, 1]], ["pass@4 is 1.00", "take harder tasks, or leave airline out"]),
        ([[1] * 4, [0] * 4], [[1, 1], [0, 0]], ["pass@4 is 0.50", "raise temperature or num_gen"]),
        ([[1] * 4, [0] * 4], [[1], [0]], []),  # one trial cannot show whether trials differ
        ([[0] * 4] * 3, [[0, 0], [0, 1]], []),
        ([[0] * 4, [0, 1, 0, 0]], [[0, 0]], []),
        ([], [[0, 0]], ["none of 2 held-out trials succeeds", "--start-report-tasks 8"]),
        ([], [[1, 1]], []),
    ],
)
def test_one_line_says_that_nothing_can_be_learned_and_what_to_do(groups, trials, words):
    played = [
        episode
        for i, of in enumerate(groups)
        for episode in episodes("airline", f"a{i}", *of, reason=StopReason.MAX_TURNS)
    ]
    lines = report(played, airline=trials)["lines"]
    assert len(lines) == bool(words)
    says("".join(lines), *words, *(["airline: "] if words else []))


def test_a_domain_that_no_stage_trains_has_no_line():
    found = report([], config(order=["retail"]))
    assert found["lines"] == [] and found["domains"]["airline"]["pass@1"] is None


def test_the_order_of_groups_does_not_depend_on_the_ranks_and_a_resume_keeps_the_report():
    first, second = episodes("airline", "a", 1, 0, 0, 0), episodes("airline", "b", 0, 0, 0, 0)
    assert report([*first, *second]) == report([*second, *first])
    made, again = StartReport(), StartReport()
    made.content = report([*first, *second])
    again.load_state_dict(json.loads(json.dumps(made.state_dict())))
    assert again.content == made.content
