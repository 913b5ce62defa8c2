"""The rows for W&B are those of a real run, and the dashboard shows names that exist."""

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from pipeline.common.durable import read_records
from pipeline.report.run_files import episode_rows, final_numbers
from pipeline.report.trackers import numbers
from pipeline.report.wandb import rows_of
from pipeline.rollout.trajectory import StopReason
from scripts import wandb_dashboard
from tests.support import ROOT
from tests.support.warm import play

RUN = [
    *("--domains", "airline,retail", "--tasks-per-domain", "8"),
    *("--eval-tasks-per-domain", "2", "--eval-trials", "1", "--validation-steps", "1"),
    *("--warm-start-steps", "1", "--warm-start-batch-size", "2", "--no-drop-zero-std-groups"),
    *("--max-steps", "2", "--tasks-per-step", "2", "--num-generations", "2"),
    *("--report-to", "none", "--max-turns", "5", "--max-tokens-per-turn", "12"),
]

WARNS_OF_ITSELF = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # wandb_workspaces


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two stages with a step each."""
    place = tmp_path_factory.mktemp("tracked")
    play(*RUN, "--output-dir", "out", cwd=place, num_ranks=1)
    return place / "out"


def lines_of(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """The step and the numbers of all lines that have any."""
    lines = [*read_records(folder / "metrics.jsonl"), *read_records(folder / "timings.jsonl")]
    return [(line["step"], numbers(line)) for line in lines if numbers(line)]


def points_of(rows: list[tuple[int, dict[str, float]]]) -> list[tuple[str, int, float]]:
    """Names, steps and values; of a step's checkpoints, the time of the last."""
    points = [(name, step, value) for step, row in rows for name, value in row.items()]
    last = {(name, step): value for name, step, value in points if name == "perf/checkpoint_s"}
    others = [point for point in points if point[:2] not in last]
    return sorted([*others, *((*key, value) for key, value in last.items())])


def test_the_rows_for_wandb_have_the_lines_and_the_summary_the_results(folder: Path) -> None:
    files = (read_records(folder / name) for name in ("metrics.jsonl", "timings.jsonl"))
    found = [(row.pop("step"), row) for row in rows_of(*files)]
    assert points_of([(int(step), row) for step, row in found]) == points_of(lines_of(folder))
    assert len(final_numbers(json.loads((folder / "results.json").read_text()))) > 20
    assert len(episode_rows(folder)) > 10


def view(capsys: pytest.CaptureFixture[str], *domains: str) -> dict[str, Any]:
    """What the script prints, without a key and without a network."""
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("WANDB_API_KEY", raising=False)
        patched.setattr(socket, "getaddrinfo", None)
        assert wandb_dashboard.main(["--print", "--domains", *domains]) == 0
    section: dict[str, Any] = json.loads(capsys.readouterr().out)["section"]
    return section


@WARNS_OF_ITSELF
def test_the_dashboard_shows_names_that_a_run_writes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logged = {name for _, row in lines_of(folder) for name in row}
    final = final_numbers(json.loads((folder / "results.json").read_text()))
    shown = view(capsys, "airline", "retail")
    panels = [p for s in shown["panelBankConfig"]["sections"] for p in s["panels"]]
    lines = [p["config"] for p in panels if p["viewType"] == "Run History Line Plot"]
    bars = [p["config"] for p in panels if p["viewType"] == "Bar Chart"]
    assert {config["xAxis"] for config in lines} == {"step"}
    # The last stage's domain has nothing to forget, and the first one's nothing to profit from.
    never = {
        *("transfer/domains/backward_transfer/retail", "transfer/domains/forgetting/retail"),
        *("transfer/domains/forward_transfer/airline", "validation/retail/kl"),
        "rollout/stop/repeated_call",  # written by runs with a limit of repeated calls
        "rollout/stop/agent_error",  # ... and of agents that have failed
        # ... and with `task_sampling: signal`
        *(f"tasks/{outcome}" for outcome in ("always_solved", "mixed", "never_solved")),
    }
    assert {name for config in lines for name in config["metrics"]} - logged - never == set()
    assert {name for config in bars for name in config["metrics"]} - set(final) - never == set()
    (stops,) = [c for c in lines if c["metrics"][0].startswith("rollout/stop/")]
    assert stops["metrics"] == [f"rollout/stop/{reason}" for reason in StopReason]


@WARNS_OF_ITSELF
def test_the_picture_in_the_documents_has_the_panels_of_the_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert wandb_dashboard.main(["--picture", str(tmp_path / "a.svg")]) == 0
    drawn, shipped = (
        re.findall(r"<text.*?>(.*?)</text>", path.read_text())
        for path in (tmp_path / "a.svg", ROOT / "docs" / "dashboard.svg")
    )
    assert drawn == shipped and len(drawn) > 100
    assert wandb_dashboard.main(["--picture", "a.gif"]) == 2
    line = "error: --picture: got a.gif; give a name that ends with .svg or .png\n"
    assert capsys.readouterr().err == line


def test_the_dashboard_needs_an_entity(capsys: pytest.CaptureFixture[str]) -> None:
    assert wandb_dashboard.main([]) == 2
    line = "error: --entity: got none; give the W&B user or team whose project it is\n"
    assert "".join(capsys.readouterr()) == line
