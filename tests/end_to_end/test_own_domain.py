"""The README's own domain joins a run from its file, on real ranks, with its tools behind HTTP."""

import gzip
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from pipeline.run import main
from scripts.proofs.ranks import play_ranks
from scripts.proofs.runs import Unreported
from tests.support import ROOT

pytestmark = pytest.mark.whole_run

README = (ROOT / "README.md").read_text(encoding="utf-8")
SHORT = [
    *("--warm-start-steps", "50", "--warm-start-batch-size", "8", "--warm-start-warmup-steps"),
    *("5", "--max-steps", "2", "--tasks-per-step", "3", "--num-generations", "3"),
    *("--tasks-per-domain", "8", "--eval-tasks-per-domain", "3", "--eval-trials", "1"),
    *("--validation-steps", "0", "--report-to", "none", "--num-gpus", "2", "--output-dir", "out"),
]


def code() -> str:
    """The whole domain, as the README shows it."""
    (found,) = re.findall(r"```python\n(# my_bank\.py\n.*?)```", README, re.DOTALL)
    return found


def flags() -> list[str]:
    """The flags with which the README starts it, with another domain beside it."""
    (line,) = re.findall(r"```sh\n(python pipeline/run\.py --domains bank .*)\n```", README)
    words = shlex.split(line)
    assert words[:4] == ["python", "pipeline/run.py", "--domains", "bank"]
    return ["--domains", "bank,airline", *words[4:]]


class Bank(ThreadingHTTPServer):
    """Frozen accounts by session, and how often it was asked what."""

    request_queue_size = 128  # of connections that wait, as many episodes call at once
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Session)
        self.frozen: dict[str, list[str]] = {}
        self.asked: list[str] = []


class Session(BaseHTTPRequestHandler):
    """One request to the bank."""

    server: Bank

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        self._answer({"frozen": self.server.frozen.get(self.path, [])})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.frozen.setdefault(self.path, []).append(body["account"])
        self._answer({"frozen": body["account"]})

    def _answer(self, found: dict[str, Any]) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())

    def log_message(self, *_: Any) -> None:
        """Keeps the test's output to itself."""


@pytest.fixture
def bank() -> Iterator[Bank]:
    with Bank() as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def run(place: str, folder: str, argv: list[str]) -> int:
    """A rank of the run, started in this folder, where it finds the domain; its exit code."""
    os.environ["BANK"] = place
    os.chdir(folder)
    sys.path.insert(0, folder)
    return main(argv, make_training=Unreported)


def bank_episodes(folder: Path) -> list[dict[str, Any]]:
    found = []
    for path in sorted(folder.glob("trajectories/**/*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            found += [row for row in map(json.loads, file) if row["domain"] == "bank"]
    return found


def test_the_example_is_short() -> None:
    assert len(code().splitlines()) <= 60


def test_the_readmes_domain_is_trained_from_its_own_file(tmp_path: Path, bank: Bank) -> None:
    (tmp_path / "my_bank.py").write_text(code(), encoding="utf-8")
    place = f"127.0.0.1:{bank.server_address[1]}"
    assert play_ranks(run, 2, place, str(tmp_path), [*flags(), *SHORT]) == [0, 0]
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert list(results["evaluations"][-1]["success"]) == ["bank", "airline"]
    for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines():
        assert json.loads(line).get("rollout/environment_errors", 0) == 0
    played = bank_episodes(tmp_path / "out")
    assert len(played) > 9
    assert {row["error"] for row in played} == {""}
    answers = {json.dumps({"frozen": made[0]}) for made in bank.frozen.values()}
    # Two ranks make the bank's half of 50 steps of 8, and try 8 tasks.
    demonstrated = 2 * 200 + 2 * 8
    assert len(bank.asked) >= demonstrated + len(played)  # every reward is the server's answer
    calling = [row for row in played if any(m["content"] in answers for m in row["messages"])]
    assert len(bank.frozen) - demonstrated >= len(calling) > 0
