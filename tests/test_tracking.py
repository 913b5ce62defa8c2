"""The files hold what was measured, and the trackers the same numbers under the same names."""

import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config import Config, UserError
from pipeline.tracking import RunLog, StageProgress, cut_back, has_wandb_key, read_records

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


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A home without keys, where wandb and others may leave what they like; no service is left."""
    from accelerate import PartialState

    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name in ("CACHE", "CONFIG", "DATA", "ARTIFACT"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("NETRC", raising=False)
    (tmp_path / "home").mkdir()
    PartialState(cpu=True)
    yield monkeypatch
    if "wandb" in sys.modules:  # where a run could not start, its service is still there
        sys.modules["wandb"].teardown()


def wandb_records(folder: Path) -> list:
    """The records of the folder's one file of W&B's; the newest where a run was resumed.

    The format is LevelDB's log (block 32 KiB; checksum, length, type) behind a header of 7 bytes.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    path = max(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    data, position, part, records = path.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        part += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            records.append(Record.FromString(part))
            part = b""
    return records


def wandb_rows(folder: Path) -> list[dict[str, float]]:
    """The rows logged, without what W&B adds."""
    rows = []
    for record in wandb_records(folder):
        if record.WhichOneof("record_type") == "history":
            names = [item.key or "/".join(item.nested_key) for item in record.history.item]
            values = [json.loads(item.value_json) for item in record.history.item]
            row = dict(zip(names, values, strict=True))
            rows.append({name: row[name] for name in row if not name.startswith("_")})
    return rows


def numbers_of(record: dict) -> dict[str, float]:
    return {name: record[name] for name in record if "/" in name or name == "step"}


def test_each_record_is_one_line_of_valid_json(tmp_path):
    with RunLog(tmp_path / "run", config(), is_main=True) as log:
        log.metrics(TRAIN)
        log.timings(TIMES)
        assert read_records(tmp_path / "run/metrics.jsonl") == [TRAIN], "flushed at once"
        log.metrics({**TRAIN, "step": 2})
    assert read_records(tmp_path / "run/metrics.jsonl") == [TRAIN, {**TRAIN, "step": 2}]
    assert read_records(tmp_path / "run/timings.jsonl") == [TIMES]


def test_what_json_does_not_know_becomes_null(tmp_path):
    with RunLog(tmp_path, config(), is_main=True) as log:
        log.metrics({"step": 1, "a": math.nan, "b": [math.inf, 1.0], "c": {"d": -math.inf}})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text == '{"step": 1, "a": null, "b": [null, 1.0], "c": {"d": null}}\n'


def test_other_ranks_write_nothing(tmp_path, capsys):
    with RunLog(tmp_path / "run", config("wandb", "tensorboard"), is_main=False) as log:
        log.metrics(TRAIN)
        log.timings(TIMES)
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


def test_a_resumed_run_drops_what_it_will_write_again(tmp_path):
    lines = [*ALL, {**TRAIN, "step": 2}, {**TRAIN, "step": 3}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text + '{"kind": "train", "st')
    cut_back(tmp_path, step=2, evaluated=["start", "warm_start"])
    assert read_records(tmp_path / "metrics.jsonl") == [
        START,
        WARM,
        TRAIN,
        VALIDATION,
        {**TRAIN, "step": 2},
    ]
    with RunLog(
        tmp_path, config(), is_main=True, resumed_at=1, evaluated=["start", "warm_start", "airline"]
    ) as log:
        log.metrics({**TRAIN, "step": 2})
    steps = [record["step"] for record in read_records(tmp_path / "metrics.jsonl")]
    assert steps == [0, 0, 1, 1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_wandb_gets_the_numbers_of_the_files(tmp_path, machine, capfd):
    folder = tmp_path / "my-run"
    with RunLog(folder, config("wandb", project="shop", tags=["tiny", "cpu"]), is_main=True) as log:
        for record in [*ALL, {**TRAIN, "step": 2, "train/kl": math.nan}]:
            log.metrics(record)
        log.timings(TIMES)
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("W&B: no API key, so this run is kept offline; to upload it: wandb sync ")
    (synced,) = folder.glob("wandb/offline-run-*")
    assert Path(err.split()[-1]).resolve() == synced.resolve()

    written = read_records(folder / "metrics.jsonl")
    assert len(written) == 6
    last = written.pop()
    assert last.pop("train/kl") is None
    assert wandb_rows(folder) == [numbers_of(row) for row in [*written, last, TIMES]]

    (run,) = [r.run for r in wandb_records(folder) if r.WhichOneof("record_type") == "run"]
    assert (run.project, run.display_name, list(run.tags)) == ("shop", "my-run", ["tiny", "cpu"])
    settings = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert settings["grpo"]["learning_rate"] == 3e-4
    axes = {
        r.metric.glob_name: r.metric.step_metric
        for r in wandb_records(folder)
        if r.WhichOneof("record_type") == "metric"
    }
    assert axes["*"] == "step"


def test_a_resumed_offline_run_is_whole_again_under_the_same_id(tmp_path, machine):
    folder = tmp_path / "run"
    settings = config("wandb", run_name="again")
    with RunLog(folder, settings, is_main=True) as log:
        log.metrics(TRAIN)
        log.metrics({**TRAIN, "step": 2, "train/loss": 9.0})
        log.timings(TIMES)
    (first,) = folder.glob("wandb/offline-run-*")  # its name holds the second it was made in
    first.rename(first.with_name("offline-run-20260101_000000-" + first.name.rsplit("-", 1)[1]))
    with RunLog(folder, settings, is_main=True, resumed_at=1) as log:
        log.metrics({**TRAIN, "step": 2})
    expected = [TRAIN, TIMES, {**TRAIN, "step": 2}]
    assert wandb_rows(folder) == [numbers_of(row) for row in expected]
    files = list(folder.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2
    assert len({path.name for path in files}) == 1, "one id"


def test_tensorboard_gets_the_numbers_of_the_files(tmp_path, machine):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with RunLog(tmp_path / "run", config("tensorboard"), is_main=True) as log:
        for record in [*ALL, {**TRAIN, "step": 2}]:
            log.metrics(record)
        log.timings(TIMES)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()

    def points(name: str) -> list[tuple[int, float]]:
        return [(event.step, event.value) for event in events.Scalars(name)]

    assert points("reward/airline") == [(1, 0.5), (2, 0.5)]
    assert points("eval/retail/success") == [(0, 0.0), (0, 0.375), (1, 0.4375)]
    assert points("perf/step_s") == [(1, 1.5)]
    assert set(events.Tags()["scalars"]) == {
        name for record in [*ALL, TIMES] for name in record if "/" in name
    }


def test_a_key_is_found_where_wandb_finds_it(tmp_path, machine):
    assert not has_wandb_key()
    netrc = tmp_path / "home" / ".netrc"
    netrc.write_text("machine api.wandb.ai login user password " + "0" * 40 + "\n")
    netrc.chmod(0o600)
    assert has_wandb_key()
    machine.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not has_wandb_key()
    machine.setenv("WANDB_API_KEY", "0" * 40)
    assert has_wandb_key()


def test_wandb_that_cannot_start_is_the_users_mistake(tmp_path, machine):
    machine.setenv("WANDB_API_KEY", "not a key")
    with pytest.raises(UserError, match=r"W&B did not start .*; set WANDB_MODE=offline"):
        RunLog(tmp_path / "run", config("wandb"), is_main=True)


def test_progress_is_a_line_now_and_then_without_a_terminal(capsys):
    with StageProgress("airline", 25, is_main=True, done=5) as progress:
        for step in range(6, 26):
            progress.step({**TRAIN, "step": step, "reward/retail": 0.25})
    lines = [line.rsplit("  ", 1) for line in capsys.readouterr().err.splitlines()]
    assert [text for text, *_ in lines] == [
        "airline 10/25  reward airline 0.50 retail 0.25",
        "airline 20/25  reward airline 0.50 retail 0.25",
        "airline 25/25  reward airline 0.50 retail 0.25",
    ]
    assert lines[0][1].endswith(" s")


def test_progress_of_many_steps_without_rewards_stays_short(capsys):
    with StageProgress("warm start", 440, is_main=True) as progress:
        for _ in range(440):
            progress.step({})
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[0].startswith("warm start 44/440  ")


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
        "import sys, pipeline.tracking, pipeline.report; "
        "print([m for m in ('torch', 'wandb', 'accelerate', 'matplotlib') if m in sys.modules])"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
