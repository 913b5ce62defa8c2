"""What all tests share: one thread, no network, and no process left behind."""

import ctypes
import gc
import os
import signal
import sys
from multiprocessing import forkserver

import psutil
import pytest

from tests.support import ROOT
from tests.support.shared_run import SharedRun, made_once

gc.disable()  # what is imported while tests are collected stays

# A shell starts background jobs with Ctrl-C ignored, which tests of Ctrl-C would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.update(OMP_NUM_THREADS="1", WANDB_MODE="offline", HF_HUB_OFFLINE="1")
os.environ["HYPOTHESIS_NO_PLUGINS"] = "1"  # those of others, which import what no test needs

PR_SET_CHILD_SUBREAPER = 36


# Folders of whole runs and of whole scripts; `bash scripts/test.sh` plays the promises alone.
LONG = {ROOT / "tests" / name for name in ("end_to_end", "gpu", "scripts")}
PROMISES = ROOT / "tests" / "end_to_end" / "test_promises.py"


@pytest.hookimpl(tryfirst=True)  # before the tests are chosen by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of whole runs go first: a process of tests that gets one last works on alone."""
    for item in items:
        if item.path.parent in LONG and item.path != PROMISES:
            item.add_marker("whole_run")
    items.sort(key=lambda i: i.path != PROMISES and i.get_closest_marker("whole_run") is None)


def pytest_collection_finish() -> None:
    """The server from which ranks fork starts before a test changes the environment.

    What ranks print besides what a test reads does not stand among the tests' lines.
    """
    gc.freeze()
    gc.enable()
    if "scripts.proofs.ranks" not in sys.modules:
        return
    before, nothing = (os.dup(1), os.dup(2)), os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nothing, number)
    forkserver.ensure_running()
    for number, own in zip((1, 2), before, strict=True):
        os.dup2(own, number)
        os.close(own)
    os.close(nothing)


def is_server(process: psutil.Process, parent: int) -> bool:
    """Whether a process is that from which ranks fork; it serves later tests as well."""
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return False
    serves = "multiprocessing.forkserver" in command or "resource_tracker" in command
    return serves and process.ppid() == parent  # ranks have its command line, and another parent


@pytest.fixture
def no_stray_processes():
    """Fails a test that leaves processes behind, also those whose parent is gone (on Linux)."""
    if sys.platform == "linux":  # orphans then become children of this process
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    me = psutil.Process()
    before = me.children(recursive=True)
    yield
    started = [
        child
        for child in me.children(recursive=True)
        if child not in before and not is_server(child, me.pid)
    ]
    _, strays = psutil.wait_procs(started, timeout=3)
    commands = [" ".join(stray.cmdline()) for stray in strays]
    for stray in strays:
        stray.kill()
    assert not commands, "processes left behind"


@pytest.fixture(autouse=True, scope="session")
def a_template_is_rehearsed_once():
    """A chat template that was harmless is not tried again in a child, which takes long here."""
    from pipeline.models.chat import template

    rehearse = template.rehearse
    harmless = set()

    def once(what, call, remedy):
        chat = call.func.__self__
        seen = repr((chat.tokenizer.chat_template, len(chat.tokenizer), chat._kwargs, call.args))
        if seen not in harmless:
            rehearse(what, call, remedy)
        harmless.add(seen)

    template.rehearse = once
    yield
    template.rehearse = rehearse


@pytest.fixture(scope="session")
def shared_run(tmp_path_factory: pytest.TempPathFactory) -> SharedRun:
    """The run of the README's first command, one for all processes of tests; nobody changes it."""
    own = tmp_path_factory.getbasetemp()
    return made_once(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own)
