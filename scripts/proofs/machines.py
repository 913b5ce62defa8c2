"""Train on two machines, which are two network namespaces, and compare with one machine.

    python scripts/proofs/machines.py        # Linux, root (ip netns)

A namespace has its own network, so launchers, store and gloo talk over a link between the two, as
between machines; only the fabric is missing. The run folder is on a disk that both share. The
forms of launch are torchrun with a static and with a c10d rendezvous, and `accelerate launch` with
`accelerate_configs/multi_node.yaml`, on 2 machines x 1 rank and 2 x 2. With `--deterministic`,
parameters and `metrics.jsonl` must equal, bit by bit, those of one machine with as many ranks.
Machines without a shared disk must be refused in one line. The exit code is 1 if anything differs.
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
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.common import ROOT, machine
from scripts.proofs.chaos import digests
from scripts.proofs.serve_export import free_port

RUN = "--deterministic --domains airline,retail --max-steps 4 --warm-start-steps 4 --save-steps 2 "
RUN += "--tasks-per-step 4 --num-generations 4 --eval-tasks-per-domain 4 --eval-trials 1 "
RUN += "--kl-probe-tasks 0 --validation-steps 0 --report-to none "
APART = "output_dir: "  # begins the line that refuses machines without a shared disk
FORMS = ("static", "c10d", "accelerate")
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
            of.mkdir()
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
    master, port = machines.addresses[0], str(free_port())
    commands = []
    for number in range(2):
        if form == "accelerate":
            config = ROOT / "accelerate_configs" / "multi_node.yaml"
            words = ["accelerate.commands.launch", "--config_file", str(config)]
            words += ["--machine_rank", str(number), "--num_processes", str(2 * per_machine)]
            words += ["--main_process_ip", master, "--main_process_port", port]
        else:
            words = ["torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(per_machine)]
            if form == "static":
                words += ["--node-rank", str(number), "--master-addr", master]
                words += ["--master-port", port]
            else:
                words += ["--rdzv-backend", "c10d", "--rdzv-id", "proof"]
                words += ["--rdzv-endpoint", f"{master}:{port}"]
                words += ["--local-addr", machines.addresses[number]]
                words += ["--rdzv-conf", f"is_host={number == 0}"]
        commands.append([sys.executable, "-m", *words, *script])
    return commands


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="of each machine")
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS)
    options = parser.parse_args(argv)
    if os.geteuid() != 0:
        sys.exit("machines.py: needs root, which makes network namespaces; try: sudo")
    print("  ".join(f"{name} {value}" for name, value in machine().items()), flush=True)
    faults = 0
    for per_machine in options.ranks:
        expected = one_machine(2 * per_machine)
        for form in options.forms:
            begun, why = time.perf_counter(), on_two(form, per_machine, expected)
            seconds = time.perf_counter() - begun
            verdict = why or "equal bits"
            print(f"2 x {per_machine} ranks, {form:<11}{seconds:4.0f} s  {verdict}", flush=True)
            faults += bool(why)
    why = apart()
    print(f"no shared disk: {why or 'refused in one line'}", flush=True)
    return int(bool(faults or why))


def one_machine(num_ranks: int) -> dict[str, str]:
    with tempfile.TemporaryDirectory(prefix="machine-") as folder:
        env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        run = [sys.executable, str(ROOT / "pipeline" / "run.py"), *RUN.split()]
        command = [*run, "--num-gpus", str(num_ranks), "--output-dir", "out"]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.decode()[-3000:])
        return digests(Path(folder) / "out")


def on_two(form: str, per_machine: int, expected: dict[str, str]) -> str:
    """Return what is wrong with a run on two machines, or an empty text."""
    with tempfile.TemporaryDirectory(prefix="machines-") as name:
        folder = Path(name)
        codes, left, said = finish(form, per_machine, folder, str(folder / "out"))
        if any(codes):
            return f"exit codes {codes}\n" + "\n".join(text[-2500:] for text in said)
        if left:
            return f"{left} processes are left"
        found: dict[str, Any] = digests(folder / "out")
        other = [what for what, of in expected.items() if found.get(what) != of]
        return f"{', '.join(other)} differ from one machine's" if other else ""


def apart() -> str:
    """Return what is wrong with the refusal of machines without a shared disk."""
    with tempfile.TemporaryDirectory(prefix="machines-") as name:
        codes, left, said = finish("static", 1, Path(name), "out")
    lines = [line for text in said for line in text.splitlines() if line.startswith("error: ")]
    if len(lines) != 1 or APART not in lines[0] or left or not all(codes):
        return f"exit codes {codes}, {left} processes left, lines {lines}"
    return ""


def finish(form: str, per_machine: int, folder: Path, out: str) -> tuple[list[int], int, list[str]]:
    """Run on two machines; return exit codes, processes that are left, and what was printed."""
    with two_machines(folder) as machines:
        logs = [folder / f"log-{number}" for number in range(2)]
        run = [str(ROOT / "pipeline" / "run.py"), *RUN.split(), "--num-gpus", str(2 * per_machine)]
        commands = launchers(form, machines, per_machine, [*run, "--output-dir", out])
        started = [machines.start(number, commands[number], logs[number]) for number in range(2)]
        codes = [process.wait() for process in started]
        left = sum(len(_processes_of(name)) for name in machines.names)
    return codes, left, [log.read_text(errors="replace") for log in logs]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
