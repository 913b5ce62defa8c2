"""Kill a run at random moments, resume it, and compare its result with an undisturbed run.

    python scripts/proofs/chaos.py --kills 100

The script first makes one undisturbed run of three short stages. The script then kills the same run
at random moments: SIGKILL to one rank, to all ranks or to the launcher, or SIGTERM to the launcher.
After some kills, the script cuts a checkpoint file short or flips one bit of a file. The same
command with `--resume-from-checkpoint auto` then resumes the run.

A run that finishes must have the same SHA-256 sums as the undisturbed run: of the parameters after
each stage, and of metrics.jsonl. A damaged checkpoint of a stage is only counted if no resume
needed the checkpoint. No process may be left after a kill, and the death of a rank must end the
other ranks. New runs start until all kills are done. With `--at-checkpoints`, a kill comes after a
step is saved instead of at a random moment. Flags after `--` are passed to every run.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import fmean, median

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.common import ROOT, machine, write_json

RUN = ROOT / "pipeline" / "run.py"
KINDS = ("one rank", "all ranks", "launcher", "SIGTERM")
Moment = Callable[[], bool]  # returns whether the time for a kill has come
RESUMED = re.compile(r"^resuming from step-\d+: ", re.MULTILINE)
LIMIT_S = 60.0  # seconds in which all processes must end after a kill
SHORT = "--tasks-per-step 6 --num-generations 6 --eval-tasks-per-domain 4 --eval-trials 1 "
SHORT += "--validation-steps 2 --validation-tasks 3 --report-to none --max-steps 6 --save-steps 1 "
SHORT += "--num-iterations 2 --dynamic-sampling --max-resample-times 1 --warm-start-steps 6"


@dataclass(kw_only=True)
class Tally:
    """Counts and times over all kills."""

    kills: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    damaged: int = 0
    num_left: int = 0  # damaged checkpoints of stages that no resume needed
    num_ends: int = 0  # number of finished runs
    num_resumed: int = 0  # number of resumes within a stage
    faults: list[str] = field(default_factory=list)
    steps_lost: list[int] = field(default_factory=list)
    detect_s: list[float] = field(default_factory=list)  # seconds from a kill to the end
    resume_s: list[float] = field(default_factory=list)  # seconds to the first new metrics line


def main(argv: Sequence[str]) -> int:
    place = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--num-gpus", type=int, default=2, help="ranks")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and kinds of kills")
    parser.add_argument("--warm-start-steps", type=int, default=150, help="of the model to train")
    parser.add_argument("--at-checkpoints", action="store_true", help="not at random moments")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args(argv[:place])
    where = machine()
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        folder = Path(temporary)
        command = prepare(folder, options.num_gpus, options.warm_start_steps)
        command += argv[place + 1 :]
        begun = time.perf_counter()
        finish([*command, "--output-dir", str(folder / "undisturbed")], folder / "log")
        length_s = time.perf_counter() - begun
        within_s = None if options.at_checkpoints else length_s
        tally = torment(command, folder, options.kills, Random(options.seed), within_s)
    figures = figures_of(tally, options.kills)
    where |= {"num_ranks": options.num_gpus, "undisturbed_s": round(length_s, 1)}
    print("\n".join(f"{name:<28}{value:g}" for name, value in figures.items()))
    print("  ".join(f"{name} {value}" for name, value in where.items()))
    print("\n".join(tally.faults))
    write_json(options.json, figures, where, vars(options))
    return int(bool(tally.faults))


def prepare(folder: Path, num_ranks: int, warm_start_steps: int) -> list[str]:
    """The flags of the run to kill. The run starts from a model that solves some tasks.

    With 0 warm-start steps, the run creates its own initial model.
    """
    command = [*SHORT.split(), "--num-gpus", str(num_ranks)]
    if not warm_start_steps:
        return command
    flags = f"--warm-start-steps {warm_start_steps} --max-steps 0 --eval-tasks-per-domain 1 "
    flags += "--eval-trials 1 --report-to none"
    finish([*flags.split(), "--output-dir", str(folder / "model")], folder / "log")
    model = folder / "model" / "checkpoints" / "warm-start"
    return [*command, "--model", str(model)]


def start(flags: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a run in a new process group."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, str(RUN), *flags],
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def finish(flags: Sequence[str], log: Path) -> None:
    if code := start(flags, log).wait():
        raise RuntimeError(f"exit code {code} of {' '.join(flags)}:\n{log.read_text()[-3000:]}")


def torment(
    command: Sequence[str], folder: Path, num_kills: int, random: Random, within_s: float | None
) -> Tally:
    """Kill and resume runs until all kills are done, and let the last run finish.

    A kill comes at most `within_s` seconds after a start; if None, after a step is saved.
    """
    tally, number = Tally(), 0
    while sum(tally.kills.values()) < num_kills and len(tally.faults) < 5:
        number += 1
        spoilt = {""}  # SHA-256 sums of damaged files
        run, log = folder / f"run-{number}", folder / f"log-{number}"
        flags = [*command, "--output-dir", str(run), "--resume-from-checkpoint", "auto"]
        while True:
            moment = None
            if sum(tally.kills.values()) < num_kills:
                moment = after_a_save(run)
                if within_s is not None:
                    moment = after(random.uniform(0, within_s))
            if live(flags, run, log, moment, random, tally):
                break
            if random.random() < 0.4:
                spoilt.add(damage(run / "checkpoints", random))
        tally.num_ends += 1
        tally.damaged += len(spoilt) - 1
        tally.num_resumed += len(RESUMED.findall(log.read_text(encoding="utf-8")))
        found = digests(run)
        expected = digests(folder / "undisturbed")
        for what, digest in expected.items():
            if found.get(what) in spoilt and what != last_of(expected):
                tally.num_left += 1  # No resume needed the damaged file.
            elif found.get(what) != digest:
                tally.faults.append(f"run {number}: {what} differ; the run's output:")
                tally.faults.append(log.read_text()[-4000:])
        shutil.rmtree(run)
        print(f"run {number}: {sum(tally.kills.values())} kills so far", flush=True)
    return tally


def after(seconds: float) -> Moment:
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() >= end


def after_a_save(run: Path) -> Moment:
    """The moment when the run has saved another step."""
    before = saved_step(run)
    return lambda: saved_step(run) > before


def live(
    flags: Sequence[str], run: Path, log: Path, moment: Moment | None, random: Random, tally: Tally
) -> bool:
    """Start or resume a run. Returns True if the run ends by itself, False after a kill."""
    lines, begun = num_lines(run), time.perf_counter()
    process, resumed = start(flags, log), False
    while process.poll() is None and (moment is None or not moment()):
        time.sleep(0.05)
        if not resumed and num_lines(run) > lines > 0:
            resumed = True
            tally.resume_s.append(time.perf_counter() - begun)
    if process.poll() is not None:
        if process.returncode:
            tally.faults.append(f"exit code {process.returncode}:\n{log.read_text()[-4000:]}")
        return True
    launcher = psutil.Process(process.pid)  # listed before the kill, which may end them
    processes, ranks = [launcher, *launcher.children(recursive=True)], ranks_of(launcher)
    kind, killed_at = kill(process, ranks, random), time.perf_counter()
    tally.kills[kind] += 1
    alive = still_alive(processes, LIMIT_S)
    took_s = time.perf_counter() - killed_at
    for stray in alive:
        tally.faults.append(f"{kind}: process {stray.pid} is alive after {LIMIT_S:.0f} s")
        stray.kill()
    process.wait()
    if kind == "one rank" and ranks:
        tally.detect_s.append(took_s)
    tally.steps_lost.append(max(0, num_steps(run) - saved_step(run)))
    return False


def ranks_of(launcher: psutil.Process) -> list[psutil.Process]:
    """The rank processes among the launcher's children, without sentinel processes."""
    found = []
    for child in launcher.children():
        with suppress(psutil.NoSuchProcess):
            if not any(word.endswith("sentinel.py") for word in child.cmdline()):
                found.append(child)
    return found


def still_alive(processes: Sequence[psutil.Process], limit_s: float) -> list[psutil.Process]:
    """The processes that still run after `limit_s` seconds. Zombies count as ended."""
    until = time.perf_counter() + limit_s
    alive = list(processes)
    while alive and time.perf_counter() < until:
        time.sleep(0.02)
        alive = [process for process in alive if not has_ended(process)]
    return alive


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def kill(process: subprocess.Popen[bytes], ranks: list[psutil.Process], random: Random) -> str:
    """Kill processes in a random way and return the way. Without ranks, kill the launcher."""
    kind = random.choice(KINDS) if ranks else "launcher"
    victims: list[psutil.Process | subprocess.Popen[bytes]] = {
        "one rank": [random.choice(ranks)] if ranks else [],
        "all ranks": ranks,
        "launcher": [process],
        "SIGTERM": [process],
    }[kind]
    for victim in victims:
        try:
            victim.send_signal(signal.SIGTERM if kind == "SIGTERM" else signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    return kind


def damage(folder: Path, random: Random) -> str:
    """Cut a random checkpoint file short or flip one bit of it; return the file's new SHA-256."""
    files = [path for path in sorted(folder.glob("[!.]*/*")) if path.stat().st_size]
    if not files:
        return ""
    path = random.choice(files)
    content = bytearray(path.read_bytes())
    place = random.randrange(len(content))
    if random.random() < 0.5:
        content[place] ^= 1 << random.randrange(8)
    else:
        del content[place:]
    path.write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def num_lines(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def num_steps(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b'"kind": "train"') if path.is_file() else 0


def saved_step(run: Path) -> int:
    return max([0, *(int(p.name[5:11]) for p in (run / "checkpoints").glob("step-*"))])


def digests(run: Path) -> dict[str, str]:
    """SHA-256 sums of the parameters after each stage and of the metrics."""
    stages = sorted((run / "checkpoints").glob("stage-*"))
    paths = {f"parameters of {stage.name}": stage / "model.safetensors" for stage in stages}
    paths["metrics.jsonl"] = run / "metrics.jsonl"
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "missing"
        for name, path in paths.items()
    }


def last_of(found: dict[str, str]) -> str:
    """The name of the parameters at the end of the run."""
    return [name for name in found if name.startswith("parameters")][-1]


def figures_of(tally: Tally, num_kills: int) -> dict[str, float]:
    figures = {
        "kills survived": float(sum(tally.kills.values()) if not tally.faults else 0),
        "kills wanted": float(num_kills),
        **{f"  {kind}": float(count) for kind, count in tally.kills.items()},
        "checkpoint files damaged": float(tally.damaged),
        "  and never needed again": float(tally.num_left),
        "runs brought to their end": float(tally.num_ends),
        "resumed inside a stage": float(tally.num_resumed),
    }
    for name, values in (
        ("steps lost per kill", tally.steps_lost),
        ("seconds to detect", tally.detect_s),
        ("seconds to resume", tally.resume_s),
    ):
        if values:
            figures |= {f"{name}, median": median(values), f"{name}, largest": max(values)}
            figures[f"{name}, mean"] = fmean(values)
    return figures


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
