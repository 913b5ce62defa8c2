"""Work on untrusted files is rehearsed in a child with limits, which changes nothing here."""

import os
import re
import signal
import sys
import time

import psutil
import pytest

from pipeline.common import children
from pipeline.common.children import rehearse
from pipeline.common.errors import UserError
from tests.support.messages import refusal


@pytest.fixture(autouse=True)
def low_limits(monkeypatch):
    monkeypatch.setattr(children, "MAX_CPU_S", 0.2)
    monkeypatch.setattr(children, "MAX_BYTES", 64 << 20)


@pytest.fixture(autouse=True)
def no_child_is_left():
    """Other tests of this process may have servers, which stay."""
    before = {child.pid for child in psutil.Process().children()}
    yield
    assert {child.pid for child in psutil.Process().children()} <= before


def refuse() -> None:
    raise UserError("no: such \udcff file")


def crash() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


ENDS = [
    ("endless work in C", lambda: re.fullmatch("(a+)+b", "a" * 99), "takes more than 0.2 s of CPU"),
    ("a long power", lambda: 7 ** (10**9), "takes more than 0.2 s of CPU time; mend it"),
    ("a long text", lambda: "a" * (1 << 40), "takes more than 64 MiB of memory; mend it"),
    ("a crash", crash, "ends the process with SIGKILL; mend it"),
    ("a refusal", refuse, "no: such ? file"),
]


@pytest.mark.parametrize(("call", "said"), [row[1:] for row in ENDS], ids=[row[0] for row in ENDS])
def test_a_call_that_passes_a_limit_is_refused_in_one_line(call, said):
    line = refusal(rehearse, "its table", call, "mend it")
    assert line.startswith(said if call is refuse else f"its table {said}")


def test_a_child_that_never_starts_is_replaced(monkeypatch, tmp_path):
    def start() -> None:
        if not (first := tmp_path / "first").exists():
            first.touch()
            time.sleep(600)

    monkeypatch.setattr(children, "end_with_the_parent", start)
    monkeypatch.setattr(children, "MAX_START_S", 0.5)
    assert refusal(rehearse, "its table", refuse, "mend it") == "no: such ? file"


def test_a_rehearsal_changes_and_says_nothing_here(capfd):
    seen = []

    def speak() -> None:
        seen.append(1)
        print("said", flush=True)
        print("said", file=sys.stderr, flush=True)

    rehearse("its table", speak, "mend it")
    rehearse("its table", lambda: seen[0], "mend it")  # its IndexError is left to the call itself
    assert seen == [] and capfd.readouterr() == ("", "")


def test_a_call_that_only_waits_is_left_to_this_process(monkeypatch):
    """A child has the locks of other threads, and never these threads."""
    monkeypatch.setattr(children, "MAX_WAIT_S", 0.05)
    rehearse("its table", lambda: time.sleep(600), "mend it")
