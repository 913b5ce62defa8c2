"""Runs with partial rollouts: ranks and kills change no bit, and no staleness is no difference."""

import gzip
import json
from pathlib import Path

import pytest

from tests.support.warm import assert_same, metrics, play

pytestmark = pytest.mark.usefixtures("no_stray_processes")
FLAGS = [
    *("--domains", "airline,retail", "--tasks-per-step", "5", "--num-generations", "2"),
    *("--max-turns", "4", "--max-tokens-per-turn", "14", "--deterministic", "--output-dir", "out"),
    *("--eval-tasks-per-domain", "1", "--eval-trials", "1", "--no-eval-greedy"),
    *("--validation-steps", "4", "--validation-tasks", "1", "--report-to", "none"),
    # Untrained, it earns nothing: entropy is what there is to learn from.
    *("--warm-start-steps", "2", "--warm-start-batch-size", "2", "--entropy-coef", "0.05"),
    *("--no-drop-zero-std-groups", "--max-steps", "6", "--save-steps", "1"),
]
PARTIAL = [*FLAGS, "--partial-rollout-tokens", "5", "--partial-rollout-correction"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cwd = tmp_path_factory.mktemp("partial")
    play(*PARTIAL, cwd=cwd, num_ranks=1)
    return cwd / "out"


def test_a_run_trains_whole_groups_and_all_of_them(undisturbed: Path) -> None:
    lines = metrics(undisturbed)
    played = [int(line["rollout/episodes"]) for line in lines]
    assert sum(played) == 6 * 5 * 2 and all(count % 2 == 0 for count in played)
    # Two stages of 3 steps: a validation follows step 4, and the other two end with their stage.
    assert played[3] and len({*played}) > 1
    stale = [sum(line[f"rollout/staleness/{s}"] for s in (1, 2, 3, 4)) for line in lines]
    assert sum(stale) and stale[0] == stale[3] == 0
    for step, line in enumerate(lines):
        (path,) = undisturbed.glob(f"trajectories/{line['stage']}/step-{step + 1:06d}.*")
        found = [json.loads(text) for text in gzip.decompress(path.read_bytes()).splitlines()]
        counts = [step - v for episode in found for of in episode["versions"] for v in of]
        assert all(counts.count(s) == line[f"rollout/staleness/{s}"] for s in range(5))
        assert [[*map(len, e["versions"])] for e in found] == [[*map(len, e["ids"])] for e in found]


def test_a_run_that_is_stopped_twice_on_other_ranks_ends_bit_by_bit_the_same(
    undisturbed: Path, tmp_path: Path
) -> None:
    resumed = [*PARTIAL, "--resume-from-checkpoint", "auto"]
    at = '"kind": "train", "stage": "airline", "step": 2'
    play(*resumed, cwd=tmp_path, num_ranks=2, code=75, sigterm_at=at)
    (saved,) = tmp_path.glob("out/checkpoints/step-000002/state.json")
    assert any(json.loads(saved.read_text())["open_groups"])
    at = '"kind": "train", "stage": "retail", "step": 5'
    done = play(*resumed, cwd=tmp_path, num_ranks=3, code=75, sigterm_at=at)
    assert "answers other than before" not in done.stdout + done.stderr
    play(*resumed, cwd=tmp_path, num_ranks=2)
    assert_same(tmp_path / "out", undisturbed)


def test_without_staleness_a_run_is_the_one_without_partial_rollouts(tmp_path: Path) -> None:
    folders = []
    for name, flags in (("plain", FLAGS), ("none", [*PARTIAL, "--max-staleness", "0"])):
        (tmp_path / name).mkdir()
        play(*flags, "--max-steps", "2", cwd=tmp_path / name, num_ranks=1)
        folders.append(tmp_path / name / "out")
    assert_same(*folders)
