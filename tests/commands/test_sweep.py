"""Sweeps: a grid becomes runs, runs share a warm start, and what is finished is not run again."""

import json
import subprocess
from functools import partial
from types import SimpleNamespace

import pytest
import yaml

from pipeline.commands import sweep
from pipeline.commands.main import main
from scripts.proofs.runs import without_report
from tests.support.launcher import WarmLauncher

pytestmark = pytest.mark.whole_run

TINY = [
    *("--domains", "airline,retail", "--warm-start-steps", "1", "--warm-start-batch-size", "2"),
    *("--tasks-per-step", "2", "--num-generations", "2", "--tasks-per-domain", "4"),
    *("--eval-tasks-per-domain", "1", "--eval-trials", "1", "--validation-steps", "0"),
    *("--max-turns", "5", "--max-tokens-per-turn", "12", "--report-to", "none"),
]


def test_a_grid_is_every_combination_and_mixed_training():
    grid = sweep.parse_grid(["beta=0,0.05", "replay=0,0.1"])
    assert sweep.expand(grid) == [
        {"beta": "0", "replay": "0"},
        {"beta": "0", "replay": "0.1"},
        {"beta": "0.05", "replay": "0"},
        {"beta": "0.05", "replay": "0.1"},
        sweep.MIXED,
    ]
    own = sweep.parse_grid(["curriculum=sequential,mixed"])
    assert len(sweep.expand(own)) == 2


def test_lists_and_mappings_are_single_values():
    assert sweep.split_values("0,0.1") == ["0", "0.1"]
    assert sweep.split_values("[airline,retail],[retail,airline]") == [
        *("airline,retail", "retail,airline"),
    ]
    assert sweep.split_values("{a: 1, b: 2},{}") == ["{a: 1, b: 2}", "{}"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--grid", "reference_per_stage=ture"], "unexpected argument 'ture'; lists are"),
        (["--grid", "beat=0"], "unknown flag --beat; did you mean --beta?"),
        (["--grid", "beta"], "--grid: got 'beta'; write each setting once, as beta=A,B"),
        (["--grid", "beta=0", "beta=1"], "--grid: got 'beta=1'; write each setting once, as beta="),
        (["--grid", "seed=1,2"], "seed: the sweep gives it to its runs; see its own flags"),
        (["--grid", "replay=0,2"], "--replay: got 2; Input should be less than 1"),
        (["--", "--seed", "3"], "--seed: the sweep gives it to its runs; see its own flags"),
        (["--", "--replay", "9"], "--replay: got 9; Input should be less than 1"),
    ],
)
def test_what_would_run_something_else_is_refused(words, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep.signal, "signal", lambda *_: None)
    assert main(["sweep", *words]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def run_sweep(tmp_path, monkeypatch, capsys):
    """The command in this process, its runs in processes of their own, without reports."""
    warm = partial(WarmLauncher, end=without_report)
    started = SimpleNamespace(Popen=warm, STDOUT=subprocess.STDOUT)
    monkeypatch.setattr(sweep, "subprocess", started)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep.signal, "signal", lambda *_: None)
    monkeypatch.setattr("pipeline.report.plots.pictures.OF_RUN", {})

    def run(*arguments, code=0):
        found = main(["sweep", *arguments])
        said = capsys.readouterr()
        assert found == code, said
        return said

    return run


def test_a_sweep_runs_its_grid_from_one_warm_start_and_names_what_fails(tmp_path, run_sweep):
    # so many tasks are not generated, which a run finds out when it makes them
    grid = ["--output-dir", "sweep", "--grid", "curriculum=mixed"]
    flags = ["--", *TINY, "--max-steps", "2"]
    good, bad = (f"mixed-validation_tasks={number}-seed-1" for number in (2, 100001))
    done = run_sweep(*grid, "validation_tasks=2,100001", *flags, code=1).out
    assert done.splitlines()[:2] == ["warm-starts/seed-1: done", f"{good}: done"]
    assert f"{bad}: failed with exit code 2, see " in done
    model = tmp_path / "sweep" / "warm-starts" / "seed-1" / "checkpoints" / "warm-start"
    assert (model / "model.safetensors").is_file()
    config = yaml.safe_load((tmp_path / "sweep" / good / "config.yaml").read_text())
    assert config["model"]["model"] == str(model)
    assert config["warm_start"]["steps"] == 0
    found = json.loads((tmp_path / "sweep" / good / "results.json").read_text())
    assert found["evaluations"][0]["after"] == "start"

    # What is finished is not run again, nor with other flags.
    grid.append("validation_tasks=2")
    metrics = tmp_path / "sweep" / good / "metrics.jsonl"
    before = metrics.stat().st_mtime_ns
    assert ": done" not in run_sweep(*grid, *flags).out
    assert metrics.stat().st_mtime_ns == before
    other = run_sweep(*grid, *flags, "--replay", "0.2", code=1).out
    assert "seed-1: done before, with other flags; give another --output-dir" in other
    (tmp_path / "sweep" / f"{good}.done.json").write_bytes(b"{\xff")  # damaged
    assert f"{good}: done before, with other flags" in run_sweep(*grid, *flags, code=1).out
