"""The comparison with TRL in small: both sides run and do the same work; times are not judged."""

import json

import pytest

from pipeline.models.tiny import tiny_model
from tests.support import ROOT
from tests.support.helpers import tokenizer

pytestmark = pytest.mark.proof

BENCH = ROOT / "scripts" / "bench"
QUANTITIES = ("s", "cpu_s", "episodes", "episodes_per_s", "tokens_per_s", "tokens_per_episode")


def test_both_sides_run_and_do_the_same_work_and_every_quantity_is_written(tmp_path, monkeypatch):
    tiny_model(tokenizer(), 0).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.syspath_prepend(BENCH)
    import vs_trl

    flags = [
        *("--ranks", "1", "--steps", "1", "--tasks-per-step", "2", "--num-generations", "2"),
        *("--model", str(tmp_path / "model"), "--json", str(tmp_path / "found.json")),
        *("--parts", "step", "update", "--trl-settings", "2:2"),
    ]
    assert vs_trl.main(flags) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert set(found) == {"figures", "machine", "settings"}
    assert found["settings"]["trl_seconds"] == "2:2"
    figures = found["figures"]
    for part in ("step", "update"):
        assert {f"{part}_vs_trl", f"{part}_vs_trl_per_token"} <= set(figures)
        assert figures[f"{part}_episodes_ours"] == figures[f"{part}_episodes_trl"] == 4
        for side in ("ours", "trl"):
            assert all(figures[f"{part}_{name}_{side}"] > 0 for name in QUANTITIES)
    assert figures["step_sample_s_trl"] < figures["step_s_trl"]
    assert figures["update_tokens_per_episode_ours"] == figures["update_tokens_per_episode_trl"]
