"""Puts a fault into each phase of a run on each rank: is the right one named, and how soon?

    python scripts/bench/faults.py

Faults: an exception, a hang in Python, a hang outside Python (which stops every thread of the
rank), an exit without a word, SIGKILL, and NaN in the loss or in what was sampled. The run must
end with exit code 1 and name rank, host and phase within the deadline (`--timeout`) and 5 s; with
NaN it must go on, count one skipped step and keep the batch. No process may be left.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from chaos import prepare, still_alive
from common import machine, write_json

SIDE = Path(__file__).with_name("faults_side.py")
PHASES = ("start", "warm start", "evaluate", "sample", "update", "checkpoint")
KINDS = ("raise", "hang", "hang outside Python", "exit", "kill")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--phases", nargs="+", default=PHASES, choices=PHASES)
    parser.add_argument("--kinds", nargs="+", default=[*KINDS, "NaN"], choices=[*KINDS, "NaN"])
    parser.add_argument("--ranks", type=int, nargs="+", help="that get faults; missing: each")
    parser.add_argument("--num-gpus", type=int, default=2, help="ranks")
    parser.add_argument("--timeout", type=float, default=20, help="the runs' deadline, in seconds")
    parser.add_argument("--slack", type=float, default=5, help="seconds beyond the deadline")
    parser.add_argument("--warm-start-steps", type=int, default=60, help="of the model to train")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args(argv)
    ranks = options.ranks or range(options.num_gpus)
    cases = [(k, p, r) for k in options.kinds for p in options.phases for r in ranks]
    cases = [case for case in cases if case[0] != "NaN" or case[1] in ("sample", "update")]
    failures, seconds = [], dict[str, list[float]]()
    with tempfile.TemporaryDirectory(prefix="faults-") as temporary:
        command = prepare(Path(temporary), options.num_gpus, options.warm_start_steps)
        command += ["--timeout", str(options.timeout)]
        command += ["--call-timeout", str(options.timeout / 2)]
        for number, (kind, phase, rank) in enumerate(cases):
            folder = Path(temporary) / str(number)
            folder.mkdir()
            limit_s = options.slack + options.timeout * kind.startswith("hang")
            took_s, text, wrong = play(command, folder, (kind, phase, rank), limit_s)
            shown = "-" if took_s is None else f"{took_s:.1f} s"
            print(f"{kind:<20} {phase:<11} rank {rank}  {shown:>7}  {wrong or text}", flush=True)
            failures += [wrong] if wrong else []
            seconds.setdefault(kind, []).extend([] if took_s is None else [took_s])
    figures = {"faults": float(len(cases)), "not told rightly": float(len(failures))}
    figures |= {f"{kind}, seconds, largest": max(found) for kind, found in seconds.items() if found}
    where = {**machine(), "num_ranks": options.num_gpus, "timeout_s": options.timeout}
    print("\n".join(f"{name:<40}{value:g}" for name, value in figures.items()))
    print("  ".join(f"{name} {value}" for name, value in where.items()))
    write_json(options.json, figures, where, vars(options))
    return int(bool(failures))


def play(
    command: Sequence[str], folder: Path, case: tuple[str, str, int], limit_s: float
) -> tuple[float | None, str, str]:
    """One run with a fault: seconds from it to the line that names it, that line, what is wrong."""
    kind, phase, rank = case
    note, run = folder / "note", folder / "run"
    environment = {
        **os.environ,
        "FAULT": f"{kind},{phase},{rank},{note}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5",
    }
    process = subprocess.Popen(
        [sys.executable, str(SIDE), *command, "--output-dir", str(run)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said, ranks = [], list[psutil.Process]()
    assert process.stdout is not None
    for line in process.stdout:
        said.append((time.time(), line.rstrip()))
        ranks = ranks or psutil.Process(process.pid).children(recursive=True)
    code = process.wait()
    left = still_alive(ranks, 5)
    text = "\n".join(line for _, line in said)
    if left:
        return None, "", f"processes {left} are left:\n{text}"
    if not note.exists():
        return None, "", f"the fault did not happen:\n{text}"
    if kind == "NaN":
        skipped = len(re.findall(r'"train/skipped": (0\.5|1)', (run / "metrics.jsonl").read_text()))
        kept = list((run / "faults").glob(f"step-*.rank-{rank}.pt"))
        fine = code == 0 and skipped == 1 and kept
        return None, "one step skipped, its batch kept", "" if fine else text
    wanted = re.compile(rf"rank {rank} on {re.escape(platform.node())}.*\b{phase}\b")
    named = [(at, line) for at, line in said if wanted.search(line)]
    struck_at = float(note.read_text(encoding="utf-8"))
    if code != 1 or not named:
        return None, "", f"exit code {code}, and nobody named rank {rank} in {phase}:\n{text}"
    took_s = named[0][0] - struck_at
    tracebacks = text.count("Traceback (most recent call last)")
    if took_s > limit_s:
        return took_s, "", f"it took {took_s:.1f} s, more than {limit_s:.1f} s:\n{text}"
    if tracebacks != (kind == "raise"):
        return took_s, "", f"{tracebacks} tracebacks:\n{text}"
    return took_s, named[0][1], ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
