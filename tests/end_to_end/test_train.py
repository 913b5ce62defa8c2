"""Whole runs: real processes, real ranks, a tiny model."""

from functools import partial
from pathlib import Path
from typing import Any

from pipeline.common.errors import RunError
from pipeline.run_state import Run, open_run
from tests.support.shared_run import SMALL
from tests.support.warm import metrics, play, results

DESK = """
from dataclasses import replace
from pathlib import Path

from pipeline.environments.embedded import airline


class DeskEnvironment(airline.AirlineEnvironment):
    def reset(self, **row):
        if row["id"].startswith("train-") and Path("out").exists() > Path("mended").exists():
            Path("broken").touch()
        if row["id"].startswith("test-medium-0-00001") and Path("broken").exists():
            raise ConnectionError("no answer")
        return super().reset(**row)


def generate_tasks(*arguments):
    tasks = airline.generate_tasks(*arguments)
    return [replace(task, domain="desk", id=task.id + "\\x1b[2J") for task in tasks]
"""


def test_an_evaluation_that_cannot_be_scored_stops_the_run_and_costs_nothing(
    tmp_path: Path,
) -> None:
    (tmp_path / "my_desk.py").write_text(DESK)
    own = [
        *("--domains", "desk", "--environments", "{desk: 'my_desk:DeskEnvironment'}"),
        *("--warm-start-steps", "0", "--max-steps", "2", "--save-steps", "0"),
        *("--tasks-per-step", "2", "--num-generations", "2"),
        *("--eval-tasks-per-domain", "4", "--output-dir", "out"),
    ]
    done = play(*SMALL, *own, cwd=tmp_path, code=1)
    assert (
        "2 of 8 trials in the evaluation after desk ended in environment errors in each "
        "attempt (the first: desk/test-medium-0-00001\\x1b[2J), so nothing is scored; the "
        "commonest error, first of desk/test-medium-0-00001\\x1b[2J: ConnectionError: no answer "
        '(my_desk.py, line 13: raise ConnectionError("no answer"))' in done.stderr
    )
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stderr + done.stdout
    found = results(tmp_path / "out")["evaluations"]
    assert [evaluation["after"] for evaluation in found] == ["start"]
    (tmp_path / "mended").touch()
    (tmp_path / "broken").unlink()
    resume = ["--resume-from-checkpoint", "latest", "--output-dir", "out"]
    done = play(*resume, cwd=tmp_path)
    assert "resuming from step-000002: 2 steps done" in done.stdout  # none is played again
    found = results(tmp_path / "out")["evaluations"]
    assert [evaluation["after"] for evaluation in found] == ["start", "desk"]
    assert [record["step"] for record in metrics(tmp_path / "out")] == [1, 2]


def note_and_fail(run: Run, name: str, _: Any) -> None:
    """Note what was played; fail where the file `fails_at` says, as a killed run would."""
    with Path("played").open("a") as file:
        file.write(f"{name}\n")
    if name == Path("fails_at").read_text():
        raise RunError("killed")


def test_no_evaluation_that_was_finished_is_played_again(
    tmp_path: Path,
) -> None:
    """And a stage of two steps does not begin anew because its evaluation failed."""
    own = [
        *("--warm-start-steps", "1", "--warm-start-batch-size", "1"),
        *("--max-steps", "2", "--tasks-per-step", "2", "--num-generations", "2"),
        *("--domains", "airline", "--eval-tasks-per-domain", "2", "--output-dir", "out"),
        *("--resume-from-checkpoint", "auto"),
    ]
    played = []
    for fails_at in ("evaluation-warm_start", "airline", "evaluation-airline", "nowhere"):
        (tmp_path / "fails_at").write_text(fails_at)
        (tmp_path / "played").unlink(missing_ok=True)
        play(
            *(*SMALL, *own),
            cwd=tmp_path,
            num_ranks=1,
            code=fails_at != "nowhere",
            open_run=partial(open_run, on_batch=note_and_fail),
        )
        played.append((tmp_path / "played").read_text().split())
    assert played == [
        ["evaluation-start", "evaluation-warm_start"],
        ["evaluation-warm_start", "airline"],
        ["airline", "airline", "evaluation-airline"],
        ["evaluation-airline"],
    ]


def test_what_is_not_wanted_is_not_evaluated_and_a_resume_does_not_make_up_for_it(
    tmp_path: Path,
) -> None:
    short = [
        *("--domains", "airline", "--warm-start-steps", "0", "--max-steps", "1"),
        *("--tasks-per-step", "2", "--num-generations", "2", "--eval-tasks-per-domain", "2"),
    ]
    left_out = ["--no-eval-on-start", "--no-eval-greedy", "--output-dir", "out"]
    play(*SMALL, *short, *left_out, cwd=tmp_path)
    (entry,) = results(tmp_path / "out")["evaluations"]
    assert (entry["after"], "greedy" in entry["success"]["airline"]) == ("airline", False)
    again = ["--resume-from-checkpoint", "latest", "--output-dir", "out", "--override"]
    play(*again, "--eval-on-start", cwd=tmp_path)
    assert [e["after"] for e in results(tmp_path / "out")["evaluations"]] == ["airline"]
