"""Code of the user's may fork: its children are not ranks, and none is left behind."""

import os
import signal
import subprocess
import sys
import time
from contextlib import chdir, suppress
from pathlib import Path

import psutil
import pytest

from tests.support import ROOT
from tests.support.launcher import warm_ranks
from tests.support.messages import says

ROWS = "".join(f'{{"prompt": "{n} + 1 =", "answer": "{n + 1}"}}\n' for n in range(12))
FLAGS = [
    *("--domains", "sums", "--tasks", "{sums: sums.jsonl}", "--reward-funcs", "forks:graded"),
    *("--warm-start-steps", "0", "--max-steps", "1", "--tasks-per-step", "2"),
    *("--num-generations", "2", "--max-tokens-per-turn", "4", "--eval-trials", "1"),
    *("--eval-tasks-per-domain", "2", "--validation-steps", "0", "--report-to", "none"),
    *("--num-gpus", "2", "--output-dir", "out", "--timeout", "30", "--call-timeout", "20"),
    *("--no-eval-on-start", "--no-eval-greedy"),
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


def write(folder: Path, grader: str) -> None:
    (folder / "sums.jsonl").write_text(ROWS)
    (folder / "forks.py").write_text(MODULE + grader)


def start(folder: Path, grader: str) -> "subprocess.Popen[str]":
    write(folder, grader)
    environ = {"PYTHONPATH": f"{folder}:{ROOT}", "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, "-m", "pipeline", "train", *FLAGS]
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def left(folder: Path) -> list[psutil.Process]:
    """The processes that a run has started, which all work in its folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cwd() == str(folder) and process.status() != "zombie":
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


@pytest.mark.proof
def test_a_run_ends_as_if_its_code_did_not_fork(tmp_path):
    run = start(tmp_path, FORKS)
    said, _ = run.communicate(timeout=120)
    assert (run.returncode, none_is_left(tmp_path)) == (0, True), said
    assert "good order" not in said
    assert "evaluation after sums: " in said


def test_ranks_that_are_launched_end_as_if_their_code_did_not_fork(tmp_path):
    write(tmp_path, FORKS)
    with chdir(tmp_path):
        started = warm_ranks(2, FLAGS)
    codes = [rank.wait() for rank in started]
    said = started[0].stdout + started[0].stderr
    assert (codes, none_is_left(tmp_path)) == ([0, 0], True), said
    assert "good order" not in said
    assert "evaluation after sums: " in said


def test_children_of_a_rank_that_fails_or_is_killed_end_with_it(tmp_path):
    write(tmp_path, FORKS_AND_WAITS)
    with chdir(tmp_path):
        started = warm_ranks(2, FLAGS)
    said = tmp_path / "stdout"
    while not said.is_file() or said.read_text().count("forked") < 2:
        assert all(rank.process.is_alive() for rank in started)
        time.sleep(0.05)
    os.kill(started[1].process.pid, signal.SIGKILL)
    codes = [rank.wait() for rank in started]
    assert (codes, none_is_left(tmp_path)) == ([1, -9], True), started[0].stderr
    says(started[0].stderr, "exited or was killed")
