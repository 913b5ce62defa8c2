"""Small runs of the proofs that kill runs and put faults into them.

That a killed run ends as the undisturbed one is proven by test_survives.py, that a killed rank is
named by test_watchdog.py, and that NaN skips a step by training/test_faults.py.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.proofs import chaos, faults

SMALL = [  # groups live whatever the untrained model says, and what it says is short
    *("--domains", "airline", "--tasks-per-step", "2", "--num-generations", "2"),
    *("--warm-start-steps", "0", "--no-dynamic-sampling", "--no-drop-zero-std-groups"),
    *("--entropy-coef", "0.05", "--validation-steps", "0", "--eval-tasks-per-domain", "1"),
    *("--tasks-per-domain", "8", "--max-turns", "2", "--max-tokens-per-turn", "8"),
]
pytestmark = [pytest.mark.proof, pytest.mark.usefixtures("no_stray_processes")]


def run(script: Any, *flags: str, folder: Path) -> dict[str, float]:
    """Run the script in this process, and return its figures."""
    figures = folder / "figures.json"
    assert script.main(["--json", str(figures), *flags]) == 0
    found: dict[str, float] = json.loads(figures.read_text())["figures"]
    return found


def test_a_run_that_is_killed_after_a_checkpoint_goes_on_from_it_and_ends_as_the_undisturbed_one(
    tmp_path: Path,
) -> None:
    flags = ["--kills", "1", "--at-checkpoints", "--seed", "6", "--warm-start-steps", "0"]
    figures = run(chaos, *flags, "--", *SMALL, "--max-steps", "3", folder=tmp_path)
    assert figures["kills survived"] == figures["  one rank"] == 1
    assert figures["checkpoint files damaged"] == 0
    assert figures["resumed inside a stage"] == 1
    assert figures["runs brought to their end"] >= 1


def test_a_rank_that_is_killed_is_named_and_nan_in_what_it_sampled_skips_one_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--phases", "sample", "--kinds", "kill", "NaN", "--ranks", "1", "--slack", "90"]
    flags += ["--warm-start-steps", "0", "--", *SMALL]
    figures = run(faults, *flags, folder=tmp_path)
    assert (figures["faults"], figures["not told rightly"]) == (2, 0)
    said = capsys.readouterr().out
    assert said.count("in sample airline step 1") == 1
    assert said.count("one step skipped, its batch kept") == 1
    assert said.endswith("2 of 2 right\n")
