"""Run one recipe over a grid of settings and several seeds, and compare the runs on one page.

    three-domain-grpo sweep --recipe forgetting --grid beta=0,0.05 --seeds 1 2 3

Each combination of settings and seed is a run, one after another. A run with mixed training on the
same number of episodes is always added as the reference of the comparison. Runs of a seed share one
warm start, so the runs differ only in the grid's settings.

The same command continues an interrupted sweep. A folder whose runs had other flags is refused.
Flags after `--` are passed to every run. The exit code is 1 if a run failed; other runs are
compared.
"""

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from pipeline.common.console import command
from pipeline.common.errors import UserError
from pipeline.config.cli import Parser, flags_of, parse
from pipeline.distributed.launch import RUN
from pipeline.report import write

# Settings of the reference run with mixed training.
MIXED = {"curriculum": "mixed", "order": [], "stage_steps": {}, "stage_tasks": {}}
WARM_STARTS = "warm-starts"  # name of a folder
# Settings that the sweep gives to its runs.
OWN = ("seed", "num_gpus", "output_dir", "run_name", "resume_from_checkpoint", "config")
# Settings of the run that makes a warm start, which needs no stages.
WARM_START = {"max_steps": 0, **MIXED, "validation_steps": 0, "plateau_patience": 0}
WARM_START |= {"domain_weights": {}, "rft_rounds": 0}


def main(argv: list[str]) -> int:
    place = argv.index("--") if "--" in argv else len(argv)
    options = _parser().parse_args(argv[:place])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # The exit also ends the run.
    flags = argv[place + 1 :]
    grid = parse_grid(options.grid)
    for word in (*grid, *flags):
        name = word.partition("=")[0].removeprefix("--").replace("-", "_")
        if name in OWN:
            raise UserError(f"{word}: the sweep gives it to its runs; see its own flags")
    common = ["--config", options.recipe, *flags]
    configurations = expand(grid)
    recipe = parse(common)
    # This refuses wrong settings before the first run.
    configs = [parse([*common, *flags_of(settings)]) for settings in configurations]
    has_warm_start = recipe.warm_start.steps > 0 and all(
        getattr(config, section) == getattr(recipe, section)
        for config in configs
        for section in ("model", "data", "warm_start")
    )
    folder = options.output_dir or Path("runs") / f"sweep-{Path(options.recipe).stem}"
    failed = run_all(
        folder, options.num_gpus, configurations, options.seeds, common, has_warm_start
    )
    code = write.main([str(folder.resolve())])
    return 1 if failed else code


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        command("sweep"), description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--recipe", default="forgetting", help="a recipe file, or a shipped one")
    parser.add_argument("--grid", nargs="+", default=[], metavar="SETTING=A,B")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--num-gpus", type=int, default=1, help="ranks of each run")
    parser.add_argument("--output-dir", type=Path, help="missing: runs/sweep-<recipe>")
    return parser


def parse_grid(words: Sequence[str]) -> dict[str, list[str]]:
    """Parse `beta=0,0.05` to {"beta": ["0", "0.05"]}. Brackets or braces protect commas."""
    grid: dict[str, list[str]] = {}
    for word in words:
        name, _, values = word.partition("=")
        if not values or name in grid:
            raise UserError(f"--grid: got {word!r}; write each setting once, as {name}=A,B")
        grid[name] = split_values(values)
    return grid


def split_values(text: str) -> list[str]:
    """Split a text at commas that are outside brackets and braces."""
    values = [""]
    depth = 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            values.append("")
        else:
            values[-1] += character
    # A flag takes a list as `a,b`.
    return [(v[1:-1] or "none") if v.startswith("[") else v for v in values]


def expand(grid: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """Every combination of the grid, and mixed training as the reference."""
    combinations: list[dict[str, Any]] = [
        dict(zip(grid, values, strict=True)) for values in product(*grid.values())
    ]
    if any(settings.get("curriculum") == "mixed" for settings in combinations):
        return combinations
    return [*combinations, dict(MIXED)]


def label(settings: Mapping[str, Any]) -> str:
    """The name of a configuration's folder, such as `replay=0.1` or `mixed`."""
    is_mixed = settings.get("curriculum") == "mixed"
    usual = MIXED if is_mixed else {}
    shown = {
        name: value
        for name, value in settings.items()
        if name not in usual or flags_of({name: value}) != flags_of({name: usual[name]})
    }
    parts = ["mixed"] * is_mixed + [f"{name}={value}" for name, value in shown.items()]
    text = "-".join(parts) or "recipe"
    return "".join(c if c.isalnum() or c in "=.-_+" else "_" for c in text)


def run_all(
    folder: Path,
    num_ranks: int,
    configurations: Sequence[Mapping[str, Any]],
    seeds: Sequence[int],
    common: Sequence[str],
    has_warm_start: bool,
) -> list[str]:
    """Run all configurations with all seeds, one after another; return the names of failed runs.

    If `has_warm_start`, the runs of a seed begin with the same one.
    """
    failed: list[str] = []
    for seed in seeds:
        of_seed = [*common, "--seed", str(seed)]
        if has_warm_start:
            name = f"{WARM_STARTS}/seed-{seed}"
            if not run_one(folder, name, num_ranks, [*of_seed, *flags_of(WARM_START)]):
                failed.append(name)
                continue
            model = (folder / name).resolve() / "checkpoints" / "warm-start"
            of_seed += ["--model", str(model), "--warm-start-steps", "0"]
        for settings in configurations:
            name = f"{label(settings)}-seed-{seed}"
            if not run_one(folder, name, num_ranks, [*of_seed, *flags_of(settings)]):
                failed.append(name)
    return failed


def run_one(folder: Path, name: str, num_ranks: int, flags: Sequence[str]) -> bool:
    """Make a run unless it is done, with its output in `<name>.log`; return False if it failed."""
    done = folder / f"{name}.done.json"  # flags of the finished run
    if done.is_file():
        if done.read_text(encoding="utf-8", errors="replace") == json.dumps(flags):
            return True
        print(f"{name}: done before, with other flags; give another --output-dir")
        return False
    log = folder / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    own = ["--num-gpus", str(num_ranks), "--output-dir", str((folder / name).resolve())]
    own += ["--run-name", name, "--resume-from-checkpoint", "auto"]
    with log.open("ab") as file:
        command = [sys.executable, str(RUN), *flags, *own]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        code = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if code == 0:
        done.write_text(json.dumps(flags), encoding="utf-8")
    outcome = "done" if code == 0 else f"failed with exit code {code}, see {log}"
    print(f"{name}: {outcome}", flush=True)
    return code == 0
