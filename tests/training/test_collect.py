"""Zero-std groups are replaced by others of their domain, the same ones on any number of ranks."""

import shutil
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline.config.settings import Config
from pipeline.data.curriculum import Stage
from pipeline.data.rng import stream_key
from pipeline.data.task_memory import TaskMemory
from pipeline.data.tasks import Task
from pipeline.distributed.connect import connect
from pipeline.distributed.ranks import Ranks
from pipeline.environments.faults import Outage
from pipeline.report.progress import StageProgress
from pipeline.rollout.trajectory import Trajectory
from pipeline.training.collect import RolloutBatch, collect_rollouts, give_advantages
from pipeline.training.open_groups import OpenGroups
from pipeline.training.step_metrics import rollout_metrics, tell_missed
from scripts.proofs.control import permute_rewards
from scripts.proofs.ranks import play_ranks
from scripts.proofs.runs import play_run
from tests.support.coin import COIN, warm_started
from tests.support.helpers import (
    Desk,
    ScriptedSampler,
    call,
    chat,
    make_task,
    rollout_of,
    say,
)
from tests.support.warm import metrics, results

pytestmark = pytest.mark.whole_run

# A step whose episodes are scripted. Two siblings each; what they earn stands in the task's id.

STAGE = Stage(
    index=0,
    name="all",
    own=("left", "right"),
    difficulty="medium",
    groups={"left": 4, "right": 3},
    num_steps=9,
)
SAID = {"dead": ("no", "no"), "won": ("done", "done"), "live": ("done", "no")}


def tasks_of(domain: str, kinds: str) -> list[Task]:
    names = {"d": "dead", "w": "won", "l": "live"}
    return [make_task(f"{names[k]}-{i}", domain=domain) for i, k in enumerate(kinds)]


SOURCES = {"left": tasks_of("left", "dlwdldlddwdlwddl"), "right": tasks_of("right", "dwdld")}


def run_of(ranks: Ranks, sources: Mapping[str, list[Task]] = SOURCES, **grpo: Any) -> Any:
    """What collecting rollouts takes, with a policy that says what the tasks ask for."""
    settings = {"dynamic_sampling": True, **grpo}
    config = Config.model_validate(
        {
            "grpo": settings,
            "rollout": {"num_generations": 2},
            "data": {
                "domains": list(sources),
                "environments": dict.fromkeys(sources, "tests.support.helpers:Desk"),
            },
        }
    )
    scripts = {
        stream_key(1, "rollout", "all", step, *task.key, k): [say(text)]
        for step in range(9)
        for tasks in sources.values()
        for task in tasks
        for k, text in enumerate(SAID[task.id.partition("-")[0]])
    }
    environments: dict[str, type[Any]] = dict.fromkeys(sources, Desk)
    rollout = rollout_of(ScriptedSampler(scripts), chat(), environments, config.rollout)
    groups = OpenGroups(rollout, ranks, config)
    return SimpleNamespace(config=config, ranks=ranks, sources=sources, groups=groups)


def collect(run: Any, stage: Stage = STAGE, step: int = 0) -> RolloutBatch:
    run.groups.begin_step(step)
    return collect_rollouts(run.groups, run.ranks, run.config, stage, run.sources)


def kept_of(played: RolloutBatch) -> list[bool]:
    return [sample.kept for sample in played.samples]


def metrics_of(run: Any, batch: RolloutBatch) -> dict[str, float]:
    metrics, counts = rollout_metrics(batch, run.ranks, run.config)
    assert sum(episodes for episodes, _ in counts.values()) >= len(batch.trajectories)
    assert sum(errors for _, errors in counts.values()) == metrics["rollout/environment_errors"]
    return metrics


def alone(**settings: Any) -> Any:
    return run_of(Ranks(0, 1, 60), **settings)


def groups_of(played: RolloutBatch) -> list[tuple[str, str]]:
    return [(t.domain, t.task_id) for t in played.trajectories[::2]]


def live(group: tuple[str, str]) -> bool:
    return group[1].startswith("live")


def test_dead_groups_are_replaced_by_tasks_of_their_domain_that_the_step_has_not_had():
    played = collect(alone())
    assert [f"{domain} {name}" for domain, name in groups_of(played)] == [
        *("left won-2", "left live-11", "left dead-5", "left dead-8"),
        *("right dead-0", "right live-3", "right dead-2"),
        *("left dead-0", "left live-1", "left dead-7", "right dead-4", "right won-1"),
        *("left won-12", "left dead-3"),  # the right has had its five tasks
        *("left live-6", "left live-15"),
    ]
    assert played.rounds == [7, 5, 2, 2]
    assert kept_of(played) == [live(group) for group in groups_of(played) for _ in range(2)]


def test_no_more_rounds_are_played_than_allowed_and_none_when_all_groups_live():
    assert len(collect(alone()).rounds) == 4
    assert len(collect(alone(max_resample_times=1)).rounds) == 2
    lively = {"left": tasks_of("left", "llll"), "right": tasks_of("right", "lll")}
    assert collect(alone(sources=lively)).rounds == [7]
    exhausted = {"left": tasks_of("left", "dddd"), "right": tasks_of("right", "ddw")}
    played = collect(alone(sources=exhausted))
    assert (played.rounds, any(kept_of(played))) == ([7], False)


def test_rewards_and_dead_groups_are_logged_of_the_stages_own_groups_by_domain(capsys):
    run, plain = alone(), alone(dynamic_sampling=False)
    played = collect(run)
    found = metrics_of(run, played)
    assert {k: v for k, v in found.items() if k in EXPECTED} == pytest.approx(EXPECTED)
    StageProgress("all", 1, is_main=True).step(found)
    assert "reward left 0.38 right 0.17  replaced 9 groups" in capsys.readouterr().err
    without = metrics_of(plain, collect(plain))
    assert 0 < without.pop("train/num_tokens") < found["train/num_tokens"]  # all that were played
    assert without == {key: found[key] for key in without}


EXPECTED = {  # of the first seven groups above
    "reward/mean": 4 / 14,
    "reward/left": 3 / 8,
    "reward/right": 1 / 6,
    "rollout/episodes": 14,
    "rollout/frac_reward_zero_std": 5 / 7,
    "rollout/frac_reward_zero_std/left": 3 / 4,
    "rollout/all_failed": 4 / 7,
    "rollout/all_failed/left": 2 / 4,
    "rollout/all_failed/right": 2 / 3,
    "rollout/all_solved": 1 / 7,
    "rollout/all_solved/left": 1 / 4,
    "rollout/all_solved/right": 0,
    "rollout/rounds": 3,
    "rollout/replaced_groups": 9,
    "rollout/extra_episodes": 18,
}


# What environments fail at


class Office(Desk):
    """Pays what was said; a tool and some words break it, one of them through no fault of whose."""

    def jam(self) -> str:
        """Jam the printer for good, where there is one."""
        threading.Event().wait(9)
        return "jammed"

    def get_reward(self) -> float:
        if self.final_message == "outage":
            raise Outage("the ledger is not there")
        return float(self.final_message)  # a word that is no number breaks it


def office(*said: str) -> tuple[list[Trajectory], list[float], list[bool], dict[str, float]]:
    """One group that says this: its episodes, advantages, whether they train, metrics."""
    sources = {"left": [make_task("live-0", domain="left")]}
    run = alone(sources=sources, dynamic_sampling=False)
    limits = run.config.rollout.model_copy(
        update={"num_generations": len(said), "call_timeout": 0.2}
    )
    run.config = run.config.model_copy(update={"rollout": limits})
    keys = [stream_key(1, "rollout", "all", 0, "left", "live-0", k) for k in range(len(said))]
    scripts = {
        key: [call("jam") if text == "jam" else say(text)]
        for key, text in zip(keys, said, strict=True)
    }
    sampler: Any = ScriptedSampler(scripts)
    run.rollout = rollout_of(sampler, chat(), {"left": Office}, limits)
    run.groups = OpenGroups(run.rollout, run.ranks, run.config)
    played = collect(run, replace(STAGE, own=("left",), groups={"left": 1}))
    give_advantages(played, run.ranks, run.config)
    advantages = [sample.advantage for sample in played.samples]
    return played.trajectories, advantages, kept_of(played), metrics_of(run, played)


@pytest.mark.parametrize(
    ("how", "others"),
    [
        ("jam", ("1", "0", "1")),
        ("boom", ("-3.5", "7.2", "0")),
        ("nan", ("-3.5", "-1", "-2")),
    ],
)
def test_a_policy_that_breaks_its_environment_gains_nothing_by_it(how, others):
    _, others_alone, _, _ = office(*others)
    trajectories, advantages, kept, metrics = office(*others, how)
    worst = min(trajectories[:3], key=lambda t: t.reward).reward
    assert trajectories[3].reward == min(0.0, worst)
    assert kept == [True] * 4 and advantages[3] == min(advantages) < -0.5
    assert metrics["rollout/environment_errors"] == 1 and metrics["rollout/left_out"] == 0

    trajectories, advantages, kept, metrics = office(*others, "outage")
    assert advantages == [*others_alone, 0.0] and kept == [True] * 3 + [False]
    assert trajectories[3].left_out == "outage"
    assert metrics["rollout/environment_errors"] == metrics["rollout/left_out"] == 1
    assert metrics["rollout/left_out/outage/left"] == 1
    assert (
        metrics["reward/mean"]
        == metrics["reward/left"]
        == pytest.approx(sum(map(float, others)) / 3)
    )


def test_breaking_it_is_no_signal_where_nothing_was_worse_and_an_outage_never_is():
    for said, dead, few in (
        (("-1", "-1", "boom"), 1, 0),  # as bad as the others, not better
        (("0", "0", "boom"), 1, 0),
        (("1", "1", "boom"), 0, 0),
        (("1", "1", "outage"), 1, 0),
        (("1", "outage", "outage"), 1, 1),
        (("outage", "outage", "outage"), 1, 1),
    ):
        _, advantages, kept, metrics = office(*said)
        assert any(kept) == any(advantages) == (not dead), said
        assert (
            metrics["rollout/frac_reward_zero_std"] == dead
            and metrics["rollout/too_few_left"] == few
        )
    assert "reward/mean" not in metrics and "reward/left" not in metrics


# The same on any number of ranks


def on_this_rank() -> dict[str, Any]:
    _, ranks = connect(Config())
    run = run_of(ranks)
    played = collect(run)
    permute_rewards(played, ranks, run.config.run.seed, step=0)
    kept = kept_of(played)
    settings = run.config.grpo.model_copy(update={"scale_rewards": "batch"})
    config = run.config.model_copy(update={"grpo": settings})
    give_advantages(played, run.ranks, config)
    groups = [group for group in groups_of(played) for _ in range(2)]
    episodes = zip(groups, kept, played.samples, strict=True)
    return {
        "episodes": {
            s.index: (group, k, s.trajectory.reward, s.advantage) for group, k, s in episodes
        },
        "rounds": played.rounds,
        "metrics": metrics_of(run, played),
    }


def whole(results: list[Any]) -> dict[str, Any]:
    """What the ranks found, put together; what all must know is the same on each."""
    for result in results:
        assert isinstance(result, dict), result
        assert {**result, "episodes": 0} == {**results[0], "episodes": 0}
    episodes = {place: told for result in results for place, told in result["episodes"].items()}
    assert len(episodes) == sum(len(result["episodes"]) for result in results)
    return {**results[0], "episodes": dict(sorted(episodes.items()))}


def test_tasks_live_groups_and_permuted_rewards_are_the_same_on_one_and_three_ranks():
    one, three = (whole(play_ranks(on_this_rank, n)) for n in (1, 3))
    assert one == three
    assert list(one["episodes"]) == list(range(2 * sum(one["rounds"])))
    episodes = one["episodes"].values()
    std = (2.5 / 9) ** 0.5  # of five ones and five zeros
    assert max(advantage for *_, advantage in episodes) == pytest.approx(0.5 / (std + 1e-4))
    assert {group for group, kept, *_ in episodes if kept} == {
        group for group, *_ in episodes if live(group)
    }


def steps_with_a_memory(dynamic_sampling: bool) -> dict[str, Any]:
    """Nine steps whose tasks are drawn by what the steps before them earned."""
    _, ranks = connect(Config())
    sources = {
        domain: [replace(task, family=task.id.partition("-")[0]) for task in tasks]
        for domain, tasks in SOURCES.items()
    }
    run = run_of(ranks, sources, dynamic_sampling=dynamic_sampling)
    memory, drawn = TaskMemory(), list[tuple[str, str]]()
    for step in range(9):
        run.groups.begin_step(step)
        batch = collect_rollouts(run.groups, ranks, run.config, STAGE, sources, memory=memory)
        drawn += [task.key for task in batch.tasks]
    return {"drawn": drawn, "memory": vars(memory), "metrics": memory.metrics(batch.tasks)}


@pytest.mark.parametrize("dynamic_sampling", [False, True])
def test_tasks_drawn_by_outcomes_are_the_same_on_one_two_and_three_ranks(dynamic_sampling):
    (one,), *others = (play_ranks(steps_with_a_memory, n, dynamic_sampling) for n in (1, 2, 3))
    assert all(result == one for results in others for result in results)
    of_left = [key for key in one["drawn"] if key[0] == "left"]
    assert sum(map(live, of_left)) > 0.5 * len(of_left)  # as 6 of 16 tasks are
    outcomes = {"live": "m", "dead": "f", "won": "s"}
    for name, of in one["memory"]["tasks"].items():
        assert {*of} == {outcomes[name.partition("/")[2].partition("-")[0]]}
    assert len({*one["drawn"]}) == sum(
        one["metrics"][f"tasks/{name}"] for name in ("always_solved", "mixed", "never_solved")
    )


# Whole runs: a tiny model that has learnt to say one of two words, and a coin that likes one


FLAGS = [*COIN, "--save-steps", "2", "--max-tokens-per-turn", "8", "--deterministic"]


def start_of(folder: Path) -> Any:
    return results(folder)["start"]


def test_a_run_is_the_same_bit_by_bit_on_one_and_two_ranks_and_after_a_resume(
    tmp_path: Path,
) -> None:
    """From a model that says one word as often as the other, a run that replaces groups."""
    folder = tmp_path / "one"
    (tmp_path / "start").mkdir()
    flags = [
        *(*FLAGS, *warm_started(tmp_path / "start"), "--max-steps", "3", "--dynamic-sampling"),
        *("--scale-rewards", "batch", "--start-report-tasks", "3"),
    ]
    one = play_run(1, flags, folder)
    two = play_run(2, flags, tmp_path / "two")
    assert one.episodes == two.episodes
    assert np.array_equal(one.parameters, two.parameters)
    assert start_of(folder) == start_of(tmp_path / "two")
    assert start_of(folder)["domains"]["coin"]["groups"] == 3 + 4
    assert sum(line["rollout/replaced_groups"] for line in metrics(folder)) > 4
    assert sum(line["rollout/left_out"] for line in metrics(folder)) > 4
    for line in metrics(folder):
        assert (
            (1 - line["rollout/frac_reward_zero_std"]) * 12 < line["train/trained_episodes"] <= 12
        )

    shutil.copytree(folder, tmp_path / "cut")
    again = play_run(2, [*flags, "--resume-from-checkpoint", "step-000002"], tmp_path / "cut")
    assert np.array_equal(again.parameters, one.parameters)
    assert metrics(tmp_path / "cut") == metrics(folder)
    assert start_of(tmp_path / "cut") == start_of(folder)


def test_draws_by_outcomes_are_the_same_bit_by_bit_on_one_and_two_ranks_and_after_a_resume(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "one"
    (tmp_path / "start").mkdir()
    start = warm_started(tmp_path / "start")
    flags = [*FLAGS, *start, "--max-steps", "6", "--task-sampling", "signal"]
    flags += ["--tasks-per-domain", "8"]
    one = play_run(1, flags, folder)
    two = play_run(2, flags, tmp_path / "two")
    assert one.episodes == two.episodes
    assert np.array_equal(one.parameters, two.parameters)
    assert metrics(tmp_path / "two") == metrics(folder)
    uniform = play_run(1, [*flags, "--task-sampling", "uniform"], tmp_path / "uniform")
    assert {name[:4] for name in uniform.episodes} != {name[:4] for name in one.episodes}
    last = metrics(folder)[-1]
    played = {task for stage, _, _, task, _ in one.episodes if stage == "coin"}
    outcomes = [last[f"tasks/{of}"] for of in ("always_solved", "mixed", "never_solved")]
    assert sum(outcomes) == len(played) and last["draws/coin/"] == 1
    assert not any(
        name.startswith(("tasks/", "draws/")) for name in metrics(tmp_path / "uniform")[-1]
    )
    shutil.copytree(folder, tmp_path / "cut")
    again = play_run(2, [*flags, "--resume-from-checkpoint", "step-000004"], tmp_path / "cut")
    assert np.array_equal(again.parameters, one.parameters)
    assert metrics(tmp_path / "cut") == metrics(folder)


def test_a_run_that_goes_on_after_a_profiled_step_says_so_unless_there_is_a_trace(tmp_path):
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "step-000003.rank-0.json.gz").touch()
    said = []
    tell_missed([2, 3, 8], 7, tmp_path, said.append)
    assert said == ["note: profile: step 2 is over, and has no trace; name later steps"]
