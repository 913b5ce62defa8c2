"""Small versions of scripts/proofs/learning.py: success must rise, in seconds and in minutes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench.common import results_of
from scripts.proofs.learning import figures
from scripts.proofs.runs import play_run
from tests.support import ROOT
from tests.support.coin import COIN, warm_started

pytestmark = pytest.mark.whole_run


def test_grpo_raises_success_on_held_out_tasks_of_one_decision(tmp_path: Path) -> None:
    """Heads or tails, where heads is paid: from saying either to beyond the change's interval."""
    (tmp_path / "start").mkdir()
    flags = [*COIN, *warm_started(tmp_path / "start"), "--max-tokens-per-turn", "8"]
    flags = [flag.replace("CoinEnvironment", "HeadsEnvironment") for flag in flags]
    flags += ["--num-generations", "8", "--max-steps", "8", "--eval-tasks-per-domain", "60"]
    play_run(2, flags, tmp_path / "out")
    found = figures(results_of(tmp_path / "out"))
    assert found["change"] > found["change_interval"] > 0
    assert found["after"] > found["before"] + 0.1


@pytest.mark.proof
def test_grpo_raises_held_out_success_beyond_its_interval(tmp_path: Path) -> None:
    small = ["--domains", "retail", "--warm-start-steps", "180", "--max-steps", "20"]
    quick = ["--validation-steps", "0", "--eval-tasks-per-domain", "60", "--report-to", "none"]
    script = str(ROOT / "scripts" / "proofs" / "learning.py")
    own = ["--seeds", "1", "--recipes", "mixed", "--split", "validation"]
    places = ["--output-dir", str(tmp_path), "--json", str(tmp_path / "figures.json")]
    done = subprocess.run(
        [sys.executable, script, *own, *places, "--", *small, *quick],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]["mixed-seed-1"]
    assert figures["change"] > figures["change_interval"] > 0
    assert figures["after"] > figures["before"] + 0.1
    assert "mixed-seed-1" in done.stdout
