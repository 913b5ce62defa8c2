"""The benchmark of the sampler, small: every method plays the cell, and the figures are written."""

import json
import sys

import pytest

from pipeline.models.tiny import tiny_model
from tests.support import ROOT
from tests.support.helpers import tokenizer
from tests.support.warm_process import WarmRun

pytestmark = pytest.mark.whole_run


def test_a_small_cell_of_a_folder_is_played_and_its_gap_to_training_measured(tmp_path):
    tiny_model(tokenizer(), 0).save_pretrained(tmp_path / "model")
    flags = ["--model", str(tmp_path / "model"), "--dtype", "bf16", "--without-batching"]
    figures = played(tmp_path, flags)["figures"]
    cell = "turns-2/G-2/prompt-16"
    assert figures[f"{cell}/vs_eager"] > 0
    assert 0 < figures[f"{cell}/gap_mean"] < figures[f"{cell}/gap_max"] < 0.5
    assert not any("batching" in name for name in figures)


def test_a_small_cell_is_played_by_every_method(tmp_path):
    found = played(tmp_path, [])
    cell = "turns-2/G-2/prompt-16"
    assert set(found["figures"]) == {
        f"{cell}/tokens_per_s",
        *(f"{cell}/vs_{name}" for name in ("generate", "batching")),
        *("sampling_vs_generate", "sampling_vs_batching"),
    }
    assert all(figure > 0 for figure in found["figures"].values())
    assert found["settings"]["repeats"] == 1
    assert found["machine"]["cores"] >= 1


def played(tmp_path, more):
    """Run the benchmark with a small cell; return what it writes."""
    flags = ["--turns", "2", "--group-sizes", "2", "--prompt-tokens", "16", "--repeats", "1", *more]
    flags += ["--message-tokens", "3", "--reply-tokens", "2"]
    flags += ["--json", str(tmp_path / "found.json")]
    with (tmp_path / "log").open("w") as log:
        command = [sys.executable, ROOT / "scripts" / "bench" / "sampler.py", *flags]
        code = WarmRun(command, stdout=log, stderr=log).wait(timeout=300)
    assert code == 0, (tmp_path / "log").read_text()
    return json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
