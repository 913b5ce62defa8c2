"""The examples of own domains: short, trained by their own commands, refused if not shown."""

import json
import time
from collections.abc import Sequence
from contextlib import chdir, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.run import main
from scripts.proofs import own_domains
from scripts.proofs.own_domains import EXAMPLES, commands_of
from scripts.proofs.runs import without_report
from tests.support.launcher import RUN, WarmLauncher
from tests.support.warm import episodes

SHORT = [
    *("--warm-start-steps", "4", "--warm-start-batch-size", "4", "--warm-start-warmup-steps"),
    *("1", "--max-steps", "2", "--tasks-per-step", "2", "--num-generations", "3"),
    *("--tasks-per-domain", "8", "--eval-tasks-per-domain", "2", "--eval-trials", "1"),
    *("--validation-steps", "0", "--kl-probe-tasks", "0", "--max-turns", "5"),
    *("--max-tokens-per-turn", "24"),
]
OWN = {"bank_http": "bank", "library_desk": "library", "trl_environment": "tickets"}


@pytest.mark.parametrize(
    "examples",
    [
        [EXAMPLES[0]],
        pytest.param([*EXAMPLES[1:]], marks=pytest.mark.proof),  # checked below
    ],
    ids=["service", "others"],
)
def test_examples_are_trained_by_the_commands_of_their_docstrings(
    examples: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run begins in a process that has imported what it needs; a service in one of its own."""
    cold = own_domains.started

    def started(words: Sequence[str], folder: Path, log: Path) -> Any:
        if words[1] != RUN:
            process = cold(words, folder, log)
            with suppress(psutil.Error):  # it has ended, and is no service
                while not psutil.Process(process.pid).net_connections():
                    time.sleep(0.05)
            return process
        with log.open("ab") as file, chdir(folder):
            return WarmLauncher(words, stdout=file, end=without_report)

    monkeypatch.setattr(own_domains, "started", started)
    flags = ["--seeds", "1", "--examples", *examples, "--output-dir", str(tmp_path)]
    code = own_domains.main([*flags, "--", *SHORT, "--num-gpus", "1"])
    said = capsys.readouterr()
    assert code == 1, said  # after so few steps no bound is kept
    lines = said.out.splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:-2]] == examples
    assert lines[-1].startswith("least success ")
    for example in examples:
        folder = tmp_path / f"{example}-seed-1"
        own = OWN.get(example, "sums")
        results = json.loads((folder / "results.json").read_text())
        expected = ["sums"] if own == "sums" else ["airline", own]
        assert list(results["evaluations"][-1]["success"]) == expected
        played = [row for row in episodes(folder) if row["domain"] == own]
        assert len(played) > 6
        assert {row["error"] for row in played} == {""}  # each reward is the server's answer


@pytest.mark.parametrize("example", EXAMPLES[1:])
def test_an_examples_commands_lead_to_a_run_that_would_begin(
    example: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Tasks, tools, rewards and demonstrations are tried, and nothing is trained."""
    monkeypatch.chdir(tmp_path)
    *before, run = commands_of(example)
    with own_domains.prepared(before, tmp_path):
        code = main([*run[2:], *SHORT, "--check", "--output-dir", str(tmp_path / "out")])
    said = capfd.readouterr()
    assert code == 0, said
    assert f"  {OWN.get(example, 'sums')}: 8 to train" in said.out
