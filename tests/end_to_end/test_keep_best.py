"""`--keep-best`: the checkpoint with the best validation is kept, also where a run was killed."""

import json
import shutil

from pipeline.checkpoints.run_folder import read_state
from pipeline.checkpoints.trained import open_checkpoint
from pipeline.config.cli import parse
from pipeline.evaluation.evaluate import mean_success
from pipeline.run_state import open_run
from scripts.proofs.ranks import play_ranks
from tests.support import SMALL_RUN, warm
from tests.support.messages import refusal, says

MODEL = SMALL_RUN / "checkpoints" / "step-000001"
REWARDS = '''
import os
from pathlib import Path

SOLVED = [2, 5, 3, 5, 7, 7, 1]  # of the 8 tasks of the validation after each number of steps

def paid(prompts, completions, trainer_state, **columns):
    """Pay for validations as SOLVED says, and else by length; a file kills the run at step 5."""
    number, step = int(prompts[0].split()[0]), trainer_state.global_step
    if step == 5 and Path("kill").exists():
        os._exit(9)
    return [float(number % 8 < SOLVED[step] if number >= 50 else len(t) % 3) for t in completions]
'''
FLAGS = [
    *("--model", "model", "--domains", "sums", "--tasks", "{sums: sums.jsonl}"),
    *("--eval-tasks", "{sums: held_out.jsonl}"),
    *("--reward-funcs", "rewards:paid", "--warm-start-steps", "0", "--max-steps", "6"),
    *("--tasks-per-step", "1", "--num-generations", "2", "--max-tokens-per-turn", "2"),
    *("--eval-tasks-per-domain", "2", "--eval-trials", "1", "--validation-tasks", "8"),
    *("--validation-steps", "1", "--save-steps", "3", "--save-total-limit", "1"),
    *("--report-to", "none", "--keep-best", "--output-dir", "out", "--num-gpus", "1"),
]


def test_the_best_checkpoint_survives_a_kill_and_later_checkpoints(tmp_path):
    unlike = shutil.ignore_patterns("optimizer.pt", "state.json", "manifest.json")
    shutil.copytree(MODEL, tmp_path / "model", ignore=unlike)
    # Rows without copies are drawn for validations first: 50 to 57.
    numbers = [*range(50), *range(58)]
    for name, prompts in {
        "sums": [f"{number} +" for number in numbers],
        "held_out": ["9 ++", "9 +++"],
    }.items():
        rows = [json.dumps({"prompt": prompt, "answer": ""}) + "\n" for prompt in prompts]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "kill").touch()
    killed = play_ranks(warm._main, 1, FLAGS, tmp_path, "", open_run, False)
    assert killed == ["rank 0 said nothing"]
    folder = tmp_path / "out" / "checkpoints"
    assert {path.name for path in folder.iterdir()} == {"latest", "step-000004"}
    (tmp_path / "kill").unlink()
    again = ["--resume-from-checkpoint", "latest"]
    warm.play(*again, "--output-dir", "out", cwd=tmp_path, num_ranks=1)
    best = {"checkpoint": "step-000004", "step": 4, "success": 0.875}  # and 5, which is later
    names = {"latest", "step-000004", "step-000006", "stage-1-sums"}
    assert {path.name for path in folder.iterdir()} == names
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["best"] == best == read_state(folder / "stage-1-sums")["best"]
    assert len(results["validations"]) == 7
    assert read_state(folder / "step-000004")["step"] == 4
    assert open_checkpoint(tmp_path / "out", "best").path == folder / "step-000004"
    assert open_checkpoint(tmp_path / "out").path == folder / "stage-1-sums"


def test_the_mean_over_domains_needs_every_domain():
    rewards = {"a": {"1": 1.0, "2": 0.0}, "b": {"1": 1.0}}
    assert mean_success(rewards, ["a", "b"], 1.0) == 0.75
    assert mean_success(rewards, ["a"], 1.0) == 0.5
    assert mean_success(rewards, ["a", "b", "c"], 1.0) is None


def test_without_validations_or_a_best_checkpoint_it_is_refused():
    line = refusal(parse, ["--keep-best", "--validation-steps", "0"])
    says(line, "keep_best", "validation_steps more than 0")
    says(refusal(open_checkpoint, SMALL_RUN, "best"), "'best'", "train with --keep-best")
