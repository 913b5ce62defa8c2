"""The benchmark of transfer, as small as it goes: all its runs, and both tables."""

import re
import subprocess
import sys

import pytest

from tests.support import ROOT

pytestmark = pytest.mark.whole_run

TINY = "--max-steps 3 --eval-tasks-per-domain 4 --tasks-per-step 3 --eval-steps 0"


def test_the_benchmark_compares_orders_remedies_and_mixed_training(tmp_path):
    command = [sys.executable, "scripts/proofs/transfer.py", "--quick", "--seeds", "1"]
    command += ["--output-dir", str(tmp_path / "out"), "--json", str(tmp_path / "figures.json")]
    done = subprocess.run(
        [*command, "--", *TINY.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = re.findall(r"(?:^\|.*\n)+", done.stdout, re.MULTILINE)
    names = [line.split("|")[1].strip() for line in first.splitlines()[2:]]
    assert names == [
        "airline, retail, telecom",
        "telecom, retail, airline",
        "airline, retail, telecom; replay 0.1",
        "airline, retail, telecom; replay 0.3",
        "airline, retail, telecom; KL anchor, beta 0.05",
        "airline, retail, telecom; replay 0.1, advantages x 4 / 2 / 1",
        "airline, retail, telecom; LoRA, learning rate 2e-3",
        "mixed",
    ]
    assert [line.split("|")[1].strip() for line in second.splitlines()[2:]] == names[1:]
    number = r"[+-]?\d+\.\d"
    numbers = re.compile(rf"-|(\*\*)?{number} \({number} to {number}\) \[[+-]?\d+\](\*\*)?")
    for line in [*first.splitlines()[2:], *second.splitlines()[2:]]:
        for cell in line.split("|")[3:-1]:
            assert numbers.fullmatch(cell.strip()), cell
    assert "mixed: average_accuracy" in (tmp_path / "figures.json").read_text()
