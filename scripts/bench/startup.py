"""Measure the start of a run: CPU seconds of all its processes before its first episode.

The processes are the launcher and the ranks of `python pipeline/run.py --num-gpus 2`. With
`--against CHECKOUT`, measurements alternate between two versions of the pipeline.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import psutil
from common import ROOT, machine, ratios_of, write_json

# Python imports this module in every process of the run. A rank that is about to sample its first
# episode writes a file and waits.
STOP = """
import builtins, os, time

build = builtins.__build_class__

def stop(*_, **__):
    open(os.path.join(os.environ["STARTED_FOLDER"], os.environ.get("RANK", "0")), "w").close()
    time.sleep(600)

def build_and_patch(function, name, *bases, **others):
    made = build(function, name, *bases, **others)
    if name == "Rollout" and made.__module__.startswith("pipeline.rollout"):
        made.__call__ = stop
    return made

builtins.__build_class__ = build_and_patch
"""


def main(argv: list[str]) -> int:
    arguments = parser().parse_args(argv)
    where = machine()
    flags, num_ranks = arguments.flags, arguments.num_gpus
    for checkout in filter(None, [ROOT, arguments.against]):  # fills the caches of both versions
        cpu_s(checkout, num_ranks, flags)
    figures: dict[str, float] = {}
    if arguments.against is None:
        found = [cpu_s(ROOT, num_ranks, flags) for _ in range(arguments.repeats)]
    else:
        found, theirs = ratios_of(
            lambda: cpu_s(ROOT, num_ranks, flags),
            lambda: cpu_s(arguments.against, num_ranks, flags),
            arguments.repeats,
        )
        figures |= {"against_cpu_s": median(theirs), "ratio": median(found) / median(theirs)}
        show(str(arguments.against), theirs)
    figures |= {"cpu_s": median(found)}
    show("this checkout", found)
    if "ratio" in figures:
        print(f"ratio of the medians: {figures['ratio']:.3f}")
    write_json(arguments.json, figures, where, vars(arguments))
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--against", type=Path, metavar="CHECKOUT", help="another version's folder")
    made.add_argument("--num-gpus", type=int, default=2, help="ranks")
    made.add_argument("--repeats", type=int, default=5, help="of each version")
    made.add_argument("--flags", nargs="*", default=["--max-steps", "1"], help="of the runs")
    made.add_argument("--json", type=Path, help="write the figures here as well")
    return made


def cpu_s(checkout: Path, num_ranks: int, flags: list[str]) -> float:
    """CPU seconds of a run of a version, until every rank is about to sample its first episode."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(STOP, encoding="utf-8")
        started = Path(folder, "started")
        started.mkdir()
        command = [sys.executable, str(checkout.resolve() / "pipeline" / "run.py"), *flags]
        command += ["--num-gpus", str(num_ranks), "--output-dir", str(Path(folder, "run"))]
        with Path(folder, "log").open("w+") as log:
            process = subprocess.Popen(
                command,
                cwd=checkout,
                env={**os.environ, "PYTHONPATH": folder, "STARTED_FOLDER": str(started)},
                stdout=log,
                stderr=log,
            )
            root = psutil.Process(process.pid)
            try:
                while len(list(started.iterdir())) < num_ranks:
                    if process.poll() is not None:
                        log.seek(0)
                        raise SystemExit(f"{' '.join(command)} has ended:\n{log.read()}")
                    time.sleep(0.1)
                return sum(
                    sum(each.cpu_times()[:4])  # children_*: times of ended child processes
                    for each in [root, *root.children(recursive=True)]
                )
            finally:
                for each in [*root.children(recursive=True), root] if root.is_running() else []:
                    each.kill()
                process.wait()


def show(name: str, seconds: list[float]) -> None:
    each = " ".join(f"{value:.1f}" for value in seconds)
    print(f"{name}: {median(seconds):.1f} CPU seconds (each: {each})")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
