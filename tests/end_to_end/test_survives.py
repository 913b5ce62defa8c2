"""Whole runs that are interrupted, killed or damaged: they end as undisturbed ones do."""

import gzip
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support import ROOT
from tests.support.installed import environment
from tests.support.messages import says
from tests.support.warm import jsonl, metrics, play, results, wait_for

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
    *("--beta", "0.1", "--reference-per-stage"),
]
LAST = "checkpoints/stage-2-retail/model.safetensors"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cwd = tmp_path_factory.mktemp("undisturbed")
    play(*FLAGS, "--save-total-limit", "9", "--output-dir", "out", cwd=cwd)
    folder = cwd / "out"
    assert [line["step"] for line in metrics(folder)] == [1, 2, 3, 4]
    assert all(line["train/grad_norm"] > 0 for line in metrics(folder))
    return folder


def assert_same(folder: Path, other: Path) -> None:
    """Byte for byte, and with no transcript missing or too many."""
    assert (folder / "metrics.jsonl").read_bytes() == (other / "metrics.jsonl").read_bytes()
    stages = sorted(other.glob("checkpoints/stage-*/model.safetensors"))
    assert stages
    for path in stages:
        assert (folder / path.relative_to(other)).read_bytes() == path.read_bytes()
    assert transcripts(folder) == transcripts(other)
    assert results(folder)["training"] == results(other)["training"]
    steps = [line["step"] for line in jsonl(folder / "timings.jsonl") if line["kind"] == "train"]
    assert steps == [line["step"] for line in metrics(other)]


def transcripts(folder: Path) -> dict[str, list[str]]:
    found = {}
    for path in sorted(folder.glob("trajectories/*/*")):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            found[str(path.relative_to(folder))] = file.readlines()
    return found


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
    assert_same(folder, undisturbed)


def launch(*flags: str, cwd: Path, log: Path) -> subprocess.Popen[bytes]:
    """Two ranks, by `accelerate launch` with the shipped configuration, which may start again."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2"]
    command += ["--config_file", str(CONFIGS / "multi_gpu.yaml"), "--max_restarts", "3"]
    command += [str(ROOT / "pipeline" / "run.py"), *flags]
    own = {**environment(), "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
    with log.open("ab") as file:
        return subprocess.Popen(command, cwd=cwd, env=own, stdout=file, stderr=subprocess.STDOUT)


def test_sigterm_in_the_warm_start_and_later_leaves_no_trace_in_what_auto_ends(
    undisturbed: Path, tmp_path: Path
) -> None:
    """In its first step, and before a stage's evaluation; with checkpoints at stage ends only."""
    flags = [*FLAGS, "--save-steps", "0", "--resume-from-checkpoint", "auto"]
    flags += ["--output-dir", "out"]
    done = play(*flags, cwd=tmp_path, code=75, sigterm_at='"after": "start"')
    assert "interrupted after 0 steps; go on with" in done.stdout
    step = '"kind": "train", "stage": "airline", "step": 2'
    done = play(*flags, cwd=tmp_path, code=75, sigterm_at=step)
    assert "Traceback" not in done.stdout + done.stderr
    assert "go on with --output-dir" in done.stdout.splitlines()[-1]
    play(*flags, cwd=tmp_path)
    assert_same(tmp_path / "out", undisturbed)


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
    assert_same(found[0], undisturbed)


def test_a_launcher_does_not_retry_a_users_mistake(tmp_path: Path) -> None:
    log = tmp_path / "log"
    mistake = ["--num-generations", "1", "--num-gpus", "2"]
    assert launch(*mistake, cwd=tmp_path, log=log).wait(timeout=120) == 1
    assert log.read_text().count("error: --num-generations: got 1") == 1
    assert not list(tmp_path.glob("runs/*"))


def test_damaged_checkpoints_are_passed_over_and_changed_settings_taken_with_override_alone(
    undisturbed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    shutil.copytree(undisturbed, folder)
    damaged = ("stage-2-retail", "step-000004")
    for name in damaged:
        path = folder / "checkpoints" / name / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[len(content) // 3] ^= 4
        path.write_bytes(content)
    before = (folder / "metrics.jsonl").read_bytes()
    resume = ["--output-dir", "out", "--resume-from-checkpoint", "latest"]
    changed = ["--learning-rate", "1e-3", "--temperature", "0.9"]
    done = play(*resume, *changed, cwd=tmp_path, num_ranks=1, code=2)
    assert done.stderr.splitlines()[1:] == [
        "error: resume_from_checkpoint: step-000003 was made with other settings (temperature 1.0 "
        "-> 0.9, learning_rate 0.0004 -> 0.001); resume with its settings, or add --override"
    ]
    assert (folder / "metrics.jsonl").read_bytes() == before
    done = play(*resume, *changed, "--override", "--timeout", "300", cwd=tmp_path)
    said = done.stdout.splitlines()
    why = "model.safetensors is not what was written (its SHA-256 differs)"
    for name in damaged:
        assert f"warning: checkpoint {name} is passed over: {why}" in said
    assert "resuming from step-000003: 3 steps done" in said
    says(done.stdout, "overridden since step-000003: temperature 1.0 -> 0.9, learning_rate 0.0004")
    assert [line["step"] for line in metrics(folder)] == [1, 2, 3, 4]
    config = json.loads((folder / LAST).with_name("state.json").read_text())["config"]
    assert (config["rollout"]["temperature"], config["run"]["timeout"]) == (0.9, 300)
