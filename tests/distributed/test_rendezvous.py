"""Ranks that do not meet: one line with rank, host, address and what to check."""

import platform
import socket
import subprocess
import sys
from datetime import timedelta

import pytest
from torch.distributed import HashStore, ProcessGroupGloo, TCPStore

from pipeline.common.errors import RunError, UserError
from pipeline.distributed.rendezvous import rendezvous

HOST = platform.node()


@pytest.fixture
def port(monkeypatch):
    """A port that nobody uses, told to this rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    for name, value in {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": number}.items():
        monkeypatch.setenv(name, str(value))
    return number


def store(port, is_master):
    return TCPStore("127.0.0.1", port, 2, is_master, timedelta(seconds=0.5))


def test_a_port_in_use_is_named(port):
    with socket.socket() as other:
        other.bind(("0.0.0.0", port))
        other.listen()
        with pytest.raises(UserError) as refused, rendezvous(0.5):
            store(port, is_master=True)
    why = f"MASTER_PORT: rank 0 on {HOST} cannot listen on {port}, which is in use "
    assert str(refused.value).startswith(why)


@pytest.mark.parametrize(
    ("rank", "connect", "reason"),
    [
        (0, lambda port: store(port, is_master=True), "1/2 clients joined"),
        (1, lambda port: store(port, is_master=False), "client socket"),
        (
            1,
            lambda _: ProcessGroupGloo(HashStore(), 0, 2, timedelta(seconds=0.5)),
            "ifa != nullptr. Unable to find address for: eth7",
        ),
    ],
    ids=["a rank that never comes", "nobody at the address", "no such interface"],
)
def test_ranks_that_do_not_meet_are_told_where_and_why(port, monkeypatch, rank, connect, reason):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    with pytest.raises(RunError) as ended, rendezvous(0.5):
        connect(port)
    line = str(ended.value)
    met = f"connection: rank {rank} on {HOST} did not meet all ranks at 127.0.0.1:{port} ("
    assert line.startswith(met) and "\n" not in line
    assert reason in line
    assert "GLOO_SOCKET_IFNAME=eth0, with GPUs also NCCL_SOCKET_IFNAME=eth0" in line


def test_a_rank_that_waits_for_ever_ends_after_the_deadline(port):
    code = "from pipeline.distributed import rendezvous; import time; rendezvous.LATE_S = 0.1\n"
    code += "with rendezvous.rendezvous(0.1): time.sleep(60)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    met = f"error: connection: rank 0 on {HOST} did not meet all ranks at 127.0.0.1:{port} (gloo "
    assert done.stderr.startswith(met) and done.stderr.count("\n") == 1
