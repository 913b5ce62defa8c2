"""Two steps with vLLM itself, where it is installed (`scripts/proofs/setup_vllm.sh`)."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.warm import metrics

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
FLAGS = [
    *("--domains", "airline", "--tasks-per-domain", "8", "--tasks-per-step", "2"),
    *("--num-generations", "2", "--max-turns", "5", "--max-tokens-per-turn", "12"),
    *("--eval-tasks-per-domain", "1", "--eval-trials", "1", "--validation-steps", "0"),
    *("--warm-start-steps", "2", "--warm-start-batch-size", "2", "--max-steps", "2"),
    *("--report-to", "none", "--no-drop-zero-std-groups", "--num-gpus", "2"),
    *("--sampler", "vllm", "--vllm-memory", "0.1", "--output-dir", "out"),
    *("--top-p", "0.9", "--temperature", "1.2"),
]


@pytest.mark.parametrize("flags", [[], ["--use-peft"]], ids=["whole", "adapters"])
def test_two_steps_on_two_ranks(flags: list[str], tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "pipeline" / "run.py"), *FLAGS, *flags]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = metrics(tmp_path / "out")
    assert [line["step"] for line in steps] == [1, 2]
    for line in steps:
        assert line["train/grad_norm"] > 0
        assert 0 < line["train/sampling_logp_difference_max"] < 1e-4
        assert line["train/importance_sampling_ratio_mean"] == pytest.approx(1, abs=1e-3)
