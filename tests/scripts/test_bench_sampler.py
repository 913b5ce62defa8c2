"""The benchmark of the sampler, small: every method plays the cell, and the figures are written."""

import json
import subprocess
import sys

import pytest

from pipeline.models.tiny import tiny_model
from tests.support import ROOT
from tests.support.helpers import tokenizer

pytestmark = pytest.mark.proof


def test_a_small_cell_is_played_by_every_method_and_its_gap_to_training_measured(tmp_path):
    tiny_model(tokenizer(), 0).save_pretrained(tmp_path / "model")
    command = [
        *(sys.executable, ROOT / "scripts" / "bench" / "sampler.py"),
        *("--model", tmp_path / "model", "--dtype", "bf16", "--json", tmp_path / "found.json"),
        *("--turns", "2", "--group-sizes", "2", "--prompt-tokens", "16", "--repeats", "1"),
        *("--message-tokens", "3", "--reply-tokens", "2"),
    ]
    subprocess.run(command, check=True)
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    figures = found["figures"]
    cell = "turns-2/G-2/prompt-16"
    methods = ("generate", "eager", "batching")
    assert set(figures) == {
        *(f"{cell}/tokens_per_s", f"{cell}/gap_mean", f"{cell}/gap_max"),
        *(f"{cell}/vs_{name}" for name in methods),
        *(f"sampling_vs_{name}" for name in methods),
    }
    assert all(figure > 0 for figure in figures.values())
    assert figures[f"{cell}/gap_mean"] < figures[f"{cell}/gap_max"] < 0.5
    assert found["settings"]["repeats"] == 1
    assert found["machine"]["cores"] >= 1
