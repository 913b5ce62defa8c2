"""The curriculum `separate`: experts from one start, then one model of them."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.models.merging import merged
from tests.support.warm import assert_same, metrics, play, results

pytestmark = [pytest.mark.whole_run, pytest.mark.usefixtures("no_stray_processes")]
FLAGS = [
    *("--curriculum", "separate", "--merge-method", "ties", "--merge-density", "0.3"),
    *("--domains", "airline,retail", "--tasks-per-step", "2", "--num-generations", "2"),
    *("--tasks-per-domain", "4", "--max-turns", "5", "--max-tokens-per-turn", "12"),
    *("--eval-tasks-per-domain", "1", "--eval-trials", "1", "--validation-steps", "2"),
    *("--validation-tasks", "1", "--report-to", "none", "--warm-start-steps", "0"),
    *("--max-steps", "4", "--save-steps", "1", "--no-drop-zero-std-groups"),
    *("--entropy-coef", "0.05", "--beta", "0.1", "--reference-per-stage", "--deterministic"),
    *("--output-dir", "out"),
]


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cwd = tmp_path_factory.mktemp("one")
    play(*FLAGS, cwd=cwd, num_ranks=1)
    return cwd / "out"


def test_experts_begin_with_the_weights_of_the_start_and_a_fresh_optimizer(
    on_one_rank: Path,
) -> None:
    lines = metrics(on_one_rank)
    kl = {line["step"]: line["train/kl"] for line in lines}
    assert [line["stage"] for line in lines] == ["airline", "airline", "retail", "retail"]
    assert max(kl[1], kl[3]) < 1e-12 < min(kl[2], kl[4])  # to the start of the stage
    names = ("start", "stage-1-airline", "stage-2-retail", "stage-3-merge")
    folders = [on_one_rank / "checkpoints" / name for name in names]
    steps = [torch.load(folder / "optimizer.pt")["state"][0]["step"] for folder in folders[1:3]]
    assert steps == [2, 2]
    start, *experts, last = [load_file(folder / "model.safetensors") for folder in folders]
    order = [*start]
    of_start, *of_experts = [[of[name] for name in order] for of in (start, *experts)]
    found = dict(zip(order, merged(of_start, of_experts, "ties", None, 0.3), strict=True))
    assert all(torch.equal(last[name], found[name]) for name in order)
    assert [entry["after"] for entry in results(on_one_rank)["evaluations"]] == [
        *("start", "airline", "retail", "merge")
    ]


def test_killed_between_experts_and_around_the_merge_two_ranks_end_as_one(
    on_one_rank: Path, tmp_path: Path
) -> None:
    """The second signal comes before the merge, or after it and before its evaluation."""
    flags = [*FLAGS, "--resume-from-checkpoint", "auto"]
    for after in ("airline", "retail"):
        done = play(*flags, cwd=tmp_path, code=75, sigterm_at=f'"after": "{after}"')
        assert "go on with" in done.stdout
    done = play(*flags, cwd=tmp_path)
    assert "stage merge: ties of airline, retail, from start" in done.stdout
    assert_same(tmp_path / "out", on_one_rank)


@pytest.mark.proof
def test_the_same_experts_can_be_merged_otherwise(on_one_rank: Path, tmp_path: Path) -> None:
    shutil.copytree(on_one_rank, tmp_path / "out")
    at = ["--resume-from-checkpoint", "stage-2-retail", "--override"]
    play(*FLAGS, *at, "--merge-method", "task_arithmetic", cwd=tmp_path, num_ranks=1)
    path = "checkpoints/stage-3-merge/model.safetensors"
    assert (tmp_path / "out" / path).read_bytes() != (on_one_rank / path).read_bytes()
    shutil.rmtree(tmp_path / "out" / "checkpoints" / "stage-1-airline")
    done = play(*FLAGS, *at, cwd=tmp_path, num_ranks=1, code=2)
    why = "stage-1-airline, which the run needs, is damaged (it has no manifest.json); restore it"
    assert why in done.stderr
