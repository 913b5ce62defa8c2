"""Evaluation: every trial of every task exactly once, whatever the ranks; what is made of the
records; and when too many episodes of a domain end in errors of their environment.
"""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
from accelerate import Accelerator

from pipeline.common.errors import RunError
from pipeline.config.settings import Config, RolloutSettings
from pipeline.distributed.ranks import Ranks
from pipeline.evaluation.evaluate import (
    error_counts,
    evaluate,
    failed_trials,
    refuse_failed_trials,
    scored,
    stop_on_errors,
    success,
    training_summary,
    unscored_trials,
)
from pipeline.rollout.trajectory import EpisodeRecord, StopReason
from pipeline.training.collect import RolloutBatch, Sample
from pipeline.training.step_metrics import rollout_metrics
from scripts.proofs.grid import make_trajectory
from scripts.proofs.ranks import play_ranks
from tests.support.helpers import (
    ALONE,
    Desk,
    ScriptedSampler,
    chat,
    make_task,
    rollout_of,
    say,
)
from tests.support.messages import refusal, says

TASKS = [make_task(f"t{n}") for n in range(5)]


class Watched:
    """A rollout whose episodes earn number of the task / 10 + trial / 100; keeps what it was
    asked to play.
    """

    def __init__(self):
        self.requests, self.greedy = [], None

    def __call__(self, requests, greedy=False, progress=None):
        self.requests, self.greedy = list(requests), greedy
        return [
            make_trajectory(
                domain=request.task.domain,
                task_id=request.task.id,
                trial=request.trial,
                reward=int(request.task.id[1:]) / 10 + request.trial / 100,
            )
            for request in requests
        ]


def keys_of(rollout):
    return {(*request.task.key, request.trial): request.key for request in rollout.requests}


# Gathering


def test_every_trial_is_played_and_comes_in_order():
    records, trajectories = evaluate(Watched(), TASKS, 2, seed=1, ranks=ALONE)
    assert [(r.task_id, r.trial) for r in records] == [
        (f"t{n}", k) for n in range(5) for k in (0, 1)
    ]
    assert [r.reward for r in records[:4]] == pytest.approx([0.0, 0.01, 0.1, 0.11])
    assert len(trajectories) == 10
    tasks = [make_task("t1", domain="airline"), make_task("t1", domain="retail")]
    rollout = Watched()
    records, _ = evaluate(rollout, tasks, 1, seed=1, ranks=ALONE, greedy=True)
    assert [record.domain for record in records] == ["airline", "retail"]
    assert rollout.greedy


def test_two_evaluations_of_a_run_draw_the_same_numbers():
    first, second, other = Watched(), Watched(), Watched()
    evaluate(first, TASKS, 2, seed=1, ranks=ALONE)
    evaluate(second, list(reversed(TASKS)), 2, seed=1, ranks=ALONE)
    evaluate(other, TASKS, 2, seed=2, ranks=ALONE)
    assert keys_of(first) == keys_of(second)
    assert len(set(keys_of(first).values())) == 10
    assert not set(keys_of(first).values()) & set(keys_of(other).values())


def play_desk(fails):
    """An evaluation of two tasks, one of which `fails` so many times before it can be played."""
    left = iter([True] * fails)

    class Flaky(Desk):
        def reset(self, **row):
            if row["id"] == "broken" and next(left, False):
                raise ConnectionError("no answer")
            return super().reset(**row)

    scripts = {number: [say("done")] for number in range(9)}
    rollout = rollout_of(ScriptedSampler(scripts), chat(), {"desk": Flaky}, RolloutSettings())
    by_number = iter(range(9))

    def play(requests, greedy, progress):
        return rollout([replace(request, key=next(by_number)) for request in requests], greedy)

    records, _ = evaluate(play, [make_task("fine"), make_task("broken")], 1, seed=1, ranks=ALONE)
    return records, next(by_number)


def test_a_trial_whose_environment_fails_is_played_again():
    records, num_played = play_desk(fails=2)
    assert [record.reward for record in records] == [1.0, 1.0]
    assert num_played == 4


def test_trials_that_fail_every_time_are_not_scored():
    records, num_played = play_desk(fails=99)
    assert num_played == 4
    assert [record.stop_reason for record in records] == ["completed", "environment_error"]
    assert failed_trials(records) == [records[1]]
    with pytest.raises(RuntimeError, match=r"1 of 2 trials at the end ended.*desk/broken"):
        refuse_failed_trials(records, "at the end")


def test_errors_of_an_agent_count_as_failures_up_to_the_largest_share_of_errors():
    fine = EpisodeRecord(domain="desk", task_id="a", reward=1.0)
    wrong = EpisodeRecord(domain="desk", task_id="b", stop_reason=StopReason.AGENT_ERROR, error="x")
    records = [fine, *[wrong] * 3]
    refuse_failed_trials(records, "at the end")
    assert error_counts(records) == {"desk": [4, 3]}
    line = stopped(ALONE, error_counts(records), 0.7, records)
    says(line, "3 of 4 episodes of desk (75 %) ended in errors", "x", "mend")
    assert stopped(ALONE, error_counts(records), 0.75, records) is None


def test_trials_without_any_reward_are_not_scored():
    played = EpisodeRecord(domain="sums", task_id="a", reward=1.0)
    silent = EpisodeRecord(domain="sums", task_id="b", left_out="reward")
    failed = replace(silent, stop_reason=StopReason.ENVIRONMENT_ERROR)
    assert unscored_trials([played, silent, failed]) == [silent]
    assert scored([played, silent]) == {}
    assert scored([played]) == {"sums": {"a": 1.0}}
    other = replace(played, domain="bank")
    assert scored([played, other, replace(failed, domain="bank")]) == {"sums": {"a": 1.0}}
    refuse_failed_trials([played], "at the end")
    message = refusal(refuse_failed_trials, [played, silent], "at the end")
    says(message, "reward_funcs: 1 of 2 trials at the end have no reward (the first: sums/b)")
    says(message, "every function returned None", "return a number for each held-out task")


def evaluations_on_this_rank():
    accelerator = Accelerator()
    ranks = Ranks(accelerator.process_index, accelerator.num_processes, 30)
    few, mine = evaluate(Watched(), TASKS[:1], 1, seed=1, ranks=ranks)
    rollout = Watched()
    records, trajectories = evaluate(rollout, TASKS, 3, seed=1, ranks=ranks)
    played = {(t.task_id, t.trial) for t in trajectories}
    return records, played, keys_of(rollout), (len(few), len(mine))


def test_two_ranks_share_the_tasks_and_draw_what_one_draws():
    rollout = Watched()
    alone, _ = evaluate(rollout, TASKS, 3, seed=1, ranks=ALONE)
    first, second = play_ranks(evaluations_on_this_rank, 2)
    assert first[0] == second[0] == alone
    # three trials of each of five tasks
    assert (len(first[1]), len(second[1]), first[1] & second[1]) == (9, 6, set())
    assert first[2] | second[2] == keys_of(rollout)
    assert (first[3], second[3]) == ((1, 1), (1, 0)), "a rank may have nothing to play"


# Success


def record(task_id, reward, domain="airline", family="cancel", branch="flex", trial=0):
    return make_trajectory(
        domain=domain, task_id=task_id, family=family, branch=branch, trial=trial, reward=reward
    ).record()


def test_reward_functions_have_means_by_name_without_what_does_not_apply():
    sampled = [record("a", 1.0, trial=trial) for trial in range(3)]
    rewards = [{"exact": 1, "style": None}, {"exact": 0, "style": 0.5}, {"exact": 1, "none": None}]
    for of, by_name in zip(sampled, rewards, strict=True):
        of.rewards = by_name
    found = success(sampled, [record("a", 1.0)], num_trials=3)["airline"]
    assert found["rewards"] == {"exact": pytest.approx(2 / 3), "style": 0.5}
    assert "rewards" not in success([record("a", 1.0)], [record("a", 1.0)], 1)["airline"]


def test_sampled_and_greedy_success_stand_side_by_side():
    sampled = [
        record("a", 1.0, trial=0),
        record("a", 1.0, trial=1),
        record("b", 0.0, branch="flown", trial=0),
        record("b", 1.0, branch="flown", trial=1),
        record("c", 0.0, family="bags", branch="gold", trial=0),
        record("c", 1.0, family="bags", branch="gold", trial=1),
        record("a", 0.0, domain="retail", family="", branch="", trial=0),
        record("a", 0.0, domain="retail", family="", branch="", trial=1),
    ]
    greedy = [
        record("a", 1.0),
        record("b", 0.0, branch="flown"),
        record("c", 0.0, family="bags", branch="gold"),
        record("a", 1.0, domain="retail", family="", branch=""),
    ]
    found = success(sampled, greedy, num_trials=2)
    airline = found["airline"]
    assert list(found) == ["airline", "retail"]
    assert airline["mean"] == pytest.approx(4 / 6)
    assert airline["greedy"] == pytest.approx(1 / 3)
    assert (airline["num_tasks"], airline["num_trials"]) == (3, 2)
    assert airline["tasks"] == {"a": [1.0, 1.0], "b": [0.0, 1.0], "c": [0.0, 1.0]}
    assert airline["pass^k"] == pytest.approx([4 / 6, 1 / 3])
    assert airline["families"] == {
        "bags": {"mean": 0.5, "greedy": 0.0, "num_tasks": 1},
        "cancel": {"mean": 0.75, "greedy": 0.5, "num_tasks": 2},
    }
    assert airline["branches"] == {
        "bags/gold": {"mean": 0.5, "greedy": 0.0, "num_tasks": 1},
        "cancel/flex": {"mean": 1.0, "greedy": 1.0, "num_tasks": 1},
        "cancel/flown": {"mean": 0.5, "greedy": 0.0, "num_tasks": 1},
    }
    assert found["retail"] == {
        "mean": 0.0,
        "greedy": 1.0,
        "num_tasks": 1,
        "num_trials": 2,
        "pass^k": [0.0, 0.0],
        "tasks": {"a": [0.0, 0.0]},
        "greedy_tasks": {"a": 1.0},
        "tools": {},
        "families": {},
        "branches": {},
    }
    without = success(sampled, [], num_trials=2)["airline"]
    assert without.keys() == airline.keys() - {"greedy", "greedy_tasks"}
    assert without["families"]["bags"] == {"mean": 0.5, "num_tasks": 1}


# Environment errors

FAILED = {"stop_reason": StopReason.ENVIRONMENT_ERROR, "error": "KeyError: 'x'"}


def limits(max_error_rate, num_generations=8):
    return RolloutSettings(max_error_rate=max_error_rate, num_generations=num_generations)


@pytest.mark.parametrize(
    ("counts", "limit", "stops"),
    [
        ((16, 8), 0.5, False),
        ((16, 9), 0.5, True),
        ((15, 15), 0.5, False),
        ((16, 16), 1, False),
        ((16, 1), 0, True),
        ((16, 0), 0, False),
        ((0, 0), 0.5, False),
    ],
)
def test_enough_episodes_are_judged_by_their_share(counts, limit, stops):
    with pytest.raises(RunError) if stops else nullcontext():
        stop_on_errors(ALONE, {"retail": counts}, limits(limit))


# What a step adds


def config_of(**rollout):
    data = {"domains": ["desk", "shop"], "environments": {"desk": "a:A", "shop": "a:B"}}
    return Config.model_validate(
        {
            "data": data,
            "rollout": {"num_generations": 2, **rollout},
            "grpo": {"dynamic_sampling": True},
        }
    )


def played_step(rank):
    """Four groups of two: those of the stage, and two in place of dead ones; rank 1 fails."""
    fine = {"num_tool_errors": 2, "reward": 1.0 - rank, "tools": {"find": [3, 1], "book": [1, 1]}}
    fine["new_sequences"] = {"history": 2}
    cut = {**fine, "reward": 0.5, "completion": range(9), "stop_reason": StopReason.MAX_TOKENS}
    ends = [fine, FAILED if rank else cut]
    trajectories = [
        make_trajectory(domain=domain, task_id=f"{rank}-{domain}", **end)
        for domain in ("desk", "shop")
        for end in ends
    ]
    return RolloutBatch(
        samples=[Sample(trajectory=t, index=i, kept=True) for i, t in enumerate(trajectories)],
        num_first=2,
        rounds=[2, 2],
        tasks=[],
        memory=None,
        step=0,
    )


def test_a_stage_tells_how_many_sequences_its_episodes_had_and_why():
    episode = partial(EpisodeRecord, task_id="t")
    told = training_summary(
        [
            [
                episode(domain="desk", new_sequences={"history": 2, "cut": 1}),
                episode(domain="shop"),
            ],
            [episode(domain="desk", new_sequences={"history": 1})],
        ]
    )
    assert told["sequences"] == {"desk": {"episodes": 2, "history": 3, "cut": 1}}


def stopped(ranks, counts, limit, *arguments):
    try:
        stop_on_errors(ranks, counts, config_of(max_error_rate=limit).rollout, *arguments)
    except RuntimeError as error:
        return str(error)
    return None


def step_on_this_rank():
    accelerator = Accelerator()
    ranks = Ranks(accelerator.process_index, accelerator.num_processes, 30)
    batch = played_step(ranks.rank)
    metrics, counts = rollout_metrics(batch, ranks, config_of(), (), 100)
    names = ("rollout/tool_errors", "rollout/environment_errors", "rollout/episodes")
    names += ("train/num_tokens", "rollout/reward_std")
    shown = ("completions/", "tools/", "rollout/new_sequences/")
    trls = [name for name in metrics if name.startswith(shown)]
    return {
        "counts": counts,
        "metrics": {name: metrics[name] for name in (*names, *trls)},
        "stopped": [stopped(ranks, counts, limit, batch.trajectories) for limit in (0.25, 0.2)],
    }


def test_errors_of_all_that_all_ranks_played_are_counted():
    metrics, counts = rollout_metrics(played_step(1), ALONE, config_of())
    assert counts == {"desk": (2, 1), "shop": (2, 1)}
    assert metrics["rollout/environment_errors"] == 2
    results = play_ranks(step_on_this_rank, 2)
    assert isinstance(results[0], dict), results
    assert results[0] == results[1]
    assert results[0] == {
        "counts": {"desk": (4, 1), "shop": (4, 1)},
        # Each of rank 0's four episodes and two of rank 1's had two; four are of the stage's own.
        "metrics": {
            "rollout/tool_errors": 12,
            "rollout/environment_errors": 2,
            "rollout/episodes": 4,
            # 100 before, and of eight episodes 3 of a prompt and 2 sampled, or 9 of the two cut off
            "train/num_tokens": 100 + 8 * 3 + 6 * 2 + 2 * 9,
            "rollout/reward_std": (0.6875 / 3) ** 0.5,  # of 1, 0.5, 0 and 0
            "rollout/new_sequences/history/desk": 6,  # two in each episode but the failed one
            "rollout/new_sequences/history/shop": 6,
            "completions/clipped_ratio": 0.25,
            "completions/mean_length": 3.75,
            "completions/min_length": 2,
            "completions/max_length": 9,
            "completions/mean_terminated_length": 2,
            "completions/min_terminated_length": 2,
            "completions/max_terminated_length": 2,
            "tools/call_frequency": 3.0,  # of the stage's own four episodes, of which three called
            "tools/failure_frequency": 0.5,
            "tools/call_frequency/book": 0.75,
            "tools/call_frequency/find": 2.25,
        },
        "stopped": [
            None,
            "rollout.max_error_rate: 1 of 4 episodes of desk (25 %) ended in errors "
            "since the stage began; the commonest error, first of desk/1-desk: KeyError: 'x'; mend "
            "the environment or the agent, or raise the limit",
        ],
    }
