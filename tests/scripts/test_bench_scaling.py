"""The small version of scripts/bench/scaling.py: what it counts is so, whatever the clock says."""

import json

import pytest

from tests.support import ROOT
from tests.support.warm_process import warm_subprocess

pytestmark = pytest.mark.whole_run

BENCH = ROOT / "scripts" / "bench"


def test_connected_ranks_do_the_work_of_runs_apart_and_exchange_their_gradients(
    tmp_path, scaling, monkeypatch, capsys
):
    import turns

    monkeypatch.setattr(turns, "subprocess", warm_subprocess())
    small = ["--ranks", "2", "--repeats", "1", "--block", "1", "--model", "tiny"]
    small += ["--tasks-per-rank", "2", "--tasks-per-step", "4", "--stage-steps", "3"]
    small += ["--num-generations", "2", "--json", str(tmp_path / "figures.json")]
    passed_on = ["--no-drop-zero-std-groups", "--tasks-per-domain", "40"]
    assert scaling.main([*small, "--", *passed_on]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert figures["exchange_bytes_2"] == figures["gradient_bytes_2"] == 4 * 558_528
    assert 0 < figures["control_bytes_2"] < 10_000  # small typed tensors, a step
    assert 0 < figures["records_bytes_2"] / (3 * 2 * 2) < 1024  # a record, as an object
    assert figures["weak_scaling_2"] > 0 and 0 < figures["wait_share_2"] < 1
    assert "2 ranks, weak: episodes/s" in capsys.readouterr().out


def side(seconds, episodes, tokens=100.0, **more):
    more = {"played": tokens, **more}
    return {
        "seconds": seconds,
        "episodes": episodes,
        "tokens": tokens,
        "peak_mb": 9.0,
        "cpu_s": seconds,
        **more,
    }


def found(**connected):
    """One repeat of two ranks, each with 8 episodes in a block of two steps."""
    waits = {"wait_s": 0.2, "exchange_s": 0.1, "exchange_bytes": 80}
    waits |= {"control_bytes": 8, "moved_bytes": 40}
    early = {"sample_0_s": 0.2, "sample_1_s": 0.5}
    late = {"sample_0_s": 0.4, "sample_1_s": 0.3}
    return {
        "connected": [[side(2.0, 16, **{"tokens": 200.0, **waits, **connected})]],
        "apart": [[side(1.0, 8, **early), side(4.0, 8, **late)]],  # 8 and 2 episodes a second
        "alone": [[side(0.8, 8)]],
        "strong": [[side(5.0, 30, **waits)]],
        "whole": [[side(6.0, 30)]],
    }


def test_ratios_are_of_episodes_a_second_and_waits_are_means_over_the_ranks(scaling):
    assert scaling.series_of(2, found(), block=2) == {
        "episodes_per_s": [8.0],
        "step_s": [1.0],
        "peak_mb": [9.0],
        "strong_step_s": [2.5],
        "wait_s": [pytest.approx(0.075)],  # 0.3 s of two ranks in two steps
        "exchange_s": [0.025],
        "wait_share": [pytest.approx(0.075)],
        "exchange_bytes": [20.0],
        "control_bytes": [2.0],
        "moved_bytes": [10.0],
        "strong_wait_share": [pytest.approx(0.03)],
        "weak_scaling": [pytest.approx(1.6)],  # 8 over the mean of 8 and 2
        "weak_speed_up": [pytest.approx(0.8)],
        "unequal_share": [pytest.approx(0.1)],  # 0.1 s in each of the two steps
        "cpu_over_apart": [0.4],
        "apart_speed_up": [pytest.approx(1.0)],
        "strong_speed_up": [pytest.approx(1.2)],
        "weak_efficiency": [pytest.approx(0.4)],
        "strong_efficiency": [pytest.approx(0.6)],
    }


@pytest.mark.parametrize("other", [{"tokens": 190.0, "played": 200.0}, {"played": 199.0}])
def test_other_work_apart_than_connected_is_no_measurement(scaling, other):
    with pytest.raises(RuntimeError, match="tokens connected, other 200 apart"):
        scaling.series_of(2, found(**other), block=2)


@pytest.fixture
def scaling(monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    import scaling

    return scaling
