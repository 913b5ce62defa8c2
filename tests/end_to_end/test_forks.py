"""Code of the user's may fork: its children are not ranks, and none is left behind."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support import ROOT
from tests.support.messages import says

pytestmark = pytest.mark.whole_run

ROWS = "".join(f'{{"prompt": "{n} + 1 =", "answer": "{n + 1}"}}\n' for n in range(12))
FLAGS = [
    *("--domains", "sums", "--tasks", "{sums: sums.jsonl}", "--reward-funcs", "forks:graded"),
    *("--warm-start-steps", "0", "--max-steps", "1", "--tasks-per-step", "2"),
    *("--num-generations", "2", "--max-tokens-per-turn", "4", "--eval-trials", "1"),
    *("--eval-tasks-per-domain", "2", "--validation-steps", "0", "--report-to", "none"),
    *("--num-gpus", "2", "--output-dir", "out", "--timeout", "30", "--call-timeout", "20"),
]
GRADERS = {
    "a child that is terminated": """
        child = fork.Process(target=time.sleep, args=(600,))
        child.start()
        child.terminate()
        child.join()
        assert child.exitcode == -15, child.exitcode
        return [1.0 * len(c) for c in answer]
    """,
    "a pool for each call": """
        with fork.Pool(2) as pool:
            return [float(n) for n in pool.map(len, answer)]
    """,
    "a pool that is never closed": """
        global pool
        pool = pool or fork.Pool(2)
        return [float(n) for n in pool.map(len, answer)]
    """,
    "a child with an alarm of its own": """
        child = fork.Process(target=wait_for_an_alarm)
        child.start()
        child.join()
        assert child.exitcode == -14, child.exitcode
        return [1.0 * len(c) for c in answer]
    """,
    "children that come back from the function": """
        if os.fork() == 0:
            sys.exit(0)
        if os.fork() == 0:
            return []
        if os.fork() == 0:
            raise ValueError("of a child")
        ended = sorted(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(3))
        assert ended == [0, 0, 1], ended
        return [1.0 * len(c) for c in answer]
    """,
    "a child that ignores SIGTERM": """
        global pool
        if pool is None:
            pool = fork.Process(target=stay, daemon=True)
            pool.start()
        return [1.0 * len(c) for c in answer]
    """,
    "a program": """
        global pool
        pool = pool or subprocess.Popen(["sleep", "600"])
        return [1.0 * len(c) for c in answer]
    """,
}
MODULE = """
import multiprocessing, os, signal, subprocess, sys, time
fork, pool = multiprocessing.get_context("fork"), None


def wait_for_an_alarm():
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    time.sleep(600)


def stay():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def graded(completions, answer, **_):
"""


def start(folder: Path, grader: str, **environ: str) -> "subprocess.Popen[str]":
    (folder / "sums.jsonl").write_text(ROWS)
    body = "".join(line[4:] + "\n" for line in grader.strip("\n").splitlines())
    (folder / "forks.py").write_text(MODULE + body)
    environ |= {"PYTHONPATH": f"{folder}:{ROOT}", "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, "-m", "pipeline", "train", *FLAGS]
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MARK": str(folder), **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def left(folder: Path) -> list[psutil.Process]:
    """The processes that a run has started, which all have its mark."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("MARK") == str(folder) and process.status() != "zombie":
                found.append(process)
    return found


def none_is_left(folder: Path) -> bool:
    for _ in range(100):
        if not left(folder):
            return True
        time.sleep(0.1)
    return False


@pytest.fixture(autouse=True)
def clean(tmp_path):
    """A test that fails leaves no process either."""
    yield
    for process in left(tmp_path):
        process.kill()


@pytest.mark.parametrize("name", GRADERS)
def test_a_run_ends_as_if_its_code_did_not_fork(tmp_path, name):
    run = start(tmp_path, GRADERS[name])
    said, _ = run.communicate(timeout=120)
    assert (run.returncode, none_is_left(tmp_path)) == (0, True), said
    assert "good order" not in said
    assert "evaluation after sums: " in said


def test_children_of_a_rank_that_fails_or_is_killed_end_with_it(tmp_path):
    grader = """
        global pool
        pool = (pool or 0) + 1
        if pool > 2:  # not while the run checks the function
            fork.Process(target=time.sleep, args=(600,), daemon=True).start()
            print("forked", flush=True)
            time.sleep(15)
        return [1.0 for _ in answer]
    """
    run = start(tmp_path, grader)
    for line in run.stdout:
        if "forked" in line:
            break
    time.sleep(1)
    ranks = [process for process in left(tmp_path) if "RANK" in process.environ()]
    parents = {process.ppid() for process in ranks} & {process.pid for process in ranks}
    os.kill(min(parents), signal.SIGKILL)
    said, _ = run.communicate(timeout=120)
    assert (run.returncode, none_is_left(tmp_path)) == (1, True), said
    says(said, "exited or was killed")
