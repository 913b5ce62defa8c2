"""Two network namespaces are two machines: torchrun on each, and ranks that meet over gloo."""

import sys
from pathlib import Path

import pytest

from scripts.proofs.machines import FORMS, launch, launcher, two_machines, why_not

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
REASON = why_not()


@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_ranks_of_two_machines_meet_and_nothing_is_left(tmp_path):
    script = tmp_path / "meeting.py"
    script.write_text(MEETING, encoding="utf-8")
    with two_machines(tmp_path / "machines") as machines:
        one, two = machines
        processes = launch(machines, "torchrun static", 1, [str(script)])
        assert [process.wait(120) for process in processes] == [0, 0], one.log() + two.log()
        assert f"met: {one.name} {two.name}\n" in one.log()
        sleeper = two.start(["sleep", "1000"])
        two.set_link("down")
    assert sleeper.wait(10) == -9
    names = {path.name for path in Path("/run/netns").glob("*")}
    assert not names & {one.name, two.name}
    assert not [name for name in (one.name, two.name) if Path("/etc/netns", name).exists()]


@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_two_machines_are_taken_away_after_a_failure(tmp_path):
    with pytest.raises(ZeroDivisionError), two_machines(tmp_path) as machines:
        print(1 / 0)
    assert not [m for m in machines if Path("/run/netns", m.name).exists()]


def test_each_launcher_gets_the_found_address_and_port():
    for form in FORMS:
        command = launcher(form, 1, 2, "10.99.0.1", 12345)
        assert command[0] == sys.executable
        assert "10.99.0.1" in " ".join(command) and "12345" in " ".join(command)
    static = launcher("torchrun static", 1, 2, "10.99.0.1", 12345)
    assert static[static.index("--node-rank") + 1] == "1"
    accelerate = launcher("accelerate launch", 1, 2, "10.99.0.1", 12345)
    assert accelerate[accelerate.index("--num_processes") + 1] == "4"
