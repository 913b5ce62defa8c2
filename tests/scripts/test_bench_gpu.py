"""The benchmark of a GPU, on a CPU: the parts in one process, and a part that fails."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from torch.distributed.fsdp import FSDPModule

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


def test_without_torch_2_13_the_sharded_part_is_skipped(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    from gpu import Bench, rows_of

    monkeypatch.delattr(FSDPModule, "reset_iter_state", raising=False)
    bench = Bench(SimpleNamespace(device="cpu", shape="tiny"), tmp_path)
    ((name, text, is_right),) = rows_of(bench.sharded, "sharded")
    assert (name, is_right) == ("sharded, one rank", None)
    assert text.startswith("needs torch 2.13, here is 2.")


def test_a_part_that_fails_is_one_row(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    from gpu import rows_of

    def broken():
        yield "first", "fine", True
        raise RuntimeError("no\nroute")

    ((name, text, is_right),) = rows_of(broken, "exchange")
    assert (name, is_right) == ("exchange", False)
    assert text.startswith("failed after 0 s: no route")
