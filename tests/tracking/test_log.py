"""The files hold what was measured, and the trackers the same numbers under the same names."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config.settings import Config
from pipeline.distributed.ranks import Ranks
from pipeline.errors import UserError
from pipeline.files.durable import read_records
from pipeline.tracking.log import RunLog, check_trackers
from pipeline.tracking.progress import StageProgress, episodes_of
from tests.support import ROOT
from tests.support.messages import says

TRAIN = {
    "kind": "train",
    "stage": "airline",
    "step": 1,
    "train/loss": 0.125,
    "train/grad_norm": 0.75,
    "rollout/episodes": 192,
    "rollout/stop/completed": 0.96875,
    "reward/airline": 0.5,
    "reward/mean": 0.5,
}
START = {"kind": "eval", "stage": "start", "after": "start", "step": 0, "eval/retail/success": 0.0}
WARM = {
    "kind": "eval",
    "stage": "warm_start",
    "after": "warm_start",
    "step": 0,
    "eval/retail/success": 0.375,
}
VALIDATION = {
    "kind": "validation",
    "stage": "airline",
    "step": 1,
    "validation/airline/success": 0.625,
}
AFTER = {
    "kind": "eval",
    "stage": "airline",
    "after": "airline",
    "step": 1,
    "eval/retail/success": 0.4375,
}
TIMES = {"kind": "train", "stage": "airline", "step": 1, "perf/step_s": 1.5, "cores": 2}
ALL = [START, WARM, TRAIN, VALIDATION, AFTER]


def config(*report_to: str, **tracking: object) -> Config:
    return Config.model_validate({"tracking": {"report_to": list(report_to), **tracking}})


def steps(path: Path) -> list[int]:
    return [record["step"] for record in read_records(path)]


def without_time(path: Path) -> list[dict]:
    return [
        {name: record[name] for name in record if name != "time"} for record in read_records(path)
    ]


def test_each_record_is_one_line_of_valid_json(tmp_path):
    with RunLog(tmp_path / "run", config(), is_main=True) as log:
        log.metrics(TRAIN)
        log.timings(TIMES)
        assert read_records(tmp_path / "run/metrics.jsonl") == [TRAIN], "flushed at once"
        log.metrics({**TRAIN, "step": 2})
    assert read_records(tmp_path / "run/metrics.jsonl") == [TRAIN, {**TRAIN, "step": 2}]
    assert without_time(tmp_path / "run/timings.jsonl") == [TIMES]


def test_lines_of_timings_that_say_the_same_can_be_told_apart(tmp_path):
    with RunLog(tmp_path, config(), is_main=True) as log:
        log.timings(TIMES)
        log.timings(TIMES)
    first, second = read_records(tmp_path / "timings.jsonl")
    assert 0 < first["time"] < second["time"]


def test_what_json_does_not_know_becomes_null(tmp_path):
    with RunLog(tmp_path, config(), is_main=True) as log:
        log.metrics({"step": 1, "a": math.nan, "b": [math.inf, 1.0], "c": {"d": -math.inf}})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text == '{"step": 1, "a": null, "b": [null, 1.0], "c": {"d": null}}\n'


def test_other_ranks_write_nothing(tmp_path, capsys):
    with RunLog(tmp_path / "run", config("wandb", "tensorboard"), is_main=False) as log:
        log.metrics(TRAIN)
        log.timings(TIMES)
        assert log.state_dict()["sizes"] == {}
    with StageProgress("airline", 10, is_main=False) as progress:
        for _ in range(10):
            progress.step(TRAIN)
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr() == ("", "")


def test_a_missing_tracker_is_the_users_mistake_on_every_rank(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for is_main in (True, False):
        with pytest.raises(UserError, match="report_to: got tensorboard, which is not installed"):
            RunLog(tmp_path / "run", config("tensorboard"), is_main=is_main)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_tracker_that_cannot_be_imported_is_refused_before_a_run(tmp_path, monkeypatch, package):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"{package}.py").write_text("import no_such_part")
    why = f"got {package}, which cannot be imported .No module named 'no_such_part'.; pip install"
    with pytest.raises(UserError, match=f"report_to: {why} {package}, or report to none"):
        check_trackers(config(package))
    with pytest.raises(UserError, match=f"report_to: {why}"):
        RunLog(tmp_path / "run", config(package), is_main=True)
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_drops_what_it_will_write_again(tmp_path, capsys):
    metrics, timings = tmp_path / "metrics.jsonl", tmp_path / "timings.jsonl"
    with RunLog(tmp_path, config(), is_main=True) as log:
        log.metrics(START)
        log.metrics(TRAIN)
        log.timings(TIMES)
        sizes = log.state_dict()["sizes"]
        assert sizes == {name.name: len(name.read_bytes()) for name in (metrics, timings)}
        log.metrics({**TRAIN, "step": 2})
        log.timings({**TIMES, "step": 2})
    undisturbed = metrics.read_bytes()
    with metrics.open("a") as file:
        file.write('{"kind": "train", "st')
    with RunLog(tmp_path, config(), is_main=True, state={"sizes": sizes}) as log:
        assert read_records(metrics) == [START, TRAIN], "cut at once"
        assert steps(timings) == [1]
        log.metrics({**TRAIN, "step": 2})
        log.timings({**TIMES, "step": 2})
    assert metrics.read_bytes() == undisturbed
    assert steps(timings) == [1, 2]
    assert capsys.readouterr().err == ""


def test_sizes_are_those_of_lines_that_reach_the_disk(tmp_path, monkeypatch):
    synced = []
    with RunLog(tmp_path, config(), is_main=True) as log:
        log.metrics(TRAIN)
        monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_ino))
        assert (
            log.state_dict()["sizes"]["metrics.jsonl"]
            == (tmp_path / "metrics.jsonl").stat().st_size
        )
    assert synced == [
        (tmp_path / name).stat().st_ino for name in ("metrics.jsonl", "timings.jsonl")
    ]


def test_a_fresh_run_starts_with_empty_files(tmp_path):
    for name in ("metrics.jsonl", "timings.jsonl"):
        (tmp_path / name).write_text('{"step": 1}\n{"st')
    with RunLog(tmp_path, config(), is_main=True) as log:
        assert log.state_dict()["sizes"] == {"metrics.jsonl": 0, "timings.jsonl": 0}
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""
    assert (tmp_path / "timings.jsonl").read_bytes() == b""


@pytest.mark.parametrize(
    ("text", "size", "kept"),
    [
        ('{"step": 1}\n{"st', 40, '{"step": 1}\n'),  # the disk lost its end
        ('{"step": 1}\n{"step": 2}\n', 15, '{"step": 1}\n'),  # not what the checkpoint saw
        ("", 12, ""),
    ],
)
def test_a_file_that_lost_lines_is_named_and_its_whole_lines_are_kept(
    tmp_path, capsys, text, size, kept
):
    (tmp_path / "metrics.jsonl").write_text(text)
    sizes = {"metrics.jsonl": size, "timings.jsonl": 0}
    with RunLog(tmp_path, config(), is_main=True, state={"sizes": sizes}):
        pass
    assert (tmp_path / "metrics.jsonl").read_text() == kept
    says(
        capsys.readouterr().err,
        f"warning: {tmp_path / 'metrics.jsonl'}",
        f"{size} bytes",
        f"{len(kept)} of these",
    )


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from pipeline.config.settings import Config
from pipeline.tracking.log import RunLog

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
nothing = Config.model_validate({"tracking": {"report_to": []}})
with RunLog(Path(sys.argv[1]), nothing, is_main=True) as log:
    log.metrics({"step": 1})
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))
    try:
        log.metrics({"step": 2})
    except OSError as error:
        print(error.filename)
    print(log.state_dict()["sizes"]["metrics.jsonl"])
"""


def test_a_disk_without_room_for_a_line_raises_and_leaves_no_part_of_it(tmp_path):
    command = [sys.executable, "-c", FULL_DISK, tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == f"{tmp_path / 'metrics.jsonl'}\n12\n"
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


@pytest.fixture
def points():
    """The points that TensorBoard shows of a run folder, by name."""
    from accelerate import PartialState
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    PartialState(cpu=True)

    def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
        events = EventAccumulator(str(folder / "tensorboard"))
        events.Reload()
        return {
            name: [(event.step, event.value) for event in events.Scalars(name)]
            for name in events.Tags()["scalars"]
        }

    return points


def test_tensorboard_gets_the_numbers_of_the_files(tmp_path, points):
    with RunLog(tmp_path / "run", config("tensorboard"), is_main=True) as log:
        for record in [*ALL, {**TRAIN, "step": 2}]:
            log.metrics(record)
        log.timings(TIMES)
    found = points(tmp_path / "run")
    assert found["reward/airline"] == [(1, 0.5), (2, 0.5)]
    assert found["eval/retail/success"] == [(0, 0.0), (0, 0.375), (1, 0.4375)]
    assert found["perf/step_s"] == [(1, 1.5)]
    assert set(found) == {name for record in [*ALL, TIMES] for name in record if "/" in name}


def test_tensorboard_shows_each_line_once_after_a_resume(tmp_path, points):
    with RunLog(tmp_path, config("tensorboard"), is_main=True) as log:
        log.metrics(START)
        log.metrics(TRAIN)
        log.timings(TIMES)
        sizes = log.state_dict()["sizes"]
        log.metrics(AFTER)  # of the step that the checkpoint is of
        log.metrics({**TRAIN, "step": 2, "train/loss": 9.0})
    with RunLog(tmp_path, config("tensorboard"), is_main=True, state={"sizes": sizes}) as log:
        log.metrics(AFTER)
        log.metrics({**TRAIN, "step": 2})
    found = points(tmp_path)
    assert found["train/loss"] == [(1, 0.125), (2, 0.125)]
    assert found["eval/retail/success"] == [(0, 0.0), (1, 0.4375)]
    assert found["perf/step_s"] == [(1, 1.5)]


def test_tensorboard_forgets_an_attempt_that_left_no_checkpoint(tmp_path, points):
    for loss in (9.0, 0.125):
        with RunLog(tmp_path, config("tensorboard"), is_main=True) as log:
            log.metrics({**TRAIN, "train/loss": loss})
    assert points(tmp_path)["train/loss"] == [(1, 0.125)]


def test_a_tracker_that_fails_is_given_up_with_one_warning(tmp_path, points, capsys, monkeypatch):
    from accelerate.tracking import TensorBoardTracker

    def full(*values: object, **settings: object) -> None:
        raise OSError(28, "No space left on device")

    with RunLog(tmp_path, config("tensorboard"), is_main=True) as log:
        log.metrics(TRAIN)
        monkeypatch.setattr(TensorBoardTracker, "log", full)
        for step in (2, 3):
            log.metrics({**TRAIN, "step": step})
    assert steps(tmp_path / "metrics.jsonl") == [1, 2, 3]
    says(capsys.readouterr().err, "warning: TensorBoard", "No space left", "the run goes on")


def test_progress_is_a_line_now_and_then_without_a_terminal(capsys):
    with StageProgress("airline", 25, is_main=True, done=5, num_later=30) as progress:
        for step in range(6, 26):
            progress.step({**TRAIN, "step": step, "reward/retail": 0.25})
    lines = [re.sub(r"[\d.e+-]+ s\b", "N s", line) for line in capsys.readouterr().err.splitlines()]
    rewards, pace = "reward airline 0.50 retail 0.25", "N s, N s per step, about"
    assert lines == [
        f"airline 10/25  {rewards}  {pace} N s left, N s left in all stages",
        f"airline 20/25  {rewards}  {pace} N s left, N s left in all stages",
        f"airline 25/25  {rewards}  {pace} N s left in all stages",
    ]


def test_progress_of_many_steps_without_rewards_stays_short(capsys):
    with StageProgress("warm start", 440, is_main=True) as progress:
        for step in range(440):
            progress.step({"loss": None if step < 55 else 0.25})
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[0].startswith("warm start 44/440  ") and "loss" not in lines[0]
    assert lines[1].startswith("warm start 88/440  loss 0.250  ")
    assert lines[-1].endswith(" s")  # nothing is left


def test_the_episodes_of_an_evaluation_are_counted_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with episodes_of("evaluation after start", 6, Ranks(0, 1, 5)) as progress:
        for count in (2, 0, 4):
            progress.end(count)
    assert "evaluation after start: 100%" in (said := capsys.readouterr().err)
    assert "6/6" in said


@pytest.fixture
def clock(monkeypatch):
    """The seconds that have passed, which a test sets."""
    passed = [0.0]
    monkeypatch.setattr("pipeline.tracking.progress.time.monotonic", lambda: passed[0])
    return passed


def test_episodes_that_end_all_together_say_nothing_of_the_time_left_until_it_is_known(
    clock, capsys
):
    """240 sampled episodes at once, of 200 s each; then 120 greedy ones."""
    with episodes_of("evaluation after start", 360, Ranks(0, 1, 5)) as progress:
        progress.begin(240)
        clock[0] = 200
        progress.end(1)
        clock[0] = 261
        progress.end(239)
        progress.begin(120)
        clock[0] = 461
        progress.end(100)
        clock[0] = 522
        progress.end(20)
    assert capsys.readouterr().err.splitlines() == [
        "evaluation after start 1/360 episodes  200.0 s",
        "evaluation after start 240/360 episodes  261.0 s, about 4 min left",
        "evaluation after start 340/360 episodes  461.0 s",
        "evaluation after start 360/360 episodes  522.0 s",
    ]


def test_the_time_left_of_many_episodes_is_that_of_the_waiting_ones(clock, capsys):
    """1,000 episodes of 100 s, 10 at once: a round of 10 takes 100 s, so 10,000 s in all."""
    said = list[str]()
    with episodes_of("evaluation", 1000, Ranks(0, 1, 5)) as progress:
        progress.begin(10)
        for _ in range(100):
            clock[0] += 100
            progress.end(10)
            said.append(capsys.readouterr().err.strip())
            progress.begin(10)
    assert said[0] == "evaluation 10/1000 episodes  100.0 s, about 2.8 h left"
    assert said[49] == "evaluation 500/1000 episodes  5000.0 s, about 83 min left"
    assert said[98] == "evaluation 990/1000 episodes  9900.0 s, about 2 min left"
    assert said[99] == "evaluation 1000/1000 episodes  10000.0 s"


def test_progress_is_a_bar_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with StageProgress("airline", 3, is_main=True) as progress:
        for _ in range(3):
            progress.step(TRAIN)
    text = capsys.readouterr().err
    assert "3/3" in text
    assert "reward airline 0.50" in text


def test_importing_it_needs_no_torch_and_no_tracker():
    code = (
        "import sys, pipeline.tracking.log, pipeline.report.write, pipeline.tracking.wandb; "
        "print([m for m in ('torch', 'wandb', 'accelerate', 'matplotlib') "
        "if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
