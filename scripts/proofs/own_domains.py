"""Train each example of a domain of one's own beside airline, with the commands of its docstring.

    python scripts/proofs/own_domains.py --seeds 1 2

The default recipe trains airline, then the example's domain; `sums` is trained alone. The table
has the sampled success of each domain on held-out tasks after the warm start and at the end. The
exit code is 1 if a success at the end, the mean or the minutes of a run break a bound. Finished
runs are not repeated. Flags after `--` are passed to every run.
"""

from __future__ import annotations

import importlib
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.common import ROOT, machine, parser_of, results_of, start_run, write_json

EXAMPLES = ("bank_http", "library_desk", "trl_environment", "sums_dataset")
LEAST = 0.70
LEAST_MEAN = 0.75
MOST_MINUTES = 10.0


def main(argv: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--examples", nargs="+", default=list(EXAMPLES), choices=EXAMPLES)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/own-domains"))
    parser.add_argument("passed_on", nargs="*", help="after --: flags of every run")
    options = parser.parse_args(argv)
    folder = options.output_dir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, float] = {}
    print("| example | seed | after the warm start | at the end | minutes |\n|---|--:|---|---|--:|")
    for example in options.examples:
        *before, run = commands_of(example)
        with prepared(before, folder):
            for seed in options.seeds:
                name = f"{example}-seed-{seed}"
                flags = ["--seed", str(seed), "--output-dir", name, "--report-to", "none"]
                if not (folder / name / "results.json").is_file():
                    log = folder / f"{name}.log"
                    if code := started([*run, *flags, *options.passed_on], folder, log).wait():
                        print(f"{name}: exit code {code}, see {log}", file=sys.stderr)
                        return 1
                results = results_of(folder / name)
                found = {**success(results, -1), "minutes": results["wall_s"] / 60}
                figures |= {f"{name} {what}": value for what, value in found.items()}
                print(row(example, seed, results), flush=True)
    write_json(
        options.json, figures, machine(), {"seeds": options.seeds, "flags": options.passed_on}
    )
    return judge(figures)


def commands_of(example: str) -> list[list[str]]:
    """Return the words of each command in an example's docstring, with absolute paths."""
    text = (importlib.import_module(f"examples.{example}").__doc__ or "").replace("\\\n", " ")
    commands = [
        shlex.split(line, comments=True) for line in text.splitlines() if line.startswith("python ")
    ]
    return [[sys.executable, str(ROOT / words[1]), *words[2:]] for words in commands]


def started(words: Sequence[str], folder: Path, log: Path) -> subprocess.Popen[bytes]:
    script = Path(words[1])
    return start_run(words[2:], log, script=script, cwd=folder, PYTHONPATH=str(ROOT))


@contextmanager
def prepared(commands: Sequence[Sequence[str]], folder: Path) -> Iterator[None]:
    """Run commands before a run; a command that ends with `&` goes on until the context's end."""
    services = []
    for words in commands:
        process = started([w for w in words if w != "&"], folder, folder / "before.log")
        if words[-1] == "&":
            services.append(process)
        elif process.wait():
            raise SystemExit(f"{shlex.join(words)} failed, see {folder / 'before.log'}")
    try:
        yield
    finally:
        for process in services:
            process.terminate()
            process.wait()


def success(results: dict[str, Any], number: int) -> dict[str, float]:
    """Return the sampled success of each domain in one of a run's evaluations."""
    domains = results["evaluations"][number]["success"].items()
    return {domain: float(of["mean"]) for domain, of in domains}


def row(example: str, seed: int, results: dict[str, Any]) -> str:
    """Format one run as a line of the table."""
    is_start = [evaluation["after"] == "warm_start" for evaluation in results["evaluations"]]
    cells = [
        ", ".join(f"{domain} {value:.2f}" for domain, value in success(results, number).items())
        for number in (is_start.index(True), -1)
    ]
    return f"| {example} | {seed} | {cells[0]} | {cells[1]} | {results['wall_s'] / 60:.1f} |"


def judge(figures: dict[str, float]) -> int:
    """Print the least and mean success and the longest time; return 1 if a bound is broken."""
    minutes = max(value for name, value in figures.items() if name.endswith(" minutes"))
    ends = [value for name, value in figures.items() if not name.endswith(" minutes")]
    print(f"\nleast success {min(ends):.3f} (bound {LEAST}), ", end="")
    print(f"mean {fmean(ends):.3f} ({LEAST_MEAN}), longest {minutes:.1f} min ({MOST_MINUTES:g})")
    is_kept = min(ends) >= LEAST and fmean(ends) >= LEAST_MEAN and minutes <= MOST_MINUTES
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
