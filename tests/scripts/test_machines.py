"""Two network namespaces are two machines: torchrun on each, and ranks that meet over gloo."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.proofs.machines import launchers, two_machines

MEETING = """
import os, platform
from datetime import timedelta
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
names = [None] * dist.get_world_size()
dist.all_gather_object(names, platform.node())
if dist.get_rank() == 0:
    print("met:", *names, flush=True)
dist.barrier()
os._exit(0)
"""
IS_ABLE = sys.platform == "linux" and os.geteuid() == 0
if IS_ABLE:  # a container's root may lack the right
    name = f"try{os.getpid()}"
    IS_ABLE = bool(shutil.which("ip")) and not subprocess.call(["ip", "netns", "add", name])
    IS_ABLE = IS_ABLE and not subprocess.call(["ip", "netns", "delete", name])
REASON = "needs Linux, `ip` and the right to make network namespaces"


@pytest.mark.skipif(not IS_ABLE, reason=REASON)
def test_ranks_of_two_machines_meet_and_nothing_is_left(tmp_path):
    script = tmp_path / "meeting.py"
    script.write_text(MEETING, encoding="utf-8")
    logs = [tmp_path / "log-0", tmp_path / "log-1"]
    with two_machines(tmp_path) as machines:
        commands = launchers("static", machines, 1, [str(script)])
        started = [machines.start(number, commands[number], logs[number]) for number in range(2)]
        codes = [process.wait(120) for process in started]
        said = logs[0].read_text(encoding="utf-8")
        assert codes == [0, 0], said
        assert f"met: {machines.names[0]} {machines.names[1]}\n" in said
        machines.start(1, ["sleep", "1000"], logs[1])
    assert machines.started[-1].poll() == -9
    assert not [name for name in machines.names if Path("/run/netns", name).exists()]
