"""Run two machines on one: each is a network namespace with its own address, host name and folder.

    python scripts/proofs/machines.py --per-machine 1

The same short deterministic run is started by `torchrun` (static and c10d rendezvous) and by
`accelerate launch` with `multi_node.yaml`, one launcher on each machine. Each run must end with the
SHA-256 sums (parameters after each stage, metrics.jsonl) of a run on one machine with as many
ranks. Linux and root are needed. Flags after `--` are passed to every run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.common import ROOT
from scripts.proofs.chaos import digests

RUN = str(ROOT / "pipeline" / "run.py")
FORMS = ("torchrun static", "torchrun c10d", "accelerate launch")
SHORT = (
    "--deterministic --max-steps 6 --warm-start-steps 10 --eval-tasks-per-domain 2 --eval-trials"
)
SHORT += " 1 --validation-steps 0 --tasks-per-step 4 --report-to none"
FREE_PORT = "import socket; s = socket.socket(); s.bind(('', 0)); print(s.getsockname()[1])"
LIMIT_S = 900.0
NETNS = Path("/etc/netns")  # `ip netns exec` mounts the files of /etc/netns/NAME over /etc


@dataclass(frozen=True)
class Machine:
    """A network namespace; `name` is its host name as well, and `folder` its working folder."""

    name: str
    address: str
    folder: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, command: Sequence[str], **environment: str) -> subprocess.Popen[bytes]:
        """Start `command` here; its output is added to the file `log` of the machine's folder."""
        inside = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name]
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *inside, *command],
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment},
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def free_port(self) -> int:
        command = ["ip", "netns", "exec", self.name, sys.executable, "-c", FREE_PORT]
        return int(subprocess.run(command, check=True, capture_output=True).stdout)

    def log(self) -> str:
        return (self.folder / "log").read_text(encoding="utf-8", errors="replace")

    def pids(self) -> list[int]:
        """All processes of the machine."""
        return [int(pid) for pid in _ip("netns", "pids", self.name).split()]

    def kill(self) -> None:
        """End all processes of the machine at once, those too that are not yet inside."""
        while pids := {*self.pids(), *(p.pid for p in self.started if p.poll() is None)}:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, SIGKILL)
            time.sleep(0.05)

    def set_link(self, state: str) -> None:
        """Cut the link of the machine off (`down`), or bring it back (`up`)."""
        _ip("-n", self.name, "link", "set", "eth0", state)


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def why_not() -> str:
    """The reason why this machine cannot make network namespaces, or an empty text."""
    if sys.platform != "linux" or not (shutil.which("ip") and shutil.which("unshare")):
        return "network namespaces need Linux with `ip` and `unshare`"
    name = f"try{os.getpid()}"
    try:
        _ip("netns", "add", name)
        _ip("netns", "delete", name)
    except OSError as error:
        return str(error)
    return ""


@contextmanager
def two_machines(folder: Path) -> Iterator[tuple[Machine, Machine]]:
    """Two machines with one link between them; both are gone afterwards, with their processes."""
    one, two = (
        Machine(f"machine{os.getpid()}{end}", f"10.99.0.{number}", folder / end)
        for number, end in enumerate("ab", 1)
    )
    made: list[Machine] = []
    try:
        for machine in (one, two):
            machine.folder.mkdir(parents=True)
            _ip("netns", "add", machine.name)
            made.append(machine)
            (NETNS / machine.name).mkdir(parents=True)
            names = [f"{other.address} {other.name}\n" for other in (one, two)]
            hosts = "".join(["127.0.0.1 localhost\n", *names])
            (NETNS / machine.name / "hosts").write_text(hosts, encoding="utf-8")
        link = ["eth0", "netns", one.name, "type", "veth", "peer", "eth0", "netns", two.name]
        _ip("link", "add", *link)
        for machine in (one, two):
            _ip("-n", machine.name, "address", "add", f"{machine.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", machine.name, "link", "set", device, "up")
        yield one, two
    finally:
        for machine in made:
            machine.kill()
            _ip("netns", "delete", machine.name)
            shutil.rmtree(NETNS / machine.name, ignore_errors=True)
        with suppress(OSError):  # another run may have files there
            NETNS.rmdir()


def launcher(form: str, rank: int, num_here: int, address: str, port: int) -> list[str]:
    """The command that starts the ranks of machine `rank` of two, without the script."""
    if form == "accelerate launch":
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
        command += [str(ROOT / "accelerate_configs" / "multi_node.yaml")]
        command += ["--machine_rank", str(rank), "--num_processes", str(2 * num_here)]
        return [*command, "--main_process_ip", address, "--main_process_port", str(port)]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    command += ["--nproc-per-node", str(num_here)]
    if form == "torchrun c10d":
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{address}:{port}"]
        return [*command, *meeting, "--rdzv-id", "run"]
    meeting = ["--node-rank", str(rank), "--master-addr", address, "--master-port", str(port)]
    return [*command, *meeting]


def launch(
    machines: Sequence[Machine], form: str, num_here: int, script: Sequence[str]
) -> list[subprocess.Popen[Any]]:
    """Start `script` with `num_here` ranks on each of the machines; returns the launchers."""
    port = machines[0].free_port()
    return [
        machine.start(
            [*launcher(form, rank, num_here, machines[0].address, port), *script],
            ACCELERATE_USE_CPU="true",
        )
        for rank, machine in enumerate(machines)
    ]


def run_on_two(folder: Path, form: str, num_here: int, flags: Sequence[str]) -> dict[str, str]:
    """Train on two machines; returns the SHA-256 sums of the run folder, which they share."""
    with two_machines(folder) as machines:
        run = folder / "run"
        script = [RUN, *flags, "--num-gpus", str(2 * num_here), "--output-dir", str(run)]
        codes = [p.wait(LIMIT_S) for p in launch(machines, form, num_here, script)]
        left = [machine.name for machine in machines if machine.pids()]
    if any(codes) or left:
        logs = "\n".join(machine.log()[-3000:] for machine in machines)
        raise RuntimeError(f"{form}: exit codes {codes}, processes left on {left}:\n{logs}")
    return digests(run)


def main(argv: Sequence[str]) -> int:
    place = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--per-machine", type=int, default=1, help="ranks on each machine")
    parser.add_argument("--forms", nargs="+", default=FORMS, choices=FORMS)
    options = parser.parse_args(argv[:place])
    if reason := why_not():
        parser.error(reason)
    flags, broken = [*SHORT.split(), *argv[place + 1 :]], 0
    with tempfile.TemporaryDirectory(prefix="machines-") as temporary:
        folder, num_ranks = Path(temporary), 2 * options.per_machine
        alone = [sys.executable, RUN, *flags, "--num-gpus", str(num_ranks)]
        alone += ["--output-dir", str(folder / "run")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        quiet: Any = {"stdout": subprocess.DEVNULL, "check": True, "timeout": LIMIT_S}
        subprocess.run(alone, cwd=folder, env=environment, **quiet)
        expected = digests(folder / "run")
        for form in options.forms:
            begun = time.perf_counter()
            found = run_on_two(folder / form, form, options.per_machine, flags)
            differ = [name for name, digest in expected.items() if found.get(name) != digest]
            broken += bool(differ)
            seen = f"differ: {', '.join(differ)}" if differ else f"{len(found)} equal files"
            seconds = f"{time.perf_counter() - begun:.0f} s"
            print(f"{form}, 2 machines x {options.per_machine}: {seen} ({seconds})", flush=True)
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
