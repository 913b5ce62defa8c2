"""W&B gets every line of metrics.jsonl once, whatever is killed when, and never holds a run up."""

import base64
import fcntl
import gzip
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

from pipeline.checkpoints.manifest import write_manifest
from pipeline.config.recipe import dump
from pipeline.config.settings import Config
from pipeline.errors import UserError
from pipeline.files.durable import read_records
from pipeline.tracking import wandb_feed, wandb_sync
from pipeline.tracking.log import RunLog
from pipeline.tracking.wandb_extras import COLUMNS, episode_rows
from pipeline.tracking.wandb_feed import has_wandb_key
from pipeline.tracking.wandb_parts import close_parts, parts_of, records
from scripts import wandb_dashboard
from tests.support import ROOT
from tests.support.warm_process import WarmRun

pytestmark = pytest.mark.whole_run

START = {"kind": "eval", "stage": "start", "after": "start", "step": 0, "eval/retail/success": 0.0}
AFTER = {**START, "stage": "airline", "after": "airline", "step": 2, "eval/retail/success": 0.5}
KEY = "0123456789" * 4


def train(step: int, **metrics: float) -> dict[str, Any]:
    line = {"kind": "train", "stage": "airline", "step": step, "train/loss": 1 / step}
    return {**line, **metrics, "rollout/episodes": 192}


def times(step: int, seconds: float = 0.5) -> dict[str, Any]:
    return {"kind": "train", "stage": "airline", "step": step, "perf/step_s": seconds, "cores": 2}


def config(*report_to: str, **tracking: object) -> Config:
    return Config.model_validate({"tracking": {"report_to": report_to or ["wandb"], **tracking}})


@pytest.fixture(scope="module", autouse=True)
def quick_starts():
    """At each start W&B lists what is installed, and waits for its service with long naps."""
    import wandb.util
    from wandb.sdk.lib.service import service_port_file

    installed = list(wandb.util.working_set())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(wandb.util, "working_set", lambda: installed)
        patched.setattr(service_port_file, "_SLEEP", lambda _: time.sleep(0.01))
        yield


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """A home without keys, where wandb may leave what it likes; no service is left."""
    in_home(tmp_path, monkeypatch)
    yield monkeypatch
    if "wandb" in sys.modules:  # where a run could not start, its service is still there
        sys.modules["wandb"].teardown()


def in_home(place: Path, patched: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        patched.delenv(name)
    for name in ("CACHE", "CONFIG", "DATA", "ARTIFACT"):
        patched.setenv(f"WANDB_{name}_DIR", str(place / "home"))
    patched.setenv("HOME", str(place / "home"))
    patched.delenv("NETRC", raising=False)
    (place / "home").mkdir()


def log_of(folder: Path, *lines: dict[str, Any]) -> None:
    """A whole run that writes these lines."""
    with RunLog(folder, config(), is_main=True) as log:
        write(log, *lines)


def write(log: RunLog, *lines: dict[str, Any]) -> None:
    """Lines that say how many cores there are go to the timings."""
    for line in lines:
        (log.timings if "cores" in line else log.metrics)(line)


def of_kind(part_file: Path, kind: str) -> list[Any]:
    found = [record for _, record in records(part_file.read_bytes())]
    return [getattr(record, kind) for record in found if record.WhichOneof("record_type") == kind]


def rows(*files: Path) -> list[tuple[int, dict[str, float]]]:
    """The rows of W&B's files and their W&B steps, without what W&B adds."""
    found = []
    for history in (history for file in files for history in of_kind(file, "history")):
        row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in history.item}
        found.append((history.step.num, {key: row[key] for key in row if not key.startswith("_")}))
    return found


def files_of(folder: Path) -> list[Path]:
    return [part.file for part in parts_of(folder / "wandb")]


def numbers_of(line: dict[str, Any]) -> dict[str, float]:
    return {name: line[name] for name in line if "/" in name or name == "step"}


# What W&B gets


def test_a_line_is_a_row_with_the_numbers_of_the_files(tmp_path, capfd):
    folder = tmp_path / "my-run"
    with RunLog(folder, config(project="shop", tags=["tiny", "cpu"]), is_main=True) as log:
        write(log, {"kind": "machine", "stage": "start", "step": 0, "cores": 2})
        write(log, START, train(1), times(1), train(2, **{"train/kl": float("nan")}), times(2))
        write(log, AFTER)
    out, err = capfd.readouterr()
    assert (out, err) == (
        "",
        "W&B: no API key, so this run is kept offline; to upload it: "
        f"bash scripts/wandb_sync.sh {folder}\n",
    )
    (file,) = files_of(folder)
    assert rows(file) == [
        (0, {"step": 0, "eval/retail/success": 0.0}),
        (1, {"step": 1, "train/loss": 1.0, "rollout/episodes": 192, "perf/step_s": 0.5}),
        (2, {"step": 2, "train/loss": 0.5, "rollout/episodes": 192, "perf/step_s": 0.5}),
        (3, {"step": 2, "eval/retail/success": 0.5}),
    ]
    (run,) = of_kind(file, "run")
    assert (run.project, run.display_name, list(run.tags)) == ("shop", "my-run", ["tiny", "cpu"])
    settings = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert settings["grpo"]["learning_rate"] == 3e-4
    axes = {metric.glob_name: metric.step_metric for metric in of_kind(file, "metric")}
    assert axes["*"] == "step"
    assert (run.run_group, run.job_type) == (
        "sequential airline-retail-telecom",
        "three_domain_tiny",
    )


def test_a_run_is_grouped_by_its_curriculum_in_names_that_the_server_takes(tmp_path, machine):
    order = ["retail", "airline"] * 30
    tree = {"recipe": "r" * 100, "curriculum": {"order": order}}
    with RunLog(tmp_path / "1", Config.model_validate(tree), is_main=True) as log:
        write(log, START)
    (run,) = of_kind(*files_of(tmp_path / "1"), "run")
    assert run.run_group.startswith("sequential retail-airline-retail-")
    assert (len(run.run_group), run.job_type) == (128, "r" * 64)
    machine.setenv("WANDB_RUN_GROUP", "mine")
    log_of(tmp_path / "2", START)
    assert of_kind(*files_of(tmp_path / "2"), "run")[0].run_group == "mine"


def test_a_resumed_run_sends_newer_lines_only_under_the_same_id(tmp_path):
    with RunLog(tmp_path, config(), is_main=True) as log:
        run_id = log.tracker_run_id
        write(log, START, train(1), times(1))
        sizes = log.state_dict()["sizes"]
        write(log, train(2), times(2, 0.25))
    with RunLog(tmp_path, config(), is_main=True, state={"sizes": sizes}) as log:
        assert log.tracker_run_id == run_id
        write(log, train(2), times(2, 0.75), AFTER, train(3), times(3))
    first, second = files_of(tmp_path)
    assert first.name == second.name == f"run-{run_id}.wandb"
    assert [row["perf/step_s"] for _, row in rows(first) if "perf/step_s" in row] == [0.5, 0.25]
    assert rows(second) == [
        (3, numbers_of(AFTER)),
        (4, {**numbers_of(train(3)), "perf/step_s": 0.5}),
    ]
    cursor = json.loads((tmp_path / "wandb/cursor.json").read_text())
    assert cursor == {"run_id": run_id, "lines": 5}


def test_lines_that_were_written_and_not_sent_are_sent_on_resume(tmp_path):
    evaluation_s = {**AFTER, "eval/retail/success": None, "perf/evaluation_s": 9.0, "cores": 2}
    with RunLog(tmp_path, config("tensorboard"), is_main=True) as log:
        write(log, START, train(1), times(1), train(2), times(2), AFTER, evaluation_s)
        sizes = log.state_dict()["sizes"]
    with RunLog(tmp_path, config(), is_main=True, state={"sizes": sizes}) as log:
        write(log, train(3))
    assert rows(*files_of(tmp_path)) == [
        (0, numbers_of(START)),
        (1, {**numbers_of(train(1)), "perf/step_s": 0.5}),
        (2, {**numbers_of(train(2)), "perf/step_s": 0.5}),
        (3, {**numbers_of(AFTER), "perf/evaluation_s": 9.0}),
        (4, numbers_of(train(3))),
    ]


def test_a_fresh_start_sends_nothing_of_an_attempt_before_it(tmp_path):
    log_of(tmp_path, START, train(1, **{"train/kl": 9.0}))
    (abandoned,) = files_of(tmp_path)
    log_of(tmp_path, START, train(1))
    (file,) = files_of(tmp_path)
    assert file.name != abandoned.name, "another id"
    assert rows(file) == [(0, numbers_of(START)), (1, numbers_of(train(1)))]
    assert len(list(tmp_path.glob("wandb/abandoned/*/*.wandb"))) == 1


def test_a_fresh_start_hides_a_part_that_says_nothing_yet(tmp_path):
    unborn = tmp_path / "wandb/offline-run-20260101_000000-old/run-old.wandb"
    unborn.parent.mkdir(parents=True)
    unborn.write_bytes(b":W&B" + bytes(3))
    log_of(tmp_path, START)
    assert not unborn.exists()


def test_parts_that_somebody_removed_are_not_sent_again(tmp_path):
    with RunLog(tmp_path, config(), is_main=True) as log:
        write(log, START, train(1))
        sizes = log.state_dict()["sizes"]
    for part in parts_of(tmp_path / "wandb"):
        shutil.rmtree(part.folder)
    with RunLog(tmp_path, config(), is_main=True, state={"sizes": sizes}) as log:
        write(log, train(2))
    assert rows(*files_of(tmp_path)) == [(2, numbers_of(train(2)))]


def test_the_id_that_a_checkpoint_remembers_is_used_where_the_folder_has_none(tmp_path):
    sizes = {"metrics.jsonl": 0, "timings.jsonl": 0}
    for given, used in (("abc123", "abc123"), ("other", "abc123")):
        with RunLog(
            tmp_path, config(), is_main=True, state={"sizes": sizes, "tracker_run_id": given}
        ) as log:
            assert log.tracker_run_id == used
            write(log, START)
    assert [file.name for file in files_of(tmp_path)] == ["run-abc123.wandb"] * 2


def test_a_disabled_wandb_leaves_nothing_and_claims_nothing(tmp_path, machine):
    machine.setenv("WANDB_MODE", "disabled")
    log_of(tmp_path, START, train(1), times(1))
    assert len(read_records(tmp_path / "metrics.jsonl")) == 2
    assert not (tmp_path / "wandb").exists()


# Processes that are killed

KILLED = """
import json, os, signal, sys, time
from pathlib import Path
import wandb.sdk.lib.service.service_port_file as port_file
from pipeline.config.settings import Config
from pipeline.tracking.log import RunLog
from pipeline.tracking.wandb_parts import parts_of

port_file._SLEEP = lambda _: time.sleep(0.01)
folder, last, save_at, wanted_rows = Path(sys.argv[1]), *map(int, sys.argv[2:])
saved = folder / "saved.json"
state = json.loads(saved.read_text()) if saved.exists() else {"step": 0, "log": None}
settings = Config.model_validate({"tracking": {"report_to": ["wandb"]}})
log = RunLog(folder, settings, is_main=True, state=state["log"])
for step in range(state["step"] + 1, last + 1):
    keys = {"kind": "train", "stage": "airline", "step": step}
    log.metrics({**keys, **{f"train/metric_{i}": step + i / 64 for i in range(40)}})
    log.timings({**keys, "perf/step_s": time.time()})
    if step % 10 == 0:
        log.metrics({**keys, "kind": "eval", "after": f"{step}", "eval/x": step / 10})
    if step == save_at:
        saved.write_text(json.dumps({"step": step, "log": log.state_dict()}))
if wanted_rows == 0:
    log.close()
    sys.exit()
while max([part.next_row or 0 for part in parts_of(folder / "wandb")], default=0) < wanted_rows:
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_parts_of_a_run_that_is_killed_hold_each_line_once_in_order(tmp_path):
    (tmp_path / "run.py").write_text(KILLED)

    def start(last: int, save_at: int, wanted_rows: int) -> int:
        command = [sys.executable, tmp_path / "run.py", tmp_path, last, save_at, wanted_rows]
        process = WarmRun(command, cwd=ROOT, stderr=subprocess.DEVNULL)
        assert process.wait(timeout=120) == (-9 if wanted_rows else 0)
        return max(part.next_row or 0 for part in parts_of(tmp_path / "wandb"))

    sent = start(last=60, save_at=20, wanted_rows=23)
    assert 23 <= sent < 66, "of 66 lines; the checkpoint holds 22"
    start(last=120, save_at=100, wanted_rows=sent + 20)
    with files_of(tmp_path)[-1].open("r+b") as file:
        file.truncate(file.seek(0, os.SEEK_END) // 2)
    sent_then = max(part.next_row or 0 for part in parts_of(tmp_path / "wandb"))
    assert sent <= sent_then < 110, "less than the checkpoint holds"
    start(last=130, save_at=0, wanted_rows=0)

    lines = read_records(tmp_path / "metrics.jsonl")
    assert len(lines) == 143
    files = files_of(tmp_path)
    assert len(files) == 3
    assert len({file.name for file in files}) == 1, "one id"
    found = rows(*files)
    assert [number for number, _ in found] == list(range(143))
    for line, (_, row) in zip(lines, found, strict=True):
        assert ("perf/step_s" in row) == (line["kind"] == "train")
        row.pop("perf/step_s", None)
        assert row == numbers_of(line)
    resumes = [run.resume for file in files for run in of_kind(file, "run")]
    assert resumes == [False, True, True]


def part_of(*found: Any) -> bytes:
    """Records as W&B writes them, in one block."""
    data = b":W&B" + bytes(3)
    for record in found:
        piece = record.SerializeToString()
        data += struct.pack("<IHB", zlib.crc32(b"\x01" + piece), len(piece), 1) + piece
    return data


def test_a_part_ends_where_it_is_not_what_was_written(tmp_path):
    log_of(tmp_path, *[train(step) for step in range(1, 11)])
    (file,) = files_of(tmp_path)
    whole = file.read_bytes()
    found = list(records(whole))
    (place,) = [end - 5 for end, record in found if record.history.step.num == 7]
    for damaged in (
        whole[:place],  # torn
        whole[:place] + b"?" + whole[place + 1 :],  # other bits
        whole[:place] + bytes(len(whole) - place),  # a hole that a power cut left
        part_of(*[record for _, record in found if record.history.step.num != 7]),  # a lost row
    ):
        file.write_bytes(damaged)
        (part,) = parts_of(tmp_path / "wandb")
        assert part.next_row == 7
        assert close_parts(tmp_path / "wandb") == 7
        assert rows(file)[-1] == (6, numbers_of(train(7)))


def test_what_the_service_of_a_killed_process_writes_too_late_does_not_count(tmp_path):
    log_of(tmp_path, train(1), train(2), train(3))
    (file,) = files_of(tmp_path)
    whole = file.read_bytes()
    (end, *_) = [end for end, record in records(whole) if record.history.step.num == 1]
    file.write_bytes(whole[:end])
    with file.open("ab") as service:
        assert close_parts(tmp_path / "wandb") == 2
        service.write(whole[end:])
    (part,) = parts_of(tmp_path / "wandb")
    assert (part.next_row, part.length) == (2, end)


# W&B in trouble


def service() -> psutil.Process:
    """W&B's process of this run; that of a test before may still be on its way out."""
    children = psutil.Process().children(recursive=True)
    cores = [child for child in children if child.name().startswith("wandb-core")]
    return max(cores, key=lambda core: core.create_time())


def test_a_service_that_dies_is_given_up_and_the_next_start_sends_the_rest(tmp_path, capfd):
    with RunLog(tmp_path, config(), is_main=True) as log:
        write(log, START, train(1))
        service().kill()
        said = capfd.readouterr().err
        step = 1
        while "warning" not in said:  # the thread may take some lines to notice
            step += 1
            write(log, train(step))
            time.sleep(0.01)
            said += capfd.readouterr().err
        write(log, train(step + 1), train(step + 2))
        sizes = log.state_dict()["sizes"]
    assert len(read_records(tmp_path / "metrics.jsonl")) == step + 3
    _, warning = (said + capfd.readouterr().err).splitlines()
    assert warning.startswith("warning: W&B: Connection")
    assert warning.endswith(
        "; the run goes on, the files are whole; send them later with scripts/wandb_sync.sh"
    )
    with RunLog(tmp_path, config(), is_main=True, state={"sizes": sizes}) as log:
        write(log, train(step + 3))
    assert [number for number, _ in rows(*files_of(tmp_path))] == list(range(step + 4))


def test_a_service_that_hangs_holds_nothing_up(tmp_path, machine, capfd):
    machine.setenv("WANDB_FINISH_TIMEOUT", "0.5")
    machine.setattr(wandb_feed, "GRACE_S", 0.5)
    with RunLog(tmp_path, config(), is_main=True) as log:
        service().suspend()
        metrics = {f"train/metric_{i}": i / 64 for i in range(200)}
        for step in range(1, 300):  # far more than the pipe to it takes
            write(log, train(step, **metrics))
    assert len(read_records(tmp_path / "metrics.jsonl")) == 299
    assert "warning: W&B: TimeoutError: it did not finish in 1 s; the run goes on" in (
        capfd.readouterr().err
    )


def test_a_service_that_hangs_does_not_keep_a_failure_back(tmp_path, machine, capfd):
    machine.setattr(wandb_feed, "FAILED_S", 0.25)
    log = RunLog(tmp_path, config(), is_main=True)
    service().suspend()
    write(log, train(1))
    log.close(failed=True)
    assert "it did not finish in 0.25 s" in capfd.readouterr().err


def test_wandb_that_cannot_start_is_the_users_mistake(tmp_path, machine):
    machine.setenv("WANDB_API_KEY", "not a key")
    with pytest.raises(UserError, match=r"W&B did not start .*; set WANDB_MODE=offline"):
        RunLog(tmp_path / "run", config(), is_main=True)


def test_wandb_that_cannot_start_again_does_not_stop_a_resumed_run(tmp_path, machine, capfd):
    with RunLog(tmp_path, config(), is_main=True) as log:
        write(log, START)
        sizes = log.state_dict()["sizes"]
    machine.setenv("WANDB_API_KEY", "not a key")
    capfd.readouterr()
    with RunLog(
        tmp_path, config(), is_main=True, state={"sizes": sizes, "tracker_run_id": "abc"}
    ) as log:
        write(log, train(1))
        assert log.tracker_run_id == "abc", "for the next checkpoint"
    assert read_records(tmp_path / "metrics.jsonl") == [START, train(1)]
    (warning,) = capfd.readouterr().err.splitlines()
    assert warning.startswith("warning: W&B: report_to: W&B did not start")


def test_a_key_is_found_where_wandb_finds_it(tmp_path, machine):
    assert not has_wandb_key()
    netrc = tmp_path / "home" / ".netrc"
    netrc.write_text(f"machine api.wandb.ai login user password {KEY}\n")
    netrc.chmod(0o600)
    assert has_wandb_key()
    machine.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not has_wandb_key()
    machine.setenv("WANDB_API_KEY", KEY)
    assert has_wandb_key()


def test_no_file_of_a_run_holds_a_password(tmp_path, machine):
    machine.setenv("WANDB_API_KEY", KEY)
    machine.setenv("WANDB_MODE", "offline")
    machine.setattr(sys, "argv", ["run.py", "--model", "https://user:hunter2@host.org/model"])
    tree = {
        "model": {
            "model": "https://user:hunter2@host.org/model",
            "chat_template_kwargs": {"urls": ["https://host.org/?token=hunter2"]},
        },
        "tracking": {"tags": ["hf_" + "hunter2" * 4]},
    }
    remote = ["remote", "add", "origin", "https://hunter2:x-oauth-basic@host.org/code.git"]
    for command in (["init", "--quiet"], remote):
        subprocess.run(["git", "-C", tmp_path, *command], check=True)
    with RunLog(tmp_path / "run", Config.model_validate(tree), is_main=True) as log:
        write(log, START)
    (run,) = of_kind(*files_of(tmp_path / "run"), "run")
    assert run.git.remote_url == "https://***@host.org/code.git"
    settings = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert settings["model"]["model"] == "https://***@host.org/model"
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) > 5
    for secret in (b"hunter2", KEY.encode()):
        assert [path for path in files if secret in path.read_bytes()] == []
    assert sys.argv[2].endswith("hunter2@host.org/model"), "as it was"


# What it gets at the end


def results_in(folder: Path) -> None:
    """What a run leaves in its folder: results, a picture, two checkpoints, transcripts."""
    success = {"airline": {"mean": 0.75, "greedy": 0.5}, "retail": {"mean": 0.25, "greedy": 0.0}}
    before = {"after": "start", "step": 0, "success": {"airline": {"mean": 0.0, "greedy": 0.0}}}
    evaluations = [before, {"after": "retail", "step": 2, "success": success}]
    transfer: dict[str, Any] = {"backward": {"airline": [-0.25, -0.5, 0.125]}, "gain": 0.5}
    transfer |= {"curve": [0.25, None, None], "matrix": [[[0.0, 0.0, 0.0]]] * 3, "of": "pilot"}
    results = {"evaluations": evaluations, "transfer": transfer}
    (folder / "results.json").write_text(json.dumps(results))
    (folder / "report.html").write_text("<p>report</p>")
    Image.new("RGB", (4, 3)).save(folder / "learning_curves.png")
    for number, name in enumerate(["step-000001", "stage-1-airline"]):
        path = folder / "checkpoints" / name
        path.mkdir(parents=True)
        (path / "state.json").write_text(name)
        write_manifest(path, number)
    (folder / "checkpoints" / "half").mkdir()
    for stage, step in (("airline", 1), ("airline", 2), ("evaluation-airline", 2)):
        transcript(folder, stage, step, 3)


def transcript(folder: Path, stage: str, step: int, count: int, **more: Any) -> Path:
    path = folder / "trajectories" / stage / f"step-{step:06d}.rank-0.jsonl.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    call = {"type": "function", "function": {"name": "book", "arguments": {"flight": "F1"}}}
    messages = [
        {"role": "user", "content": "a flight, please"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "booked"},
    ]
    episode = {"domain": "airline", "family": "book", "stop_reason": "completed", **more}
    with gzip.open(path, "wt", encoding="utf-8") as file:
        for trial in range(count):
            row = {**episode, "task_id": "t1", "trial": trial, "reward": 1.0, "messages": messages}
            file.write(json.dumps(row) + "\n")
    return path


def artifacts_in(*files: Path) -> dict[str, list[Any]]:
    """The artifacts in W&B's files, by type."""
    found: dict[str, list[Any]] = {}
    for artifact in (artifact for file in files for artifact in of_kind(file, "artifact")):
        found.setdefault(artifact.type, []).append(artifact)
    return found


def summary_of(file: Path) -> dict[str, Any]:
    updates = [update for summary in of_kind(file, "summary") for update in summary.update]
    return {u.key or "/".join(u.nested_key): json.loads(u.value_json) for u in updates}


@pytest.fixture
def finished(tmp_path):
    """The folder of an offline run that ended with results."""
    folder = tmp_path / "a run"
    with RunLog(folder, config(), is_main=True) as log:
        write(log, train(1), times(1), AFTER)
        results_in(folder)
        log.finish_with(folder)
    return folder


def test_results_make_no_row_and_their_numbers_are_the_summary(finished, capfd):
    (file,) = files_of(finished)
    assert rows(file) == [
        (0, {**numbers_of(train(1)), "perf/step_s": 0.5}),
        (1, numbers_of(AFTER)),
    ]
    assert "warning" not in capfd.readouterr().err
    summary = summary_of(file)
    found = {name: summary[name] for name in summary if name.startswith(("final/", "transfer/"))}
    assert found == {
        "final/airline/success": 0.75,
        "final/airline/greedy": 0.5,
        "final/retail/success": 0.25,
        "final/retail/greedy": 0.0,
        "transfer/backward/airline": -0.25,
        "transfer/backward/airline/low": -0.5,
        "transfer/backward/airline/high": 0.125,
        "transfer/gain": 0.5,
        "transfer/curve": 0.25,
    }


def test_plots_and_report_are_sent_from_the_run_folder(finished):
    (file,) = files_of(finished)
    (report,) = artifacts_in(file)["report"]
    assert report.name == f"report-{of_kind(file, 'run')[0].run_id}"
    assert {entry.path: entry.local_path for entry in report.manifest.contents} == {
        name: str(finished / name)
        for name in ("learning_curves.png", "report.html", "results.json")
    }
    picture = summary_of(file)["plots/learning_curves"]
    assert (picture["width"], picture["height"]) == (4, 3)
    assert (file.parent / "files" / picture["path"]).is_file()


def test_checkpoints_are_named_by_path_and_not_sent(finished):
    models = artifacts_in(*files_of(finished))["model"]
    assert [sorted(model.aliases) for model in models] == [
        ["latest", "step-000001"],
        ["latest", "stage-1-airline"],
    ]
    (state,) = [f for f in models[1].manifest.contents if f.path.endswith("/state.json")]
    path = finished / "checkpoints" / "stage-1-airline" / "state.json"
    assert (state.ref, state.local_path) == (path.as_uri(), "")
    content = base64.b64encode(hashlib.md5(path.read_bytes()).digest()).decode()
    assert state.digest != content, "large files are not read"


def test_the_table_of_episodes_stays_with_the_run(finished):
    (file,) = files_of(finished)
    (table,) = artifacts_in(file)["run_table"]
    (entry,) = table.manifest.contents
    assert Path(entry.local_path).is_relative_to(finished)
    episodes = json.loads(Path(entry.local_path).read_text())
    assert (episodes["columns"], len(episodes["data"])) == (list(COLUMNS), 9)
    assert episodes["data"][0] == [
        *("airline", 1, "airline", "book", "t1", 0, 1.0, "completed", None),
        'user: a flight, please\n\nassistant: book({"flight": "F1"})\n\ntool: booked',
    ]
    assert summary_of(file)["trajectories"]["nrows"] == 9
    assert os.environ["WANDB_DATA_DIR"] == str(finished.parent / "home"), "as it was"


def test_the_table_holds_few_episodes_of_all_steps(tmp_path):
    for step in range(1, 101):
        transcript(tmp_path, "airline", step, 16, advantage=0.5)
    found = episode_rows(tmp_path)
    assert len(found) == 200
    assert [row[1] for row in found[::40]] == [1, 21, 41, 61, 81]
    assert [(row[5], row[8]) for row in found[:4]] == [(0, 0.5), (4, 0.5), (8, 0.5), (12, 0.5)]


def test_the_table_leaves_out_what_a_killed_process_did_not_write_whole(tmp_path):
    transcript(tmp_path, "airline", 1, 3)
    path = transcript(tmp_path, "airline", 2, 3)
    for missing in range(1, path.stat().st_size):
        path.write_bytes(path.read_bytes()[:-1])
        found = [(row[1], row[5]) for row in episode_rows(tmp_path)]
        assert found[:3] == [(1, 0), (1, 1), (1, 2)], missing
        assert found[3:] == [(2, trial) for trial in range(len(found) - 3)]


def test_what_of_the_results_cannot_be_sent_is_said_and_the_rest_is_sent(tmp_path, capfd):
    with RunLog(tmp_path, config(), is_main=True) as log:
        write(log, train(1))
        results_in(tmp_path)
        (tmp_path / "results.json").write_text("{")
        log.finish_with(tmp_path)
    (file,) = files_of(tmp_path)
    assert rows(file) == [(0, numbers_of(train(1)))]
    assert set(artifacts_in(file)) == {"report", "model", "run_table"}
    warning = capfd.readouterr().err.splitlines()[-1]
    assert warning.startswith("warning: W&B did not get the final numbers (JSONDecodeError: ")
    assert warning.endswith("; the run folder has them")


def test_a_run_that_failed_sends_no_results(tmp_path):
    log = RunLog(tmp_path, config(), is_main=True)
    write(log, train(1))
    results_in(tmp_path)
    log.finish_with(tmp_path)
    log.close(failed=True)
    assert artifacts_in(*files_of(tmp_path)) == {}


def test_a_finished_run_that_is_resumed_has_each_row_once(finished):
    sizes = {name: (finished / name).stat().st_size for name in ("metrics.jsonl", "timings.jsonl")}
    for step in (3, 4):
        with RunLog(finished, config(), is_main=True, state={"sizes": sizes}) as log:
            write(log, train(step), times(step))
            log.finish_with(finished)
            sizes = log.state_dict()["sizes"]
    files = files_of(finished)
    assert [number for number, _ in rows(*files)] == [0, 1, 2, 3]
    assert [row["step"] for _, row in rows(*files)] == [1, 2, 3, 4]
    reports = artifacts_in(*files)["report"]
    assert len({report.digest for report in reports}) == 1, "which W&B keeps as one version"


# scripts/wandb_sync.sh


def sync(*folders: Path) -> int:
    return wandb_sync.main([str(folder) for folder in folders])


def make_parts(folder: Path, starts: int = 3) -> list[Path]:
    """A run of so many starts with a step each, kept offline; the folders of its parts."""
    state = None
    for step in range(1, starts + 1):
        with RunLog(folder, config(), is_main=True, state=state) as log:
            write(log, train(step))
            state = log.state_dict()
    (folder / "config.yaml").write_text(dump(config()))
    return [part.folder for part in parts_of(folder / "wandb")]


def test_parts_that_were_not_sent_are_named_in_order_of_time(tmp_path, capfd):
    first, second, third = make_parts(tmp_path / "run")
    later = second.rename(second.with_name("offline-run-29990101_000000-later"))
    (first / f"{files_of(tmp_path / 'run')[0].name}.synced").touch()
    capfd.readouterr()
    assert sync(tmp_path / "run") == 0
    assert capfd.readouterr() == (f"{later}\n{third}\n", "")


def test_lines_that_no_part_holds_get_a_part_of_their_own(tmp_path, capfd):
    folder = tmp_path / "run"
    make_parts(folder, starts=1)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(train(2)) + "\n")
    with (folder / "timings.jsonl").open("a") as file:
        file.write(json.dumps(times(2)) + "\n")
    capfd.readouterr()
    assert sync(folder) == 0
    out, err = capfd.readouterr()
    assert err == "1 lines of metrics.jsonl were in no part, and are in a new one\n"
    assert out.splitlines() == [str(part) for part in parts_of_folder(folder)]
    assert rows(files_of(folder)[1]) == [(1, {**numbers_of(train(2)), "perf/step_s": 0.5})]
    assert sync(folder) == 0
    assert len(files_of(folder)) == 2, "nothing is missing any more"


def parts_of_folder(folder: Path) -> list[Path]:
    return [part.folder for part in parts_of(folder / "wandb")]


def test_the_last_part_of_a_run_that_is_alive_is_left_for_later(tmp_path, capfd):
    first, second, _ = make_parts(tmp_path)
    capfd.readouterr()
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert sync(tmp_path) == 0
    out, err = capfd.readouterr()
    assert out == f"{first}\n{second}\n"
    assert err == "the run is still alive: its last part can be sent when it has ended\n"


def test_a_folder_without_parts_is_the_users_mistake(tmp_path, capfd):
    assert sync(tmp_path) == 2
    assert sync() == 2
    assert capfd.readouterr().err == (
        f"error: RUN_FOLDER: {tmp_path} holds nothing for W&B (no wandb/offline-run-*); give the "
        "folder of a run that was kept offline\n"
        "error: RUN_FOLDER: got 0 arguments; give one run folder\n"
    )


PYTHON = """#!/bin/sh
case "$1 $2" in
    "-c "* | "-m pip") ;;
    *) exec {python} "$@" ;;
esac
"""
NOTING_WANDB = """#!/bin/sh
echo "$@" >>{calls}
[ -e {calls}.fails ] || touch "$4"/run-"$3".wandb.synced
"""


@pytest.fixture
def script(tmp_path):
    """Run the script in a checkout whose wandb is the text given, or the real one."""
    venv = tmp_path / "a checkout" / ".venv" / "bin"
    venv.mkdir(parents=True)
    shutil.copytree(ROOT / "scripts", venv.parent.parent / "scripts")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, venv.parent.parent)

    def script(*arguments: Path, wandb: str = "") -> subprocess.CompletedProcess[str]:
        (venv / "python").write_text(PYTHON.format(python=sys.executable))
        real = Path(sys.executable).with_name("wandb")
        (venv / "wandb").write_text(wandb or f'#!/bin/sh\nexec {real} "$@"\n')
        for name in ("python", "wandb"):
            (venv / name).chmod(0o755)
        command = ["bash", venv.parent.parent / "scripts" / "wandb_sync.sh", *arguments]
        here = tmp_path / "here"
        here.mkdir(exist_ok=True)
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=120)
        assert list(here.iterdir()) == [], "it writes to the run folder alone"
        return done

    return script


def test_the_script_sends_part_after_part_and_stops_at_one_that_fails(tmp_path, script):
    folder = tmp_path / "a run"
    run_id = make_parts(folder, starts=2)[0].name.rsplit("-", 1)[1]
    calls = [f"sync --id {run_id} {part}" for part in parts_of_folder(folder)]
    noted = tmp_path / "calls"
    wandb = NOTING_WANDB.format(calls=noted)

    (tmp_path / "calls.fails").touch()  # wandb exits with 0 there, too
    done = script(folder, wandb=wandb)
    assert (done.returncode, noted.read_text().splitlines()) == (1, calls[:1])
    assert f"{parts_of_folder(folder)[0]} was not sent" in done.stderr
    (tmp_path / "calls.fails").unlink()
    assert script(folder, wandb=wandb).returncode == 0
    assert noted.read_text().splitlines() == calls[:1] + calls
    done = script(folder, wandb=wandb)
    assert (done.returncode, noted.read_text().splitlines()) == (0, calls[:1] + calls)
    assert done.stderr.endswith("wandb_sync.sh: nothing is left to be sent\n")
    assert script(tmp_path, wandb=wandb).returncode == 2


class Server(ThreadingHTTPServer):
    """A stand-in for W&B's server, as far as a run's history goes; it has every artifact."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.history: list[dict[str, Any]] = []
        self.artifacts: list[tuple[str, str]] = []
        self.views: list[dict[str, Any]] = []
        self.run: dict[str, Any] | None = None

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        project = {"id": "p", "name": "p", "entity": {"id": "e", "name": "somebody"}}
        if "mutation UpsertBucket" in query:
            self.run = {"id": "r", "name": variables["name"], "displayName": "run"}
            bucket = {**self.run, "project": project, "historyLineCount": len(self.history)}
            return {"upsertBucket": {"bucket": bucket, "inserted": not self.history}}
        if "query RunResumeStatus" in query:
            last = [json.dumps(self.history[-1])] if self.history else []
            counts = {"historyLineCount": len(self.history), "historyTail": json.dumps(last)}
            counts |= {"eventsLineCount": 0, "eventsTail": "[]", "logLineCount": 0}
            state = {"summaryMetrics": "{}", "config": "{}", "wandbConfig": '{"t": 1}', "tags": []}
            return {"model": {**project, "bucket": self.run and {**self.run, **counts, **state}}}
        if "mutation UpsertView" in query:
            self.views.append(variables)
            return {"upsertView": {"view": {"id": "v", "name": variables["name"]}}}
        if "mutation CreateArtifact " in query:
            new = variables["input"]
            self.artifacts.append((new["artifactTypeName"], new["artifactCollectionName"]))
            known = {"id": "a", "state": "COMMITTED", "artifactSequence": {"latestArtifact": None}}
            return {"createArtifact": {"artifact": known}}
        viewer = {"id": "u", "entity": "somebody", "username": "u", "flags": "{}"}
        files = {"runID": "r", "uploadHeaders": [], "files": []}
        return {
            "viewer": {**viewer, "teams": {"edges": []}},
            "serverInfo": {"features": []},
            "createRunFiles": files,
            "project": {**project, "artifact": None},
        }


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        answer: dict[str, Any] = {}
        if self.path.endswith("/graphql"):
            asked = json.loads(body)
            answer = {"data": self.server.answer(asked["query"], asked.get("variables") or {})}
        elif self.path.endswith("/file_stream"):
            sent = json.loads(body).get("files", {}).get("wandb-history.jsonl")
            if sent:
                place, new = sent["offset"], [json.loads(row) for row in sent["content"]]
                self.server.history[place : place + len(new)] = new
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_PUT = do_POST

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server(machine) -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        machine.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
        machine.setenv("WANDB_API_KEY", KEY)
        yield server
        if "wandb" in sys.modules:
            sys.modules["wandb"].teardown()
        server.shutdown()


def on(server: Server) -> list[tuple[int, float]]:
    """The rows on the server: W&B's step and the run's."""
    return [(row["_step"], row["step"]) for row in server.history]


def test_wandb_itself_appends_the_parts_that_the_script_sends(tmp_path, script, server, machine):
    machine.setenv("WANDB_MODE", "offline")
    folder = tmp_path / "run"
    make_parts(folder, starts=1)
    with files_of(folder)[0].open("r+b") as file:  # the run was killed
        file.truncate(file.seek(0, os.SEEK_END) - 10)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(train(2)) + "\n")
    machine.delenv("WANDB_MODE")
    done = script(folder)
    assert (done.returncode, on(server)) == (0, [(0, 1), (1, 2)]), done.stderr
    assert done.stderr.endswith("wandb_sync.sh: all parts are sent\n")


def artifacts_of(run_id: str) -> list[tuple[str, str]]:
    """What results_in() makes, by type and name."""
    model, table = ("model", f"model-{run_id}"), ("run_table", f"run-{run_id}-trajectories")
    return [model, model, ("report", f"report-{run_id}"), table]


def test_the_results_of_an_offline_run_are_sent_with_its_parts(finished, script, server):
    done = script(finished)
    assert (done.returncode, on(server)) == (0, [(0, 1), (1, 2)]), done.stderr
    run_id = (finished / "wandb" / "run-id").read_text().strip()
    assert sorted(server.artifacts) == artifacts_of(run_id)


def test_an_online_run_sends_its_results_beside_the_rows(tmp_path, server):
    with RunLog(tmp_path, config(), is_main=True) as log:
        write(log, train(1), train(2))
        results_in(tmp_path)
        log.finish_with(tmp_path)
        run_id = log.tracker_run_id
    assert on(server) == [(0, 1), (1, 2)]
    assert sorted(server.artifacts) == artifacts_of(run_id)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of wandb_workspaces, about itself
def test_the_dashboard_is_made_as_a_view_of_the_project(server, capsys):
    assert wandb_dashboard.main(["--entity", "somebody", "--project", "shop"]) == 0
    (view,) = server.views
    assert (view["entityName"], view["projectName"], view["displayName"]) == (
        *("somebody", "shop", "curricula"),
    )
    assert json.loads(view["spec"])["section"]["runSets"][0]["grouping"] == [
        {"section": "run", "name": "group"}
    ]
    url = f"http://127.0.0.1:{server.server_port}/somebody/shop?nw="
    assert f"made: {url}" in capsys.readouterr().err


def test_a_resumed_online_run_sends_what_the_server_lacks(tmp_path, server):
    with RunLog(tmp_path, config(), is_main=True) as log:
        write(log, train(1), train(2))
        sizes = log.state_dict()["sizes"]
        write(log, train(3), train(4))
    assert on(server) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    with RunLog(tmp_path, config(), is_main=True, state={"sizes": sizes}) as log:
        write(log, train(3), train(4), train(5))
        sizes = log.state_dict()["sizes"]
    assert on(server) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
    del server.history[1:]  # what a killed process could not send
    with RunLog(tmp_path, config(), is_main=True, state={"sizes": sizes}) as log:
        write(log, train(6))
    assert on(server) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6)]


def test_an_offline_run_that_goes_on_online_is_sent_whole(tmp_path, server, machine):
    machine.setenv("WANDB_MODE", "offline")
    with RunLog(tmp_path, config(), is_main=True) as log:
        write(log, train(1), train(2))
        sizes = log.state_dict()["sizes"]
    machine.delenv("WANDB_MODE")
    with RunLog(tmp_path, config(), is_main=True, state={"sizes": sizes}) as log:
        write(log, train(3))
    assert on(server) == [(0, 1), (1, 2), (2, 3)]
    assert [part.is_offline for part in parts_of(tmp_path / "wandb")] == [False]


def test_lines_that_an_online_run_could_not_send_are_sent_by_the_script(tmp_path, server, capfd):
    folder = tmp_path / "run"
    with RunLog(folder, config(), is_main=True) as log:
        write(log, train(1))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(train(2)) + "\n")
    (folder / "config.yaml").write_text(dump(config()))
    assert sync(folder) == 0
    assert on(server) == [(0, 1), (1, 2)]
    assert capfd.readouterr().out == "", "no part is left to be sent"
