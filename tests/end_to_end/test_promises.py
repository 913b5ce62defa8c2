"""The promises of the README on a run of three domains that its first command makes."""

import gzip
import json
import os
import shutil
import signal
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.run_state import Run, open_run
from scripts.proofs.ranks import play_ranks
from tests.support import ROOT, warm
from tests.support.shared_run import FLAGS, SMALL, SharedRun, first_command
from tests.support.warm import assert_same, episodes, jsonl, metrics, play, results


def test_the_first_command_trains_on_two_ranks_and_ends_with_a_report(
    shared_run: SharedRun,
) -> None:
    folder, printed = shared_run
    assert folder.name.startswith("three_domain_tiny-")
    assert "running on CPU: 2 ranks, over gloo\n" in printed
    assert [record["train/grad_norm"] > 0 for record in metrics(folder)] == [True] * 3
    assert (folder / "report.html").stat().st_size > 0


def die(run: Run, name: str, _: Any) -> None:
    if name == "retail" and run.ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_run_whose_rank_is_killed_ends_after_a_resume_as_if_undisturbed(
    shared_run: SharedRun, tmp_path: Path
) -> None:
    shutil.copytree(shared_run.folder, tmp_path / "out")
    again = ["--output-dir", "out", "--report-to", "none", "--no-watch", "--profile", "none"]
    again.append("--resume-from-checkpoint")
    argv = [*again, "warm-start", "--num-gpus", "2"]
    dying = partial(open_run, on_batch=die)
    said = play_ranks(warm._main, 2, argv, tmp_path, "", dying, False)
    assert said == [1, "rank 1 said nothing"]
    assert [record["step"] for record in metrics(tmp_path / "out")] == [1]
    done = play(*again, "latest", cwd=tmp_path)
    assert "resuming from stage-1-airline: 1 step" in done.stdout
    assert_same(tmp_path / "out", shared_run.folder)


def test_one_rank_makes_the_run_of_two(shared_run: SharedRun, tmp_path: Path) -> None:
    play(*FLAGS, "--output-dir", "out", cwd=tmp_path, num_ranks=1)
    assert_same(tmp_path / "out", shared_run.folder)


def test_a_run_with_lora_is_resumed_bit_by_bit(tmp_path: Path) -> None:
    flags = [
        *(*SMALL, "--use-peft", "--domains", "airline", "--warm-start-steps", "0"),
        *("--max-steps", "2", "--tasks-per-step", "2", "--num-generations", "2"),
        *("--eval-tasks-per-domain", "1", "--no-drop-zero-std-groups", "--save-steps", "1"),
        *("--entropy-coef", "0.05", "--save-total-limit", "3"),
    ]
    play(*flags, "--output-dir", "out", cwd=tmp_path, num_ranks=1)
    resumed = tmp_path / "resumed"
    shutil.copytree(tmp_path / "out", resumed)
    again = ["--output-dir", "resumed", "--resume-from-checkpoint", "step-000001"]
    play(*again, cwd=tmp_path, num_ranks=1)
    names = [
        f"checkpoints/{name}/adapter_model.safetensors"
        for name in ("step-000001", "stage-1-airline")
    ]
    first, last = ((tmp_path / "out" / name).read_bytes() for name in names)
    assert first != last == (resumed / names[1]).read_bytes()
    assert jsonl(resumed / "metrics.jsonl") == jsonl(tmp_path / "out" / "metrics.jsonl")


REWARDS = """
def characters(completions, answer, **columns):
    return [len(text) + 100.0 * len(right) for text, right in zip(completions, answer)]
"""


def test_an_own_dataset_trains_with_its_reward(tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    shutil.copy(ROOT / "examples" / "one_digit_sums.jsonl", tmp_path / "sums.jsonl")
    flags = [
        *(*SMALL, "--domains", "sums", "--tasks", "{sums: sums.jsonl}", "--max-steps", "1"),
        *("--reward-funcs", "my_rewards:characters", "--warm-start-steps", "0"),
        *("--tasks-per-step", "2", "--num-generations", "4", "--eval-tasks-per-domain", "2"),
    ]
    play(*flags, "--output-dir", "out", cwd=tmp_path)
    answers = {row["prompt"]: row["answer"] for row in jsonl(tmp_path / "sums.jsonl")}
    played = episodes(tmp_path / "out")
    assert len(played) == 2 * 4 + 2 * 2  # a step, and two evaluations
    for row in played:
        prompt, said = (row["messages"][at]["content"] for at in (0, -1))
        assert row["reward"] == len(said) + 100 * len(answers[prompt])
    (step,) = metrics(tmp_path / "out")
    trained = [row["reward"] for row in played if row["advantage"] is not None]
    assert step["reward/sums"] == pytest.approx(sum(trained) / len(trained))
    assert step["train/grad_norm"] > 0


def test_a_mistake_is_one_line(shared_run: SharedRun, tmp_path: Path) -> None:
    """Whether the command finds it, or a rank."""
    command = [*first_command(), "--num-generations", "1", "--output-dir", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=shared_run.checkout, stderr=subprocess.PIPE, text=True)
    called, line = done.stderr.splitlines()
    assert called.startswith("run_ddp.sh: pipeline/run.py ")
    assert done.returncode == 2 and line.startswith("error: --num-generations: got 1; ")
    mistake = ["--tasks", "{airline: nowhere.jsonl}", "--output-dir", "out"]
    done = play(*FLAGS, *mistake, cwd=tmp_path, num_ranks=1, code=2)
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("running on")]
    assert line.startswith("error: ") and "nowhere.jsonl" in line
    assert not (tmp_path / "out").exists()


# What the run leaves


def test_a_run_leaves_everything_that_its_folder_promises(shared_run: SharedRun) -> None:
    folder = shared_run.folder
    for name in (
        *("config.yaml", "curriculum.json", "metrics.jsonl", "timings.jsonl", "results.json"),
        *("report.html", "report.md", "learning_curves.png", "stage_performance.png"),
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


def test_results_hold_every_evaluation_in_order(shared_run: SharedRun) -> None:
    found = results(shared_run.folder)
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


def test_each_rank_writes_the_transcripts_of_its_own_episodes(shared_run: SharedRun) -> None:
    rows = []
    for rank in (0, 1):
        path = shared_run.folder / "trajectories" / "airline" / f"step-000001.rank-{rank}.jsonl.gz"
        with gzip.open(path, "rt") as file:
            rows += [json.loads(line) for line in file]
    assert len(rows) == 16
    assert len({(row["task_id"], row["trial"]) for row in rows}) == 16
    assert rows[0]["messages"][0]["role"] == "system"


def test_a_tracker_gets_the_episodes_of_all_ranks(shared_run: SharedRun) -> None:
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    events = EventAccumulator(str(shared_run.folder / "tensorboard"))
    events.Reload()
    found = events.Tensors("completions/text_summary")
    texts = {of.step: of.tensor_proto.string_val[0].decode() for of in found}
    assert {step: text.count("**stage ") for step, text in texts.items()} == {1: 16, 2: 16, 3: 16}


def test_timings_tell_where_the_seconds_of_a_step_went(shared_run: SharedRun) -> None:
    timings = [r for r in jsonl(shared_run.folder / "timings.jsonl") if r["kind"] == "train"]
    for timing, record in zip(timings, metrics(shared_run.folder), strict=True):
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
    shared_run: SharedRun,
) -> None:
    folder, printed = shared_run
    paths = sorted((folder / "profile").iterdir())
    assert [path.name for path in paths] == [f"step-000002.rank-{r}.json.gz" for r in (0, 1)]
    for path in paths:
        with gzip.open(path, "rt") as file:
            names = {event["name"] for event in json.load(file)["traceEvents"]}
        assert {"sample", "update", "wait", "aten::mm"} <= names
    assert f"profile of step 2: runs/{folder.name}/profile/step-000002.rank-0.json.gz" in printed
    assert "profiler_start" not in printed


def test_a_run_says_where_its_ranks_are_and_how_to_watch_it(shared_run: SharedRun) -> None:
    folder, printed = shared_run
    posted = json.loads((folder / "ranks.json").read_text())
    assert [rank["rank"] for rank in posted["ranks"]] == [0, 1]
    assert (posted["is_over"], posted["why"]) == (True, "")
    command = shared_run.checkout / ".venv" / "bin" / "three-domain-grpo"  # for another terminal
    watch = f"{command} watch {folder.resolve()}"
    assert f"run folder: runs/{folder.name} (watch it: {watch})\n" in printed


def test_the_terminal_shows_progress_a_table_and_the_folder(shared_run: SharedRun) -> None:
    folder, printed = shared_run
    (line,) = [line for line in printed.splitlines() if "telecom 1/1  reward " in line]
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    last = [line for line in lines if line["kind"] == "train"][-1]
    of_the_step = [name for name in ("airline", "retail", "telecom") if f"reward/{name}" in last]
    assert [name for name in line.split() if name in ("airline", "retail")] == of_the_step[:-1]
    assert "success, sampled" in printed
    assert printed.count("running on CPU: 2 ranks") == 1
    assert f"report, plots and checkpoints: runs/{folder.name}\n" in printed
