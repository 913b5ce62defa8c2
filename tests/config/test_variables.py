"""What the environment of a process says besides changes nothing of a run, or is refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeline.before_grpo import before_training
from pipeline.config import environment_variables
from pipeline.config.cli import parse
from pipeline.run import main
from pipeline.train import train
from scripts.proofs.ranks import play_ranks
from tests.support import ROOT
from tests.support.helpers import start_unwatched
from tests.support.messages import refusal

FLAGS = [
    *("--domains", "airline", "--tasks-per-step", "2", "--num-generations", "2", "--report-to"),
    *("none", "--max-turns", "5", "--max-tokens-per-turn", "12", "--eval-tasks-per-domain", "2"),
    *(
        "--eval-trials",
        "1",
        "--validation-steps",
        "0",
        "--warm-start-steps",
        "1",
        "--max-steps",
        "1",
    ),
    *("--no-drop-zero-std-groups", "--entropy-coef", "0.05", "--tasks-per-domain", "8"),
    *("--warm-start-batch-size", "2"),
]


PINNED = {
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1",
}


def metrics_of(folder: Path, variables: dict[str, str]) -> str:
    """Of a run with a warm start and one update, with these variables set."""
    os.environ |= variables
    if "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE" in variables:  # torch is loaded, and reads it no more
        torch.set_float32_matmul_precision("high")
    run = start_unwatched(parse([*FLAGS, "--output-dir", str(folder)]))
    before_training(run)
    train(run)
    assert torch.get_float32_matmul_precision() == "highest"
    return (folder / "metrics.jsonl").read_text()


def test_what_is_pinned_changes_no_number_of_a_run(tmp_path: Path) -> None:
    (plain,) = play_ranks(metrics_of, 1, tmp_path / "plain", {})
    assert '"train/grad_norm": ' in plain and '"warm_start/loss": ' in plain, plain
    assert play_ranks(metrics_of, 1, tmp_path / "set", PINNED) == [plain]


@pytest.mark.parametrize("name", environment_variables.REFUSED)
def test_what_cannot_be_pinned_is_refused_by_name(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(name, "inductor" if "DYNAMO" in name else "true")
    assert main(["--check"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {name}: got '")
    assert "in the environment, which would change what is computed; unset it" in line
    for harmless in environment_variables.REFUSED[name]:
        monkeypatch.setenv(name, harmless.upper())
        environment_variables.refuse()


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("OMP_NUM_THREADS", "abc", "give a number of threads"),
        ("OMP_NUM_THREADS", "0", "give a number of threads"),
        ("OMP_NUM_THREADS", "4,2", "give a number of threads"),
        ("MKL_NUM_THREADS", "-1", "give a number of threads"),
        ("WANDB_MODE", "banana", "give one of online, offline, "),
    ],
)
def test_what_a_library_could_not_read_is_refused_in_one_line(
    name: str, value: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    message = refusal(environment_variables.refuse)
    assert message.startswith(f"{name}: got {value!r} in the environment; {remedy}")


@pytest.mark.parametrize(
    ("name", "value", "library", "reason"),
    [
        ("TORCH_LOGS", "banana", "torch", "Invalid log settings: banana, "),
        ("HF_HUB_ETAG_TIMEOUT", "abc", "huggingface_hub.constants", "invalid literal for int()"),
    ],
)
def test_what_a_library_cannot_read_as_it_is_imported_is_one_line(
    name: str, value: str, library: str, reason: str
) -> None:
    program = "from pipeline.run import exit_code_of; "
    program += f"exit(exit_code_of(lambda: __import__({library!r}), []))"
    environment = {**os.environ, name: value}
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"error: {name}: got {value!r} in the environment, which cannot be read")
    assert reason in line and line.endswith("; mend it, or unset it")
