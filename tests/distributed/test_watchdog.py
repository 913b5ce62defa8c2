"""Faults and signals on real ranks: who is named, who ends how, and that all end."""

import ctypes
import os
import re
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from accelerate import Accelerator

from pipeline.distributed.ranks import CollectiveError, Interrupted, Ranks
from pipeline.distributed.watchdog import ToldElsewhere, Watchdog
from pipeline.errors import UserError
from scripts.proofs.ranks import play_ranks

pytestmark = pytest.mark.whole_run

TIMEOUT_S = 8
TASK = "airline/t7\x1b[2J"
SHOWN = r"airline/t7\\x1b\[2J"  # in a terminal


def work(kind: str, num_ranks: int, stderr: str):
    """Three rounds of rollouts and an update; what befalls the last rank in the second."""
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    accelerator = Accelerator()
    rank = accelerator.process_index
    ranks = Ranks(rank, accelerator.num_processes, TIMEOUT_S)
    begun = time.monotonic()
    try:
        with Watchdog(ranks, TIMEOUT_S) as watchdog:
            ranks.barrier("start")
            for step in range(1, 4):
                with ranks.phase("sample", "airline", step):
                    if rank == num_ranks - 1 and step == 2:
                        ranks.progress(TASK)
                        while watchdog._own.task != TASK:  # until it has been told
                            time.sleep(0.05)
                        befall(kind, ranks)
                    ranks.progress()
                    ranks.agree("end of rollouts")
                with ranks.phase("update", "airline", step):
                    ranks.sum([1.0])
    except (ToldElsewhere, CollectiveError, ValueError, Interrupted, KeyboardInterrupt) as error:
        notes = getattr(error, "__notes__", [])
        code = getattr(error, "exit_code", None)
        return type(error).__name__, code, notes, step, time.monotonic() - begun
    return "done", 0, [], 3, time.monotonic() - begun


def befall(kind: str, ranks: Ranks) -> None:
    if kind == "raise":
        raise ValueError("no such seat")
    if kind == "raise no Exception":
        raise KeyboardInterrupt
    if kind == "mistake":
        raise UserError("seat: got 9, give 1 to 6")
    if kind == "exit":
        os._exit(3)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang":
        time.sleep(1000)
    if kind == "hang outside Python":
        ctypes.PyDLL(None).sleep(1000)  # holds the interpreter's lock: none of its threads runs
    if kind == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
        while not ranks.stop_wanted:
            time.sleep(0.01)


@pytest.fixture
def played(tmp_path):
    """Plays a fault; what each rank says of its end, and what all wrote to standard error."""

    def play(kind: str, num_ranks: int = 2) -> tuple[list, str]:
        stderr = tmp_path / "stderr"
        results = play_ranks(work, num_ranks, kind, num_ranks, str(stderr))
        return results, stderr.read_text()

    return play


@pytest.mark.parametrize(
    ("num_ranks", "kind", "name"),
    [
        (3, "raise", "ValueError"),
        (2, "raise no Exception", "KeyboardInterrupt"),
    ],
)
def test_of_a_rank_that_raises_only_its_own_exception_is_told(played, num_ranks, kind, name):
    (*others, last), said = played(kind, num_ranks)
    assert last[:2] == (name, None)
    place = f"rank {num_ranks - 1} on {os.uname().nodename}, in sample airline step 2, "
    assert last[2] == [f"{place}task {TASK}"]
    assert [other[:2] for other in others] == [("ToldElsewhere", 1)] * len(others)
    assert "Traceback" not in said


def test_a_users_mistake_on_one_rank_ends_the_others_as_a_mistake(played):
    (first, last), _ = played("mistake")
    assert last[0] == "UserError"
    assert first[:2] == ("ToldElsewhere", 2)


@pytest.mark.parametrize("kind", ["exit", "kill"])
def test_a_rank_that_is_gone_is_named_with_where_it_was(played, kind):
    (first, last), said = played(kind)
    assert first[:2] == ("ToldElsewhere", 1)
    assert last == "rank 1 said nothing"
    named = r"rank 1 on \S+ \(pid \d+\) exited or was killed; it was in sample airline step 2, task"
    assert len(re.findall(rf"{named} {SHOWN}\n", said)) == 1


@pytest.mark.parametrize("kind", ["hang", "hang outside Python"])
def test_a_rank_that_hangs_is_named_and_ended(played, kind):
    (first, last), said = played(kind)
    assert first[:2] == ("ToldElsewhere", 1)
    assert last == "rank 1 said nothing"
    if kind == "hang":
        assert "rank 1 is at\n" in said and "time.sleep(1000)" in said
    named = r"^rank 1 on \S+ \(pid \d+\) (hangs in|did not come to 'end of rollouts': it is in) "
    found = re.findall(rf"{named}sample airline step 2, task {SHOWN}", said, re.MULTILINE)
    assert len(found) == 1


def wait_in_torch(stderr: str) -> None:
    """One rank hangs; the other waits for it where no collective of ours says so."""
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    ranks = Ranks(Accelerator().process_index, 2, 60)
    with Watchdog(ranks, TIMEOUT_S / 2), ranks.phase("warm start"):
        if ranks.rank == 1:
            time.sleep(1)
            ranks.alive()  # the one that waits has shown no progress for longer
            time.sleep(1000)
        torch.distributed.all_reduce(torch.ones(1))


def test_a_rank_that_waits_inside_torch_is_not_taken_for_the_one_that_hangs(tmp_path):
    stderr = tmp_path / "stderr"
    play_ranks(wait_in_torch, 2, str(stderr))
    named = re.findall(r"^rank (\d) on \S+ \(pid", stderr.read_text(), re.MULTILINE)
    assert named == ["1"]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_signal_to_one_rank_interrupts_all_of_them_at_the_same_place(played, num_ranks):
    results, said = played("SIGTERM", num_ranks)
    assert [result[0] for result in results] == ["Interrupted"] * num_ranks
    assert {result[3] for result in results} == {2}
    assert said.count("SIGTERM: the run stops in good order; a second signal ends it at once") == 1


def twice(pause_s: float, can_resume: bool):
    """Two signals, `pause_s` apart, while the main thread is busy."""
    Accelerator()
    with Watchdog(Ranks(0, 1, TIMEOUT_S), 60) as watchdog:
        watchdog.can_resume = can_resume
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(pause_s)
    return "lived"


@pytest.mark.parametrize(("pause_s", "lives"), [(0.2, True), (2.5, False)])
def test_a_signal_that_comes_twice_is_one_and_a_later_one_ends_the_rank_at_once(pause_s, lives):
    (result,) = play_ranks(twice, 1, pause_s, True)
    assert result == ("lived" if lives else "rank 0 said nothing")


def exit_code_of_second_signal(can_resume: bool) -> int:
    if (child := os.fork()) == 0:
        twice(2.5, can_resume)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_its_exit_code_says_whether_there_is_a_checkpoint():
    assert play_ranks(exit_code_of_second_signal, 1, True) == [75]
    assert play_ranks(exit_code_of_second_signal, 1, False) == [1]


def slow(num_deadlines: float):
    """Work that takes several deadlines, with signs of progress all the time."""
    accelerator = Accelerator()
    ranks = Ranks(accelerator.process_index, 2, 60)
    with Watchdog(ranks, 2):
        ranks.barrier("start")
        until = time.monotonic() + 2 * num_deadlines
        while time.monotonic() < until:
            ranks.progress("t1")
            time.sleep(0.05)
        ranks.barrier("end")
    return "done"


def test_a_rank_at_work_is_left_alone_however_long_it_takes():
    assert play_ranks(slow, 2, 2.5) == ["done", "done"]


def test_handlers_of_signals_are_put_back():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with Watchdog(Ranks(0, 1, 60), 60):
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


SHORT_S, SUSPENDED_S = 3, 10  # a deadline, and more than three times as long


def go_through(folder: str) -> str:
    """Rounds with collectives of every kind, until a file says that it is enough."""
    ranks = Ranks(Accelerator().process_index, int(os.environ["WORLD_SIZE"]), SHORT_S)
    Path(folder, f"pid-{ranks.rank}").write_text(str(os.getpid()))
    rounds = 0
    with Watchdog(ranks, SHORT_S), ranks.phase("sample", "airline", 1):
        while not ranks.max(float(Path(folder, "enough").exists())):
            ranks.barrier("round")
            if ranks.rank == 0:
                time.sleep(0.3)  # the others wait in a collective most of the time
            ranks.sum([1.0])
            ranks.agree("end of round")
            if ranks.num_ranks > 1:
                torch.distributed.all_reduce(torch.ones(1))
            rounds += 1
    return "went on"


def suspend_all(folder: Path, num_ranks: int) -> None:
    """Stop all ranks, and what watches them, for longer than the deadline; then let them go on."""
    while len(pids := [p.read_text() for p in folder.glob("pid-*")]) < num_ranks or "" in pids:
        time.sleep(0.1)
    time.sleep(2)
    ranks = [psutil.Process(int(pid)) for pid in pids]
    processes = [process for rank in ranks for process in [*rank.children(), rank]]
    assert len(processes) >= 2 * num_ranks
    for process in processes:
        process.suspend()
    time.sleep(SUSPENDED_S)
    for process in reversed(processes):
        process.resume()
    time.sleep(2)
    (folder / "enough").touch()


def test_ranks_that_were_suspended_for_longer_than_the_deadline_go_on(tmp_path):
    num_ranks = 2
    suspending = threading.Thread(target=suspend_all, args=[tmp_path, num_ranks])
    suspending.start()
    assert play_ranks(go_through, num_ranks, str(tmp_path)) == ["went on"] * num_ranks
    suspending.join()


def stuck_outside_python(stderr: str) -> None:
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    with Watchdog(Ranks(0, 1, 60), 1):
        ctypes.PyDLL(None).sleep(1000)


def test_a_rank_alone_that_is_stuck_outside_python_is_ended_with_its_stack(tmp_path):
    stderr = tmp_path / "stderr"
    assert play_ranks(stuck_outside_python, 1, str(stderr)) == ["rank 0 said nothing"]
    said = stderr.read_text()
    assert re.match(r"rank process \d+ shows no sign of Python for 6 s and is ended\n", said)
    assert "Fatal Python error: Aborted" in said and "in stuck_outside_python" in said
