"""The documented loop of one's own trains on real ranks, and draws the same on one and on two."""

import base64
import gzip
from pathlib import Path
from typing import Any

import pytest

from pipeline.report.page_episodes import read_episodes
from scripts.proofs.ranks import play_ranks
from tests.end_to_end.test_own_rewards import run
from tests.support import ROOT
from tests.support.warm import episodes, jsonl

FLAGS = [
    *("--domains", "sums", "--environments", "{sums: examples.plan_and_act:play}"),
    *("--tasks", f"{{sums: {ROOT / 'examples' / 'one_digit_sums.jsonl'}}}"),
    *("--max-steps", "2", "--tasks-per-step", "2", "--num-generations", "3"),
    *("--eval-tasks-per-domain", "3", "--eval-trials", "1", "--validation-steps", "0"),
    *("--warm-start-steps", "0", "--max-tokens-per-turn", "6", "--no-drop-zero-std-groups"),
    *("--entropy-coef", "0.01", "--report-to", "none"),
]


def told(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["task_id"], row["trial"], row["reward"], row["stop_reason"], row["ids"]


def test_an_own_loop_trains_and_draws_the_same_on_one_and_two_ranks(tmp_path: Path) -> None:
    for number in (1, 2):
        argv = [*FLAGS, "--num-gpus", str(number), "--output-dir", f"out-{number}"]
        assert play_ranks(run, number, str(tmp_path), argv) == [0] * number
    one, two = (episodes(tmp_path / f"out-{number}") for number in (1, 2))
    assert len(one) == 2 * 3 + 2 * 2 * 3  # two evaluations, two steps
    assert sorted(map(told, one)) == sorted(map(told, two))
    for row in one:
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["user", "assistant", "conversation", "system", "user", "assistant"]
        assert row["num_turns"] == len(row["ids"]) == 2
        assert row["num_sampled_tokens"] == sum(map(len, row["ids"]))
        assert row["messages"][3]["content"] == row["messages"][1]["content"]  # the plan
    of_one, of_two = (jsonl(tmp_path / f"out-{n}" / "metrics.jsonl") for n in (1, 2))
    assert [line["kind"] for line in of_one] == [line["kind"] for line in of_two]
    steps = [line for line in of_one if line["kind"] == "train"]
    assert [line["train/grad_norm"] > 0 for line in steps] == [True, True]
    assert [line["rollout/turns"] for line in steps] == [2.0, 2.0]
    for mine, other in zip(of_one, of_two, strict=True):
        assert mine.keys() == other.keys()
        numbers = {name: value for name, value in mine.items() if isinstance(value, float)}
        assert {name: other[name] for name in numbers} == pytest.approx(numbers, 1e-3, 1e-4)
    found = read_episodes(tmp_path / "out-2")  # what the page's reader shows
    assert b"conversation" in gzip.decompress(base64.b64decode(found.chunks[-1]))
