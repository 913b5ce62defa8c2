"""Two network namespaces are two machines: torchrun on each, and ranks that meet over gloo."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts.proofs.machines import launchers, two_machines

MEETING = """
import platform, time
import torch.distributed as dist
from pipeline.distributed import watchdog as watching
from pipeline.distributed.ranks import Ranks

dist.init_process_group("gloo")
ranks, watching.GRACE_S = Ranks(dist.get_rank(), 2, 60), 0.5
with watching.Watchdog(ranks, 4), ranks.phase("sample"):
    print("met:", *ranks.all_gather_objects(platform.node(), "meeting"), flush=True)
    while True:
        ranks.alive()
        time.sleep(0.05)
"""
IS_ABLE = sys.platform == "linux" and os.geteuid() == 0
if IS_ABLE:  # a container's root may lack the right
    name = f"try{os.getpid()}"
    IS_ABLE = bool(shutil.which("ip")) and not subprocess.call(["ip", "netns", "add", name])
    IS_ABLE = IS_ABLE and not subprocess.call(["ip", "netns", "delete", name])
REASON = "needs Linux, `ip` and the right to make network namespaces"


@pytest.mark.skipif(not IS_ABLE, reason=REASON)
def test_machines_whose_link_is_cut_name_each_other_and_end_and_nothing_is_left(tmp_path):
    script = tmp_path / "meeting.py"
    script.write_text(MEETING, encoding="utf-8")
    logs = [tmp_path / "log-0", tmp_path / "log-1"]
    with two_machines(tmp_path) as machines:
        commands = launchers("static", machines, 1, [str(script)])
        started = [machines.start(number, commands[number], logs[number]) for number in range(2)]
        met = f"met: {machines.names[0]} {machines.names[1]}\n"
        while not all(met in log.read_text(encoding="utf-8") for log in logs):
            assert [process.poll() for process in started] == [None, None], logs[0].read_text()
            time.sleep(0.1)
        machines.set_link(1, "down")
        assert [process.wait(120) for process in started] == [1, 1]
        assert [machines.processes(number) for number in range(2)] == [[], []]
        named = rf"^rank 1 on {machines.names[1]} \(pid \d+\) (hangs in|did not come)"
        assert len(re.findall(named, logs[0].read_text(encoding="utf-8"), re.MULTILINE)) == 1
        first = rf"rank 0 on {machines.names[0]} \({machines.addresses[0]}\)"
        cut_off = f"the node of {first} with the key-value store does not answer\n"
        assert len(re.findall(cut_off, logs[1].read_text(encoding="utf-8"))) == 1
        machines.start(1, ["sleep", "1000"], logs[1])
    assert machines.started[-1].poll() == -9
    assert not [name for name in machines.names if Path("/run/netns", name).exists()]
