"""Train on two machines, which are two network namespaces, and compare with one machine.

    python scripts/proofs/machines.py        # Linux, root (ip netns)

A namespace has its own network, so launchers, store and gloo talk over a link between the two, as
between machines; only the fabric is missing. The run folder is on a disk that both share. The
forms of launch are torchrun with a static and with a c10d rendezvous, `accelerate launch` with
`accelerate_configs/multi_node.yaml`, and `train` with torchrun's variables PET_NNODES and so on, on
2 machines x 1 rank and 2 x 2. With `--deterministic`, parameters, `metrics.jsonl` and transcripts
must equal, bit by bit, those of one machine with as many ranks. The run is a short one;
`--run "--deterministic --report-to none"` plays the whole default recipe. Machines that cannot meet
must end with one line each, within the deadline, with the launcher of `train` and without a
launcher (as srun starts ranks): a port in use, a wrong address, a machine that never comes, a wrong
network interface. The exit code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.common import ROOT, machine
from scripts.proofs.chaos import digests
from scripts.proofs.serve_export import free_port

RUN = "--deterministic --domains airline,retail --max-steps 4 --warm-start-steps 4 --save-steps 2 "
RUN += "--tasks-per-step 4 --num-generations 4 --eval-tasks-per-domain 4 --eval-trials 1 "
RUN += "--kl-probe-tasks 0 --validation-steps 0 --report-to none "
RUN += "--no-drop-zero-std-groups --entropy-coef 0.05 "  # gradients in each step
ERRORS = {  # what differs on a machine: variables, None: not started; and what its line says
    "port in use": ("cannot listen on", None),
    "wrong address": ("1/2 clients joined", "did not meet all ranks at 192.0.2.1:"),
    "never comes": ("1/2 clients joined", None),
    "wrong interface": ("GLOO_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
}
DEADLINE_S = 15  # --timeout; ranks end GRACE_S, and where torch waits without an end LATE_S, later
FORMS = ("static", "c10d", "accelerate", "train")
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
    master, port = machines.addresses[0], str(free_port())
    commands = []
    for number in range(2):
        if form == "train":
            told = _told(number, machines, port, "PET_")
            commands.append(["env", *told, sys.executable, *script])
            continue
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


def _told(number: int, machines: Machines, port: str, of: str) -> list[str]:
    """Return the variables of a machine's launcher (`of` is "PET_"), or of its only rank ("")."""
    own: dict[str, int | str] = {"PET_NNODES": 2, "PET_NODE_RANK": number}
    if not of:
        own = {"RANK": number, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1}
    own |= {f"{of}MASTER_ADDR": machines.addresses[0], f"{of}MASTER_PORT": port}
    return [f"{name}={value}" for name, value in own.items()]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="of each machine")
    parser.add_argument("--forms", nargs="*", default=list(FORMS), choices=FORMS)
    parser.add_argument("--errors", nargs="*", default=list(ERRORS), choices=ERRORS)
    parser.add_argument("--run", default=RUN, help="flags of the run; default: a short run")
    options = parser.parse_args(argv)
    if os.geteuid() != 0:
        sys.exit("machines.py: needs root, which makes network namespaces; try: sudo")
    print("  ".join(f"{name} {value}" for name, value in machine().items()), flush=True)
    faults = 0
    for per_machine in options.ranks if options.forms else ():
        expected = one_machine(2 * per_machine, options.run)
        for name in options.forms:
            begun = time.perf_counter()
            why = on_two(name, per_machine, options.run, expected)
            seconds = time.perf_counter() - begun
            verdict = why or "equal bits"
            print(f"2 x {per_machine} ranks, {name:<42}{seconds:4.0f} s  {verdict}", flush=True)
            faults += bool(why)
    for name, of in ((name, of) for of in ("", "PET_") for name in options.errors):
        why, seconds = error_of(name, of)
        what = f"{'train' if of else 'no launcher'}, {name}"
        print(f"{what:<59}{seconds:4.0f} s  {why or 'one line'}", flush=True)
        faults += bool(why)
    return int(bool(faults))


def one_machine(num_ranks: int, flags: str) -> dict[str, str]:
    with tempfile.TemporaryDirectory(prefix="machine-") as folder:
        env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        run = [sys.executable, str(ROOT / "pipeline" / "run.py"), *flags.split()]
        command = [*run, "--num-gpus", str(num_ranks), "--output-dir", "out"]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.decode()[-3000:])
        return outputs(Path(folder) / "out")


def outputs(run: Path) -> dict[str, str]:
    """SHA-256 sums of parameters, metrics and the text of each file of transcripts."""
    found: dict[str, str] = digests(run)
    for path in sorted((run / "trajectories").glob("*/*.gz")):
        name = f"{path.parent.name}/{path.name}"
        found[name] = hashlib.sha256(gzip.decompress(path.read_bytes())).hexdigest()
    return found


def on_two(form: str, per_machine: int, flags: str, expected: dict[str, str]) -> str:
    """Return what is wrong with a run on two machines, or an empty text."""
    with tempfile.TemporaryDirectory(prefix="machines-") as name:
        folder = Path(name)
        out = folder / "out"
        run = [str(ROOT / "pipeline" / "run.py"), *flags.split()]
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
        found = outputs(out)
        other = [what for what, of in expected.items() if found.get(what) != of]
        return f"{', '.join(other)} differ from one machine's" if other else ""


def error_of(name: str, of: str) -> tuple[str, float]:
    """Return what is wrong with the lines of machines that cannot meet, and their seconds.

    `of` is "PET_" for machines with the launcher of `train`, "" for ranks without a launcher.
    """
    with tempfile.TemporaryDirectory(prefix="machines-") as at, two_machines(Path(at)) as machines:
        port, logs, codes = str(free_port()), [Path(at) / f"log-{n}" for n in range(2)], []
        if name == "port in use":
            listen = f"import socket; s = socket.create_server(('', {port})); "
            listen += "print(flush=True); s.accept()"
            machines.start(0, [sys.executable, "-c", listen], Path(at) / "other")
            while not (Path(at) / "other").stat().st_size:
                time.sleep(0.05)
        run = [sys.executable, str(ROOT / "pipeline" / "run.py"), *RUN.split(), "--num-gpus", "2"]
        run += ["--output-dir", "out", "--timeout", str(DEADLINE_S), "--call-timeout", "5"]
        begun, started = time.perf_counter(), []
        for number in (number for number in range(2) if ERRORS[name][number]):
            told = _told(number, machines, port, of)
            if name == "wrong address" and number:  # one that RFC 5737 keeps for documents
                told.append(f"{of}MASTER_ADDR=192.0.2.1")
            if name == "wrong interface":
                told.append("GLOO_SOCKET_IFNAME=lo")
            started.append(machines.start(number, ["env", *told, *run], logs[number]))
        codes = [process.wait() for process in started]
        seconds = time.perf_counter() - begun
        for text, log in zip(ERRORS[name], logs, strict=True):
            said = log.read_text(errors="replace") if text else ""
            lines = [line for line in said.splitlines() if line.startswith("error: ")]
            if text and of:
                text = text.replace("rank", "machine")
            if text and (len(lines) != 1 or text not in lines[0] or "Traceback" in said):
                return f"exit codes {codes}\n{said[-2500:]}", seconds
    return "" if all(code in (1, 2) for code in codes) else f"exit codes {codes}", seconds


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
