"""When too many episodes of a domain end in errors of their environment, and what is said then."""

import json

import pytest
from accelerate import Accelerator

from pipeline.config.settings import Config, RolloutSettings
from pipeline.distributed.ranks import Ranks
from pipeline.evaluation.error_rates import ErrorRates, stop_on_errors
from pipeline.grpo.collect import RolloutBatch, Sample
from pipeline.rollout.trajectory import StopReason
from pipeline.tracking.step_metrics import rollout_metrics
from scripts.proofs.grid import make_trajectory
from scripts.proofs.ranks import play_ranks
from tests.support.messages import says

ALONE = Ranks(0, 1, 5)
WHEN = "since the stage began"
FAILED = {"stop_reason": StopReason.ENVIRONMENT_ERROR, "error": "KeyError: 'x'"}


def limits(max_error_rate, num_generations=8):
    return RolloutSettings(max_error_rate=max_error_rate, num_generations=num_generations)


def shares_of(**counts):
    shares = ErrorRates()
    for domain, (episodes, errors) in counts.items():
        shares.add(domain, episodes, errors)
    return shares


def test_a_share_above_the_limit_is_a_problem_that_names_domain_and_counts():
    shares = shares_of(airline=(16, 8), retail=(10, 9))
    shares.add("retail", 6, 5)
    says(
        shares.problem(limits(0.5), WHEN),
        "rollout.max_error_rate",
        "14 of 16 episodes of retail (88 %)",
        "mend the environment",
    )


def test_the_commonest_error_is_named_with_its_first_task():
    shares = shares_of(retail=(4, 3))
    tasks = [
        make_trajectory(domain="retail", task_id="t15", **FAILED),
        make_trajectory(domain="retail", task_id="t16", **{**FAILED, "error": "OSError: down"}),
        make_trajectory(domain="retail", task_id="t17", **FAILED),
        make_trajectory(domain="retail", task_id="t18"),
    ]
    with pytest.raises(RuntimeError) as raised:
        stop_on_errors(ALONE, shares, limits(0.5, 2), tasks, "in the evaluation after start")
    said = "start; the commonest error, first of retail/t15: KeyError: 'x'; mend"
    assert said in str(raised.value)


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
    assert (shares_of(retail=counts).problem(limits(limit), WHEN) is not None) == stops


def test_counts_survive_a_checkpoint_and_go_on():
    shares = shares_of(retail=(8, 4))
    again = ErrorRates()
    again.load_state_dict(json.loads(json.dumps(shares.state_dict())))
    again.add("retail", 8, 5)
    assert again.counts == {"retail": [16, 9]}
    assert shares.counts == {"retail": [8, 4]}
    assert again.problem(limits(0.5), WHEN) is not None


def test_records_of_an_evaluation_are_counted_by_domain():
    played = [make_trajectory(domain="retail", **FAILED), make_trajectory(domain="retail")]
    played.append(make_trajectory(domain="airline"))
    shares = ErrorRates(t.record() for t in played)
    assert shares.counts == {"retail": [2, 1], "airline": [1, 0]}


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
    fine = {"num_tool_errors": 2}
    ends = [fine, FAILED if rank else fine]
    trajectories = [
        make_trajectory(domain=domain, task_id=f"{rank}-{domain}", **end)
        for domain in ("desk", "shop")
        for end in ends
    ]
    return RolloutBatch(
        samples=[Sample(trajectory=t, index=i, kept=True) for i, t in enumerate(trajectories)],
        num_first=2,
        rounds=[2, 2],
    )


def stopped(ranks, shares, limit, *arguments):
    try:
        stop_on_errors(ranks, shares, config_of(max_error_rate=limit).rollout, *arguments)
    except RuntimeError as error:
        return str(error)
    return None


def step_on_this_rank():
    accelerator = Accelerator()
    ranks = Ranks(accelerator.process_index, accelerator.num_processes, 30)
    batch = played_step(ranks.rank)
    metrics, counts = rollout_metrics(batch, ranks, config_of())
    shares = shares_of(**counts)
    names = ("rollout/tool_errors", "rollout/environment_errors", "rollout/episodes")
    return {
        "shares": shares.counts,
        "metrics": {name: metrics[name] for name in names},
        "stopped": [stopped(ranks, shares, limit, batch.trajectories) for limit in (0.25, 0.2)],
    }


def test_errors_of_all_that_all_ranks_played_are_counted():
    metrics, counts = rollout_metrics(played_step(1), ALONE, config_of())
    assert counts == {"desk": (2, 1), "shop": (2, 1)}
    assert metrics["rollout/environment_errors"] == 2
    results = play_ranks(step_on_this_rank, 2)
    assert isinstance(results[0], dict), results
    assert results[0] == results[1]
    assert results[0] == {
        "shares": {"desk": [4, 1], "shop": [4, 1]},
        # Each of rank 0's four episodes and two of rank 1's had two; four are of the stage's own.
        "metrics": {
            "rollout/tool_errors": 12,
            "rollout/environment_errors": 2,
            "rollout/episodes": 4,
        },
        "stopped": [
            None,
            "rollout.max_error_rate: 1 of 4 episodes of desk (25 %) ended in environment errors "
            "since the stage began; the commonest error, first of desk/1-desk: KeyError: 'x'; mend "
            "the environment, or raise the limit",
        ],
    }
