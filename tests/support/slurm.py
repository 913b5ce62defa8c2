"""A stand-in for SLURM: sbatch, srun, scontrol and scancel for jobs on this machine.

    python slurm.py COMMAND ARGUMENTS

`STAND_IN` is a folder for notes between the commands. `STAND_IN_NODES` has the addresses of the
nodes, and `STAND_IN_NAMESPACES`, if set, the network namespace of each. As in SLURM: options in the
script count unless the command line has them, a signal of scancel goes to all processes of the
tasks but not to the batch script, srun returns the highest exit code, and a requeued job starts
again under its id. The tasks of a job array run one after the other.
"""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

NOTES = Path(os.environ.get("STAND_IN", ""))
NODES = os.environ.get("STAND_IN_NODES", "").split()
NAMESPACES = os.environ.get("STAND_IN_NAMESPACES", "").split()
FIRST_JOB = 4001


def sbatch(*words: str) -> int:
    """Run the job to its end; returns the highest exit code of the array's tasks."""
    at = next(number for number, word in enumerate(words) if not word.startswith("-"))
    script, arguments = words[at], words[at + 1 :]
    lines = re.findall(r"^#SBATCH (\S+)", Path(script).read_text(), re.MULTILINE)
    options = dict(line.partition("=")[::2] for line in [*lines, *words[:at]])
    first, _, last = options.get("--array", "").partition("-")
    tasks = range(int(first), int(last or first) + 1) if first else [None]
    num_nodes, per_node = int(options["--nodes"]), int(options["--ntasks-per-node"])
    assert num_nodes <= len(NODES), "the stand-in has too few nodes"
    codes = []
    for number, task in enumerate(tasks):
        job = str(FIRST_JOB + number)
        environ = {
            "SLURM_JOB_ID": job,
            "SLURM_NTASKS": str(num_nodes * per_node),
            "SLURM_NTASKS_PER_NODE": str(per_node),
            "SLURM_JOB_NODELIST": ",".join(NODES[:num_nodes]),
            "SLURM_CPUS_PER_TASK": options["--cpus-per-task"],
        }
        if task is not None:
            environ |= {"SLURM_ARRAY_JOB_ID": str(FIRST_JOB), "SLURM_ARRAY_TASK_ID": str(task)}
        codes.append(_run(job, ["bash", script, *arguments], environ, "--requeue" in options))
    return max(codes)


def _run(job: str, command: list[str], environ: dict[str, str], may_requeue: bool) -> int:
    restarts = 0
    while True:
        own = {**os.environ, **environ} | (
            {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
        )
        batch = subprocess.Popen(command, env=own)
        (NOTES / f"batch-{job}").write_text(str(batch.pid))
        code = batch.wait()
        if not (NOTES / f"requeue-{job}").exists():
            return code
        assert may_requeue, "scontrol requeue: the job was submitted without --requeue"
        (NOTES / f"requeue-{job}").unlink()
        restarts += 1


def srun(*words: str) -> int:
    command = [word for word in words if not word.startswith("--kill-on-bad-exit")]
    per_node = int(os.environ["SLURM_NTASKS_PER_NODE"])
    tasks = []
    for rank in range(int(os.environ["SLURM_NTASKS"])):
        node, local = divmod(rank, per_node)
        own = {**os.environ, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local)}
        inside = ["ip", "netns", "exec", NAMESPACES[node]] if NAMESPACES else []
        tasks.append(subprocess.Popen([*inside, *command], env=own))
    pids = NOTES / f"tasks-{os.environ['SLURM_JOB_ID']}"
    pids.write_text(" ".join(str(task.pid) for task in tasks))
    codes = [task.wait() for task in tasks]
    pids.unlink()
    return max(code if code >= 0 else 128 - code for code in codes)


def scontrol(*words: str) -> int:
    if words[:2] == ("show", "hostnames"):
        with suppress(BrokenPipeError):  # the script reads the first line only
            os.write(1, "".join(f"{name}\n" for name in words[2].split(",")).encode())
        return 0
    assert words[0] == "requeue", words
    (NOTES / f"requeue-{words[1]}").touch()
    return 0


def scancel(*words: str) -> int:
    """Signal the tasks of a job; without --signal=NAME, SIGTERM to tasks and batch script."""
    *options, job = words
    name = options[0].partition("=")[2] if options else "TERM"
    pids = (NOTES / f"tasks-{job}").read_text().split()
    tasks = [psutil.Process(int(pid)) for pid in pids]
    found = [process for task in tasks for process in [task, *task.children(recursive=True)]]
    if not options:
        found.insert(0, psutil.Process(int((NOTES / f"batch-{job}").read_text())))
    for process in found:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.Signals[f"SIG{name}"])
    return 0


def put_into(folder: Path) -> None:
    """Make the commands in a folder for PATH."""
    folder.mkdir()
    for name in COMMANDS:
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {name} "$@"\n')
        (folder / name).chmod(0o755)


COMMANDS = {"sbatch": sbatch, "srun": srun, "scontrol": scontrol, "scancel": scancel}

if __name__ == "__main__":
    sys.exit(COMMANDS[sys.argv[1]](*sys.argv[2:]))
