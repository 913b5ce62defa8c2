"""Train on two machines, which are two network namespaces, and compare with one machine.

    python scripts/proofs/machines.py        # Linux, root (ip netns)

A namespace has its own network, so launchers, store and gloo talk over a link between the two, as
between machines; only the fabric is missing. The run folder is on a disk that both share. The
forms of launch are torchrun with a static and with a c10d rendezvous, `accelerate launch` with
`accelerate_configs/multi_node.yaml`, and `train` with torchrun's variables PET_NNODES and so on, on
2 machines x 1 rank and 2 x 2. With `--deterministic`, checkpoints, `metrics.jsonl` and transcripts
must equal, bit by bit, those of one machine with as many ranks. The run is a short one;
`--run "--deterministic --report-to none"` plays the whole default recipe. The exit code is 1 if
anything differs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.common import ROOT, RUN, finish_run, machine
from scripts.proofs.ranks import free_port
from scripts.proofs.same import compared

SHORT = (
    "--deterministic --domains airline,retail --max-steps 4 --warm-start-steps 4 --save-steps 2 "
    "--tasks-per-step 4 --num-generations 4 --eval-tasks-per-domain 4 --eval-trials 1 "
    "--kl-probe-tasks 0 --validation-steps 0 --report-to none "
    "--no-drop-zero-std-groups --entropy-coef 0.05 "  # gradients in each step
)
FORMS = ("static", "c10d", "accelerate", "train")
MULTI_NODE = ROOT / "accelerate_configs" / "multi_node.yaml"
LINK = "net0"  # the name of the link in both namespaces


class Machines:
    """Two namespaces that are joined by a link, and a working folder for each."""

    def __init__(self, folder: Path) -> None:
        tag = f"{os.getpid() % 10_000:04d}"
        self.names = [f"m{tag}-{number}" for number in range(2)]
        net = f"10.{77 + os.getpid() % 100}.{os.getpid() % 250}"
        self.addresses = [f"{net}.{number + 1}" for number in range(2)]
        self.started: list[subprocess.Popen[bytes]] = []
        self.folders = [folder / f"machine-{number}" for number in range(2)]

    def start(self, number: int, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """Start a command on a machine; the machine's host name is the namespace's."""
        env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        env |= {"GLOO_SOCKET_IFNAME": LINK, "PYTHONPATH": str(ROOT)}
        name = self.names[number]
        inside = ["ip", "netns", "exec", name, "unshare", "--uts"]
        inside += ["sh", "-c", 'hostname "$0" && exec "$@"', name, *command]
        with log.open("ab") as file:
            process = subprocess.Popen(
                inside, cwd=self.folders[number], env=env, stdout=file, stderr=file
            )
        self.started.append(process)
        return process

    def processes(self, number: int) -> list[int]:
        """Return the ids of the processes that run on a machine."""
        return _processes_of(self.names[number])

    def set_link(self, number: int, state: str) -> None:
        """Set a machine's end of the link `up` or `down`."""
        _ip("-n", self.names[number], "link", "set", LINK, state)


@contextmanager
def two_machines(folder: Path) -> Iterator[Machines]:
    """Make two namespaces, and take them and all their processes away. Needs root."""
    machines = Machines(folder)
    try:
        for name, of in zip(machines.names, machines.folders, strict=True):
            of.mkdir(exist_ok=True)
            _ip("netns", "add", name)
        first, second = machines.names
        link = ["link", "add", LINK, "netns", first, "type", "veth"]
        _ip(*link, "peer", "name", LINK, "netns", second)
        for name, address in zip(machines.names, machines.addresses, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", LINK)
            for device in ("lo", LINK):
                _ip("-n", name, "link", "set", device, "up")
        yield machines
    finally:
        for process in machines.started:  # `ip` may not yet be inside its namespace
            process.kill()
            process.wait()
        for name in machines.names:
            for pid in _processes_of(name):
                with suppress(ProcessLookupError):
                    os.kill(pid, 9)
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _processes_of(name: str) -> list[int]:
    done = subprocess.run(
        ["ip", "netns", "pids", name], capture_output=True, text=True, check=False
    )
    return list(map(int, done.stdout.split()))


def launchers(
    form: str, machines: Machines, per_machine: int, script: Sequence[str]
) -> list[list[str]]:
    """Return the command of each machine; `script` is a Python file with its arguments."""
    master = machines.addresses[0]
    port = str(free_port())
    commands = []
    for number in range(2):
        if form == "train":
            told = ["PET_NNODES=2", f"PET_NODE_RANK={number}"]
            told += [f"PET_MASTER_ADDR={master}", f"PET_MASTER_PORT={port}"]
            commands.append(["env", *told, sys.executable, *script])
            continue
        common = ["torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(per_machine)]
        words_of_form = {
            "static": [
                *(*common, "--node-rank", str(number)),
                *("--master-addr", master, "--master-port", port),
            ],
            "c10d": [
                *(*common, "--rdzv-backend", "c10d", "--rdzv-id", "proof"),
                *("--rdzv-endpoint", f"{master}:{port}", "--rdzv-conf", f"is_host={number == 0}"),
                *("--local-addr", machines.addresses[number]),
            ],
            "accelerate": [
                *("accelerate.commands.launch", "--config_file", str(MULTI_NODE)),
                *("--machine_rank", str(number), "--num_processes", str(2 * per_machine)),
                *("--main_process_ip", master, "--main_process_port", port),
            ],
        }
        words = words_of_form[form]
        commands.append([sys.executable, "-m", *words, *script])
    return commands


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="of each machine")
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS)
    parser.add_argument("--run", default=SHORT, help="flags of the run; default: a short run")
    options = parser.parse_args(argv)
    if os.geteuid() != 0:
        sys.exit("machines.py: needs root, which makes network namespaces; try: sudo")
    print("  ".join(f"{name} {value}" for name, value in machine().items()), flush=True)
    faults = 0
    for per_machine in options.ranks:
        with tempfile.TemporaryDirectory(prefix="machine-") as folder:
            one = Path(folder) / "out"
            flags = [*options.run.split(), "--num-gpus", str(2 * per_machine)]
            flags += ["--output-dir", str(one)]
            finish_run(flags, Path(folder) / "log", ACCELERATE_USE_CPU="true")
            for name in options.forms:
                begun = time.perf_counter()
                why = on_two(name, per_machine, options.run, one)
                seconds = time.perf_counter() - begun
                verdict = why or "equal bits"
                print(f"2 x {per_machine} ranks, {name:<42}{seconds:4.0f} s  {verdict}", flush=True)
                faults += bool(why)
    return int(bool(faults))


def on_two(form: str, per_machine: int, flags: str, expected: Path) -> str:
    """Return what is wrong with a run on two machines, or an empty text.

    `expected` is the folder of the run on one machine.
    """
    with tempfile.TemporaryDirectory(prefix="machines-") as name:
        folder = Path(name)
        out = folder / "out"
        run = [str(RUN), *flags.split()]
        run += ["--num-gpus", str(2 * per_machine), "--output-dir", str(out)]
        with two_machines(folder) as machines:
            logs = [folder / f"log-{number}" for number in range(2)]
            commands = launchers(form, machines, per_machine, run)
            started = [machines.start(n, commands[n], logs[n]) for n in range(2)]
            codes = [process.wait() for process in started]
            left = sum(len(_processes_of(name)) for name in machines.names)
        if any(codes):
            said = [log.read_text(errors="replace")[-2500:] for log in logs]
            return f"exit codes {codes}\n" + "\n".join(said)
        if left:
            return f"{left} processes are left"
        return "\n".join(compared(expected, out))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
