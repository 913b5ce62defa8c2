"""The comparison with TRL in small: both sides run and do the same work; times are not judged."""

import json

import pytest

from pipeline.models.tiny import tiny_model
from tests.support import ROOT
from tests.support.helpers import tokenizer
from tests.support.warm_process import warm_subprocess

pytestmark = pytest.mark.whole_run

BENCH = ROOT / "scripts" / "bench"
SMALL = ["--ranks", "1", "--steps", "1", "--tasks-per-step", "2", "--num-generations", "4"]
QUANTITIES = ("s", "cpu_s", "episodes", "episodes_per_s", "tokens_per_s", "tokens_per_episode")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vs-trl")
    tiny_model(tokenizer(), 0).save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    flags = ["--model", str(folder / "model"), "--json", str(folder / "found.json")]
    flags += ["--parts", "step", "update", "--trl-settings", "4:2"]
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(BENCH)
        import turns
        import vs_trl

        patched.setattr(turns, "subprocess", warm_subprocess())
        assert vs_trl.main([*SMALL, *flags]) == 0
    return json.loads((folder / "found.json").read_text())


def test_it_writes_every_quantity_of_both_sides_and_their_ratio(found):
    assert set(found) == {"figures", "machine", "settings"}
    figures = found["figures"]
    for part in ("step", "update"):
        assert {f"{part}_vs_trl", f"{part}_vs_trl_per_token"} <= set(figures)
        for side in ("ours", "trl"):
            assert all(figures[f"{part}_{name}_{side}"] > 0 for name in QUANTITIES)
    assert figures["step_sample_s_trl"] < figures["step_s_trl"]
    assert found["settings"]["trl_seconds"] == "4:2"


def test_both_sides_play_and_train_as_many_episodes(found):
    figures = found["figures"]
    assert figures["step_episodes_ours"] == figures["step_episodes_trl"] == 8
    assert figures["update_episodes_ours"] == figures["update_episodes_trl"] == 8
    assert figures["update_tokens_per_episode_ours"] == figures["update_tokens_per_episode_trl"]
