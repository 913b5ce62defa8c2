"""Inject a fault into each phase of a run on each rank, and check that the error names the fault.

    python scripts/proofs/faults.py

Faults: an exception, a hang in Python, a hang outside Python (which stops every thread of the
rank), a silent exit, SIGKILL, and NaN in the loss or in sampled log-probabilities. The run must end
with exit code 1 and name rank, host and phase within the deadline (`--timeout`) plus 5 s. After a
NaN, the run must continue, count one skipped step and keep the batch. No process may be left.

A correct but late error is tried again, up to `--tries` times in total, because other load on the
machine may delay one run. A defect delays all tries. The table counts the repetitions. The exit
code is 1 if a case fails. Flags after `--` are passed to every run.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.common import machine, write_json
from scripts.proofs.chaos import prepare, still_alive

SIDE = Path(__file__).with_name("faults_side.py")
PHASES = ("start", "warm start", "evaluate", "sample", "update", "checkpoint")
KINDS = ("raise", "hang", "hang outside Python", "exit", "kill")
SHORTER = "--domains airline --max-steps 2"  # The fault comes in step 1.
END_S = 900.0  # seconds after which a run is killed
LEFT_S = 20.0  # seconds in which processes must end after their run


def main(argv: Sequence[str]) -> int:
    place = argv.index("--") if "--" in argv else len(argv)
    options = parse(argv[:place])
    ranks = options.ranks or range(options.num_gpus)
    cases = [(k, p, r) for k in options.kinds for p in options.phases for r in ranks]
    cases = [case for case in cases if case[0] != "NaN" or case[1] in ("sample", "update")]
    where = {**machine(), "num_ranks": options.num_gpus, "timeout_s": options.timeout}
    wrong, seconds, num_repeated = list[str](), dict[str, list[float]](), 0
    with tempfile.TemporaryDirectory(prefix="faults-") as temporary:
        print("preparing the model", flush=True)
        command = prepare(Path(temporary), options.num_gpus, options.warm_start_steps)
        command += [*SHORTER.split(), "--timeout", str(options.timeout)]
        command += ["--call-timeout", str(options.timeout / 2), *argv[place + 1 :]]
        for number, case in enumerate(cases):
            kind, phase, rank = case
            name = f"{number + 1:>3}/{len(cases)} {kind:<20} {phase:<11} rank {rank}"
            limit_s = options.slack + options.timeout * kind.startswith("hang")
            for attempt in range(options.tries):
                folder = Path(temporary) / f"case-{number}-{attempt}"
                found = play(command, folder, case, limit_s)
                shutil.rmtree(folder, ignore_errors=True)
                took = "-" if found.took_s is None else f"{found.took_s:.1f} s"
                print(f"{name}  {took:>7}  {found.wrong or found.said}", flush=True)
                if not found.is_late:
                    break
            num_repeated += attempt
            wrong += [name] if found.wrong else []
            seconds.setdefault(kind, []).extend([] if found.took_s is None else [found.took_s])
    figures = {"faults": float(len(cases)), "not told rightly": float(len(wrong))}
    figures["repeated, because late"] = float(num_repeated)
    figures |= {f"{kind}, seconds, largest": max(took) for kind, took in seconds.items() if took}
    print("\n".join(f"{name:<40}{value:g}" for name, value in figures.items()))
    print("  ".join(f"{name} {value}" for name, value in where.items()))
    print("\n".join(f"wrong: {name}" for name in wrong), end="\n" * bool(wrong))
    print(f"{len(cases) - len(wrong)} of {len(cases)} right")
    write_json(options.json, figures, where, vars(options))
    return int(bool(wrong))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--phases", nargs="+", default=PHASES, choices=PHASES)
    parser.add_argument("--kinds", nargs="+", default=[*KINDS, "NaN"], choices=[*KINDS, "NaN"])
    parser.add_argument("--ranks", type=int, nargs="+", help="that get faults; missing: each")
    parser.add_argument("--num-gpus", type=int, default=2, help="ranks")
    parser.add_argument("--timeout", type=float, default=20, help="the runs' deadline, in seconds")
    parser.add_argument("--slack", type=float, default=5, help="seconds beyond the deadline")
    parser.add_argument("--tries", type=int, default=3, help="of a case that is told late")
    parser.add_argument("--warm-start-steps", type=int, default=2, help="of the model to train")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    return parser.parse_args(argv)


@dataclass(frozen=True, kw_only=True)
class Found:
    """The result of a run with a fault."""

    took_s: float | None = None  # seconds from the fault to the error line
    said: str = ""  # the error line
    wrong: str = ""  # the problem; empty if the case is right
    is_late: bool = False  # The only problem is the delay.


def play(command: Sequence[str], folder: Path, case: tuple[str, str, int], limit_s: float) -> Found:
    """Make one run with a fault in a new folder."""
    kind, phase, rank = case
    folder.mkdir()
    note, run = folder / "note", folder / "run"
    fault = f"{kind},{phase},{rank},{note}"
    code, lines, left = output_of([*command, "--output-dir", str(run)], fault)
    text = "\n".join(line for _, line in lines)
    if left:
        return Found(wrong=f"processes {left} are left:\n{text}")
    if not note.exists():
        return Found(wrong=f"the fault did not happen:\n{text}")
    if kind == "NaN":
        fine = code == 0 and num_skipped(run) == 1 and kept(run, phase, rank)
        return Found(said="one step skipped, its batch kept", wrong="" if fine else text)
    wanted = re.compile(rf"rank {rank} on {re.escape(platform.node())}.*\b{phase}\b")
    named = [(at, line) for at, line in lines if wanted.search(line)]
    if code != 1 or not named:
        return Found(wrong=f"exit code {code}, and nobody named rank {rank} in {phase}:\n{text}")
    (named_at, said), *_ = named
    took_s = named_at - float(note.read_text(encoding="utf-8"))
    tracebacks = text.count("Traceback (most recent call last)")
    if tracebacks != (kind == "raise"):
        return Found(took_s=took_s, wrong=f"{tracebacks} tracebacks:\n{text}")
    if took_s > limit_s:
        late = f"it took {took_s:.1f} s, more than {limit_s:.1f} s:\n{text}"
        return Found(took_s=took_s, wrong=late, is_late=True)
    return Found(took_s=took_s, said=said)


def output_of(
    flags: Sequence[str], fault: str
) -> tuple[int, list[tuple[float, str]], list[psutil.Process]]:
    """Make a run; return its exit code, its lines with times, and processes that still run.

    A run that takes longer than END_S is killed.
    """
    environment = {
        **os.environ,
        "FAULT": fault,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5",
    }
    process = subprocess.Popen(
        [sys.executable, str(SIDE), *flags],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines, ranks = list[tuple[float, str]](), set[psutil.Process]()

    def end() -> None:
        lines.append((time.time(), f"faults.py: no end within {END_S:.0f} s"))
        for one in {*psutil.Process(process.pid).children(recursive=True), *ranks}:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        process.kill()

    alarm = threading.Timer(END_S, end)
    alarm.start()
    assert process.stdout is not None
    for line in process.stdout:
        lines.append((time.time(), line.rstrip()))
        ranks |= set(psutil.Process(process.pid).children(recursive=True))
    code = process.wait()
    alarm.cancel()
    return code, lines, still_alive(list(ranks), LEFT_S)


def num_skipped(run: Path) -> int:
    """The number of steps with at least one skipped update."""
    path = run / "metrics.jsonl"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return len(re.findall(r'"train/skipped": (0\.5|1)', text))


def kept(run: Path, phase: str, rank: int) -> bool:
    """Whether the batch with NaN was kept.

    For a NaN in the loss, the faulty rank keeps the batch. For sampled NaN, any rank may keep the
    batch, because load balancing may move episodes.
    """
    owner = rank if phase == "update" else "*"
    return any((run / "faults").glob(f"step-*.rank-{owner}.pt"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
