"""Inject a fault into each phase of a run on each rank, and check that the error names the fault.

    python scripts/proofs/faults.py

Faults: an exception, a hang in Python, a hang outside Python (which stops every thread of the
rank), a silent exit, SIGKILL, and NaN in the loss or in sampled log-probabilities. The run must end
with exit code 1 and name rank, host and phase within the deadline (`--timeout`) plus 5 s. After a
NaN, the run must continue, count one skipped step and keep the batch. No process may be left.

Other load on the machine may delay a run; `--slack` gives more time. The exit code is 1 if a case
fails. Flags after `--` are passed to every run.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeline import run, train
from pipeline.run_state import Run, open_run
from scripts.bench.common import machine, parser_of, write_json
from scripts.proofs.chaos import family, prepare, send, still_alive

PHASES = ("start", "warm start", "evaluate", "sample", "update", "checkpoint")
KINDS = ("raise", "hang", "hang outside Python", "exit", "kill")
SHORTER = "--domains airline --max-steps 2"  # The fault comes in step 1.
END_S = 900.0  # seconds after which a run is killed
LEFT_S = 20.0  # seconds in which processes must end after their run


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    ranks = options.ranks or range(options.num_gpus)
    cases = [(k, p, r) for k in options.kinds for p in options.phases for r in ranks]
    cases = [case for case in cases if case[0] != "NaN" or case[1] in ("sample", "update")]
    where = {**machine(), "num_ranks": options.num_gpus, "timeout_s": options.timeout}
    wrong: list[str] = []
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="faults-") as temporary:
        print("preparing the model", flush=True)
        command = prepare(Path(temporary), options.num_gpus, options.warm_start_steps)
        command += [*SHORTER.split(), "--timeout", str(options.timeout)]
        command += ["--call-timeout", str(options.timeout / 2), *options.passed_on]
        for number, case in enumerate(cases):
            kind, phase, rank = case
            name = f"{number + 1:>3}/{len(cases)} {kind:<20} {phase:<11} rank {rank}"
            limit_s = options.slack + options.timeout * kind.startswith("hang")
            folder = Path(temporary) / f"case-{number}"
            found = play(command, folder, case, limit_s)
            shutil.rmtree(folder, ignore_errors=True)
            took = "-" if found.took_s is None else f"{found.took_s:.1f} s"
            print(f"{name}  {took:>7}  {found.wrong or found.said}", flush=True)
            wrong += [name] if found.wrong else []
            seconds.setdefault(kind, []).extend([] if found.took_s is None else [found.took_s])
    figures = {"faults": float(len(cases)), "not told rightly": float(len(wrong))}
    figures |= {f"{kind}, seconds, largest": max(took) for kind, took in seconds.items() if took}
    print("\n".join(f"{name:<40}{value:g}" for name, value in figures.items()))
    print("  ".join(f"{name} {value}" for name, value in where.items()))
    print("\n".join(f"wrong: {name}" for name in wrong), end="\n" * bool(wrong))
    print(f"{len(cases) - len(wrong)} of {len(cases)} right")
    write_json(options.json, figures, where, vars(options))
    return int(bool(wrong))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--phases", nargs="+", default=PHASES, choices=PHASES)
    parser.add_argument("--kinds", nargs="+", default=[*KINDS, "NaN"], choices=[*KINDS, "NaN"])
    parser.add_argument("--ranks", type=int, nargs="+", help="that get faults; missing: each")
    parser.add_argument("--num-gpus", type=int, default=2, help="ranks")
    parser.add_argument("--timeout", type=float, default=20, help="the runs' deadline, in seconds")
    parser.add_argument("--slack", type=float, default=5, help="seconds beyond the deadline")
    parser.add_argument("--warm-start-steps", type=int, default=2, help="of the model to train")
    parser.add_argument("passed_on", nargs="*", help="after --: flags of every run")
    return parser.parse_args(argv)


@dataclass(frozen=True, kw_only=True)
class Found:
    """The result of a run with a fault."""

    took_s: float | None = None  # seconds from the fault to the error line
    said: str = ""  # the error line
    wrong: str = ""  # the problem; empty if the case is right


def play(command: Sequence[str], folder: Path, case: tuple[str, str, int], limit_s: float) -> Found:
    """Make one run with a fault in a new folder."""
    kind, phase, rank = case
    folder.mkdir()
    note = folder / "note"
    out = folder / "run"
    words = f"{kind},{phase},{rank},{note}"
    code, lines, left = output_of([*command, "--output-dir", str(out)], words)
    text = "\n".join(line for _, line in lines)
    if left:
        return Found(wrong=f"processes {left} are left:\n{text}")
    if not note.exists():
        return Found(wrong=f"the fault did not happen:\n{text}")
    if kind == "NaN":
        fine = code == 0 and num_skipped(out) == 1 and kept(out, phase, rank)
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
        return Found(took_s=took_s, wrong=late)
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
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5",
    }
    process = subprocess.Popen(
        [sys.executable, __file__, *flags],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: list[tuple[float, str]] = []
    ranks: set[psutil.Process] = set()

    def end() -> None:
        lines.append((time.time(), f"faults.py: no end within {END_S:.0f} s"))
        send(signal.SIGKILL, [*family(process.pid), *ranks])

    alarm = threading.Timer(END_S, end)
    alarm.start()
    assert process.stdout is not None
    for line in process.stdout:
        lines.append((time.time(), line.rstrip()))
        ranks |= set(psutil.Process(process.pid).children(recursive=True))
    code = process.wait()
    alarm.cancel()
    return code, lines, still_alive(list(ranks), LEFT_S)


def num_skipped(out: Path) -> int:
    """The number of steps with at least one skipped update."""
    path = out / "metrics.jsonl"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return len(re.findall(r'"train/skipped": (0\.5|1)', text))


def kept(out: Path, phase: str, rank: int) -> bool:
    """Whether the batch with NaN was kept.

    For a NaN in the loss, the faulty rank keeps the batch. For sampled NaN, any rank may keep the
    batch, because load balancing may move episodes.
    """
    owner = rank if phase == "update" else "*"
    return any((out / "faults").glob(f"step-*.rank-{owner}.pt"))


# The run with a fault: the same file, in the processes that `output_of` starts.


def fault(kind: str) -> None:
    if kind == "raise":
        raise ValueError("injected fault")
    if kind == "hang":
        time.sleep(10_000)
    if kind == "hang outside Python":  # holds the GIL, so all threads stop
        ctypes.PyDLL(None).sleep(10_000)
    if kind == "exit":
        os._exit(3)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


def faulty(kind: str, phase: str, rank: int, note: Path) -> Callable[..., Run]:
    """Return an `open_run` of a run with the fault on one rank, in which every group trains."""
    is_here = rank == int(os.environ["RANK"])
    begin = train.begin_grpo
    play = train.collect

    def once() -> bool:
        is_first = is_here and not note.exists()
        if is_first:
            note.write_text(str(time.time()), encoding="utf-8")
        return is_first

    def opened(
        config: Any, folder: Any, parts: Any, accelerator: Any, ranks: Any, watchdog: Any
    ) -> Run:
        told = ranks.on_phase

        def on_phase() -> None:
            told()
            if ranks.current.name == phase and kind != "NaN" and once():
                fault(kind)

        ranks.on_phase = on_phase
        if phase == "start" and once():
            fault(kind)
        return open_run(config, folder, parts, accelerator, ranks, watchdog)

    def begin_grpo(run: Run) -> Any:
        meter = begin(run)
        if kind == "NaN" and phase == "update":
            compute = train.updater_of(run).loss

            def loss_with_nan(*arguments: Any) -> Any:
                loss, stats = compute(*arguments)
                return loss * float("nan") if once() else loss, stats

            train.updater_of(run).loss = loss_with_nan
        return meter

    def collect(run: Run, stage: Any, step: int) -> Any:
        """Replace the rewards of training episodes, so that every group trains."""
        batch = play(run, stage, step)
        for trajectory in batch.trajectories:
            trajectory.reward = float(trajectory.trial % 2)
        if kind == "NaN" and phase == "sample" and once():
            for trajectory in batch.trajectories:
                trajectory.logprobs[:] = [float("nan")] * len(trajectory.logprobs)
        return batch

    train.begin_grpo = begin_grpo
    train.collect = collect
    return opened


def run_with_fault() -> NoReturn:
    """`pipeline/run.py` with the fault of the variable FAULT, which is kind,phase,rank,file.

    The fault happens once, when the rank enters the phase. The file gets the time of the fault.
    Rewards within a group are 0 and 1 in turns, so every group and every rank trains in each step.
    """
    hooks: dict[str, Any] = {}
    if "RANK" in os.environ:
        kind, phase, rank, note = os.environ["FAULT"].split(",")
        hooks["open_run"] = faulty(kind, phase, int(rank), Path(note))
    run.leave(run.main(sys.argv[1:], entry=Path(__file__).resolve(), **hooks))


if __name__ == "__main__":
    if "FAULT" in os.environ:
        run_with_fault()
    sys.exit(main(sys.argv[1:]))
