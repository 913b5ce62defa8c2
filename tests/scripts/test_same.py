"""The ruler of changes that must leave every run as it is: what it calls different."""

import gzip
import json
from pathlib import Path

import pytest

from scripts.proofs.same import compared

METRICS = [{"kind": "train", "step": 1, "train/loss": 0.25}, {"kind": "eval", "step": 1}]
EPISODES = "trajectories/airline/step-000001.rank-0.jsonl.gz"
FILES = ("checkpoints/stage-1/model.safetensors", "checkpoints/stage-1/optimizer.pt", EPISODES)


def run_folder(folder: Path) -> Path:
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        content = name.encode()
        (folder / name).write_bytes(gzip.compress(content) if name == EPISODES else content)
    write_metrics(folder, METRICS)
    return folder


def write_metrics(folder: Path, rows: list[dict[str, object]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("name", FILES)
def test_a_changed_or_missing_file_is_named_and_the_time_in_a_packed_one_is_no_change(
    tmp_path, name
):
    a = run_folder(tmp_path / "a")
    b = run_folder(tmp_path / "b")
    (b / EPISODES).write_bytes(gzip.compress(EPISODES.encode(), mtime=1))
    assert list(compared(a, b)) == []
    (b / name).write_bytes(gzip.compress(b"other") if name == EPISODES else b"other")
    assert list(compared(a, b)) == [f"{name}: other content"]
    (a / name).unlink()
    assert list(compared(a, b)) == [f"{name}: only on one side"]


def test_a_metric_that_differs_or_is_new_is_named_with_its_line(tmp_path):
    a = run_folder(tmp_path / "a")
    b = run_folder(tmp_path / "b")
    write_metrics(b, [METRICS[0] | {"train/loss": 0.5}, METRICS[1] | {"eval/new": 1.0}])
    assert list(compared(a, b)) == [
        "metrics.jsonl:1 train/loss: 0.25 there, 0.5 here",
        "metrics.jsonl:2 eval/new: None there, 1.0 here",
    ]
    write_metrics(b, METRICS[:1])
    assert list(compared(a, b)) == ["metrics.jsonl: 2 lines there, 1 here"]
