"""Whole runs: real processes, real ranks, a tiny model."""

import gzip
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.common.errors import RunError
from pipeline.config.settings import Config
from pipeline.distributed.ranks import Ranks
from pipeline.models import memory
from pipeline.models.memory import Memory
from pipeline.run_state import Run, open_run
from pipeline.training.collect import RolloutBatch, Sample, give_advantages
from scripts.proofs.grid import make_trajectory
from tests.support.warm import play

pytestmark = pytest.mark.whole_run


def metrics(folder: Path, kind: str = "train") -> list[dict[str, Any]]:
    return [record for record in jsonl(folder / "metrics.jsonl") if record["kind"] == kind]


def jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def results(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return read


SMALL = [
    *("--max-tokens-per-turn", "12", "--max-turns", "5", "--tasks-per-domain", "8"),
    *("--eval-trials", "1", "--validation-steps", "0", "--report-to", "none"),
]
TRAIN = [
    *(*SMALL, "--warm-start-steps", "2", "--warm-start-batch-size", "4", "--max-steps", "3"),
    *("--tasks-per-step", "4", "--num-generations", "4", "--eval-tasks-per-domain", "2"),
    *("--no-drop-zero-std-groups", "--entropy-coef", "0.05"),  # almost untrained, it earns nothing
]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Three domains in sequence on two ranks, a step each."""
    cwd = tmp_path_factory.mktemp("two-ranks")
    arguments = ["--save-steps", "1", "--output-dir", "out", "--profile", "2", "--watch"]
    tables = ["--report-to", "tensorboard", "--log-completions-steps", "1"]
    done = play(*TRAIN, *arguments, *tables, cwd=cwd, with_report=True)
    assert all(record["train/grad_norm"] > 0 for record in metrics(cwd / "out"))
    return cwd / "out", done.stdout + done.stderr


def test_a_run_leaves_everything_that_its_folder_promises(two_ranks: tuple[Path, str]) -> None:
    folder, _ = two_ranks
    for name in (
        *("config.yaml", "curriculum.json", "metrics.jsonl", "timings.jsonl", "results.json"),
        *("report.md", "learning_curves.png", "stage_performance.png"),
    ):
        assert (folder / name).stat().st_size > 0, name
    assert yaml.safe_load((folder / "config.yaml").read_text())["run"]["num_gpus"] == 2
    meanings = json.loads((folder / "results.json").read_text())["reward_parts"]
    assert meanings["telecom"]["database"] == "the database at the end is the expected one"
    stages = json.loads((folder / "curriculum.json").read_text())["stages"]
    assert [stage["name"] for stage in stages] == ["airline", "retail", "telecom"]
    assert stages[2]["domains"] == {"airline": 1, "telecom": 3}
    assert [record["step"] for record in metrics(folder)] == [1, 2, 3]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        *("latest", "stage-1-airline", "stage-2-retail", "stage-3-telecom"),
        *("step-000002", "step-000003", "warm-start"),
    ]


def test_advantages_of_a_domain_are_scaled() -> None:
    config = Config.model_validate(
        {
            "grpo": {"domain_advantage_scale": {"retail": 3}, "scale_rewards": "none"},
            "rollout": {"num_generations": 2},
        }
    )
    domains = ["airline", "airline", "retail", "retail", "retail", "retail"]
    rewards = [1.0, 0.0, 1.0, 0.0, 1.0, 1.0]
    played = [make_trajectory(domain=d, reward=r) for d, r in zip(domains, rewards, strict=True)]
    samples = [Sample(trajectory=t, index=i, kept=True) for i, t in enumerate(played)]
    batch = RolloutBatch(samples=samples, num_first=6, rounds=[3])
    give_advantages(batch, Ranks(0, 1, 5), config, 0)
    assert [sample.advantage for sample in samples] == [0.5, -0.5, 1.5, -1.5, 0.0, 0.0]
    assert [sample.kept for sample in samples] == [True, True, True, True, False, False]


def test_results_hold_every_evaluation_in_order(two_ranks: tuple[Path, str]) -> None:
    found = results(two_ranks[0])
    order = [(evaluation["after"], evaluation["step"]) for evaluation in found["evaluations"]]
    assert order == [("start", 0), ("warm_start", 0), ("airline", 1), ("retail", 2), ("telecom", 3)]
    for evaluation in found["evaluations"]:
        assert list(evaluation["success"]) == ["airline", "retail", "telecom"]
        for success in evaluation["success"].values():
            assert 0 <= success["mean"] <= 1
            assert 0 <= success["greedy"] <= 1
            assert (success["num_tasks"], success["num_trials"]) == (2, 1)
    assert found["baselines"]["telecom"]["nothing"] == 0.0
    assert found["split"] == "test"
    assert found["training"]["retail"]["episodes_per_rank"] == [8, 8]


def test_each_rank_writes_the_transcripts_of_its_own_episodes(two_ranks: tuple[Path, str]) -> None:
    rows = []
    for rank in (0, 1):
        path = two_ranks[0] / "trajectories" / "airline" / f"step-000001.rank-{rank}.jsonl.gz"
        with gzip.open(path, "rt") as file:
            rows += [json.loads(line) for line in file]
    assert len(rows) == 16
    assert len({(row["task_id"], row["trial"]) for row in rows}) == 16
    assert rows[0]["messages"][0]["role"] == "system"


def test_a_tracker_gets_the_episodes_of_all_ranks(two_ranks: tuple[Path, str]) -> None:
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    events = EventAccumulator(str(two_ranks[0] / "tensorboard"))
    events.Reload()
    found = events.Tensors("completions/text_summary")
    texts = {of.step: of.tensor_proto.string_val[0].decode() for of in found}
    assert {step: text.count("**stage ") for step, text in texts.items()} == {1: 16, 2: 16, 3: 16}


def test_timings_tell_where_the_seconds_of_a_step_went(two_ranks: tuple[Path, str]) -> None:
    timings = [r for r in jsonl(two_ranks[0] / "timings.jsonl") if r["kind"] == "train"]
    for timing, record in zip(timings, metrics(two_ranks[0]), strict=True):
        of = {name.removeprefix("perf/"): timing[name] for name in timing if "perf/" in name}
        assert 0 < of["environment_s"] < of["sample_s"] < of["step_s"]
        assert of["sample_s"] + of["update_s"] + of["wait_s"] <= of["step_s"]
        assert of["tokens_per_s"] * of["step_s"] == pytest.approx(record["rollout/sampled_tokens"])
        assert of["episodes_per_s"] * of["step_s"] == pytest.approx(16)
        assert 0 <= of["sample_padding_share"] < 1
        trained = record["train/trained_episodes"] > 0
        assert (of["update_tokens_per_s"] > 0) == trained
        assert of["exchanged_bytes"] > 0 and of["peak_memory_mb"] > 100


def test_a_profiled_step_leaves_a_trace_of_each_rank_with_its_phases(
    two_ranks: tuple[Path, str],
) -> None:
    folder, printed = two_ranks
    paths = sorted((folder / "profile").iterdir())
    assert [path.name for path in paths] == [f"step-000002.rank-{r}.json.gz" for r in (0, 1)]
    for path in paths:
        with gzip.open(path, "rt") as file:
            names = {event["name"] for event in json.load(file)["traceEvents"]}
        assert {"sample", "update", "wait", "aten::mm"} <= names
    assert "profile of step 2: out/profile/step-000002.rank-0.json.gz" in printed
    assert "profiler_start" not in printed


def test_a_run_says_where_its_ranks_are_and_how_to_watch_it(two_ranks: tuple[Path, str]) -> None:
    folder, printed = two_ranks
    posted = json.loads((folder / "ranks.json").read_text())
    assert [rank["rank"] for rank in posted["ranks"]] == [0, 1]
    assert (posted["is_over"], posted["why"]) == (True, "")
    watch = f"python -m pipeline watch {folder.resolve()}"  # for another terminal
    assert f"run folder: out (watch it: {watch})\n" in printed


def test_the_terminal_shows_progress_a_table_and_the_folder(two_ranks: tuple[Path, str]) -> None:
    folder, printed = two_ranks
    (line,) = [line for line in printed.splitlines() if "telecom 1/1  reward " in line]
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    last = [line for line in lines if line["kind"] == "train"][-1]
    of_the_step = [name for name in ("airline", "retail", "telecom") if f"reward/{name}" in last]
    assert [name for name in line.split() if name in ("airline", "retail")] == of_the_step[:-1]
    assert "success, sampled" in printed
    assert printed.count("running on CPU: 2 ranks") == 1
    assert "report, plots and checkpoints: out" in printed


DESK = """
from dataclasses import replace
from pathlib import Path

from pipeline.environments.embedded import airline


class DeskEnvironment(airline.AirlineEnvironment):
    def reset(self, **row):
        if row["id"].startswith("train-") and Path("out").exists() > Path("mended").exists():
            Path("broken").touch()
        if row["id"].startswith("test-medium-0-00001") and Path("broken").exists():
            raise ConnectionError("no answer")
        return super().reset(**row)


def generate_tasks(*arguments):
    tasks = airline.generate_tasks(*arguments)
    return [replace(task, domain="desk", id=task.id + "\\x1b[2J") for task in tasks]
"""


def test_an_evaluation_that_cannot_be_scored_stops_the_run_and_costs_nothing(
    tmp_path: Path,
) -> None:
    (tmp_path / "my_desk.py").write_text(DESK)
    own = ["--domains", "desk", "--environments", "{desk: 'my_desk:DeskEnvironment'}"]
    own += ["--warm-start-steps", "0", "--max-steps", "2", "--save-steps", "0"]
    own += ["--tasks-per-step", "2", "--num-generations", "2"]
    own += ["--eval-tasks-per-domain", "4", "--output-dir", "out"]
    done = play(*SMALL, *own, cwd=tmp_path, code=1)
    assert (
        "2 of 8 trials in the evaluation after desk ended in environment errors in each "
        "attempt (the first: desk/test-medium-0-00001\\x1b[2J), so nothing is scored; the "
        "commonest error, first of desk/test-medium-0-00001\\x1b[2J: ConnectionError: no answer "
        '(my_desk.py, line 13: raise ConnectionError("no answer"))' in done.stderr
    )
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stderr + done.stdout
    found = results(tmp_path / "out")["evaluations"]
    assert [evaluation["after"] for evaluation in found] == ["start"]
    (tmp_path / "mended").touch()
    (tmp_path / "broken").unlink()
    resume = ["--resume-from-checkpoint", "latest", "--output-dir", "out"]
    done = play(*resume, cwd=tmp_path)
    assert "resuming from step-000002: 2 steps done" in done.stdout  # none is played again
    found = results(tmp_path / "out")["evaluations"]
    assert [evaluation["after"] for evaluation in found] == ["start", "desk"]
    assert [record["step"] for record in metrics(tmp_path / "out")] == [1, 2]


def note_and_fail(run: Run, name: str, _: Any) -> None:
    """Note what was played; fail where the file `fails_at` says, as a killed run would."""
    with Path("played").open("a") as file:
        file.write(f"{name}\n")
    if name == Path("fails_at").read_text():
        raise RunError("killed")


@pytest.mark.parametrize("num_supervised", [0, 1])
def test_no_evaluation_that_was_finished_is_played_again(
    tmp_path: Path, num_supervised: int
) -> None:
    """And a stage of two steps does not begin anew because its evaluation failed."""
    own = ["--warm-start-steps", str(num_supervised), "--warm-start-batch-size", "1"]
    own += ["--max-steps", "2", "--tasks-per-step", "2", "--num-generations", "2"]
    own += ["--domains", "airline", "--eval-tasks-per-domain", "2", "--output-dir", "out"]
    own += ["--resume-from-checkpoint", "auto"]
    supervised = ["evaluation-warm_start"] * num_supervised
    first = [*supervised, "airline", "evaluation-airline"]
    played = []
    for fails_at in (*first, "nowhere"):
        (tmp_path / "fails_at").write_text(fails_at)
        (tmp_path / "played").unlink(missing_ok=True)
        play(
            *(*SMALL, *own),
            cwd=tmp_path,
            num_ranks=1,
            code=fails_at != "nowhere",
            open_run=partial(open_run, on_batch=note_and_fail),
        )
        played.append((tmp_path / "played").read_text().split())
    expected = [
        ["airline"],
        ["airline", "airline", "evaluation-airline"],
        ["evaluation-airline"],
    ]
    if num_supervised:
        expected = [["evaluation-warm_start"], ["evaluation-warm_start", "airline"], *expected[1:]]
    expected[0] = ["evaluation-start", *expected[0]]
    assert played == expected


def test_what_is_not_wanted_is_not_evaluated_and_a_resume_does_not_make_up_for_it(
    tmp_path: Path,
) -> None:
    short = ["--domains", "airline", "--warm-start-steps", "0", "--max-steps", "1"]
    short += ["--tasks-per-step", "2", "--num-generations", "2", "--eval-tasks-per-domain", "2"]
    left_out = ["--no-eval-on-start", "--no-eval-greedy", "--output-dir", "out"]
    play(*SMALL, *short, *left_out, cwd=tmp_path)
    (entry,) = results(tmp_path / "out")["evaluations"]
    assert (entry["after"], "greedy" in entry["success"]["airline"]) == ("airline", False)
    again = ["--resume-from-checkpoint", "latest", "--output-dir", "out", "--override"]
    play(*again, "--eval-on-start", cwd=tmp_path)
    assert [e["after"] for e in results(tmp_path / "out")["evaluations"]] == ["airline"]


def crowded(config: Config, *arguments: Any) -> Run:
    """Open a run on a machine whose memory is less than all episodes at once need."""
    need = Memory(config.changed("rollout", max_concurrent_episodes=4)).need()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "memory_of_a_rank", lambda _: need)
        run = open_run(config, *arguments)
    print(f"at once: {run.learner.sampling.max_episodes}")
    return run


def test_a_run_plays_as_many_episodes_at_once_as_fit(tmp_path: Path) -> None:
    """With the same draws, as test_rollout.py shows."""
    arguments = [*("--no-grpo", "--domains", "airline", "--eval-tasks-per-domain", "6")]
    arguments += ["--max-turns", "2", "--max-tokens-per-turn", "8", "--report-to", "none"]
    arguments += ["--output-dir", "few"]
    done = play(*arguments, cwd=tmp_path, num_ranks=1, open_run=crowded)
    assert "note: 4 of 12 episodes at once, as many as fit into memory\n" in done.stdout
    assert "at once: 4\n" in done.stdout
    saved = yaml.safe_load((tmp_path / "few" / "config.yaml").read_text())
    assert saved["rollout"]["max_concurrent_episodes"] == 512
