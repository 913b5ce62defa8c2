"""Benchmarks and proofs in small: they run, and of their figures holds what no clock decides."""

import json
import subprocess
import sys
from collections import Counter
from itertools import combinations
from math import inf

import pytest

from pipeline.data.tasks import SPLITS
from pipeline.models.tiny import tiny_model
from scripts.proofs import task_sampling
from tests.support import ROOT
from tests.support.helpers import tokenizer

STEP = [*("--tasks-per-step", "2", "--num-generations", "2", "--tasks-per-domain", "8")]
SHORT = ["--max-turns", "2", "--max-tokens-per-turn", "8"]
RUN = [  # groups live whatever the untrained model says
    *(*STEP, *SHORT, "--domains", "airline", "--warm-start-steps", "0", "--validation-steps", "0"),
    *("--no-dynamic-sampling", "--no-drop-zero-std-groups", "--entropy-coef", "0.05"),
    *("--eval-tasks-per-domain", "1"),
]
CELL = "turns-2/G-2/prompt-16"
SIDES = ("ours", "trl")
POSITIVE = (1e-9, inf)
SCRIPTS = {  # arguments, and the least and the greatest value of figures
    "bench/address": (
        ["--model", "model", "--episodes", "8", "--times", "1"],
        {f"8/{way}/requests": (8, 256) for way in ("policy.message", "address")},
    ),
    "bench/gpu": (
        ["--parts", "exchange", "logprobs", "loss", "graph", "update", "sampling", "domains"],
        {
            **{
                "equal_CPU": (1, 1),
                "gap_Python": (0, 0),
                "passes": (1, 10),
                "step_sample_s": POSITIVE,
            },
            **{"logprobs_mean": (0, 1e-5), "loss_gap": (0, 0), "update_tokens_per_s": POSITIVE},
            "sampling_of_bound": (1e-9, 1),
        },
    ),
    "bench/inflight": (
        ["--customers", "6", "--turns", "2", "--median", "0.01"],
        {"6/turned": (0, 0), "6/wall_s": POSITIVE},
    ),
    "bench/sampler": (
        [
            *("--model", "model", "--dtype", "bf16", "--turns", "2", "--group-sizes", "2"),
            *("--prompt-tokens", "16", "--repeats", "1"),
            *("--message-tokens", "3", "--reply-tokens", "2"),
        ],
        {
            **{f"{CELL}/vs_{name}": POSITIVE for name in ("generate", "eager", "batching")},
            **{f"{CELL}/gap_mean": (0, 0.5), f"{CELL}/gap_max": (0, 0.5)},
        },
    ),
    "bench/scaling": (
        [
            *("--ranks", "2", "--repeats", "1", "--block", "1", "--model", "tiny"),
            *("--tasks-per-rank", "2", "--tasks-per-step", "4", "--num-generations", "2"),
            *("--", "--no-drop-zero-std-groups", "--tasks-per-domain", "8", *SHORT),
        ],
        {
            "exchange_bytes_2": (4 * 558_528, 4 * 558_528),
            **{"control_bytes_2": (1, 10_000), "weak_scaling_2": POSITIVE},
        },
    ),
    "bench/vs_trl": (
        [
            *("--ranks", "1", "--steps", "1", "--tasks-per-step", "2", "--num-generations", "2"),
            *("--model", "model", "--parts", "step", "update", "--trl-settings", "2:2"),
        ],
        {
            **{f"{part}_episodes_{side}": (4, 4) for part in ("step", "update") for side in SIDES},
            **{"step_vs_trl": POSITIVE, "update_vs_trl_per_token": POSITIVE},
        },
    ),
    "proofs/chaos": (
        [
            *("--kills", "1", "--at-checkpoints", "--seed", "6", "--warm-start-steps", "0"),
            *("--", *RUN, "--max-steps", "3"),
        ],
        {
            **{"kills survived": (1, 1), "  one rank": (1, 1), "checkpoint files damaged": (0, 0)},
            **{"resumed inside a stage": (1, 1), "runs brought to their end": (1, inf)},
        },
    ),
    "proofs/faults": (
        [
            *("--phases", "sample", "--kinds", "kill", "NaN", "--ranks", "1", "--slack", "90"),
            *("--warm-start-steps", "0", "--", *RUN),
        ],
        {"faults": (2, 2), "not told rightly": (0, 0)},
    ),
    "proofs/forgetting": (
        [
            *("--quick", "--seeds", "1", "--rows", "sequence", "mixed", "rft"),
            *("--output-dir", "out", "--raw", "raw.json", "--figure", "forgetting.png"),
            *("--", *STEP, "--max-turns", "5", "--max-tokens-per-turn", "12", "--max-steps", "3"),
            *("--tasks-per-step", "3", "--eval-tasks-per-domain", "2", "--validation-steps", "0"),
            *("--warm-start-steps", "1", "--warm-start-batch-size", "3"),
        ],
        {"mixed: average_accuracy": (0, 100)},
    ),
}
TIMED = {"bench/inflight"}  # whose exit code a slow machine decides


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "bench/inflight" else pytest.mark.proof) for n in SCRIPTS],
)
@pytest.mark.usefixtures("no_stray_processes")
def test_a_benchmark_or_proof_in_small_has_the_figures_that_it_must_have(name, tmp_path):
    tiny_model(tokenizer(), 0).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    arguments, bounds = SCRIPTS[name]
    command = [sys.executable, str(ROOT / "scripts" / f"{name}.py"), "--json", "found", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert name in TIMED or done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "found").read_text())["figures"]
    for figure, (least, greatest) in bounds.items():
        assert least <= figures[figure] <= greatest, figure


def test_the_levels_of_task_sampling_are_equally_many_and_no_split_has_a_question_of_another():
    tasks = {split: task_sampling.generate_tasks(1, 60, split, "medium") for split in SPLITS}
    questions = [{task.prompt[0]["content"] for task in of} for of in tasks.values()]
    assert all(one.isdisjoint(other) for one, other in combinations(questions, 2))
    for of in tasks.values():
        assert Counter(task.family for task in of) == dict.fromkeys(task_sampling.LEVELS, 10)
