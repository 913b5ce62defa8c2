"""A warm optimizer step opens few rooms and few files: who reads one need not read the house."""

import json
import subprocess
import sys

import pytest

from tests.support import ROOT

pytestmark = pytest.mark.whole_run

# What a step of commit 5571d6b opened, before there were rooms, by the same script.
FILES_BEFORE = 34


def test_a_warm_step_opens_few_rooms_and_files():
    command = [sys.executable, str(ROOT / "scripts" / "bench" / "step_trace.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"rollout", "chat", "embedded", "grpo", "distributed"} <= set(found["rooms"])
    assert found["num_rooms"] <= 11, found["rooms"]
    assert found["num_files"] <= 0.75 * FILES_BEFORE, list(found["files"])
