"""The doctor: what is well gets a table and 0, each fault a line that says what to try, and 1.

Faults are put into the ranks themselves: a function in place of another, on one rank.
"""

import io
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from pipeline.config.settings import Config
from pipeline.distributed import gradients as distributed
from pipeline.distributed.ranks import Ranks
from pipeline.distributed.store import Board
from pipeline.doctor import links, machine
from pipeline.doctor import main as doctor
from pipeline.doctor.links import judge_fit, judge_mean, judge_speed
from pipeline.doctor.machine import (
    judge_bf16,
    judge_devices,
    judge_disk,
    judge_memory,
    judge_versions,
)
from pipeline.doctor.table import Check, Finding, named, shown
from scripts.proofs.ranks import play_ranks
from tests.support.warm import play

ROWS = (
    *("connection", "devices", "versions", "all-reduce", "bandwidth", "barrier", "DDP"),
    *("bf16", "disk", "memory"),
)
GIB = 1 << 30


def rows_of(text: str) -> dict[str, tuple[str, str]]:
    """Status and text of each row of a printed table, lines joined."""
    table = text.split("finding\n", 1)[1].rsplit("doctor: ", 1)[0]
    lines = re.sub(r"\n {20}", " ", table).splitlines()
    rows = [re.fullmatch(r"(\S+) +(ok|broken|note) +(.*)", line) for line in lines]
    assert all(rows), lines
    return {row[1]: (row[2], row[3]) for row in rows if row}


# The command


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """An empty folder to run in, without a GPU and without settings of Accelerate."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tmp").mkdir()
    for name, value in {"HF_HOME": "home", "TMPDIR": "tmp", "CUDA_VISIBLE_DEVICES": ""}.items():
        monkeypatch.setenv(name, str(tmp_path / value) if value else value)


def files() -> list[str]:
    return sorted(str(path) for path in Path(".").rglob("*"))


def test_two_ranks_that_are_well_get_every_row_and_leave_nothing(tmp_path):
    done = play("--doctor", "--output-dir", "deep/er/run", cwd=tmp_path)
    rows = rows_of(done.stdout)
    assert tuple(rows) == ROWS
    assert {name for name, (status, _) in rows.items() if status != "ok"} == {"bf16"}
    assert rows["connection"][1].startswith("2 ranks met in ")
    assert "ranks 0-1, each on CPU (" in rows["devices"][1]
    assert f"torch {torch.__version__}" in rows["versions"][1]
    assert re.search(r"all-reduce \d+\.\d\d GB/s and \d+ µs; all-gather \d+", rows["bandwidth"][1])
    assert re.search(r"fit y = 2x \+ 3, .* ms, .* ms: speed-up \d+\.\d\d", rows["DDP"][1])
    assert re.search(r": \d+ MB/s .*, \d+\.\d GiB free; in ", rows["disk"][1])
    assert re.fullmatch(r"doctor: nothing is broken \(after \d+ s\)", done.stdout.splitlines()[-1])
    assert done.stderr == "running on CPU: 2 ranks, over gloo\n"
    said = [f"{name}-{rank}" for name in ("stderr", "stdout") for rank in range(2)]
    assert sorted(path.name for path in tmp_path.rglob("*")) == said  # what `play` wrote


# Ranks with a fault


def examine(fault=None, names=ROWS, deadline_s=30.0, output_dir=None):
    """The doctor on this rank, smaller: its exit code and what it printed."""
    links.EXCHANGED["cpu"], links.SAMPLES["cpu"] = 1 << 12, 1 << 10
    machine.WRITTEN = 1 << 20
    if fault is not None:
        fault(int(os.environ["RANK"]))
    checks = [check for check in doctor.CHECKS if check.name in names]
    config = Config.model_validate({"run": {"output_dir": output_dir}})
    with redirect_stdout(io.StringIO()) as said:
        code = doctor.main(config, checks, deadline_s)
    return code, said.getvalue()


def examined(num_ranks, *arguments):
    """The rows that rank 0 printed; all ranks have one code, which is returned, and one speaks."""
    results = play_ranks(examine, num_ranks, *arguments)
    assert all(isinstance(result, tuple) for result in results), results
    codes, texts = zip(*results, strict=True)
    assert len(set(codes)) == 1 and not any(texts[1:]), results
    return codes[0], rows_of(texts[0])


def test_three_ranks_show_the_worked_example(tmp_path):
    code, rows = examined(3, None, ROWS, 30.0, str(tmp_path / "run"))
    assert rows["all-reduce"] == (
        "ok",
        "rank 0 gave [1, 2, 3], rank 1 gave [1.5, 2.5, 3.5], rank 2 gave [2, 3, 4]; "
        "all got the mean [1.5, 2.5, 3.5]",
    )
    assert "3 ranks fit y = 2x + 3, as one process does" in rows["DDP"][1]
    assert tuple(rows) == ROWS
    assert code == 0
    assert list(tmp_path.iterdir()) == []


def test_one_rank_has_nothing_to_exchange_and_may_look_at_the_folder_of_a_run(environment):
    Path("old").mkdir()
    Path("old/config.yaml").write_text("recipe: x")
    code, rows = examined(1, None, ROWS, 30.0, "old")
    assert code == 0
    assert tuple(rows) == ROWS
    for name in ("all-reduce", "bandwidth", "barrier", "DDP"):
        assert rows[name] == ("note", "one rank: there is nothing to exchange")
    assert rows["disk"][1].endswith(f"; in {Path('old').absolute()}")
    assert files() == ["old", "old/config.yaml", "tmp"]


def test_a_folder_that_cannot_be_written_is_one_line_and_code_1(environment):
    Path("file").write_text("no folder")
    code, rows = examined(2, None, ROWS, 30.0, "file/run")
    assert code == 1
    file = Path("file").absolute()
    status, text = rows["disk"]
    assert (status, text.split(" ", 1)[1]) == (
        "broken",
        f"(rank 0) cannot write in {file} (for {file}/run): Not a directory "
        "try: another --output-dir, or mend this folder",
    )
    assert tuple(rows) == ROWS, "the later checks are made nevertheless"
    assert files() == ["file", "tmp"]


def wrong_sum(rank):
    if rank == 1:
        links.sum_over_ranks = lambda tensor: distributed.sum_over_ranks(tensor) + 0.25


def wrong_order(rank):
    """Of the many bytes, rank 1 gathers those of the ranks in the order turned round."""

    def gather(whole, part):
        distributed.gather_into(whole, part)
        return whole.copy_(whole.flip(0).clone()) if len(part) > 1 else whole

    if rank == 1:
        links.gather_into = gather


def gradients_not_averaged(rank):
    Accelerator.prepare = lambda self, model: model


def another_torch(rank):
    if rank == 1:
        torch.__version__ = "1.0"


def error_on_rank_1(rank):
    if rank == 1:
        machine.version = lambda name: {}[name]


def error_before_the_exchange(rank):
    doctor.EARLY = 4 / 30
    if rank == 1:
        links.sum_over_ranks = lambda tensor: {}["cable"]


def no_barrier(rank):
    doctor.EARLY = 4 / 30
    if rank == 1:
        Ranks.barrier = lambda self, name: None


def without_bf16(rank):
    if rank == 1:
        torch.Tensor.bfloat16 = lambda self: self * 1.1
    machine.uses_bf16 = lambda settings: True


def little_memory(rank):
    if rank == 1:
        machine.memory_of_a_rank = lambda config: 1e6


def judge_that_fails(rank):
    old = next(check for check in doctor.CHECKS if check.name == "bf16")
    new = Check(old.name, old.measure, lambda facts: facts[9], old.remedy)
    doctor.CHECKS = [new if check is old else check for check in doctor.CHECKS]


INTERFACE = "try: GLOO_SOCKET_IFNAME=eth0 "
FAULTS = {
    wrong_sum: (
        "all-reduce",
        "rank 1 computed the mean [1.375, 2.375, 3.375]; it is [1.25, 2.25, 3.25] try: NCCL_P2P",
    ),
    wrong_order: (
        "bandwidth",
        "all-gather gave other values to rank 1 try: NCCL_P2P",
    ),
    gradients_not_averaged: (
        "DDP",
        "rank 0 fitted y = 1.749699x + 2.75 with DDP, one process alone y = 2x + 3 try: TORCH",
    ),
    another_torch: (
        "versions",
        f"torch is {torch.__version__} on rank 0, 1.0 on rank 1 try: the same versions on every ",
    ),
    error_on_rank_1: (
        "versions",
        "rank 1: KeyError: 'accelerate' try: pip install -c constraints.txt",
    ),
    without_bf16: ("bf16", "does not work on rank 1, and this recipe asks for it try: --mixed-"),
    judge_that_fails: ("bf16", "IndexError: list index out of range try: --mixed-precision no"),
    little_memory: ("memory", "too little on rank 1: each rank needs about 0."),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_of_a_rank_is_a_broken_line_with_what_to_try(fault):
    name, expected = FAULTS[fault]
    code, rows = examined(2, fault, (name,))
    status, text = rows[name]
    assert text.startswith(expected)
    assert (code, status) == (1, "broken")
    assert "try: " in text


@pytest.fixture(scope="module")
def waited(tmp_path_factory):
    """What takes the time of deadlines is played side by side; `result()` of each waits for it."""
    folder = str(tmp_path_factory.mktemp("hang"))
    exchanged, barred = ("all-reduce", "barrier", "bf16"), ("barrier", "DDP")
    left = ("versions", "bf16", "disk", "memory")
    with ThreadPoolExecutor() as pool:
        yield {
            "hang": pool.submit(lambda: (Path(folder), play_ranks(hang, 2, folder, left))),
            "error": pool.submit(examined, 2, error_before_the_exchange, exchanged),
            "barrier": pool.submit(examined, 2, no_barrier, barred),
        }


def test_an_error_before_an_exchange_is_told_with_the_wait_of_the_others(waited):
    """Rank 0 waits in the exchange, until gloo's deadline, which comes before the check's."""
    code, rows = waited["error"].result()
    status, text = rows["all-reduce"]
    assert (code, status) == (1, "broken")
    assert re.match(r"rank 1: KeyError: 'cable'; rank 0: RuntimeError: Timed out waiting ", text)
    assert rows["barrier"] == ("note", "not checked, because the ranks cannot talk (see above)")
    assert rows["bf16"][0] == "note" and rows["bf16"][1].startswith("works ")


def test_a_rank_that_is_missing_at_the_barrier_is_named(waited):
    code, rows = waited["barrier"].result()
    status, text = rows["barrier"]
    assert (code, status) == (1, "broken")
    assert text.startswith("rank 0: CollectiveError: barrier 'doctor' (rank 0 in phase start): ")
    assert "missing: rank 1; " in text
    assert INTERFACE in text
    assert rows["DDP"] == ("note", "not checked, because the ranks cannot talk (see above)")


def in_a_folder_of_its_own(base, rank):
    folder = Path(base) / str(rank)
    folder.mkdir()
    os.chdir(folder)


def test_ranks_that_do_not_share_the_folder_of_the_runs_are_named(tmp_path):
    fault = partial(in_a_folder_of_its_own, str(tmp_path))
    code, rows = examined(2, fault, ("disk",), 30.0, "runs/a")
    status, text = rows["disk"]
    assert (code, status) == (1, "broken")
    assert text.startswith("rank 1 on ")
    assert f"cannot see in {tmp_path}/1 the file that rank 0 on " in text
    assert f"made in {tmp_path}/0 try: an --output-dir in a folder that all hosts share" in text
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["0", "1"]


def hang(folder, names):
    """The doctor on two ranks, of which the second never ends its check."""
    doctor.GRACE_S = 1.0

    def give_up(code):
        (Path(folder) / os.environ["RANK"]).write_text(f"{said.getvalue()}exit {code}")
        leave(code)

    leave, os._exit = os._exit, give_up
    sleeping = Check("bf16", lambda place: time.sleep(600 * place.ranks.rank), judge_bf16, "sleep")
    checks = [sleeping if check.name == "bf16" else check for check in doctor.CHECKS]
    with redirect_stdout(io.StringIO()) as said:
        doctor.main(Config(), [check for check in checks if check.name in names], 4.0)


def test_a_check_that_hangs_is_named_and_ended(waited):
    folder, results = waited["hang"].result()
    assert results == ["rank 0 said nothing", "rank 1 said nothing"]
    table, end = (folder / "0").read_text().split("doctor: broken: ")
    rows = rows_of(f"{table}doctor: ")
    assert list(rows) == ["connection", "versions", "bf16"]
    assert rows["bf16"] == ("broken", "not done after 4 s; rank 1 still in it try: sleep")
    assert re.fullmatch(r"bf16; not checked: disk, memory \(after \d+ s\)\nexit 1", end)
    assert (folder / "1").read_text() == "exit 1"


# The connection


@pytest.fixture
def alone(monkeypatch):
    """One process, in which no rank was launched."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor, "SILENT_S", 0.0)


def no_route(config, deadline_s):
    raise RuntimeError("no route to\nhost Exception raised from connect at socket.cpp: frame #0")


def test_ranks_that_do_not_meet_are_told_what_to_try(alone, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "connect", no_route)
    assert doctor.main(Config()) == 1
    said = capsys.readouterr().out
    status, text = rows_of(said)["connection"]
    assert status == "broken"
    assert re.match(r"rank 0 on \S+: RuntimeError: no route to host try: GLOO_SOCKET", text)
    assert "MASTER_ADDR" in text
    left = "devices, versions, all-reduce, bandwidth, barrier, DDP, bf16, disk, memory"
    assert f"doctor: broken: connection; not checked: {left} (after 0 s)" in said


def test_another_rank_that_cannot_reach_rank_0_speaks_for_itself(alone, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "connect", no_route)
    monkeypatch.setenv("RANK", "3")
    assert doctor.main(Config()) == 1
    said = capsys.readouterr().out
    assert re.match(r"\nconnection  broken  rank 3 on \S+: RuntimeError: no route to host\n", said)
    assert "doctor: " not in said


def test_a_connection_that_hangs_is_ended(alone, monkeypatch, capsys):
    ended, codes = threading.Event(), []

    def note(code):
        codes.append(code)
        ended.set()

    def wait_for_ever(config, deadline_s):
        assert ended.wait(60)
        raise RuntimeError("a process would have ended here")

    monkeypatch.setattr(os, "_exit", note)
    monkeypatch.setattr(doctor, "connect", wait_for_ever)
    doctor.main(Config(), deadline_s=0.2)
    assert codes == [1]
    said = capsys.readouterr().out
    assert said.splitlines()[2].startswith("connection  broken  not done after 0.2 s")
    assert "try: GLOO_SOCKET_IFNAME=eth0" in said
    assert "doctor: broken: connection; not checked: devices" in said


def test_the_deadline_of_a_check_is_the_run_s_where_that_is_shorter(alone, monkeypatch):
    deadlines = []
    monkeypatch.setattr(doctor, "connect", lambda config, deadline_s: deadlines.append(deadline_s))
    for timeout in (600, 7):
        with pytest.raises(AttributeError):  # what should be a connection is None
            doctor.main(Config.model_validate({"run": {"timeout": timeout, "doctor": True}}))
    assert deadlines == [30, 7]


def test_gpus_are_told_what_nccl_listens_to(monkeypatch):
    monkeypatch.setattr(doctor, "on_gpu", lambda: True)
    for name in ("DEBUG=INFO", "SOCKET_IFNAME=eth0", "IB_DISABLE=1", "P2P_DISABLE=1"):
        assert f"NCCL_{name}" in doctor.links_remedy()
    monkeypatch.setattr(doctor, "on_gpu", lambda: False)
    assert "NCCL" not in doctor.links_remedy()


# What is made of measurements


def devices(*places):
    return [{"host": host, "device": "H200", "gpu": gpu} for host, gpu in places]


def test_two_ranks_on_one_gpu_of_a_host_are_broken():
    found = judge_devices(devices(("a", "gpu-1"), ("b", "gpu-1"), ("a", "gpu-2"), ("a", "gpu-1")))
    assert found.status == "broken"
    assert found.text == "ranks 0, 3 of a share one GPU (H200, gpu-1)"
    assert "CUDA_VISIBLE_DEVICES" in found.remedy
    found = judge_devices(devices(("a", "gpu-1"), ("a", "gpu-2"), ("b", "gpu-1"), ("b", "gpu-2")))
    assert found == Finding("ok", "a: ranks 0-1, each on H200; b: ranks 2-3, each on H200")


def test_a_rank_without_a_gpu_among_others_is_broken():
    found = judge_devices([*devices(("a", "gpu-1")), {"host": "b", "device": "CPU", "gpu": ""}])
    assert (found.status, found.text) == (
        "broken",
        "some ranks have no GPU: a: rank 0, each on H200; b: rank 1, each on CPU",
    )


def test_ranks_with_other_versions_are_named():
    facts = [{"torch": "2", "NCCL": "1"}, {"torch": "3", "NCCL": "1"}, {"torch": "2", "NCCL": "1"}]
    found = judge_versions(facts)
    assert (found.status, found.text) == ("broken", "torch is 2 on ranks 0, 2, 3 on rank 1")


def test_the_bandwidth_is_that_of_nccl_tests_and_of_the_slowest_rank():
    fact = {"bytes": 16 << 20, "gathered": True}
    quick = {**fact, "all-reduce": (0.001, 1e-6), "all-gather": (0.001, 9e-6)}
    slow = {**fact, "all-reduce": (0.002, 5e-6), "all-gather": (0.004, 7e-6)}
    assert judge_speed([quick, quick, slow, quick]).text == (
        "all-reduce 12.58 GB/s and 5 µs; all-gather 3.15 GB/s and 9 µs (bus bandwidth, as "
        "nccl-tests defines it, of 16 MiB; latency of one number)"
    )


def test_of_many_ranks_the_first_and_the_last_are_shown():
    own = [[1 + rank / 2, 2 + rank / 2, 3 + rank / 2] for rank in range(16)]
    found = judge_mean([[mine, [4.75, 5.75, 6.75]] for mine in own])
    assert shown(found).splitlines() == [
        "ok      rank 0 gave [1, 2, 3], rank 1 gave [1.5, 2.5, 3.5], ..., rank 15 gave",
        f"{'':20}[8.5, 9.5, 10.5]; all got the mean [4.75, 5.75, 6.75]",
    ]


def fitted(weights, ddp_s=0.001, alone=None, alone_s=0.002):
    facts = {"ddp": {"weights": weights, "seconds": ddp_s}}
    return facts if alone is None else {**facts, "alone": {"weights": alone, "seconds": alone_s}}


def test_the_speed_up_is_told_also_where_there_is_none():
    line = [2.0, 3.0]
    quick = judge_fit([fitted(line, alone=line), fitted(line)])
    assert quick.text.endswith("a step takes 1.0 ms, that of one process 2.0 ms: speed-up 2.00")
    slow = judge_fit([fitted(line, alone=line), fitted(line, ddp_s=0.004)])
    assert "speed-up 0.50, slower: " in slow.text
    assert (quick.status, slow.status) == ("ok", "ok")


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        (
            [fitted([2.0, 3.0], alone=[2.0, 3.0]), fitted([2.000002, 3.0])],
            "rank 1 fitted y = 2.000002x + 3 with DDP, one process alone y = 2x + 3",
        ),
        (
            [fitted([2.0, 3.0], alone=[2.0, 3.0]), fitted([2.0, float("nan")])],
            "rank 1 fitted y = 2x + nan with DDP, one process alone y = 2x + 3",
        ),
        (
            [fitted([2.0, 3.1], alone=[2.0, 3.1])],
            "fitted y = 2x + 3.1, which is not y = 2x + 3",
        ),
    ],
)
def test_weights_that_differ_are_broken(facts, text):
    found = judge_fit(facts)
    assert (found.status, found.text) == ("broken", text)


@pytest.mark.parametrize(
    ("errors", "wanted", "status"),
    [
        ((0.003, 0.003), True, "ok"),
        ((0.003, 0.003), False, "note"),
        ((0.003, None), True, "broken"),
        ((0.003, None), False, "note"),
        ((float("nan"), 0.003), True, "broken"),
    ],
)
def test_bf16_must_work_where_the_recipe_asks_for_it(errors, wanted, status):
    assert judge_bf16([{"wanted": wanted, "error": e} for e in errors]).status == status


def test_a_full_disk_is_noted():
    fact = {"host": "a", "folder": "/r", "there": "/r", "sees": True, "speed": 5e8}
    full = judge_disk([{**fact, "free": GIB / 2}])
    assert (full.status, full.text) == (
        "note",
        "a: 500 MB/s (64 MiB with fsync), 0.5 GiB free; in /r",
    )
    assert judge_disk([{**fact, "free": 2 * GIB}]).status == "ok"


def test_memory_that_is_less_than_needed_is_broken_and_a_need_unknown_is_noted():
    facts = [{"host": "a", "free": 8.0 * GIB, "need": 4.0 * GIB}, {"host": "b", "free": 5.0 * GIB}]
    has = "has 5.0 GiB free or more (least: rank 1 on b)"
    text = f"each rank needs about 4.0 GiB for this recipe and {has}"
    assert judge_memory(facts) == Finding("ok", text)
    facts[0]["need"] = 6.0 * GIB
    short = judge_memory(facts)
    assert (short.status, short.text) == (
        "broken",
        f"too little on rank 1: {text}".replace("4", "6"),
    )
    assert "a smaller model" in short.remedy
    del facts[0]["need"]
    facts[0]["why"] = "model: got x"
    text = f"each rank {has}; what the recipe needs is not known: model: got x"
    assert judge_memory(facts) == Finding("note", text)


def test_out_of_memory_on_a_gpu_has_a_remedy_of_its_own():
    outcome = doctor.Outcome(error="OutOfMemoryError: CUDA out of memory")
    found = doctor._judged(doctor.CHECKS[3], [outcome])
    assert "nvidia-smi" in found.remedy


@pytest.mark.parametrize(
    ("ranks", "name"), [([1], "rank 1"), ([7, 0, 1, 2], "ranks 0-2, 7"), ([4, 5], "ranks 4-5")]
)
def test_ranks_are_named_in_spans(ranks, name):
    assert named(ranks) == name


# Notes between ranks


def read_while_another_waits():
    """One board of rank 0 waits for what rank 1 posts only after rank 0 posted on the other."""
    rank = Accelerator().process_index
    boards = Board(2), Board(2)
    if rank == 1:
        boards[0].post("answer", {"heard": boards[0].read("question", 60)})
        return "posted"
    answers: list = []
    waiting = threading.Thread(target=lambda: answers.append(boards[0].read("answer", 60)))
    waiting.start()
    time.sleep(0.5)
    boards[1].post("question", "well?")
    waiting.join()
    return answers, boards[1].has("question"), boards[1].has("nothing")


def test_a_note_arrives_while_another_board_of_the_rank_waits():
    first, second = play_ranks(read_while_another_waits, 2)
    assert first == ([{"heard": "well?"}], True, False)
    assert second == "posted"


def test_a_note_that_is_never_posted_is_an_error():
    with pytest.raises(RuntimeError):
        Board(1).read("nothing", 0.1)
