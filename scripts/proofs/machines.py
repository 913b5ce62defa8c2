"""Train on two machines, which are two network namespaces, and compare with one machine.

    python scripts/proofs/machines.py        # Linux, root (ip netns)

A namespace has its own network, so launchers, store and gloo talk over a link between the two, as
between machines; only the fabric is missing. The run folder is on a disk that both share. The
forms of launch are torchrun with a static and with a c10d rendezvous, `accelerate launch` with
`accelerate_configs/multi_node.yaml`, and `train` with torchrun's variables PET_NNODES and so on, on
2 machines x 1 rank and 2 x 2. With `--deterministic`, parameters, `metrics.jsonl` and transcripts
must equal, bit by bit, those of one machine with as many ranks. So must those of machines
without a shared disk: in one go; after both were killed, and all of machine 1's disk was removed;
and with transcripts that stay on machine 1. The run is a short one; `--run "--deterministic
--report-to none"` plays the whole default recipe. Machines that cannot meet must end with one line
each, within the deadline, with the launcher of `train` and without a launcher (as srun starts
ranks): a port in use, a wrong address, a machine that never comes, a wrong network interface. The
exit code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.common import ROOT, machine
from scripts.proofs.chaos import digests
from scripts.proofs.serve_export import free_port

RUN = "--deterministic --domains airline,retail --max-steps 4 --warm-start-steps 4 --save-steps 2 "
RUN += "--tasks-per-step 4 --num-generations 4 --eval-tasks-per-domain 4 --eval-trials 1 "
RUN += "--kl-probe-tasks 0 --validation-steps 0 --report-to none "
RUN += "--no-drop-zero-std-groups --entropy-coef 0.05 "  # gradients in each step
APART = ("in one go", "killed and resumed", "transcripts stay")  # without a shared disk
ERRORS = {  # what differs on a machine: variables, None: not started; and what its line says
    "port in use": ("cannot listen on", None),
    "wrong address": ("1 of 2 ranks came to rank 0", "did not reach rank 0 at 192.0.2.1:"),
    "never comes": ("1 of 2 ranks came to rank 0", None),
    "wrong interface": ("GLOO_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
}
DEADLINE_S = 15  # --timeout; ranks end GRACE_S, and where torch waits without an end LATE_S, later
FORMS = ("static", "c10d", "accelerate", "train")
LINK = "net0"  # the name of the link in both namespaces


class Machines:
    """Two namespaces that are joined by a link, and a working folder for each.

    With `apart`, each machine finds its own folder, and no other's, at the path `disk`.
    """

    def __init__(self, folder: Path, apart: bool = False) -> None:
        tag = f"{os.getpid() % 10_000:04d}"
        self.names = [f"m{tag}-{number}" for number in range(2)]
        net = f"10.{77 + os.getpid() % 100}.{os.getpid() % 250}"
        self.addresses = [f"{net}.{number + 1}" for number in range(2)]
        self.started: list[subprocess.Popen[bytes]] = []
        self.folders = [folder / f"machine-{number}" for number in range(2)]
        self.disk, self.apart = folder / "disk", apart

    def start(self, number: int, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """Start a command on a machine; the machine's host name is the namespace's."""
        env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        env |= {"GLOO_SOCKET_IFNAME": LINK, "PYTHONPATH": str(ROOT)}
        name = self.names[number]
        inside = ["ip", "netns", "exec", name, "unshare", "--uts"]
        own = f"mount --bind {self.folders[number]} {self.disk} && cd {self.disk} && "
        inside += ["sh", "-c", f'hostname "$0" && {own * self.apart}exec "$@"', name, *command]
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
def two_machines(folder: Path, apart: bool = False) -> Iterator[Machines]:
    """Make two namespaces, and take them and all their processes away. Needs root."""
    machines = Machines(folder, apart)
    machines.disk.mkdir(exist_ok=True)
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
    parser.add_argument("--apart", nargs="*", default=list(APART), choices=APART)
    parser.add_argument("--errors", nargs="*", default=list(ERRORS), choices=ERRORS)
    parser.add_argument("--run", default=RUN, help="flags of the run; default: a short run")
    options = parser.parse_args(argv)
    if os.geteuid() != 0:
        sys.exit("machines.py: needs root, which makes network namespaces; try: sudo")
    print("  ".join(f"{name} {value}" for name, value in machine().items()), flush=True)
    faults = 0
    for per_machine in options.ranks if options.forms or options.apart else ():
        expected = one_machine(2 * per_machine, options.run)
        cases = [(form, partial(on_two, form)) for form in options.forms]
        cases += [(f"no shared disk, {case}", partial(apart, case)) for case in options.apart]
        for name, play in cases:
            begun, why = time.perf_counter(), play(per_machine, options.run, expected)
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
    """Return what is wrong with a run on two machines that share a disk, or an empty text."""
    with tempfile.TemporaryDirectory(prefix="machines-") as name:
        out = Path(name) / "out"
        return _finish(form, per_machine, Path(name), str(out), flags) or _differing(out, expected)


def apart(case: str, per_machine: int, flags: str, expected: dict[str, str]) -> str:
    """Return what is wrong with a run on two machines without a shared disk, or an empty text."""
    with tempfile.TemporaryDirectory(prefix="machines-") as name:
        first, second = (Path(name) / f"machine-{number}" for number in range(2))
        more, kept = flags, expected
        if case == "killed and resumed":
            if why := _killed(per_machine, Path(name), flags):
                return why
            shutil.rmtree(second)
            more = f"{flags} --resume-from-checkpoint latest"
        if case == "transcripts stay":
            more = f"{flags} --no-gather-trajectories"
            own = [f"rank-{per_machine + n}." for n in range(per_machine)]
            kept = {what: of for what, of in expected.items() if not any(n in what for n in own)}
        why = _finish("static", per_machine, Path(name), "out", more)
        why = why or _differing(first / "out", kept)
        if case != "transcripts stay":
            return why or ", ".join(f"{path} is left" for path in second.glob("*"))
        stayed = {what: of for what, of in expected.items() if what not in kept}
        there = outputs(second / f"out.rank-{per_machine}")
        return why or ("" if there.items() >= stayed.items() else "transcripts did not stay")


def _differing(run: Path, expected: dict[str, str]) -> str:
    found = outputs(run)
    other = [what for what, of in expected.items() if found.get(what) != of]
    return f"{', '.join(other)} differ from one machine's" if other else ""


def _killed(per_machine: int, folder: Path, flags: str) -> str:
    """Kill both machines after the first checkpoint; return what is wrong, or an empty text."""
    saved = folder / "machine-0" / "out" / "checkpoints"
    with two_machines(folder, apart=True) as machines:
        commands = _commands("static", per_machine, machines, "out", flags)
        for number in range(2):
            machines.start(number, commands[number], folder / f"killed-{number}")
        while not any(saved.glob("step-*[1-9]*")):
            if any(process.poll() is not None for process in machines.started):
                return (folder / "killed-0").read_text(errors="replace")[-2500:]
            time.sleep(0.05)
    return ""


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


def _commands(
    form: str, per_machine: int, machines: Machines, out: str, flags: str
) -> list[list[str]]:
    run = [str(ROOT / "pipeline" / "run.py"), *flags.split(), "--num-gpus", str(2 * per_machine)]
    return launchers(form, machines, per_machine, [*run, "--output-dir", out])


def _finish(form: str, per_machine: int, folder: Path, out: str, flags: str) -> str:
    """Run on two machines to the end; return what is wrong, or an empty text.

    With a relative `out`, the machines share no disk.
    """
    with two_machines(folder, apart=out == "out") as machines:
        logs = [folder / f"log-{number}" for number in range(2)]
        commands = _commands(form, per_machine, machines, out, flags)
        started = [machines.start(number, commands[number], logs[number]) for number in range(2)]
        codes = [process.wait() for process in started]
        left = sum(len(_processes_of(name)) for name in machines.names)
    said = [log.read_text(errors="replace") for log in logs]
    if any(codes):
        return f"exit codes {codes}\n" + "\n".join(text[-2500:] for text in said)
    if machines.apart != ("\ndisks: " in said[0]):
        return "the line about disks is missing" if machines.apart else "the machines share no disk"
    return f"{left} processes are left" if left else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
