"""Small versions of scripts/proofs/learning.py: success must rise, in seconds and in minutes."""

from pathlib import Path

from scripts.bench.common import results_of
from scripts.proofs.learning import figures
from scripts.proofs.runs import play_run
from tests.support.coin import COIN, warm_started


def test_grpo_raises_success_on_held_out_tasks_of_one_decision(tmp_path: Path) -> None:
    """Heads or tails, where heads is paid: from saying either to beyond the change's interval."""
    (tmp_path / "start").mkdir()
    flags = [*COIN, *warm_started(tmp_path / "start"), "--max-tokens-per-turn", "8"]
    flags = [flag.replace("CoinEnvironment", "HeadsEnvironment") for flag in flags]
    flags += ["--num-generations", "8", "--max-steps", "8", "--eval-tasks-per-domain", "60"]
    play_run(2, flags, tmp_path / "out")
    found = figures(results_of(tmp_path / "out"))
    assert found["change"] > found["change_interval"] > 0
    assert found["after"] > found["before"] + 0.1
