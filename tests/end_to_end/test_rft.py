"""Rejection fine-tuning: what it trains on, and that ranks and a kill do not change its result."""

import gzip
import json
import shutil
from pathlib import Path

from pipeline.config.settings import Config
from pipeline.report.run_files import transcripts_in
from pipeline.rollout.trajectory import StopReason, Trajectory
from pipeline.training.rft import (
    examples_of,
    kept_of,
    round_in_words,
    schedule_of_round,
    summary_of,
)
from pipeline.training.sft import IGNORED, Schedule
from tests.support import SMALL_RUN
from tests.support.messages import says
from tests.support.warm import jsonl, play

MODEL = SMALL_RUN / "checkpoints" / "step-000001"


def episode(task: str, trial: int, sampled: list[int], reward: float = 1.0, left_out: str = ""):
    """An episode whose prompt is 1, 2 and whose last token is a reply's."""
    return Trajectory(
        domain="desk",
        task_id=task,
        trial=trial,
        reward=reward,
        left_out=left_out,
        stop_reason=StopReason.COMPLETED,
        prompt_ids=[1, 2],
        completion_ids=[*sampled, 9],
        loss_mask=[*[True] * len(sampled), False],
        logprobs=[0.0] * (len(sampled) + 1),
    )


PLAYED = [
    *(episode("b", 0, [3]), episode("b", 1, [3]), episode("b", 2, [4]), episode("b", 3, [5], 0.0)),
    *(episode("b", 4, [5], left_out="reply"), *(episode("b", 5 + i, [6 + i]) for i in range(3))),
    *(episode("a", i, [20 + i], reward=float(i == 7)) for i in range(8)),
]


def test_different_successes_are_kept_at_most_four_of_a_task():
    kept = kept_of(PLAYED, 8, 1.0)
    assert [one[:3] for one in kept] == [
        *(("desk", "b", 0), ("desk", "b", 2), ("desk", "b", 5), ("desk", "b", 6)),
        ("desk", "a", 7),
    ]
    assert kept[-1].example == {
        "input_ids": [1, 2, 27, 9],
        "labels": [IGNORED, IGNORED, 27, IGNORED],
    }


def test_a_round_has_whole_batches_of_about_two_passes_in_an_order_without_ranks():
    kept = kept_of(PLAYED, 8, 1.0)
    examples = examples_of(kept, 4, 1, "rft-1")
    assert examples == examples_of(kept[::-1], 4, 1, "rft-1") != examples_of(kept, 4, 2, "rft-1")
    assert len(examples) == 12  # two passes of 5, in batches of 4
    first = {tuple(example["input_ids"]) for example in examples[:5]}
    assert len(first) == 5 and first == {tuple(e["input_ids"]) for e in examples[5:10]}
    given = Config.model_validate(
        {"warm_start": {"batch_size": 4}, "rft": {"rft_learning_rate": 2e-4}}
    )
    schedule = schedule_of_round(given, len(examples))
    assert schedule == Schedule(3, batch_size=4, learning_rate=2e-4, num_warmup_steps=0)


def test_a_round_without_a_success_says_so_in_one_line():
    failed = [episode("a", i, [i], reward=0.0) for i in range(8)]
    entry = summary_of(2, failed, kept_of(failed, 8, 1.0), 1.0)
    assert entry["domains"] == {"desk": {"episodes": 8, "successes": 0, "kept": 0}}
    says(round_in_words(entry), "warning: rft round 2: none of 8 episodes", "or raise rft_tasks")
    entry = summary_of(1, PLAYED, kept_of(PLAYED, 8, 1.0), 1.0)
    assert (entry["successes"], entry["episodes"]) == (7, 16)


REWARDS = """
def paid(prompts, completions, **columns):
    return [float(len(text) % 3) for text in completions]
"""
FLAGS = [
    *("--model", "model", "--domains", "sums", "--tasks", "{sums: sums.jsonl}"),
    *("--reward-funcs", "rewards:paid", "--warm-start-steps", "0", "--warm-start-batch-size", "4"),
    *("--rft-rounds", "2", "--rft-tasks", "3", "--rft-learning-rate", "1e-3", "--max-steps", "2"),
    *("--tasks-per-step", "2", "--num-generations", "4", "--max-tokens-per-turn", "3"),
    *("--eval-tasks-per-domain", "2", "--eval-trials", "1", "--validation-steps", "0"),
    *("--beta", "0.1", "--deterministic", "--report-to", "none", "--output-dir", "out"),
]


SUMS = ["sums", "evaluation-sums"]


def test_ranks_and_a_kill_between_rounds_change_nothing(tmp_path: Path) -> None:
    """With a KL reference, which a resumed run reads from the checkpoint of the last round."""
    for name in ("whole", "killed"):
        unlike = shutil.ignore_patterns("optimizer.pt", "state.json", "manifest.json")
        shutil.copytree(MODEL, tmp_path / name / "model", ignore=unlike)
        rows = (json.dumps({"prompt": f"{n} +"}) + "\n" for n in range(20))
        (tmp_path / name / "sums.jsonl").write_text("".join(rows))
        (tmp_path / name / "rewards.py").write_text(REWARDS)
    play(*FLAGS, cwd=tmp_path / "whole")
    first = play(*FLAGS, cwd=tmp_path / "killed", num_ranks=1, code=75, sigterm_at='"rft/round": 1')
    assert "rft round 1: " in first.stdout and "rft round 2: " not in first.stdout
    again = ["--resume-from-checkpoint", "latest", "--output-dir", "out"]
    second = play(*again, cwd=tmp_path / "killed", num_ranks=1)
    assert "rft round 2: " in second.stdout and "rft round 1: " not in second.stdout
    whole, killed = tmp_path / "whole" / "out", tmp_path / "killed" / "out"
    assert jsonl(whole / "metrics.jsonl") == jsonl(killed / "metrics.jsonl")
    model = Path("checkpoints", "rft", "model.safetensors")
    assert (whole / model).read_bytes() == (killed / model).read_bytes()
    results = json.loads((killed / "results.json").read_text())
    assert [entry["kept"] > 0 for entry in results["rft"]] == [True, True]
    assert [entry["after"] for entry in results["evaluations"]] == ["start", "rft", "sums"]
    assert results["start"]["after"] == "rft"
    stages = list(dict.fromkeys(name for name, _ in transcripts_in(killed)))
    assert stages == ["evaluation-start", "rft-1", "rft-2", "evaluation-rft", *SUMS]
    held_out = {task for e in results["evaluations"] for task in e["success"]["sums"]["tasks"]}
    played = []
    for number in (1, 2):
        (file,) = (killed / "trajectories").glob(f"rft-{number}/*")
        with gzip.open(file, "rt") as lines:
            played.append({json.loads(line)["task_id"] for line in lines})
    assert [len(tasks) for tasks in played] == [3, 3]
    assert not played[0] & played[1] and not held_out & (played[0] | played[1])
