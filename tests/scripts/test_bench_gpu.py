"""The benchmark of a GPU, on a CPU: the parts in one process, and a part that fails."""

import json
import subprocess
import sys

import pytest

from tests.support import ROOT

SCRIPT = ROOT / "scripts" / "bench" / "gpu.py"
PARTS = ("exchange", "logprobs", "loss", "update", "sampling", "memory")


@pytest.mark.proof
def test_the_parts_of_one_process_find_what_must_be(tmp_path):
    command = [sys.executable, SCRIPT, "--parts", *PARTS, "--json", tmp_path / "found.json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [line[42:51].strip() for line in done.stdout.splitlines()[1:-1]]
    assert rows == ["ok"] * 5 + ["skipped"]
    figures = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["figures"]
    assert figures["logprobs_mean"] <= 1e-5 and figures["loss_gap"] == 0.0
    assert figures["update_tokens_per_s"] > 0 and 0 < figures["sampling_of_bound"] < 1
