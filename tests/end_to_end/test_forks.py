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

ROWS = "".join(f'{{"prompt": "{n} + 1 =", "answer": "{n + 1}"}}\n' for n in range(12))
FLAGS = [
    *("--domains", "sums", "--tasks", "{sums: sums.jsonl}", "--reward-funcs", "forks:graded"),
    *("--warm-start-steps", "0", "--max-steps", "1", "--tasks-per-step", "2"),
    *("--num-generations", "2", "--max-tokens-per-turn", "4", "--eval-trials", "1"),
    *("--eval-tasks-per-domain", "2", "--validation-steps", "0", "--report-to", "none"),
    *("--num-gpus", "2", "--output-dir", "out", "--timeout", "30", "--call-timeout", "20"),
]
MODULE = """
import multiprocessing, os, signal, subprocess, sys, time
from pipeline import train
train.write_report = lambda run: None  # its pages and pictures take longer than the run
fork = multiprocessing.get_context("fork")
kept = []


def wait_for_an_alarm():
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    time.sleep(600)


def stay():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def ended(target, *arguments):
    child = fork.Process(target=target, args=arguments)
    child.start()
    if target is time.sleep:
        child.terminate()
    child.join()
    return child.exitcode


"""
FORKS = """
def graded(completions, answer, **_):
    assert ended(time.sleep, 600) == -15
    assert ended(wait_for_an_alarm) == -14  # an alarm of its own
    with fork.Pool(2) as pool:
        pool.map(len, answer)
    # Children that come back from the function.
    if os.fork() == 0:
        sys.exit(0)
    if os.fork() == 0:
        return []
    if os.fork() == 0:
        raise ValueError("of a child")
    codes = sorted(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(3))
    assert codes == [0, 0, 1], codes
    if not kept:  # what is never closed: a pool, a child that ignores SIGTERM, a program
        kept.append(fork.Pool(2))
        kept.append(fork.Process(target=stay, daemon=True))
        kept[1].start()
        kept.append(subprocess.Popen(["sleep", "600"]))
    return [float(n) for n in kept[0].map(len, answer)]
"""
FORKS_AND_WAITS = """
calls = []


def graded(completions, answer, **_):
    calls.append(answer)
    if len(calls) > 2:  # not while the run checks the function
        fork.Process(target=time.sleep, args=(600,), daemon=True).start()
        print("forked", flush=True)
        time.sleep(5)
    return [1.0 for _ in answer]
"""


def start(folder: Path, grader: str) -> "subprocess.Popen[str]":
    (folder / "sums.jsonl").write_text(ROWS)
    (folder / "forks.py").write_text(MODULE + grader)
    environ = {"PYTHONPATH": f"{folder}:{ROOT}", "ACCELERATE_USE_CPU": "true"}
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
    _, alive = psutil.wait_procs(left(folder), timeout=10)
    return not alive


@pytest.fixture(autouse=True)
def clean(tmp_path):
    """A test that fails leaves no process either."""
    yield
    for process in left(tmp_path):
        process.kill()


def test_a_run_ends_as_if_its_code_did_not_fork(tmp_path):
    run = start(tmp_path, FORKS)
    said, _ = run.communicate(timeout=120)
    assert (run.returncode, none_is_left(tmp_path)) == (0, True), said
    assert "good order" not in said
    assert "evaluation after sums: " in said


def test_children_of_a_rank_that_fails_or_is_killed_end_with_it(tmp_path):
    run = start(tmp_path, FORKS_AND_WAITS)
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
