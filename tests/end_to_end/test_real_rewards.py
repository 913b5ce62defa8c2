"""Rewards that are no successes or failures, such as -3.5 and 7.2: whole runs, and what they leave.

A model that has learnt to say one of three words earns one of three rewards.
"""

import json
import os
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from pipeline import train
from pipeline.config.cli import parse
from pipeline.data.tasks import Task
from pipeline.evaluation import evaluate as evaluation
from pipeline.report import write as report
from pipeline.report.run_files import final_numbers
from pipeline.run_state import Run
from scripts.proofs.ranks import play_ranks
from scripts.proofs.runs import without_report
from tests.support.helpers import make_task, say
from tests.support.messages import says
from tests.support.report_runs import make_run, matplotlib_home  # noqa: F401
from tests.support.warm import episodes, jsonl
from tests.support.warm import results as results_of

REWARDS = {"red": -3.5, "green": 0.0, "blue": 7.2}


class Lamp:
    """Pays for the colour that is said; nothing for any other word."""

    def reset(self, **row: Any) -> None:
        self.final_message = ""

    def press(self, hard: bool) -> str:
        """Press the switch.

        Args:
            hard: How hard.
        """
        return "on"

    def get_reward(self) -> float:
        return REWARDS.get(self.final_message, -3.5)


def generate_tasks(seed: int, n: int, split: str, difficulty: str) -> list[Task]:
    made = {"domain": "lamp", "request": "which colour"}
    return [make_task(f"{split}-{i}", family=("old", "new")[i % 2], **made) for i in range(n)]


FAMILY_SHARES = {"new": 1}


def baselines(task: Task) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    return {"press_twice": [("press", {"hard": True})] * 2}


def about() -> dict[str, Any]:
    return {"commit": "a2c0247", "num_lamps": 3, "colours": [*REWARDS]}


FLAGS = [
    *("--domains", "lamp", "--num-gpus", "1"),
    *("--environments", "{lamp: tests.end_to_end.test_real_rewards:Lamp}"),
    *("--eval-tasks-per-domain", "4", "--eval-trials", "2", "--validation-steps", "1"),
    *("--validation-tasks", "3", "--tasks-per-domain", "8", "--max-tokens-per-turn", "8"),
    *("--num-generations", "4", "--tasks-per-step", "2", "--save-steps", "1"),
    *("--report-to", "none", "--max-steps", "2"),
]


def on_this_rank(argv: list[str], end: Callable[[Run], None]) -> tuple[int, str]:
    """The exit code of a run, and what it says."""
    said = StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        code = train.main(parse(argv), end=end)
    return code, said.getvalue()


def play(folder: Path, *flags: str, end: Callable[[Run], None] = without_report) -> str:
    (done,) = play_ranks(on_this_rank, 1, [*FLAGS, *flags, "--output-dir", str(folder)], end)
    assert isinstance(done, tuple), done
    assert done[0] == 0
    return str(done[1])


BROKEN = {  # what fails after training, and what the warning calls it
    "report": (train, "write_report"),
    "results.json": (evaluation, "describe_stages"),
    "transfer numbers": (evaluation, "summary"),
    "table": (train, "final_table"),
}


def break_report(*_: object) -> None:
    raise ZeroDivisionError("no ink")


def finish_broken_and_whole(run: Run) -> None:
    """The end of a run with each fault, and then without one."""
    report.pictures.OF_RUN = {}
    for place in BROKEN.values():
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(*place, break_report)
            train.finish(run)
        print(f"report: {(run.folder / 'report.md').is_file()}")
    train.finish(run)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("lamp")
    prompt = make_task(request="which colour").prompt
    lines = [{"messages": [*prompt, say(word)]} for word in REWARDS]
    (folder / "said.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = [
        *("--demonstrations", f"{{lamp: {folder / 'said.jsonl'}}}", "--warm-start-steps", "20"),
        *("--warm-start-batch-size", "4"),
    ]
    said = play(folder / "run", *flags, end=finish_broken_and_whole)
    return folder / "run", said


def test_what_a_domain_says_of_itself_is_in_results_report_and_curriculum(
    run: tuple[Path, str],
) -> None:
    folder, _ = run
    results = results_of(folder)
    assert results["about"] == {"lamp": about()}
    assert results["baselines"] == {"lamp": {"nothing": -3.5, "press_twice": -3.5}}
    page = (folder / "report.md").read_text()
    says(
        page,
        "| lamp | nothing | -3.50 |\n| lamp | press twice | -3.50 |",
        "## Where the tasks come from",
        "| lamp | colours | red, green, blue |",
    )
    (stage,) = json.loads((folder / "curriculum.json").read_text())["stages"]
    assert stage["family_shares"] == {"lamp": {"new": 1.0}}
    assert {t["family"] for t in episodes(folder) if t["advantage"] is not None} == {"new"}


def test_a_run_ends_with_its_report_and_success_is_a_share(run: tuple[Path, str]) -> None:
    folder, text = run
    said = text.rpartition("report: ")[2]
    assert "warning" not in said and "mean reward lamp  " in said
    results = results_of(folder)
    assert results["success_threshold"] == 1.0
    for entry in results["evaluations"]:
        of = entry["success"]["lamp"]
        rewards = [reward for trials in of["tasks"].values() for reward in trials]
        assert set(rewards) <= set(REWARDS.values())
        assert of["mean"] == sum(reward == 7.2 for reward in rewards) / 8
        assert of["reward"] == pytest.approx(sum(rewards) / 8)
    for line in jsonl(folder / "metrics.jsonl"):
        for place in ("eval", "validation"):
            if f"{place}/lamp/success" in line:
                assert 0 <= line[f"{place}/lamp/success"] <= 1
    point = of["reward"]
    value, low, high = results["transfer"]["rewards"]["lamp"][-1]
    assert value == pytest.approx(point, abs=1e-6) and -3.5 <= low <= value <= high <= 7.2
    assert final_numbers(results)["final/lamp/reward"] == of["reward"]
    text = (folder / "report.md").read_text()
    says(text, "## Mean reward", "| lamp | ", "A trial is a success with a reward of 1 or more")
    assert (folder / "report.html").is_file()


def test_an_evaluation_alone_has_the_rewards_and_a_threshold_of_its_own(
    run: tuple[Path, str], tmp_path: Path
) -> None:
    folder, _ = run
    model = str(folder / "checkpoints" / "stage-1-lamp")
    play(tmp_path / "alone", "--model", model, "--no-grpo", "--success-threshold", "-1")
    (alone,) = results_of(tmp_path / "alone")["evaluations"]
    last = results_of(folder)["evaluations"][-1]["success"]["lamp"]
    of = alone["success"]["lamp"]
    assert of["tasks"] == last["tasks"] and of["reward"] == last["reward"]
    assert of["mean"] == sum(r > -3.5 for trials in of["tasks"].values() for r in trials) / 8
    shutil.copytree(folder, tmp_path / "other")
    report.write_comparison([folder, tmp_path / "other"], tmp_path / "both")
    assert "| mean reward at the end | lamp |" in (tmp_path / "both" / "comparison.md").read_text()


def test_a_run_that_is_trained_does_not_fail_by_its_report(run: tuple[Path, str]) -> None:
    folder, said = run
    told, *warnings = [line for line in said.splitlines() if line.startswith("warning: ")]
    assert told.startswith("warning: demonstrations of lamp: 4 of 4 held-out requests")
    assert len(warnings) == len(BROKEN)
    for line, what in zip(warnings, BROKEN, strict=True):
        assert line.startswith(f"warning: {what}: ZeroDivisionError: no ink (")
        assert f"{os.path.basename(__file__)}, line " in line and str(folder) in line
        assert ("python -m pipeline report" in line) == (what != "results.json")
    assert said.count(f"checkpoints, without a report: {folder}\nreport: False\n") == 1
    assert said.count(f"report, plots and checkpoints: {folder}\nreport: True\n") == 3
