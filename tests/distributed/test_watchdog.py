"""Faults and signals on real ranks: who is named, who ends how, and that all end."""

import ctypes
import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from accelerate import Accelerator

from pipeline.common.errors import UserError
from pipeline.distributed import watchdog as watching
from pipeline.distributed.ranks import CollectiveError, Interrupted, Ranks
from pipeline.distributed.rendezvous import rendezvous_again
from pipeline.distributed.watchdog import ToldElsewhere, Watchdog
from scripts.proofs.ranks import play_ranks

pytestmark = pytest.mark.whole_run

TIMEOUT_S = 4
SHORT_S = 2  # a deadline
TASK = "airline/t7\x1b[2J"
SHOWN = r"airline/t7\\x1b\[2J"  # in a terminal


def work(kind: str, num_ranks: int, stderr: str):
    """Three rounds of rollouts and an update; what befalls the last rank in the second."""
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    accelerator = Accelerator()
    rank = accelerator.process_index
    ranks = Ranks(rank, accelerator.num_processes, TIMEOUT_S)
    if kind == "hang outside Python" and rank == num_ranks - 1:
        watching.GRACE_S = 2.0  # its sentinel ends it, after the other rank has named it
    try:
        with Watchdog(ranks, TIMEOUT_S) as watchdog:
            ranks.barrier("start")
            for step in range(1, 4):
                with ranks.phase("sample", "airline", step):
                    if rank == num_ranks - 1 and step == 2:
                        ranks.progress(TASK)
                        while TASK not in watchdog._own.phase:  # until it has been posted
                            time.sleep(0.05)
                        befall(kind, ranks)
                    ranks.progress()
                    ranks.agree("end of rollouts")
                with ranks.phase("update", "airline", step):
                    ranks.sum([1.0])
    except (ToldElsewhere, CollectiveError, ValueError, Interrupted, KeyboardInterrupt) as error:
        notes = getattr(error, "__notes__", [])
        code = getattr(error, "exit_code", None)
        return type(error).__name__, code, notes, step
    return "done", 0, [], 3


RAISED = {
    "raise": ValueError("no such seat"),
    "raise no Exception": KeyboardInterrupt(),
    "mistake": UserError("seat: got 9, give 1 to 6"),
}
SENT = {"kill": signal.SIGKILL, "SIGUSR1": signal.SIGUSR1}


def befall(kind: str, ranks: Ranks) -> None:
    if kind in RAISED:
        raise RAISED[kind]
    if kind in SENT:
        os.kill(os.getpid(), SENT[kind])
    if kind == "hang":
        time.sleep(1000)
    if kind == "hang outside Python":
        ctypes.PyDLL(None).sleep(1000)  # holds the interpreter's lock: none of its threads runs
    while not ranks.stop_wanted:
        time.sleep(0.01)


def played_in(folder: Path, function, num_ranks: int, *arguments) -> tuple[list, str]:
    """What each rank says of its end, and what all wrote to standard error."""
    folder.mkdir(exist_ok=True)
    stderr = folder / "stderr"
    stderr.touch()
    results = play_ranks(function, num_ranks, *arguments, str(stderr))
    return results, stderr.read_text()


@pytest.fixture
def played(tmp_path):
    """Plays a fault."""
    return lambda kind, num_ranks=2: played_in(tmp_path, work, num_ranks, kind, num_ranks)


@pytest.fixture(scope="module")
def waited(tmp_path_factory):
    """What takes the time of deadlines is played side by side; `result()` of each waits for it."""
    folder = tmp_path_factory.mktemp("waited")
    plays = {
        "hang outside Python": (played_in, work, 2, "hang outside Python", 2),
        "hang": (played_in, work, 2, "hang", 2),
        "torch": (played_in, wait_in_torch, 2),
        "slow": (played_in, slow, 2),
        "restarted": (played_in, restarted, 2),
        "lost": (played_in, lost, 2),
        "apart": (play_apart,),
    }
    with ThreadPoolExecutor(max_workers=3) as pool:
        yield {
            name: pool.submit(play, folder / name, *arguments)
            for name, (play, *arguments) in plays.items()
        }


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


def test_a_rank_that_is_gone_is_named_with_where_it_was(played):
    (first, last), said = played("kill")
    assert first[:2] == ("ToldElsewhere", 1)
    assert last == "rank 1 said nothing"
    named = r"rank 1 on \S+ \(pid \d+\) exited or was killed; it was in sample airline step 2, task"
    assert len(re.findall(rf"{named} {SHOWN}\n", said)) == 1


@pytest.mark.parametrize("kind", ["hang", "hang outside Python"])
def test_a_rank_that_hangs_is_named_and_ended(waited, kind):
    (first, last), said = waited[kind].result()
    assert first[:2] == ("ToldElsewhere", 1)
    assert last == "rank 1 said nothing"
    if kind == "hang":
        assert "rank 1 is at\n" in said and "time.sleep(1000)" in said
    else:
        assert re.search("^rank 1 .* is ended: it is stuck outside Python, or ", said, re.MULTILINE)
        assert "Fatal Python error: Aborted" in said and "in befall" in said
    named = r"^rank 1 on \S+ \(pid \d+\) (hangs in|did not come to 'end of rollouts': it is in) "
    found = re.findall(rf"{named}sample airline step 2, task {SHOWN}", said, re.MULTILINE)
    assert len(found) == 1


def wait_in_torch(stderr: str) -> None:
    """One rank hangs; the other waits for it where no collective of ours says so."""
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    ranks = Ranks(Accelerator().process_index, 2, 60)
    with Watchdog(ranks, 3), ranks.phase("warm start"):
        if ranks.rank == 1:
            time.sleep(1)
            ranks.alive()  # the one that waits has shown no progress for longer
            time.sleep(1000)
        torch.distributed.all_reduce(torch.ones(1))


def test_a_rank_that_waits_inside_torch_is_not_taken_for_the_one_that_hangs(waited):
    _, said = waited["torch"].result()
    named = re.findall(r"^rank (\d) on \S+ \(pid", said, re.MULTILINE)
    assert named == ["1"]


def test_a_signal_to_one_rank_interrupts_all_of_them_at_the_same_place(played):
    results, said = played("SIGUSR1")
    assert [result[0] for result in results] == ["Interrupted"] * 2
    assert {result[3] for result in results} == {2}
    assert said.count("SIGUSR1: the run stops in good order; a second signal ends it at once") == 1


def twice(same_signal_s: float, can_resume: bool) -> None:
    """Two signals, the second half a second after the first was heard; the main thread is busy."""
    watching.SAME_SIGNAL_S = same_signal_s
    with Watchdog(Ranks(0, 1, TIMEOUT_S), 60) as watchdog:
        watchdog.can_resume = can_resume
        os.kill(os.getpid(), signal.SIGTERM)
        while not watchdog._first_signal_at:
            time.sleep(0.01)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)


def exit_codes_of_two_signals() -> list[int]:
    """The second at once; later, without a checkpoint; later, with one."""
    children = []
    for same_signal_s, can_resume in ((2.0, True), (0.2, False), (0.2, True)):
        if (child := os.fork()) == 0:
            twice(same_signal_s, can_resume)
            os._exit(0)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def test_a_signal_that_comes_twice_is_one_and_a_later_one_ends_the_rank_at_once():
    """And its exit code says whether it can be resumed."""
    assert watching.SAME_SIGNAL_S == 2
    assert play_ranks(exit_codes_of_two_signals, 1) == [[0, 1, 75]]


def ends_of_runs(folder: str) -> list[str]:
    """Why runs have ended, as the file for those who watch says."""
    Path(folder, ".lock").touch()
    found = []
    for ending in ("", "https://me:password@host is gone\nwith more", "signal"):
        with suppress(ValueError), Watchdog(Ranks(0, 1, TIMEOUT_S), 60) as watchdog:
            watchdog.run_folder = Path(folder)
            if ending == "signal":
                os.kill(os.getpid(), signal.SIGTERM)
                while not watchdog._ranks.stop_wanted:
                    time.sleep(0.01)
            elif ending:
                raise ValueError(ending)
        posted = json.loads(Path(folder, "ranks.json").read_text())
        found.append(posted["why"] if posted["is_over"] else "not over")
    return found


def test_who_watches_reads_why_a_run_has_ended_without_secrets(tmp_path):
    (found,) = play_ranks(ends_of_runs, 1, str(tmp_path))
    assert found == ["", "ValueError: https://***@host is gone", "interrupted"]


def restarted(stderr: str) -> tuple[str, int | None]:
    """Rank 1 begins again, as its launcher would start it, while rank 0 waits for it at work."""
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    ranks = Ranks(Accelerator().process_index, 2, 60)
    try:
        if ranks.rank == 0:
            with Watchdog(ranks, 60):
                ranks.agree("end of rollouts")
        ranks.connect_to_store().get("heartbeat 0")
        torch.distributed.destroy_process_group()
        os.environ |= {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        rendezvous_again(1, "cpu")
    except (ToldElsewhere, RuntimeError) as error:
        return type(error).__name__, getattr(error, "exit_code", None)
    return "met", None


def test_a_rank_that_its_launcher_starts_again_ends_the_ranks_that_wait_for_it(waited):
    (first, _), said = waited["restarted"].result()
    assert first == ("ToldElsewhere", 1)
    named = (
        r"^rank 1 on \S+ \(local rank 1\) exited or was killed, and its launcher has started it "
    )
    assert len(re.findall(f"{named}again\n", said, re.MULTILINE)) == 1


def slow(stderr: str) -> str:
    """Work that takes longer than the deadline, with signs of progress all the time."""
    ranks = Ranks(Accelerator().process_index, 2, 60)
    with Watchdog(ranks, SHORT_S):
        ranks.barrier("start")
        until = time.monotonic() + 1.5 * SHORT_S
        while time.monotonic() < until:
            ranks.progress("t1")
            time.sleep(0.05)
        ranks.barrier("end")
    return "done"


def test_a_rank_at_work_is_left_alone_however_long_it_takes(waited):
    assert waited["slow"].result() == (["done", "done"], "")


def begin_apart(stderr: str) -> int:
    """The rank, which says that it is alone on its machine."""
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    rank = int(os.environ["RANK"])
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    watching.platform.node = lambda: f"machine-{rank}"
    watching.GRACE_S = 1.0
    return rank


def lost(stderr: str) -> None:
    """A rank is killed while the one of another machine waits for it in a collective of torch."""
    rank = begin_apart(stderr)
    watching.LOOK_S, watching.PATIENCE_S = 2.0, 1.0
    ranks = Ranks(Accelerator().process_index, 2, 60)
    with Watchdog(ranks, 60), ranks.phase("update", "airline", 1):
        ranks.barrier("start")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.distributed.all_reduce(torch.ones(1))


def test_a_killed_rank_of_another_machine_is_named_when_its_connection_is_lost(waited):
    results, said = waited["lost"].result()
    assert "ToldElsewhere: hangs" in results[0]
    named = (
        r"^rank 1 on machine-1 \(pid \d+\) did not come to 'a collective of torch': it is in update"
    )
    assert len(re.findall(f"{named} airline step 1, its", said, re.MULTILINE)) == 1


def apart(folder: str, stderr: str) -> None:
    """The process of rank 0 is suspended, and with it the ranks' key-value store."""
    rank = begin_apart(stderr)
    ranks = Ranks(Accelerator().process_index, 2, 60)
    with Watchdog(ranks, SHORT_S), ranks.phase("sample", "airline", 1):
        ranks.barrier("start")
        if rank == 0:
            Path(folder, "pid").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        while True:
            ranks.alive()
            time.sleep(0.05)


def play_apart(folder: Path) -> str:
    """What was said; the suspended process is killed as soon as the other has ended.

    Not when its own sentinel has spoken, which may be the first: the other would miss the store.
    """
    folder.mkdir()
    with ThreadPoolExecutor() as pool:
        playing = pool.submit(played_in, folder, apart, 2, str(folder))
        while not re.search("^rank 1 .* is ended", read(folder / "stderr"), re.MULTILINE):
            assert not playing.done(), playing.result()
            time.sleep(0.1)
        psutil.Process(int(read(folder / "pid"))).kill()
        return playing.result()[1]


def read(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def test_where_the_store_falls_silent_a_rank_ends_and_names_the_machine_of_rank_0(waited):
    said = waited["apart"].result()
    named = r"rank 1 on machine-1 \(pid \d+\) shows no sign of life for 3 s and is ended: it is "
    stuck = r"stuck outside Python, or the node of rank 0 on machine-0 \(127.0.0.1\) with the "
    store = "key-value store does not answer"
    assert len(re.findall(f"^{named}{stuck}{store}\n", said, re.MULTILINE)) == 1
