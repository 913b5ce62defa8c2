"""Whole runs on warm ranks: the command line without the seconds of a cold start; their files."""

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.run_state import Run, open_run
from pipeline.train import finish
from scripts.proofs import ranks
from scripts.proofs.runs import without_report

Done = subprocess.CompletedProcess[str]


def play(
    *arguments: str,
    cwd: Path,
    num_ranks: int = 2,
    code: int = 0,
    sigterm_at: str = "",
    open_run: Callable[..., Run] = open_run,
    with_report: bool = False,
) -> Done:
    """`pipeline/run.py` with these arguments on so many ranks that were launched, in `cwd`.

    All ranks get SIGTERM when the metrics of the folder `out` have a line with `sigterm_at`.
    `with_report`: with the pages and pictures at the end, which take longer than a small run.
    """
    argv = [*arguments, "--num-gpus", str(num_ranks)]
    codes = ranks.play_ranks(_main, num_ranks, argv, cwd, sigterm_at, open_run, with_report)
    said = [
        "".join((cwd / f"{name}-{rank}").read_text() for rank in range(num_ranks))
        for name in ("stdout", "stderr")
    ]
    done = Done(argv, codes[0], *said)
    assert codes == [code] * num_ranks, f"{codes}\n{done.stdout}{done.stderr}"
    assert "what was trained is whole" not in done.stdout, done.stdout  # a report that failed
    return done


def _main(
    argv: list[str],
    cwd: Path,
    sigterm_at: str,
    open_run: Callable[..., Run],
    with_report: bool,
) -> int:
    from pipeline.run import main

    os.chdir(cwd)
    sys.path.insert(0, str(cwd))  # environments of the test's own
    rank = os.environ["RANK"]
    for name in ("stdout", "stderr"):
        file = open(cwd / f"{name}-{rank}", "w", buffering=1, encoding="utf-8")  # noqa: SIM115
        os.dup2(file.fileno(), getattr(sys, name).fileno())
        setattr(sys, name, file)
    if sigterm_at:
        threading.Thread(target=_sigterm, args=(Path("out"), sigterm_at), daemon=True).start()
    end = finish if with_report else without_report
    code = main(argv, open_run=open_run, end=end)
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _sigterm(folder: Path, text: str) -> None:
    wait_for(folder, text)
    os.kill(os.getpid(), signal.SIGTERM)


def wait_for(folder: Path, text: str, process: subprocess.Popen[bytes] | None = None) -> None:
    """Until the run has written a line with this text to its metrics."""
    path = folder / "metrics.jsonl"
    while process is None or process.poll() is None:
        if path.is_file() and text in path.read_text():
            return
        time.sleep(0.02)
    raise AssertionError(f"the run ended before {text}")


def jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics(folder: Path, kind: str = "train") -> list[dict[str, Any]]:
    return [record for record in jsonl(folder / "metrics.jsonl") if record["kind"] == kind]


def results(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return read


def episodes(folder: Path) -> list[dict[str, Any]]:
    """Every transcript of a run, of all ranks."""
    found = []
    for path in sorted(folder.glob("trajectories/**/*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            found += list(map(json.loads, file))
    return found


def assert_same(folder: Path, other: Path) -> None:
    """Bit by bit, whatever the number of ranks, with no episode missing or too many."""
    assert jsonl(folder / "metrics.jsonl") == jsonl(other / "metrics.jsonl")
    stages = sorted(other.glob("checkpoints/stage-*/model.safetensors"))
    assert stages
    for path in stages:
        assert (folder / path.relative_to(other)).read_bytes() == path.read_bytes()
    mine, others = (sorted(map(json.dumps, episodes(path))) for path in (folder, other))
    assert mine == others
    assert results(folder)["evaluations"] == results(other)["evaluations"]
