"""Run one recipe over a grid of settings and several seeds, and compare the runs on one page.

    three-domain-grpo sweep --recipe forgetting --grid beta=0,0.05 --seeds 1 2 3

Each combination of settings and seed is a run. `--side-by-side` runs start at a time. On a machine
with GPUs, each run has its own GPUs, and by default all GPUs are used. A run with mixed training on
the same number of episodes is always added as the reference of the comparison. Runs of a seed share
one warm start, so the runs differ only in the grid's settings.

The same command continues an interrupted sweep. A folder whose runs had other flags is refused.
Flags after `--` are passed to every run. The exit code is 1 if a run failed; other runs are
compared.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.config.cli import flag, parse
from pipeline.config.recipe import SETTINGS
from pipeline.config.trl_names import instead
from pipeline.distributed.launch import RUN, visible_gpus
from pipeline.errors import UserError, nearest
from pipeline.files.console import command
from pipeline.report import write

# Settings of the reference run with mixed training.
MIXED = {"curriculum": "mixed", "order": "none", "stage_steps": "{}", "stage_tasks": "{}"}
FIXED = ("model", "warm_start", "data")  # sections whose settings change the warm start
WARM_STARTS = "warm-starts"  # name of a folder
OWN = ("run", "tracking")  # sections that cannot be in a grid
WORDS = {"true": True, "yes": True, "on": True, "1": True}
WORDS |= {"false": False, "no": False, "off": False, "0": False}
# A warm start needs no stages.
NO_STAGES = "--max-steps 0 --curriculum mixed --order none --stage-steps {} --stage-tasks {} "
NO_STAGES += "--validation-steps 0 --plateau-patience 0 --domain-weights {} --rft-rounds 0"


class Job(NamedTuple):
    """The name of a run's folder, and the flags of the run."""

    name: str
    flags: tuple[str, ...]


def main(argv: list[str]) -> int:
    place = argv.index("--") if "--" in argv else len(argv)
    options = parser().parse_args(argv[:place])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # The exit also ends the runs.
    grid = parse_grid(options.grid)
    configurations = expand(grid)
    refuse_doubles([label(settings) for settings in configurations], "--grid")
    refuse_doubles([str(seed) for seed in options.seeds], "--seeds")
    common = ["--config", options.recipe, *refuse_own(argv[place + 1 :])]
    for settings in configurations:
        parse([*common, *flags_of(settings)])  # refuses wrong settings before the first run
    folder = options.output_dir or Path("runs") / f"sweep-{Path(options.recipe).stem}"
    side_by_side = options.side_by_side or max(1, visible_gpus() // options.num_gpus)
    sweep = Sweep(folder, options.num_gpus, side_by_side)
    shares_warm_start = not any(is_of(name, FIXED) for name in grid)
    failed = sweep.run(configurations, options.seeds, common, shares_warm_start)
    code = write.main([str(folder.resolve())])
    return 1 if failed else code


def parser() -> argparse.ArgumentParser:
    form = argparse.RawTextHelpFormatter
    made = argparse.ArgumentParser(command("sweep"), description=__doc__, formatter_class=form)
    made.add_argument("--recipe", default="forgetting", help="a recipe file, or a shipped one")
    made.add_argument("--grid", nargs="+", default=[], metavar="SETTING=A,B")
    made.add_argument("--seeds", type=int, nargs="+", default=[1])
    made.add_argument("--num-gpus", type=int, default=1, help="ranks of each run")
    made.add_argument("--side-by-side", type=int, help="runs at a time; all GPUs, else one")
    made.add_argument("--output-dir", type=Path, help="missing: runs/sweep-<recipe>")
    return made


def parse_grid(words: Sequence[str]) -> dict[str, list[str]]:
    """Parse `beta=0,0.05` to {"beta": ["0", "0.05"]}. Brackets or braces protect commas.

    UserError for an unknown setting.
    """
    known = {name_of(section, name): (section, name) for section, name in SETTINGS}
    grid: dict[str, list[str]] = {}
    for word in words:
        name, _, values = word.partition("=")
        if name not in known:
            raise UserError(f"--grid: got {name!r}; {meant(name, known)}")
        if not values:
            raise UserError(f"--grid: got {word!r}; write {name}=A,B")
        if name in grid:
            raise UserError(f"--grid: got {name} twice; give all its values at once")
        if is_of(name, OWN):
            raise UserError(f"--grid: got {name!r}, which the sweep sets; see its own flags")
        grid[name] = split_values(values)
    return grid


def meant(name: str, known: Iterable[str]) -> str:
    """What an unknown setting is called, or the setting that it misspells, as advice."""
    near = nearest(name, known)
    advice = f"did you mean {near}?" if near else "name settings of the recipe"
    return instead(f"--{name}") or advice


def split_values(text: str) -> list[str]:
    """Split a text at commas that are outside brackets and braces."""
    values, depth = [""], 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            values.append("")
        else:
            values[-1] += character
    # A flag takes a list as `a,b`.
    return [(v[1:-1] or "none") if v.startswith("[") else v for v in values]


def name_of(section: str, name: str) -> str:
    """The name of a setting in a grid, such as `warm_start_steps`."""
    return flag(section, name)[2:].replace("-", "_")


def is_of(name: str, sections: Sequence[str]) -> bool:
    return any(section in sections and name == name_of(section, n) for section, n in SETTINGS)


def refuse_own(flags: Sequence[str]) -> Sequence[str]:
    """Return the flags for every run; UserError for a flag that the sweep sets itself."""
    own = ("seed", "num_gpus", "output_dir", "run_name", "resume_from_checkpoint", "config")
    for word in flags:
        name = word.partition("=")[0].removeprefix("--").replace("-", "_")
        if word.startswith("--") and name in own:
            raise UserError(f"{word}: the sweep gives it to its runs; see its own flags")
    return flags


def refuse_doubles(words: Sequence[str], where: str) -> None:
    if double := [word for word in words if words.count(word) > 1]:
        raise UserError(f"{where}: got {double[0]} twice; name each configuration and seed once")


def expand(grid: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """Every combination of the grid, and mixed training as the reference."""
    combinations = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    if any(settings.get("curriculum") == "mixed" for settings in combinations):
        return combinations
    return [*combinations, dict(MIXED)]


def flags_of(settings: Mapping[str, str]) -> list[str]:
    """The flags of a configuration; boolean flags have no value."""
    flags: list[str] = []
    annotations = {name_of(s, n): field.annotation for (s, n), field in SETTINGS.items()}
    for name, value in settings.items():
        word = f"--{name.replace('_', '-')}"
        if annotations[name] is bool:
            if value.lower() not in WORDS:
                raise UserError(f"{name}: got {value!r}; give true or false")
            is_on = WORDS[value.lower()]
            flags.append(word if is_on else f"--no-{word[2:].removeprefix('use-')}")
        else:
            flags += [word, value]
    return flags


def label(settings: Mapping[str, str]) -> str:
    """The name of a configuration's folder, such as `replay=0.1` or `mixed`."""
    is_mixed = settings.get("curriculum") == "mixed"
    shown = {n: v for n, v in settings.items() if not (is_mixed and MIXED.get(n) == v)}
    parts = ["mixed"] * is_mixed + [f"{name}={value}" for name, value in shown.items()]
    text = "-".join(parts) or "recipe"
    return "".join(c if c.isalnum() or c in "=.-_+" else "_" for c in text)


class Sweep:
    """Runs jobs in a folder, several at a time, with their output in `<name>.log`."""

    def __init__(self, folder: Path, ranks: int, side_by_side: int) -> None:
        self.folder, self.ranks, self.side_by_side = folder, ranks, side_by_side
        self._slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(side_by_side):
            self._slots.put(slot)
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = threading.Event()

    def run(
        self,
        configurations: Sequence[Mapping[str, str]],
        seeds: Sequence[int],
        common: Sequence[str],
        shares_warm_start: bool = True,
    ) -> list[str]:
        """Run all configurations with all seeds; return the names of failed runs."""
        starts: dict[int, list[str]] = {seed: [] for seed in seeds}
        failed: list[str] = []
        if shares_warm_start and parse(list(common)).warm_start.steps:
            flags = {seed: (*common, "--seed", str(seed), *NO_STAGES.split()) for seed in seeds}
            jobs = {seed: Job(f"{WARM_STARTS}/seed-{seed}", flags[seed]) for seed in seeds}
            failed = self.run_all(list(jobs.values()))
            folders = {s: self._folder(job) for s, job in jobs.items() if job.name not in failed}
            starts = {
                seed: ["--model", f"{folder}/checkpoints/warm-start", "--warm-start-steps", "0"]
                for seed, folder in folders.items()
            }
        of_runs = [
            Job(
                name=f"{label(settings)}-seed-{seed}",
                flags=(*common, *start, *flags_of(settings), "--seed", str(seed)),
            )
            for seed, start in starts.items()
            for settings in configurations
        ]
        return failed + self.run_all(of_runs)

    def _folder(self, job: Job) -> Path:
        return (self.folder / job.name).resolve()

    def run_all(self, jobs: Sequence[Job]) -> list[str]:
        """Run jobs in the given order, several at a time; return the names of failed jobs."""
        self.folder.mkdir(parents=True, exist_ok=True)
        failed: list[str] = []
        with ThreadPoolExecutor(self.side_by_side) as pool:
            try:
                for job, code in zip(jobs, pool.map(self._run, jobs), strict=True):
                    if code:
                        failed.append(job.name)
            except BaseException:
                self._stopped.set()
                for process in list(self._running):
                    process.terminate()
                raise
        return failed

    def _run(self, job: Job) -> int:
        done = self.folder / f"{job.name}.done.json"  # flags of the finished run
        if self._stopped.is_set():
            return 0
        if done.is_file():
            if done.read_text(encoding="utf-8", errors="replace") == json.dumps(job.flags):
                return 0
            print(f"{job.name}: done before, with other flags; give another --output-dir")
            return 2
        slot, log = self._slots.get(), self.folder / f"{job.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        flags = ["--num-gpus", str(self.ranks), "--output-dir", str(self._folder(job))]
        flags += ["--run-name", job.name, "--resume-from-checkpoint", "auto"]
        try:
            with log.open("ab") as file:
                process = subprocess.Popen(
                    [sys.executable, str(RUN), *job.flags, *flags],
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **self._place(slot)},
                )
            self._running.add(process)
            code = process.wait()
            self._running.discard(process)
        finally:
            self._slots.put(slot)
        if code == 0:
            done.write_text(json.dumps(job.flags), encoding="utf-8")
        said = "done" if code == 0 else f"failed with exit code {code}, see {log}"
        print(f"{job.name}: {said}", flush=True)
        return code

    def _place(self, slot: int) -> dict[str, Any]:
        """The environment variables that give a run its GPUs, or its share of the CPU cores."""
        if gpus := visible_gpus():
            named = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
            known = named.split(",")
            own = [known[(slot * self.ranks + i) % len(known)] for i in range(self.ranks)]
            return {"CUDA_VISIBLE_DEVICES": ",".join(own)}
        threads = max(1, (os.cpu_count() or 1) // (self.side_by_side * self.ranks))
        return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
