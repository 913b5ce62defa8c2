"""Searches over settings: what is suggested is a setting, and hopeless trials end early."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from pipeline.config.cli import parse
from scripts import optuna_study
from scripts.proofs.runs import without_report
from tests.support import ROOT
from tests.support.launcher import WarmLauncher
from tests.support.messages import refusal

SWEEP = yaml.safe_load((ROOT / "scripts" / "wandb_sweep.yaml").read_text(encoding="utf-8"))
TINY = [
    *("--domains", "airline", "--tasks-per-domain", "4", "--eval-tasks-per-domain", "1"),
    *("--eval-trials", "1", "--validation-steps", "1", "--validation-tasks", "2"),
    *("--max-steps", "2"),
    *("--warm-start-steps", "1", "--warm-start-batch-size", "2", "--tasks-per-step", "2"),
    *("--num-generations", "2", "--max-turns", "5", "--max-tokens-per-turn", "12"),
]
BETA = ["--search", "beta=0..1", "--"]
# A run that writes a validation a step, whose success is its learning rate, until it is told to
# end, or interrupted from outside where a file says so.
RUN = """
import json, os, signal, sys, time
from pathlib import Path
def value(name):
    return sys.argv[sys.argv.index(name) + 1]
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), os._exit(75)))
rate, folder = float(value("--learning-rate")), Path(value("--output-dir"))
assert value("--resume-from-checkpoint") == "auto"
folder.mkdir(exist_ok=True)
with (folder / "metrics.jsonl").open("a") as file:
    for step in (1, 2):
        found = {"validation/airline/success": rate, "validation/retail/success": rate / 2}
        print(json.dumps({"kind": "validation", "step": step, **found}), file=file, flush=True)
if rate < 0.5 and "--patient" in sys.argv:
    time.sleep(60)
sys.exit(1 if "--broken" in sys.argv else 0)
"""


# W&B


def parameters() -> dict[str, list[Any]]:
    """The values of each parameter, or the ends of its range."""
    return {
        name: given.get("values") or [given["min"], given["max"]]
        for name, given in SWEEP["parameters"].items()
    }


def command(values: dict[str, Any]) -> list[str]:
    """The arguments of the program as W&B's agent makes them of a sweep's command."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    expanded = create_sweep_command_args({"args": {k: {"value": v} for k, v in values.items()}})
    words = create_sweep_command(list(SWEEP["command"]))
    assert words[:3] == ["${env}", "${interpreter}", "${program}"]
    return [w for word in words[3:] for w in (expanded["args"] if word == "${args}" else [word])]


def test_every_value_of_the_wandb_sweep_is_taken_by_the_command_line() -> None:
    assert SWEEP["program"] == "pipeline/run.py"
    assert len(parameters()) == 5
    first = {name: values[0] for name, values in parameters().items()}
    for name, values in parameters().items():
        for value in values:
            assert not isinstance(value, bool)  # a switch takes no value
            config = parse(command({**first, name: value}))
            assert getattr(config.grpo, name.replace("-", "_"), None) == value or (
                getattr(config.rollout, name.replace("-", "_")) == value
            )
    assert config.curriculum.curriculum == "mixed"
    assert config.data.eval_split == "validation"


# Ranges


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--search", "learning_rat=0..1"], "unknown flag --learning-rat; did you mean --learning"),
        (["--search", "beta"], "--search: got 'beta'; write beta=LOW..HIGH[:log] or A,B"),
        (["--search", "beta=0..x"], "--beta: got 'x'"),
        (["--search", "beta=1..0"], "--search: got 'beta=1..0'; give LOW below HIGH, and above 0"),
        (["--search", "beta=0..1:log"], "--search: got 'beta=0..1:log'; give LOW below HIGH, and"),
        (["--search", "replay=0..1.5"], "--replay: got 1.5; Input should be less than 1"),
        ([*BETA, "--max-steps", "9", "--validation-steps", "0"], "validation_steps: got 0 of 9 st"),
        ([*BETA, "--max-steps", "9", "--validation-steps", "10"], "validation_steps: got 10 of 9"),
    ],
)
def test_what_a_run_would_refuse_and_no_range_are_refused(words: list[str], said: str) -> None:
    assert refusal(optuna_study.main, words).startswith(said)


# Trials


class PretendedStudy:
    """A study of the learning rate with runs that only pretend, kept in the folder."""

    def __init__(self, folder: Path, *flags: str, startup: int = 1) -> None:
        self.study = optuna_study.open_study(folder, startup)
        searches = optuna_study.searches_of(["learning_rate=1e-3..1"], [])
        command = [sys.executable, "-c", RUN, *flags]
        self.objective = partial(optuna_study.play, searches, folder, command)

    def run(self, num_trials: int) -> None:
        optuna_study.run_trials(self.study, num_trials, self.objective)


def states(made: Any) -> list[str]:
    return [trial.state.name for trial in made.study.get_trials()]


def test_a_trial_that_does_worse_than_the_median_is_told_to_end_and_saves(tmp_path: Path) -> None:
    made = PretendedStudy(tmp_path, "--patient")
    for rate in (0.8, 0.1, 0.9):
        made.study.enqueue_trial({"learning_rate": rate})
    made.run(3)
    assert states(made) == ["COMPLETE", "PRUNED", "COMPLETE"]
    assert (tmp_path / "trial-0001.log").read_text() == "saved\n"
    assert made.study.best_trial.value == pytest.approx(0.9 * 0.75)
    assert made.study.get_trials()[1].intermediate_values == {1: pytest.approx(0.1 * 0.75)}


def test_a_study_goes_on_in_its_storage_up_to_its_number_of_trials(tmp_path: Path) -> None:
    PretendedStudy(tmp_path).run(2)
    made = PretendedStudy(tmp_path)
    made.run(3)
    made.run(3)
    assert states(made) == ["COMPLETE"] * 3
    assert len({trial.params["learning_rate"] for trial in made.study.get_trials()}) == 3


def test_a_run_that_fails_is_told_and_does_not_end_the_study(tmp_path: Path, capsys: Any) -> None:
    made = PretendedStudy(tmp_path, "--broken")
    made.run(2)
    assert states(made) == ["FAIL", "FAIL"]
    told = capsys.readouterr().out
    assert told.startswith(f"trial-0000: failed, see {tmp_path}/trial-0000.log")


def test_an_interrupted_trial_is_run_again_in_its_folder(tmp_path: Path) -> None:
    made = PretendedStudy(tmp_path, "--patient", startup=9)
    made.study.enqueue_trial({"learning_rate": 0.1})
    with pytest.MonkeyPatch().context() as patched:
        patched.setattr("optuna.trial.Trial.report", interrupt)
        with pytest.raises(KeyboardInterrupt):
            made.run(1)
    assert states(made) == ["FAIL", "WAITING"]
    assert (tmp_path / "trial-0000.log").read_text() == "saved\n"

    again = PretendedStudy(tmp_path)
    again.run(1)
    assert states(again) == ["FAIL", "COMPLETE"]
    trial = again.study.get_trials()[1]
    assert (trial.params, trial.user_attrs["folder"]) == ({"learning_rate": 0.1}, "trial-0000")
    assert not (tmp_path / "trial-0001").exists()


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_study_of_real_runs_finds_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(optuna_study.signal, "signal", lambda *_: None)
    warm = partial(WarmLauncher, end=without_report)
    started = SimpleNamespace(Popen=warm, STDOUT=subprocess.STDOUT)
    monkeypatch.setattr(optuna_study, "subprocess", started)
    words = ["--search", "learning_rate=1e-4..1e-3:log", "num_generations=2,3", "--trials", "1"]
    code = optuna_study.main([*words, "--output-dir", str(tmp_path), "--", *TINY])
    said = capsys.readouterr()
    assert code == 0, said
    first, best = said.out.splitlines()
    assert first.startswith("trial-0000: success 0.")
    assert best.startswith("best: trial-0000, success 0.")
    assert "--learning-rate 0.000" in best and "--num-generations " in best
    lines = (tmp_path / "trial-0000" / "metrics.jsonl").read_text().splitlines()
    found = [record["step"] for record in map(json.loads, lines) if record["kind"] == "validation"]
    assert found[-2:] == [1, 2]
