"""The small version of scripts/bench/scaling.py: what it counts is so, whatever the clock says."""

import json

import pytest

from tests.support import ROOT

pytestmark = pytest.mark.proof

BENCH = ROOT / "scripts" / "bench"


def test_connected_ranks_do_the_work_of_runs_apart_and_exchange_their_gradients(
    tmp_path, scaling, capsys
):

    small = ["--ranks", "2", "--repeats", "1", "--block", "1", "--model", "tiny"]
    small += ["--tasks-per-rank", "2", "--tasks-per-step", "4"]
    small += ["--num-generations", "2", "--json", str(tmp_path / "figures.json")]
    passed_on = ["--no-drop-zero-std-groups", "--tasks-per-domain", "8", "--max-turns", "5"]
    passed_on += ["--max-tokens-per-turn", "12"]
    assert scaling.main([*small, "--", *passed_on]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert figures["exchange_bytes_2"] == 4 * 558_528
    assert 0 < figures["control_bytes_2"] < 10_000  # small typed tensors, a step
    assert figures["weak_scaling_2"] > 0 and 0 < figures["wait_share_2"] < 1
    assert "2 ranks, weak: episodes/s" in capsys.readouterr().out


@pytest.fixture
def scaling(monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    import scaling

    return scaling
