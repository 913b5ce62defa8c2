"""Whole runs that are interrupted, killed or damaged: they end as undisturbed ones do."""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import chdir
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.run_state import Run, open_run
from scripts.proofs.runs import without_report
from tests.support import ROOT
from tests.support.installed import environment
from tests.support.launcher import warm_ranks
from tests.support.warm import assert_same, jsonl, metrics, play, results, wait_for

pytestmark = pytest.mark.usefixtures("no_stray_processes")
CONFIGS = ROOT / "accelerate_configs"
FLAGS = [
    *("--domains", "airline,retail", "--tasks-per-step", "2", "--num-generations", "2"),
    *("--tasks-per-domain", "4", "--max-turns", "5", "--max-tokens-per-turn", "12"),
    *("--eval-tasks-per-domain", "1", "--eval-trials", "1", "--validation-steps", "2"),
    *("--validation-tasks", "1", "--report-to", "none", "--warm-start-steps", "2"),
    *("--warm-start-batch-size", "2", "--max-steps", "4", "--save-steps", "1", "--num-gpus", "2"),
    # Untrained, it earns nothing: entropy and divergence are what there is to learn from.
    *("--num-iterations", "2", "--no-drop-zero-std-groups", "--entropy-coef", "0.05"),
    *("--beta", "0.1", "--reference-per-stage", "--no-eval-greedy"),
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cwd = tmp_path_factory.mktemp("undisturbed")
    play(*FLAGS, "--save-total-limit", "9", "--output-dir", "out", cwd=cwd)
    folder = cwd / "out"
    assert [line["step"] for line in metrics(folder)] == [1, 2, 3, 4]
    assert all(line["train/grad_norm"] > 0 for line in metrics(folder))
    return folder


def assert_undisturbed(folder: Path, other: Path) -> None:
    """Also with the same parts on each rank, and each step timed once."""
    assert_same(folder, other)
    assert results(folder)["training"] == results(other)["training"]
    steps = [line["step"] for line in jsonl(folder / "timings.jsonl") if line["kind"] == "train"]
    assert steps == [line["step"] for line in metrics(other)]


@pytest.mark.proof
@pytest.mark.parametrize("name", ["warm-start", "step-000001"])
def test_from_every_kind_of_checkpoint_a_resume_ends_bit_by_bit_as_the_undisturbed_run(
    undisturbed: Path, tmp_path: Path, name: str
) -> None:
    """At the end of the warm start; inside a stage and before its evaluation, below as well."""
    folder = tmp_path / "out"
    shutil.copytree(undisturbed, folder)
    done = play("--resume-from-checkpoint", str(folder / "checkpoints" / name), cwd=tmp_path)
    assert f"resuming from {name}: " in done.stdout
    assert_undisturbed(folder, undisturbed)


def launch(*flags: str, cwd: Path, log: Path) -> subprocess.Popen[bytes]:
    """Two ranks, by `accelerate launch` with the shipped configuration, which may start again."""
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2"),
        *("--config_file", str(CONFIGS / "multi_gpu.yaml"), "--max_restarts", "3"),
        *(str(ROOT / "pipeline" / "run.py"), *flags),
    ]
    own = {**environment(), "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
    with log.open("ab") as file:
        return subprocess.Popen(command, cwd=cwd, env=own, stdout=file, stderr=subprocess.STDOUT)


def test_sigterm_in_the_warm_start_and_later_leaves_no_trace_in_what_auto_ends(
    undisturbed: Path, tmp_path: Path
) -> None:
    """In its first step, and before a stage's evaluation; with checkpoints at stage ends only."""
    flags = [
        *(*FLAGS, "--save-steps", "0", "--resume-from-checkpoint", "auto"),
        *("--output-dir", "out"),
    ]
    done = play(*flags, cwd=tmp_path, code=75, sigterm_at='"after": "start"')
    assert "interrupted after 0 steps; go on with" in done.stdout
    step = '"kind": "train", "stage": "airline", "step": 2'
    done = play(*flags, cwd=tmp_path, code=75, sigterm_at=step)
    assert "Traceback" not in done.stdout + done.stderr
    assert "go on with --output-dir" in done.stdout.splitlines()[-1]
    play(*flags, cwd=tmp_path)
    assert_undisturbed(tmp_path / "out", undisturbed)


def die(run: Run, name: str, _: Any) -> None:
    if (name, run.state.step, run.ranks.rank) == ("airline", 2, 1):
        os.kill(os.getpid(), signal.SIGKILL)


def test_ranks_that_a_launcher_starts_again_go_on_in_their_folder(
    undisturbed: Path, tmp_path: Path
) -> None:
    """Without a person and without an output folder."""
    dying = {"open_run": partial(open_run, on_batch=die)}
    for again, hooks, codes in (("0", dying, [1, -9]), ("1", {}, [0, 0])):
        told = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": again}
        with chdir(tmp_path):
            ranks = warm_ranks(2, FLAGS, told, end=without_report, **hooks)
        assert [rank.wait() for rank in ranks] == codes, ranks[0].stderr
    assert "resuming from step-000001: 1 step" in ranks[0].stdout
    (found,) = tmp_path.glob("runs/*")
    assert_undisturbed(found, undisturbed)


@pytest.mark.proof
def test_a_launcher_restarts_a_run_whose_rank_was_killed(undisturbed: Path, tmp_path: Path) -> None:
    """Without a person and without an output folder."""
    log = tmp_path / "log"
    process = launch(*FLAGS, cwd=tmp_path, log=log)
    while not (found := list(tmp_path.glob("runs/*"))):
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)
    wait_for(found[0], '"kind": "train", "stage": "airline", "step": 2', process)
    ranks = [p for p in psutil.Process(process.pid).children() if "run.py" in str(p.cmdline())]
    ranks[1].kill()
    assert process.wait(timeout=240) == 0, log.read_text()
    said = log.read_text()
    assert "resuming from step-00000" in said
    assert said.count("running on CPU: 2 ranks") == 2  # launched, and launched again
    assert list(tmp_path.glob("runs/*")) == found
    assert_undisturbed(found[0], undisturbed)


def test_a_launcher_does_not_retry_a_users_mistake(tmp_path: Path) -> None:
    log = tmp_path / "log"
    mistake = ["--num-generations", "1", "--num-gpus", "2"]
    assert launch(*mistake, cwd=tmp_path, log=log).wait(timeout=120) == 1
    assert log.read_text().count("error: --num-generations: got 1") == 1
    assert not list(tmp_path.glob("runs/*"))
