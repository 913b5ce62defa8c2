"""Small runs of the benchmarks that kill runs and put faults into them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[1] / "scripts" / "bench"
pytestmark = [pytest.mark.whole_run, pytest.mark.usefixtures("no_stray_processes")]


def run(script: str, *flags: str, folder: Path) -> tuple[str, dict[str, float]]:
    figures = folder / "figures.json"
    done = subprocess.run(
        [sys.executable, str(BENCH / script), *flags, "--json", str(figures)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, float] = json.loads(figures.read_text())["figures"]
    return done.stdout, found


def test_a_run_that_is_killed_three_times_ends_as_the_undisturbed_one(tmp_path: Path) -> None:
    _, figures = run("chaos.py", "--kills", "3", "--warm-start-steps", "20", folder=tmp_path)
    assert figures["kills survived"] == 3
    assert figures["runs brought to their end"] >= 1


def test_a_rank_that_hangs_or_is_killed_is_named(tmp_path: Path) -> None:
    flags = ["--phases", "sample", "--kinds", "hang", "kill", "--ranks", "1", "--slack", "90"]
    said, figures = run("faults.py", *flags, "--warm-start-steps", "2", folder=tmp_path)
    assert (figures["faults"], figures["not told rightly"]) == (2, 0)
    assert said.count("in sample airline step 1") == 2
