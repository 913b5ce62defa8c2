"""W&B gets every line of metrics.jsonl once, whatever is killed when, and never holds a run up."""

import fcntl
import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

from pipeline.checkpoints.transcripts import save_transcripts
from pipeline.common.durable import read_records
from pipeline.config.recipe import dump
from pipeline.config.settings import Config
from pipeline.report import wandb as feed
from pipeline.report.log import RunLog
from pipeline.report.run_files import COLUMNS, rows_of_step
from pipeline.report.trackers import known_id
from scripts import wandb_dashboard, wandb_sync
from scripts.proofs.grid import make_trajectory
from tests.support import ROOT, http
from tests.support.messages import refusal, says

START = {"kind": "eval", "stage": "start", "after": "start", "step": 0, "eval/retail/success": 0.0}
AFTER = {**START, "stage": "airline", "after": "airline", "step": 2, "eval/retail/success": 0.5}
KEY = "0123456789" * 4


def train(step: int, **metrics: float) -> dict[str, Any]:
    line = {"kind": "train", "stage": "airline", "step": step, "train/loss": 1 / step}
    return {**line, **metrics, "rollout/episodes": 192}


def times(step: int, seconds: float = 0.5) -> dict[str, Any]:
    return {"kind": "train", "stage": "airline", "step": step, "perf/step_s": seconds, "cores": 2}


def config(**tracking: object) -> Config:
    tree = {"grpo": {"learning_rate": 3e-4}, "tracking": {"report_to": ["wandb"], **tracking}}
    return Config.model_validate(tree)


def write(log: RunLog, *lines: dict[str, Any]) -> None:
    """Lines that say how many cores there are go to the timings."""
    for line in lines:
        (log.timings if "cores" in line else log.metrics)(line)


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
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name in ("CACHE", "CONFIG", "DATA", "ARTIFACT"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("NETRC", raising=False)
    (tmp_path / "home").mkdir()
    yield monkeypatch
    if "wandb" in sys.modules:  # where a run could not start, its service is still there
        sys.modules["wandb"].teardown()


# A stand-in for W&B's server


class Server(ThreadingHTTPServer):
    """W&B's server as far as a run goes: its settings, history, summary; it has every artifact."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.history: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.artifacts: list[str] = []
        self.upserts: list[dict[str, Any]] = []
        self.views: list[dict[str, Any]] = []
        self.run: dict[str, Any] | None = None

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        project = {"id": "p", "name": "p", "entity": {"id": "e", "name": "somebody"}}
        if "mutation UpsertBucket" in query:
            self.upserts.append(variables)
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
            self.artifacts.append(variables["input"]["artifactCollectionName"])
            known = {"id": "a", "state": "COMMITTED", "artifactSequence": {"latestArtifact": None}}
            return {"createArtifact": {"artifact": known}}
        viewer = {"id": "u", "entity": "somebody", "username": "u", "flags": "{}"}
        return {
            "viewer": {**viewer, "teams": {"edges": []}},
            "serverInfo": {"features": []},
            "createRunFiles": {"runID": "r", "uploadHeaders": [], "files": []},
            "project": {**project, "artifact": None},
        }

    def take(self, files: dict[str, Any]) -> None:
        if sent := files.get("wandb-history.jsonl"):
            place, new = sent["offset"], [json.loads(row) for row in sent["content"]]
            self.history[place : place + len(new)] = new
        for text in files.get("wandb-summary.json", {}).get("content", []):
            self.summary = json.loads(text)

    @property
    def rows(self) -> list[tuple[int, dict[str, float]]]:
        """The rows and W&B's own steps, without what W&B adds."""
        return [
            (row["_step"], {name: row[name] for name in row if not name.startswith("_")})
            for row in self.history
        ]

    @property
    def steps(self) -> list[tuple[int, float]]:
        return [(number, row["step"]) for number, row in self.rows]


class Handler(http.Handler):
    server: Server

    def do_POST(self) -> None:
        body = self.body()
        answer: dict[str, Any] = {}
        if self.path.endswith("/graphql"):
            asked = json.loads(body)
            answer = {"data": self.server.answer(asked["query"], asked.get("variables") or {})}
        elif self.path.endswith("/file_stream"):
            self.server.take(json.loads(body).get("files", {}))
        self.send(json.dumps(answer))

    do_GET = do_PUT = do_POST


@pytest.fixture
def server(machine) -> Iterator[Server]:
    with http.running(Server()) as server:
        machine.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
        machine.setenv("WANDB_API_KEY", KEY)
        yield server
        if "wandb" in sys.modules:
            sys.modules["wandb"].teardown()


# What W&B gets


def test_a_line_is_a_row_with_the_numbers_of_the_files(tmp_path, server, capfd):
    folder = tmp_path / "my-run"
    with RunLog(folder, config(project="shop", tags=["tiny", "cpu"]), is_main=True) as log:
        write(log, {"kind": "machine", "stage": "start", "step": 0, "cores": 2})
        write(log, START, train(1), times(1), train(2, **{"train/kl": float("nan")}), times(2))
        write(log, AFTER)
    assert server.rows == [
        (0, {"step": 0, "eval/retail/success": 0.0}),
        (1, {"step": 1, "train/loss": 1.0, "rollout/episodes": 192, "perf/step_s": 0.5}),
        (2, {"step": 2, "train/loss": 0.5, "rollout/episodes": 192, "perf/step_s": 0.5}),
        (3, {"step": 2, "eval/retail/success": 0.5}),
    ]
    run = server.upserts[0]
    assert (run["project"], run["displayName"], run["tags"]) == ("shop", "my-run", ["tiny", "cpu"])
    assert json.loads(run["config"])["grpo"]["value"]["learning_rate"] == 3e-4
    assert (run["groupName"], run["jobType"]) == (
        *("sequential airline-retail-telecom", "three_domain_tiny"),
    )
    out, err = capfd.readouterr()
    assert out == ""
    runs = f"http://127.0.0.1:{server.server_port}/somebody/p/runs"
    assert err.endswith(f"W&B: {runs}/{known_id(folder, feed.ID_FILE)}\n")


def test_a_resumed_run_sends_what_the_server_lacks_under_the_same_id(tmp_path, server):
    with RunLog(tmp_path, config(), is_main=True) as log:
        run_id = known_id(tmp_path, feed.ID_FILE)
        write(log, START, train(1), times(1))
        state = log.state_dict()
        write(log, train(2), times(2, 0.25))
    assert server.steps == [(0, 0), (1, 1), (2, 2)]
    with RunLog(tmp_path, config(), is_main=True, state=state) as log:
        write(log, train(2), times(2, 0.75), AFTER, train(3), times(3))
        assert known_id(tmp_path, feed.ID_FILE) == run_id == server.upserts[-1]["name"]
        state = log.state_dict()
    assert [row.get("perf/step_s") for _, row in server.rows] == [None, 0.5, 0.25, None, 0.5]
    del server.history[2:]  # what a killed process could not send
    with RunLog(tmp_path, config(), is_main=True, state=state) as log:
        write(log, train(4))
    assert server.steps == [(0, 0), (1, 1), (2, 2), (3, 2), (4, 3), (5, 4)]
    assert [row.get("perf/step_s") for _, row in server.rows][2:] == [0.75, None, 0.5, None]


KILLED = """
import json, os, signal, sys, time
from pathlib import Path
from pipeline.config.settings import Config
from pipeline.report.log import RunLog

folder, last, save_at, die = Path(sys.argv[1]), *map(int, sys.argv[2:])
saved = folder / "saved.json"
state = json.loads(saved.read_text()) if saved.exists() else {"step": 0, "log": None}
settings = Config.model_validate({"tracking": {"report_to": ["wandb"]}})
log = RunLog(folder, settings, is_main=True, state=state["log"])
for step in range(state["step"] + 1, last + 1):
    log.metrics({"kind": "train", "stage": "airline", "step": step, "train/loss": step / 64})
    if step == save_at:
        saved.write_text(json.dumps({"step": step, "log": log.state_dict()}))
if die:
    os.kill(os.getpid(), signal.SIGKILL)
log.close()
"""


@pytest.mark.whole_run
def test_the_server_has_each_line_once_though_a_run_was_killed(tmp_path, server):
    def start(last: int, save_at: int, die: bool) -> None:
        numbers = [str(int(number)) for number in (last, save_at, die)]
        command = [sys.executable, "-c", KILLED, tmp_path, *numbers]
        done = subprocess.run(command, cwd=ROOT, stderr=subprocess.DEVNULL)
        assert done.returncode == (-9 if die else 0)

    start(last=60, save_at=20, die=True)
    start(last=70, save_at=0, die=False)
    assert server.rows == [
        (step - 1, {"step": step, "train/loss": step / 64}) for step in range(1, 71)
    ]


def test_tables_are_in_the_folder_at_once_and_sent_once_though_rows_are_lost(tmp_path, server):
    settings = config(log_completions_steps=2)
    for step in (2, 4):
        transcript(tmp_path, "airline", step, 3)
    with RunLog(tmp_path, settings, is_main=True) as log:
        write(log, START, train(1), train(2))
        (path,) = tmp_path.rglob("completions_*.table.json")  # which a kill would leave there
        table, state = json.loads(path.read_text()), log.state_dict()
    assert table["columns"] == COLUMNS and len(table["data"]) == 3
    assert table["data"][0][6:8] == [1.0, "completed"]
    assert table["data"][0][-1].startswith("user: a flight, please")
    for lost in (0, 1):
        del server.history[len(server.history) - lost :]  # the row of step 2, with its table
        with RunLog(tmp_path, settings, is_main=True, state=state):
            pass
        tables = [row["completions"]["nrows"] for row in server.history if "completions" in row]
        assert ([step for _, step in server.steps], tables) == ([0, 1, 2], [3])


def test_the_table_of_a_step_has_whole_groups_on_any_number_of_ranks(tmp_path):
    groups = [[(f"t{g}", trial) for trial in range(8)] for g in range(12)]
    for num_ranks in (1, 3):
        for rank in range(num_ranks):
            folder = tmp_path / str(num_ranks) / "trajectories" / "airline"
            mine = [pair for group in groups[rank::num_ranks] for pair in group]
            episodes = [make_trajectory(task_id=task, trial=trial) for task, trial in mine]
            save_transcripts(folder, 7, rank, episodes)
    one, three = (rows_of_step(tmp_path / name, "airline", 7) for name in ("1", "3"))
    assert one == three
    assert [row[4:6] for row in one] == [[f"t{g}", k] for g in (0, 11, 4, 7) for k in range(8)]
    assert rows_of_step(tmp_path, "airline", 7) == []


# W&B in trouble


def service() -> psutil.Process:
    """W&B's process of this run; that of a test before may still be on its way out."""
    children = psutil.Process().children(recursive=True)
    cores = [child for child in children if child.name().startswith("wandb-core")]
    return max(cores, key=lambda core: core.create_time())


def test_a_service_that_dies_is_given_up_and_the_next_start_sends_the_rest(tmp_path, server, capfd):
    with RunLog(tmp_path, config(), is_main=True) as log:
        write(log, START, train(1))
        service().kill()
        said, step = "", 1
        while "warning" not in said:  # the thread may take some lines to notice
            step += 1
            write(log, train(step))
            time.sleep(0.01)
            said += capfd.readouterr().err
        write(log, train(step + 1), train(step + 2))
        state = log.state_dict()
    assert len(read_records(tmp_path / "metrics.jsonl")) == step + 3
    warning = (said + capfd.readouterr().err).splitlines()[-1]
    assert warning.startswith("warning: W&B: Connection")
    assert "the run goes on" in warning and warning.endswith("scripts/wandb_sync.sh")
    with RunLog(tmp_path, config(), is_main=True, state=state) as log:
        write(log, train(step + 3))
    assert [number for number, _ in server.steps] == list(range(step + 4))


def test_a_service_that_hangs_holds_nothing_up(tmp_path, server, machine, capfd):
    machine.setenv("WANDB_FINISH_TIMEOUT", "0.5")
    with RunLog(tmp_path, config(), is_main=True) as log:
        core = service()
        core.suspend()
        metrics = {f"train/metric_{i}": i / 64 for i in range(200)}
        for step in range(1, 300):  # far more than the pipe to it takes
            write(log, train(step, **metrics))
    core.kill()
    assert len(read_records(tmp_path / "metrics.jsonl")) == 299
    assert "TimeoutError: it did not answer in 0.5 s; the run goes on" in capfd.readouterr().err


def test_wandb_that_cannot_start_stops_a_fresh_run_and_no_resumed_one(tmp_path, machine, capfd):
    with RunLog(tmp_path / "run", config(), is_main=True) as log:
        write(log, START)
        state = log.state_dict()
    (tmp_path / "run" / "wandb").mkdir()
    (tmp_path / "run" / feed.ID_FILE).write_text("abc\n")
    machine.setenv("WANDB_API_KEY", "not a key")
    says(
        refusal(RunLog, tmp_path / "fresh", config(), is_main=True),
        "W&B did not start ",
        "; set WANDB_MODE=offline",
    )
    capfd.readouterr()
    with RunLog(tmp_path / "run", config(), is_main=True, state=state) as log:
        write(log, train(1))
        assert known_id(tmp_path / "run", feed.ID_FILE) == "abc"
    assert read_records(tmp_path / "run" / "metrics.jsonl") == [START, train(1)]
    (warning,) = capfd.readouterr().err.splitlines()
    assert warning.startswith("warning: W&B: report_to: W&B did not start")


def test_a_key_is_found_where_wandb_finds_it(tmp_path, machine):
    assert not feed.is_wanted()
    netrc = tmp_path / "home" / ".netrc"
    netrc.write_text(f"machine api.wandb.ai login user password {KEY}\n")
    netrc.chmod(0o600)
    assert feed.is_wanted()
    machine.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not feed.is_wanted()


def test_no_file_of_a_run_holds_a_password(tmp_path, machine):
    machine.chdir(tmp_path)  # where W&B looks for a repository
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
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert any(b"https://***@host.org/model" in path.read_bytes() for path in files)
    for secret in (b"hunter2", KEY.encode()):
        assert [path for path in files if secret in path.read_bytes()] == []


# What it gets at the end


def results_in(folder: Path) -> None:
    """What a run leaves in its folder: results, a picture, transcripts."""
    success = {"airline": {"mean": 0.75, "greedy": 0.5}, "retail": {"mean": 0.25, "greedy": 0.0}}
    before = {"after": "start", "step": 0, "success": {"airline": {"mean": 0.0, "greedy": 0.0}}}
    evaluations = [before, {"after": "retail", "step": 2, "success": success}]
    transfer: dict[str, Any] = {"backward": {"airline": [-0.25, -0.5, 0.125]}, "gain": 0.5}
    transfer |= {"curve": [0.25, None, None], "matrix": [[[0.0, 0.0, 0.0]]] * 3, "of": "pilot"}
    results = {"evaluations": evaluations, "transfer": transfer}
    (folder / "results.json").write_text(json.dumps(results))
    (folder / "report.html").write_text("<p>report</p>")
    Image.new("RGB", (4, 3)).save(folder / "learning_curves.png")
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


def test_results_make_no_row_and_their_numbers_are_the_summary(tmp_path, server, capfd):
    with RunLog(tmp_path, config(), is_main=True) as log:
        write(log, train(1), times(1), AFTER)
        results_in(tmp_path)
        log.results = tmp_path
        run_id = known_id(tmp_path, feed.ID_FILE)
    assert server.steps == [(0, 1), (1, 2)]
    assert sorted(server.artifacts) == [f"report-{run_id}", f"run-{run_id}-trajectories"]
    assert "warning" not in capfd.readouterr().err
    found = {n: v for n, v in server.summary.items() if n.startswith(("final/", "transfer/"))}
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
    assert server.summary["plots/learning_curves"]["width"] == 4
    assert server.summary["trajectories"]["nrows"] == 9


# scripts/wandb_sync.sh


def command(*arguments: Path) -> int:
    return wandb_sync.exit_code_of(lambda: wandb_sync.send(*map(str, arguments)))


def test_a_run_without_a_key_is_sent_once_when_there_is_one(tmp_path, server, machine, capfd):
    machine.delenv("WANDB_API_KEY")
    folder = tmp_path / "run"
    with RunLog(folder, config(), is_main=True) as log:
        write(log, train(1), times(1), train(2))
    (line,) = capfd.readouterr().err.splitlines()
    assert "no API key" in line and f"bash scripts/wandb_sync.sh {folder}" in line
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.jsonl", "timings.jsonl"]
    (folder / "config.yaml").write_text(dump(config()))
    results_in(folder)
    assert command(folder) == 2
    assert "W&B did not start" in capfd.readouterr().err
    machine.setenv("WANDB_API_KEY", KEY)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert command(folder) == 2
        assert "still alive" in capfd.readouterr().err
    for _ in range(2):  # it may be repeated
        assert command(folder) == 0
        assert capfd.readouterr().err.endswith("W&B has all 2 lines of metrics.jsonl\n")
        assert server.steps == [(0, 1), (1, 2)]
    assert len({run["name"] for run in server.upserts}) == 1
    assert server.summary["final/airline/success"] == 0.75


def test_a_folder_without_a_run_is_the_users_mistake(tmp_path, capfd):
    assert command(tmp_path) == command() == command(tmp_path, tmp_path) == 2
    for line in capfd.readouterr().err.splitlines():
        assert "holds no run; give one run folder" in line


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
