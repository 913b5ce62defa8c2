"""The doctor: what is well gets a table and 0, each fault a line that says what to try, and 1.

Faults are put into the ranks themselves: a function in place of another, on one rank.
"""

import io
import os
import re
import time
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

from pipeline.config.settings import Config
from pipeline.distributed import ranks as distributed
from pipeline.distributed.watchdog import ToldElsewhere
from pipeline.preflight import doctor
from pipeline.preflight.doctor import (
    Check,
    judge_all_reduce,
    judge_devices,
    judge_folder,
    judge_versions,
)
from scripts.proofs.ranks import play_ranks
from tests.support.warm import play

pytestmark = pytest.mark.whole_run

ROWS = (*("connection", "devices", "versions", "all-reduce", "folder"),)


def rows_of(text: str) -> dict[str, tuple[str, str]]:
    """Status and text of each row of a printed table, lines joined."""
    table = text.split("finding\n", 1)[-1].rsplit("doctor: ", 1)[0]
    lines = re.sub(r"\n {20}", " ", table).splitlines()
    rows = [re.fullmatch(r"(\S+) +(ok|broken) +(.*)", line) for line in lines]
    assert all(rows), lines
    return {row[1]: (row[2], row[3]) for row in rows if row}


# The command


def test_two_ranks_that_are_well_get_every_row_and_leave_nothing(tmp_path):
    done = play("--doctor", "--output-dir", "deep/er/run", cwd=tmp_path)
    rows = rows_of(done.stdout)
    assert tuple(rows) == ROWS
    assert {status for status, _ in rows.values()} == {"ok"}
    assert rows["connection"][1].startswith("2 ranks met in ")
    assert ": ranks 0, 1 on CPU with " in rows["devices"][1]
    assert f"torch {torch.__version__}" in rows["versions"][1]
    speed = r"2 ranks added 17 MB up in \d+\.\d ms \(each sent \d+\.\d\d GB/s\)"
    assert re.fullmatch(speed, rows["all-reduce"][1])
    assert f"that rank 0 writes in {tmp_path} on " in rows["folder"][1]
    assert re.fullmatch(r"doctor: nothing is broken \(after \d+ s\)", done.stdout.splitlines()[-1])
    assert done.stderr == "running on CPU: 2 ranks, over gloo\n"
    said = [f"{name}-{rank}" for name in ("stderr", "stdout") for rank in range(2)]
    assert sorted(path.name for path in tmp_path.rglob("*")) == said  # what `play` wrote


# Ranks with a fault


def examine(fault=None, names=ROWS, deadline_s=30.0, output_dir=None):
    """The doctor on this rank, smaller: its exit code and what it printed."""
    doctor.REDUCED["cpu"] = 1 << 12
    if fault is not None:
        fault(int(os.environ["RANK"]))
    some = [check for check in doctor.CHECKS if check.name in names]
    config = Config.model_validate({"run": {"output_dir": output_dir}})
    with redirect_stdout(io.StringIO()) as said:
        try:
            code = doctor.main(config, some, deadline_s)
        except ToldElsewhere as error:
            code = error.exit_code
    return code, said.getvalue()


def examined(num_ranks, *arguments):
    """The exit code of all ranks, and the rows that they printed."""
    results = play_ranks(examine, num_ranks, *arguments)
    assert all(isinstance(result, tuple) for result in results), results
    codes, texts = zip(*results, strict=True)
    assert len(set(codes)) == 1, results
    rows: dict[str, tuple[str, str]] = {}
    for text in texts:
        rows |= rows_of(text)
    return codes[0], rows


def wrong_sum(rank):
    if rank == 1:
        doctor.sum_over_ranks = lambda tensor: distributed.sum_over_ranks(tensor) + 0.25


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """An empty folder to run in, without a GPU and without settings of Accelerate."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tmp").mkdir()
    for name, value in {"HF_HOME": "home", "TMPDIR": "tmp", "CUDA_VISIBLE_DEVICES": ""}.items():
        monkeypatch.setenv(name, str(tmp_path / value) if value else value)


def files() -> list[str]:
    return sorted(str(path) for path in Path(".").rglob("*"))


def test_one_rank_has_nothing_to_exchange_and_may_look_at_the_folder_of_a_run(environment):
    Path("old").mkdir()
    Path("old/config.yaml").write_text("recipe: x")
    code, rows = examined(1, None, ROWS, 30.0, "old")
    assert code == 0
    assert tuple(rows) == ROWS
    assert rows["all-reduce"] == ("ok", "one rank: there is nothing to exchange")
    assert f" in {Path('old').absolute()} on " in rows["folder"][1]
    assert files() == ["old", "old/config.yaml", "tmp"]


def error_before_the_exchange(rank):
    if rank == 1:
        doctor.sum_over_ranks = lambda tensor: {}["cable"]


@pytest.mark.parametrize(
    ("fault", "name", "expected"),
    [
        (wrong_sum, "all-reduce", "rank 1 computed a wrong sum try: NCCL_P2P"),
        (
            error_before_the_exchange,
            "all-reduce",
            r"rank 1 on \S+: KeyError: 'cable' try: GLOO_SOCKET_IFNAME=eth0 ",
        ),
        (None, "folder", r"rank 0 on \S+: NotADirectoryError: .* try: another --output-dir"),
    ],
)
def test_what_is_broken_is_one_line_with_what_to_try_and_code_1(environment, fault, name, expected):
    Path("file").write_text("no folder")
    code, rows = examined(2, fault, (name,), 30.0, "file/run")
    status, text = rows[name]
    assert (code, status) == (1, "broken")
    assert re.match(expected, text)
    assert files() == ["file", "tmp"]


def hang(stderr, stdout):
    """The doctor on two ranks, of which the second never ends its check."""
    for number, name in ((2, stderr), (1, stdout)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT), number)
    judge = doctor.CHECKS[-1].judge
    sleeping = Check("nap", lambda *a: time.sleep(600 * a[-1].rank), judge, "sleep")
    some = [doctor.CHECKS[1], sleeping, doctor.CHECKS[-1]]
    doctor.main(Config(), some, 3.0)


def test_a_check_that_hangs_is_named_with_what_to_try_and_ended(tmp_path):
    stderr, stdout = tmp_path / "stderr", tmp_path / "stdout"
    results = play_ranks(hang, 2, str(stderr), str(stdout))
    assert "rank 1 said nothing" in results
    assert list(rows_of(stdout.read_text())) == ["connection", "versions"]
    said = stderr.read_text()
    named = r"^rank 1 on \S+ \(pid \d+\) .*\bin nap\b.*; try: sleep$"
    assert len(re.findall(named, said, re.MULTILINE)) == 1
    assert "rank 1 is at\n" in said and "time.sleep(600" in said


# The connection


@pytest.fixture
def alone(monkeypatch):
    """One process, in which no rank was launched."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor, "SILENT_S", 0.0)


def no_route(config):
    raise RuntimeError("no route to host\nException raised from connect at socket.cpp: frame #0")


def test_ranks_that_do_not_meet_are_told_what_to_try(alone, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(doctor, "connect", no_route)
    assert doctor.main(Config()) == 1
    said = capsys.readouterr().out
    status, text = rows_of(said)["connection"]
    assert status == "broken"
    assert re.match(r"rank 3 on \S+: RuntimeError: no route to host try: GLOO_SOCKET", text)
    assert "MASTER_ADDR" in text
    left = "devices, versions, all-reduce, folder"
    assert f"doctor: broken: connection; not checked: {left} (after 0 s)" in said


# What is made of measurements


def devices(places):
    return [{"host": host, "device": "H200", "gpu": gpu} for host, gpu in places]


ALONE = [("a", "gpu-1"), ("a", "gpu-2")]
SHARED = [("a", "gpu-1"), ("b", "gpu-1")]
QUICK = {"is_right": True, "seconds": 0.001, "bytes": 16_000_000}


@pytest.mark.parametrize(
    ("judge", "measured", "status", "text", "remedy"),
    [
        (
            *(judge_folder, [("one", "/runs", True), ("two", "/runs", False)], "broken"),
            "rank 1 on two cannot see /runs of rank 0 on one",
            "a folder that all hosts share as --output-dir",
        ),
        (
            *(judge_devices, devices(SHARED + ALONE[::-1]), "broken"),
            *("ranks 0, 3 of a share one GPU (H200, gpu-1)", "CUDA_VISIBLE_DEVICES"),
        ),
        (
            *(judge_devices, devices([*ALONE, ("b", "gpu-1"), ("b", "gpu-2")]), "ok"),
            *("a: ranks 0, 1 on H200; b: ranks 2, 3 on H200", ""),
        ),
        (
            judge_devices,
            [*devices(ALONE[:1]), {"host": "b", "device": "CPU", "gpu": ""}],
            *("broken", "some ranks have no GPU: a: rank 0 on H200; b: rank 1 on CPU", ""),
        ),
        (
            *(judge_versions, ["torch 2, NCCL 1", "torch 3, NCCL 1", "torch 2, NCCL 1"], "broken"),
            *("ranks 0, 2: torch 2, NCCL 1; rank 1: torch 3, NCCL 1", ""),
        ),
        (  # the speed is that of the slowest
            *(judge_all_reduce, [QUICK, QUICK | {"seconds": 0.002}, QUICK], "ok"),
            *("3 ranks added 16 MB up in 2.0 ms (each sent 10.67 GB/s)", ""),
        ),
        (
            *(judge_all_reduce, [QUICK, QUICK | {"is_right": False}], "broken"),
            *("rank 1 computed a wrong sum", ""),
        ),
    ],
)
def test_what_is_found_on_several_ranks_is_judged(judge, measured, status, text, remedy):
    found = judge(measured)
    assert (found.status, found.text) == (status, text)
    assert remedy in (found.remedy or "")
