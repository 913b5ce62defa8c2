"""Measure learning over several seeds, with a control whose rewards are permuted; one table.

    python scripts/proofs/learning.py --seeds 1 2 3 --recipes three_domain_tiny mixed --control

Every run is `pipeline/run.py` with an unchanged recipe, evaluated on held-out tasks of the split.
The control is the first recipe with `--permute-rewards`, so rewards carry no information about
episodes. The table compares sampled success with sampled success, and greedy with greedy. The
interval is the 95 % interval of the mean difference over tasks (paired, normal). Flags after `--`
are passed to every run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Results = dict[str, Any]


def main(argv: list[str]) -> int:
    place = argv.index("--") if "--" in argv else len(argv)
    own, passed_on = argv[:place], argv[place + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--recipes", nargs="+", default=["three_domain_tiny", "mixed"])
    parser.add_argument(
        "--control", action="store_true", help="also run the control with permuted rewards"
    )
    parser.add_argument("--num-gpus", type=int, default=2, help="ranks of each run")
    parser.add_argument("--split", default="test", choices=["validation", "test"])
    parser.add_argument("--output-dir", type=Path, default=Path("runs/learning"))
    parser.add_argument("--reuse", action="store_true", help="keep runs that are finished already")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args(own)
    jobs = [(recipe, seed, False) for recipe in options.recipes for seed in options.seeds]
    if options.control:
        jobs += [(options.recipes[0], seed, True) for seed in options.seeds]
    rows = []
    for recipe, seed, control in jobs:
        name = f"{recipe}{'-control' if control else ''}-seed-{seed}"
        folder = options.output_dir / name
        flags = ["--config", recipe, "--seed", str(seed), "--num-gpus", str(options.num_gpus)]
        flags += ["--eval-split", options.split, "--output-dir", str(folder), *passed_on]
        if control:
            flags.append("--permute-rewards")
        if not (options.reuse and (folder / "report.md").exists()):
            run(flags)
        seconds = float(results_of(folder)["wall_s"])
        rows.append({"name": name, "seconds": seconds, **figures(results_of(folder))})
        print(table(rows[-1:], heading=len(rows) == 1), flush=True)
    if options.json:
        machine = {
            "cores": os.cpu_count(),
            "machine": platform.machine(),
            "date": time.strftime("%Y-%m-%d"),
        }
        settings = {"ranks": options.num_gpus, "split": options.split, "flags": passed_on}
        content = {
            "figures": {row["name"]: row for row in rows},
            "machine": machine,
            "settings": settings,
        }
        options.json.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return 0


def run(flags: list[str]) -> None:
    """Make one run. The script exits with the exit code of a failed run."""
    command = [sys.executable, str(ROOT / "pipeline" / "run.py"), *flags]
    code = subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode
    if code:
        sys.exit(code)


def results_of(folder: Path) -> Results:
    read: Results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return read


def figures(results: Results) -> dict[str, Any]:
    """Sampled and greedy success before GRPO and at the end: means, and values per domain."""
    before = [e for e in results["evaluations"] if e["after"] in ("start", "warm_start")][-1][
        "success"
    ]
    after = results["evaluations"][-1]["success"]
    differences = [
        fmean(late) - fmean(before[domain]["tasks"][task])
        for domain, success in after.items()
        for task, late in success["tasks"].items()
    ]
    return {
        "before": fmean(s["mean"] for s in before.values()),
        "after": fmean(s["mean"] for s in after.values()),
        "greedy_before": fmean(s["greedy"] for s in before.values()),
        "greedy_after": fmean(s["greedy"] for s in after.values()),
        "domains": {domain: s["mean"] for domain, s in after.items()},
        "change": fmean(differences),
        "change_interval": 1.96 * stdev(differences) / len(differences) ** 0.5,
    }


def table(rows: list[dict[str, Any]], heading: bool) -> str:
    """Format one line per run."""
    lines = []
    if heading:
        lines.append(
            f"{'run':<36}{'before':>8}{'after':>8}{'change (95 %)':>20}  {'domains at the end':<34}"
            f"{'greedy':>16}{'seconds':>9}"
        )
    for row in rows:
        domains = "  ".join(f"{name} {value:.2f}" for name, value in row["domains"].items())
        change = f"{row['change']:+.3f} +- {row['change_interval']:.3f}"
        greedy = f"{row['greedy_before']:.2f} -> {row['greedy_after']:.2f}"
        lines.append(
            f"{row['name']:<36}{row['before']:>8.3f}{row['after']:>8.3f}{change:>20}  {domains:<34}"
            f"{greedy:>16}{row['seconds']:>9.0f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
