"""The small version of scripts/proofs/learning.py: one domain, minutes, and it must rise."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

pytestmark = [pytest.mark.whole_run, pytest.mark.proof]


def test_grpo_raises_held_out_success_beyond_its_interval(tmp_path: Path) -> None:
    small = ["--domains", "retail", "--warm-start-steps", "180", "--max-steps", "20"]
    quick = ["--eval-steps", "0", "--eval-tasks-per-domain", "60", "--report-to", "none"]
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
