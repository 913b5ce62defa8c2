"""Kill a run at random moments, resume it, and compare its result with an undisturbed run.

    python scripts/proofs/chaos.py --kills 100

The script first makes one undisturbed run of a warm start and three short stages. It then kills the
same run at random moments: SIGKILL to one rank, to all ranks or to the launcher, or SIGTERM to the
launcher. After some kills, the script cuts a checkpoint file short or flips one bit of a file. The
same command with `--resume-from-checkpoint auto` then resumes the run.

A run that finishes must have the same SHA-256 sums as the undisturbed run: of the parameters after
each stage, and of metrics.jsonl. A damaged checkpoint of a stage is only counted if no resume
needed the checkpoint. No process may be left after a kill, and the death of a rank must end the
other ranks. New runs start until all kills are done. With `--at-checkpoints`, a kill comes after a
step is saved instead of at a random moment. Flags after `--` are passed to every run.

    python scripts/proofs/chaos.py --kills 10 --ways 2:full 1:none 4:full -- --learning-rate 1e-6

With `--ways`, each start takes the next number of ranks and way of sharding, and no file is
damaged. Sums are then rounded otherwise, so a run must have drawn the same texts in all its
episodes, and its parameters may differ by 1e-3 of what training changed. A low learning rate keeps
draws off ties. With `--deterministic`, the bits must be equal here, too.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import psutil
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.common import finish_run, machine, parser_of, start_run, write_json

KINDS = ("one rank", "all ranks", "launcher", "SIGTERM")
Moment = Callable[[], bool]  # returns whether the time for a kill has come
RESUMED = re.compile(r"^resuming from step-\d*[1-9]\d*: ", re.MULTILINE)
LIMIT_S = 60.0  # seconds in which all processes must end after a kill
CLOSE = 1e-3  # of the change of the parameters
SHORT = (
    "--tasks-per-step 6 --num-generations 6 --eval-tasks-per-domain 4 --eval-trials 1 "
    "--validation-steps 2 --validation-tasks 3 --report-to none --max-steps 6 --save-steps 1 "
    "--num-iterations 2 --dynamic-sampling --max-resample-times 1 --warm-start-steps 6 "
    "--save-minutes 0.002"
)


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
    end_s: dict[str, list[float]] = field(default_factory=dict)  # seconds from a kill to the end
    resume_s: list[float] = field(default_factory=list)  # seconds to the first new metrics line


def main(argv: Sequence[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--num-gpus", type=int, default=2, help="ranks")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and kinds of kills")
    parser.add_argument("--warm-start-steps", type=int, default=150, help="of the model to train")
    parser.add_argument("--at-checkpoints", action="store_true", help="not at random moments")
    parser.add_argument("--ways", nargs="*", metavar="RANKS:SHARD", help="of the next starts")
    parser.add_argument("passed_on", nargs="*", help="after --: flags of every run")
    options = parser.parse_args(argv)
    where = machine()
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        folder = Path(temporary)
        command = prepare(folder, options.num_gpus, options.warm_start_steps)
        command += options.passed_on
        tally = Tally()
        random = Random(options.seed)
        run = folder / "undisturbed"
        begun = time.perf_counter()
        live([*command, "--output-dir", str(run)], run, folder / "log", tally, random)
        length_s = time.perf_counter() - begun
        if not tally.faults:
            within_s = 0.0 if options.at_checkpoints else length_s
            torment(command, folder, options.kills, within_s, tally, random, options.ways)
    figures = figures_of(tally, options.kills)
    where |= {"num_ranks": options.num_gpus, "undisturbed_s": round(length_s, 1)}
    print("\n".join(f"{name:<41}{value:g}" for name, value in figures.items()))
    print("  ".join(f"{name} {value}" for name, value in where.items()), *tally.faults, sep="\n")
    write_json(options.json, figures, where, vars(options))
    return int(bool(tally.faults))


def prepare(folder: Path, num_ranks: int, warm_start_steps: int) -> list[str]:
    """The flags of the run to kill. The run starts from a model that solves some tasks.

    With 0 warm-start steps, the run creates its own initial model.
    """
    command = [*SHORT.split(), "--num-gpus", str(num_ranks)]
    if not warm_start_steps:
        return command
    flags = (
        f"--warm-start-steps {warm_start_steps} --max-steps 0 --eval-tasks-per-domain 1 "
        "--eval-trials 1 --report-to none"
    )
    finish_run([*flags.split(), "--output-dir", str(folder / "model")], folder / "log")
    model = folder / "model" / "checkpoints" / "warm-start"
    return [*command, "--model", str(model)]


def torment(
    command: Sequence[str],
    folder: Path,
    num_kills: int,
    within_s: float,
    tally: Tally,
    random: Random,
    ways: Sequence[str] | None = None,
) -> None:
    """Kill and resume runs until all kills are done, and let the last run finish.

    A kill comes at most `within_s` seconds after a start, or, if that is 0, after a step is saved.
    """
    number = 0
    next_ways = cycle(ways or [""])
    while sum(tally.kills.values()) < num_kills and len(tally.faults) < 5:
        number += 1
        spoilt = set[str]()  # SHA-256 sums and names of damaged files
        run = folder / f"run-{number}"
        log = folder / f"log-{number}"
        flags = [*command, "--output-dir", str(run), "--resume-from-checkpoint", "auto"]
        while True:
            moment = None
            if sum(tally.kills.values()) < num_kills:
                moment = after(random.uniform(0, within_s)) if within_s else after_a_save(run)
            if live([*flags, *flags_of(next(next_ways))], run, log, tally, random, moment):
                break
            if not ways and random.random() < 0.4:
                spoilt |= damage(run / "checkpoints", random)
        tally.num_ends += 1
        tally.damaged += len(spoilt) // 2
        tally.num_resumed += len(RESUMED.findall(log.read_text(encoding="utf-8")))
        undisturbed = folder / "undisturbed"
        if ways and "--deterministic" not in command:
            faults = [*differences(run, undisturbed, folder / "model")]
        else:
            faults = unequal(digests(run), digests(undisturbed), spoilt, tally)
        if faults:
            faults.append(f"the output:\n{log.read_text()[-4000:]}")
        tally.faults += [f"run {number}: {fault}" for fault in faults]
        shutil.rmtree(run)
        print(f"run {number}: {sum(tally.kills.values())} kills so far", flush=True)


def unequal(
    found: dict[str, str], expected: dict[str, str], spoilt: set[str], tally: Tally
) -> list[str]:
    """What differs from the undisturbed run and was not damaged."""
    faults = list[str]()
    last = [name for name in expected if name.startswith("parameters")][-1]
    for what, digest in expected.items():
        stage = what.removeprefix("parameters of ")  # a resume may have put it aside
        is_aside = what not in found and f"{stage}/manifest.json" in spoilt
        if (is_aside or found.get(what) in spoilt) and what != last:
            tally.num_left += 1  # No resume needed the damaged file.
        elif found.get(what) != digest:
            faults.append(f"{what} differ")
    return faults


def flags_of(way: str) -> list[str]:
    """The flags of a way such as `2:full`."""
    ranks, _, shard = way.partition(":")
    return ["--num-gpus", ranks, "--shard", shard] if way else []


def differences(run: Path, undisturbed: Path, model: Path) -> Iterator[str]:
    """What differs in the draws and the parameters of a run, which `model` has started."""
    here, there = drawn(run), drawn(undisturbed)
    yield from (f"other draws in {step}" for step in there if here.get(step) != there[step])
    begun = tensors(model / "checkpoints" / "warm-start")
    for stage in sorted((undisturbed / "checkpoints").glob("stage-*")):
        ends = tensors(run / "checkpoints" / stage.name)
        expected = tensors(stage)
        change = sum(float((expected[name] - begun[name]).norm()) ** 2 for name in begun)
        gap = sum(float((expected[name] - ends[name]).norm()) ** 2 for name in begun)
        share = (gap / change) ** 0.5
        print(f"{stage.name}: the parameters differ by {share:.1e} of their change", flush=True)
        if not share <= CLOSE:
            yield f"{stage.name}: the parameters differ by {share:.1e} of their change"


def drawn(run: Path) -> dict[str, set[str]]:
    """Of each step: its episodes, with all their messages."""
    steps = dict[str, set[str]]()
    for path in (run / "trajectories").glob("*/*.jsonl.gz"):
        rows = map(json.loads, gzip.decompress(path.read_bytes()).splitlines())
        step = f"{path.parent.name}/{path.name.partition('.')[0]}"
        texts = {json.dumps([r["domain"], r["task_id"], r["trial"], r["messages"]]) for r in rows}
        steps[step] = steps.get(step, set()) | texts
    assert steps, run
    return steps


def tensors(checkpoint: Path) -> dict[str, Any]:
    found = dict[str, Any]()
    for path in checkpoint.glob("*.safetensors"):
        with safe_open(path, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    assert found, checkpoint
    return found


def after(seconds: float) -> Moment:
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() >= end


def after_a_save(run: Path) -> Moment:
    """The moment when the run has saved another step."""
    before = saved_step(run)
    return lambda: saved_step(run) > before


def live(
    flags: Sequence[str],
    run: Path,
    log: Path,
    tally: Tally,
    random: Random,
    moment: Moment | None = None,
) -> bool:
    """Start or resume a run. Returns True if the run ends by itself, False after a kill."""
    lines = num_lines(run)
    begun = time.perf_counter()
    resumed = False
    kind = random.choice(KINDS) if moment is not None else ""
    launcher = start_run(flags, log)
    while launcher.poll() is None:
        time.sleep(0.05)
        if not resumed and num_lines(run) > lines > 0:
            resumed = True
            tally.resume_s.append(time.perf_counter() - begun)
        if moment is not None and moment():
            kill(kind, launcher.pid, tally, random)
            launcher.wait()
            tally.steps_lost.append(max(0, num_lines(run, b'"kind": "train"') - saved_step(run)))
            return False
    if launcher.returncode:
        tally.faults.append(f"exit code {launcher.returncode}:\n{log.read_text()[-4000:]}")
    return True


def kill(kind: str, launcher: int, tally: Tally, random: Random) -> None:
    """Kill a run or a part of it, wait for the end of all its processes, and count."""
    processes = family(launcher)  # listed before the kill, which may end them
    ranks = ranks_of(processes[0])
    kind = kind if ranks else "launcher"
    victims = {"one rank": ranks and [random.choice(ranks)], "all ranks": ranks}
    number = signal.SIGTERM if kind == "SIGTERM" else signal.SIGKILL
    send(number, victims.get(kind, processes[:1]))
    killed_at = time.perf_counter()
    tally.kills[kind] += 1
    for left in still_alive(processes, LIMIT_S):
        what = " ".join(left.cmdline())[-200:]
        tally.faults.append(f"{kind}: process {left.pid} is alive after {LIMIT_S:.0f} s: {what}")
        left.kill()
    tally.end_s.setdefault(kind, []).append(time.perf_counter() - killed_at)


def ranks_of(launcher: psutil.Process) -> list[psutil.Process]:
    """The rank processes among the launcher's children, without sentinel processes."""
    found = []
    for child in launcher.children():
        with suppress(psutil.NoSuchProcess):
            if not any(word.endswith("sentinel.py") for word in child.cmdline()):
                found.append(child)
    return found


def family(pid: int) -> list[psutil.Process]:
    """A launcher and all processes below it."""
    launcher = psutil.Process(pid)
    return [launcher, *launcher.children(recursive=True)]


def send(number: signal.Signals, processes: Sequence[psutil.Process]) -> None:
    """Send a signal to all processes that are still there."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


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


def damage(folder: Path, random: Random) -> set[str]:
    """Cut a checkpoint file short or flip one bit of it; return its new SHA-256 and its name."""
    found = sorted(folder.glob("[!.]*/**/*"))
    files = [path for path in found if path.is_file() and path.stat().st_size]
    if not files:
        return set()
    path = random.choice(files)
    content = bytearray(path.read_bytes())
    place = random.randrange(len(content))
    if random.random() < 0.5:
        content[place] ^= 1 << random.randrange(8)
    else:
        del content[place:]
    path.write_bytes(content)
    return {hashlib.sha256(content).hexdigest(), str(path.relative_to(folder))}


def num_lines(run: Path, text: bytes = b"\n") -> int:
    """The number of the run's metrics lines that hold a text."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(text) if path.is_file() else 0


def saved_step(run: Path) -> int:
    return max([0, *(int(p.name[5:11]) for p in (run / "checkpoints").glob("step-*"))])


def digests(run: Path) -> dict[str, str]:
    """SHA-256 sums of the parameters after each stage and of the metrics."""
    stages = sorted((run / "checkpoints").glob("stage-*"))
    files = {f"parameters of {stage.name}": [*stage.glob("*.safetensors")] for stage in stages}
    files["metrics.jsonl"] = [run / "metrics.jsonl"]
    found = dict[str, str]()
    for name, paths in files.items():
        assert paths, f"{name}: no file"
        whole = b"".join(path.read_bytes() for path in sorted(paths))
        found[name] = hashlib.sha256(whole).hexdigest()
    return found


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
    rows = {"steps lost per kill": tally.steps_lost, "seconds to resume": tally.resume_s}
    rows |= {f"seconds to end, {kind}": values for kind, values in tally.end_s.items()}
    for name, values in ((name, values) for name, values in rows.items() if values):
        figures |= {f"{name}, median": median(values), f"{name}, largest": max(values)}
    return figures


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
