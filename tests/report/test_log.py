"""The files hold what was measured, and the trackers the same numbers under the same names."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.checkpoints.transcripts import save_transcripts
from pipeline.common.durable import read_records
from pipeline.common.errors import UserError
from pipeline.config.settings import Config, TrackingSettings
from pipeline.report.log import TRACKERS, RunLog, check_trackers
from pipeline.report.progress import StageProgress
from scripts.proofs.grid import make_trajectory
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
WARM = {**START, "stage": "warm_start", "after": "warm_start", "eval/retail/success": 0.375}
AFTER = {**START, "stage": "airline", "after": "airline", "step": 1, "eval/retail/success": 0.4375}
TIMES = {"kind": "train", "stage": "airline", "step": 1, "perf/step_s": 1.5, "cores": 2}


def config(*report_to: str, **tracking: object) -> Config:
    return Config.model_validate({"tracking": {"report_to": list(report_to), **tracking}})


def steps(path: Path) -> list[int]:
    return [record["step"] for record in read_records(path)]


def test_each_record_is_one_line_of_valid_json_which_is_there_at_once(tmp_path):
    with RunLog(tmp_path, config(), is_main=True) as log:
        log.metrics(TRAIN)
        assert read_records(tmp_path / "metrics.jsonl") == [TRAIN]
        log.metrics({"step": 1, "a": math.nan, "b": [math.inf, 1.0], "c": {"d": -math.inf}})
        log.timings(TIMES)
        log.timings(TIMES)
    last = (tmp_path / "metrics.jsonl").read_text().splitlines()[-1]
    assert last == '{"step": 1, "a": null, "b": [null, 1.0], "c": {"d": null}}'
    times = read_records(tmp_path / "timings.jsonl")
    assert 0 < times[0].pop("time") < times[1].pop("time")
    assert times == [TIMES, TIMES]


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


def test_each_tracker_can_be_named_in_the_settings():
    report_to = TrackingSettings.model_json_schema()["properties"]["report_to"]
    assert report_to["items"]["enum"] == [*TRACKERS]


@pytest.mark.parametrize("package", TRACKERS)
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
from pipeline.config.settings import Config, TrackingSettings
from pipeline.report.log import RunLog

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


def test_tensorboard_has_the_numbers_of_the_files_once_whatever_was_begun_before(tmp_path, points):
    with RunLog(tmp_path, config("tensorboard"), is_main=True) as log:  # leaves no checkpoint
        log.metrics({**TRAIN, "train/loss": 8.0})
    with RunLog(tmp_path, config("tensorboard"), is_main=True) as log:
        log.metrics(START)
        log.metrics(WARM)
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
    assert found["eval/retail/success"] == [(0, 0.0), (0, 0.375), (1, 0.4375)]
    assert found["perf/step_s"] == [(1, 1.5)]
    names = {name for record in (START, TRAIN, TIMES) for name in record if "/" in name}
    assert set(found) == names


def test_tensorboard_has_the_text_of_a_steps_episodes_once(tmp_path):
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    settings = config("tensorboard", log_completions_steps=1)
    line = {**TRAIN, "step": 2}
    call = {"function": {"name": "book", "arguments": {"flight": "F1"}}}
    episode = make_trajectory(domain="airline", task_id="t1", reward=0.5)
    episode.messages += [{"role": "assistant", "content": "", "tool_calls": [call]}]
    save_transcripts(tmp_path / "trajectories" / "airline", 2, 0, [episode], [0.25])
    with RunLog(tmp_path, settings, is_main=True) as log:
        log.metrics(line)
        state = log.state_dict()
    with RunLog(tmp_path, settings, is_main=True, state=state) as log:
        log.metrics({**TRAIN, "step": 3})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (text,) = events.Tensors("completions/text_summary")
    assert (text.step, text.tensor_proto.string_val[0].decode()) == (
        2,
        "**stage airline, step 2, domain airline, family , task t1, trial 0, reward 0.5, "
        "stop_reason completed, advantage 0.25, rewards **\n\n"
        '    assistant: book({"flight": "F1"})',
    )


TRACKIO = """  # what a run asks of it; each call of `log` reaches the disk
import json
from pathlib import Path

file = Path(__file__).with_suffix(".jsonl")


class Run:
    def __init__(self, id):
        self.id = id
    def log(self, values, step):
        with file.with_name(f"{self.id}.jsonl").open("a") as lines:
            lines.write(json.dumps({"step": step, **values}) + chr(10))
    def finish(self):
        pass


def init(**asked):
    with file.with_suffix(".asked").open("a") as lines:
        lines.write(json.dumps(asked) + chr(10))
    number = len(file.with_suffix(".asked").read_text().splitlines())
    return Run(str(number))  # a new run; all have one name


def Table(columns, data):
    return [dict(zip(columns, row)) for row in data]


class SQLiteStorage:
    def get_logs(project, run_id):
        assert project == "three-domain-grpo"
        lines = file.with_name(f"{run_id}.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]
"""


def test_trackio_gets_each_number_once_though_another_run_has_the_name(tmp_path, monkeypatch):
    package = tmp_path / "trackio"
    package.mkdir()
    (package / "__init__.py").write_text("from trackio.sqlite_storage import *")
    (package / "sqlite_storage.py").write_text(TRACKIO)
    monkeypatch.syspath_prepend(tmp_path)
    settings = config("trackio", log_completions_steps=2, run_name="mine")
    folder = tmp_path / "run"
    save_transcripts(folder / "trajectories" / "airline", 2, 0, [make_trajectory(domain="airline")])
    second = {**TRAIN, "step": 2}
    with RunLog(folder, settings, is_main=True) as log:
        log.metrics(TRAIN)
        log.timings(TIMES)
        state = log.state_dict()
        log.metrics(second)  # after the checkpoint
    with RunLog(tmp_path / "other" / "run", settings, is_main=True) as log:
        log.metrics({**TRAIN, "step": 7})
    sent = package / "1.jsonl"
    before = read_records(sent)
    sent.write_text("".join(sent.read_text().splitlines(keepends=True)[1:]))  # the first was lost
    with RunLog(folder, settings, is_main=True, state=state) as log:
        log.metrics(second)
        log.metrics({**TRAIN, "step": 3})
    assert read_records(sent) == [*before[1:], before[0], {**before[0], "step": 3}]
    assert before[0] == {"step": 1, **{name: TRAIN[name] for name in TRAIN if "/" in name}}
    assert [line["step"] for line in before if "completions" in line] == [2]
    asked = read_records(package / "sqlite_storage.asked")
    assert [(of["name"], of["resume"]) for of in asked] == [("mine", "never")] * 3
    assert [line["step"] for line in read_records(package / "2.jsonl")] == [7]
    assert not {"space_id", "server_url"} & asked[0].keys()
    for name in ("trackio", "trackio.sqlite_storage"):
        monkeypatch.delitem(sys.modules, name)


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
