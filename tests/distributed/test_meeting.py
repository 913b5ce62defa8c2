"""Ranks that do not meet: one line with rank, host, address and what to check."""

import platform
import re
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import HashStore, ProcessGroupGloo, TCPStore

from pipeline.distributed.meeting import meeting
from pipeline.errors import RunError, UserError

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
        with pytest.raises(UserError) as refused, meeting(0.5):
            store(port, is_master=True)
    why = f"MASTER_PORT: rank 0 on {HOST} cannot listen on {port}, which is in use "
    assert str(refused.value).startswith(why)


def test_machines_that_never_come_are_counted(port):
    with pytest.raises(RunError) as ended, meeting(0.5):
        store(port, is_master=True)
    came = (
        rf"connection: 1 of 2 ranks came to rank 0 on {HOST} at 127.0.0.1:{port} in \d+ s; start "
    )
    assert re.match(came, str(ended.value))


def test_an_address_where_no_rank_0_listens_is_named(port, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(RunError) as ended, meeting(0.5):
        store(port, is_master=False)
    assert f"rank 1 on {HOST} did not reach rank 0 at 127.0.0.1:{port} in " in str(ended.value)
    assert "\n" not in str(ended.value)


def test_an_interface_that_does_not_exist_is_explained(port, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    with pytest.raises(RunError) as ended, meeting(0.5):
        ProcessGroupGloo(HashStore(), 0, 2, timedelta(seconds=0.5))
    assert f"met the others at 127.0.0.1:{port}, but does not reach them" in str(ended.value)
    assert "ifa != nullptr. Unable to find address for: eth7); give" in str(ended.value)
    assert "GLOO_SOCKET_IFNAME=eth0, with GPUs also NCCL_SOCKET_IFNAME=eth0" in str(ended.value)
    with pytest.raises(RuntimeError, match=r"^out of memory$"), meeting(0.5):
        raise RuntimeError("out of memory")


def test_a_rank_that_waits_for_ever_ends_after_the_deadline(port):
    code = "from pipeline.distributed import meeting; import time; meeting.LATE_S = 0.1\n"
    code += "with meeting.meeting(0.1): time.sleep(60)"
    start = f"error: connection: rank 0 on {HOST} "
    with socket.socket() as rank_0:
        rank_0.bind(("127.0.0.1", port))
        for listens, why in ((False, "did not reach rank 0"), (True, "met the others")):
            if listens:
                rank_0.listen()
            command = [sys.executable, "-c", code]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 1
            assert done.stderr.startswith(f"{start}{why} at 127.0.0.1:{port}")
            assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("host", ["localhost", "no-such-host.invalid"])
def test_no_name_is_resolved_beside_the_connecting(port, monkeypatch, host):
    """Name resolution reads the environment, to which Accelerate writes then: it would crash."""
    asked, resolve = [], socket.getaddrinfo

    def by_thread(*address, **how):
        asked.append(threading.current_thread())
        return resolve(*address, **how)

    monkeypatch.setenv("MASTER_ADDR", host)
    monkeypatch.setattr(socket, "getaddrinfo", by_thread)
    with meeting(60):
        time.sleep(0.35)
    assert asked == [threading.main_thread()]
