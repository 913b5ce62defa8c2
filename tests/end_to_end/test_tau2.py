"""A run on a checkout of τ²-bench: the real one of TAU2_PATH, or the miniature."""

import json
import os

import pytest

from tests.support import warm
from tests.support.tau2_miniature import write

pytestmark = pytest.mark.whole_run

TAU2_PATH = os.environ.get("TAU2_PATH")
SOURCE = "tau2-bench" if TAU2_PATH else "miniature"
FEW = [
    *("--report-to", "none", "--output-dir", "out", "--max-steps", "3"),
    *("--eval-tasks-per-domain", "2", "--eval-trials", "1"),
]


@pytest.fixture(params=[SOURCE])
def checkout(request, tmp_path):
    return TAU2_PATH or str(write(tmp_path / "checkout"))


def results_of(tmp_path):
    return json.loads((tmp_path / "out" / "results.json").read_text())


def test_the_three_domains_run_in_sequence(checkout, tmp_path):
    few = [*FEW, "--tasks-per-step", "2", "--num-generations", "2", "--max-tokens-per-turn", "8"]
    warm.play("--config", "tau2_three_smoke", "--tau2", checkout, *few, cwd=tmp_path)
    results = results_of(tmp_path)
    assert [*results["about"]] == ["airline", "retail", "telecom"]
    assert {of["reward"] for of in results["about"].values()} == {"verifiable"}
    assert all([*of] == ["nothing", "transfer"] for of in results["baselines"].values())
    assert results["baselines"]["telecom"]["nothing"] == 0
    assert len(results["evaluations"]) == 4
    assert results["transfer"]


@pytest.mark.skipif(SOURCE == "miniature", reason="the expert needs the real phone")
def test_the_recipe_of_telecom_runs(tmp_path):
    few = [*FEW, "--warm-start-steps", "4", "--tasks-per-step", "2"]
    warm.play("--config", "tau2_telecom_tiny", "--tau2", str(TAU2_PATH), *few, cwd=tmp_path)
    assert [e["after"] for e in results_of(tmp_path)["evaluations"]] == [
        *("start", "warm_start", "telecom"),
    ]
