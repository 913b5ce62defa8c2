"""Whole runs whose experts teach a student: on other ranks and after a signal they end alike."""

from pathlib import Path

import pytest

from tests.support.warm import assert_same, metrics, play, results

pytestmark = [pytest.mark.whole_run, pytest.mark.usefixtures("no_stray_processes")]
FLAGS = [
    *("--domains", "airline,retail", "--tasks-per-step", "2", "--num-generations", "2"),
    *("--tasks-per-domain", "4", "--max-turns", "5", "--max-tokens-per-turn", "12"),
    *("--eval-tasks-per-domain", "1", "--eval-trials", "1", "--validation-steps", "0"),
    *("--no-eval-on-start", "--no-eval-greedy", "--report-to", "none", "--save-steps", "0"),
    *("--warm-start-steps", "1", "--warm-start-batch-size", "2", "--stage-warmup-steps", "0"),
    *("--curriculum", "separate", "--merge-method", "distillation", "--output-dir", "out"),
    *("--stage-steps", "{airline: 1, retail: 1}", "--max-steps", "5", "--deterministic"),
    # Untrained, the model earns nothing, and so the experts have only the entropy to learn from.
    *("--no-drop-zero-std-groups", "--entropy-coef", "0.5"),
]


def test_a_student_is_taught_alike_on_other_ranks_and_after_a_signal(tmp_path: Path) -> None:
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    undisturbed.mkdir()
    killed.mkdir()
    play(*FLAGS, cwd=undisturbed)
    lines = metrics(undisturbed / "out")
    assert [line["stage"] for line in lines] == ["airline", "retail", *["distill"] * 3]
    assert "train/teacher_kl" not in lines[1]
    for line in lines[2:]:
        assert line["train/trained_episodes"] == line["rollout/episodes"] == 4
        assert line["reward/mean"] == 0  # equal rewards
        of_domains = [line[f"train/teacher_kl/{domain}"] for domain in ("airline", "retail")]
        assert min(of_domains) <= line["train/teacher_kl"] <= max(of_domains)
        assert 0 not in of_domains
        assert line["train/grad_norm"] > 0
        assert line["train/loss"] == line["train/policy_loss"]  # without an entropy bonus
    after = [entry["after"] for entry in results(undisturbed / "out")["evaluations"]]
    assert after == ["warm_start", "airline", "retail", "distill"]
    done = play(*FLAGS, cwd=killed, code=75, sigterm_at='"stage": "distill", "step": 3')
    assert "interrupted after" in done.stdout
    resume = ["--resume-from-checkpoint", "latest", "--output-dir", "out"]
    play(*resume, cwd=killed, num_ranks=1)
    assert_same(killed / "out", undisturbed / "out")
