"""Measure learning over several seeds, with a control whose rewards are permuted; one table.

    python scripts/proofs/learning.py --seeds 1 2 3 --recipes three_domain_tiny mixed --control

Every run is `pipeline/run.py` with an unchanged recipe, evaluated on held-out tasks of the split.
The control is the first recipe in `control.py`, which permutes rewards, so that they carry no
information about episodes. The table compares sampled success with sampled success, and greedy with
greedy. The interval is the 95 % interval of the mean difference over tasks (paired, normal). Flags
after `--` are passed to every run.

    python scripts/proofs/learning.py --seeds 1 2 3 4 5 --recipes three_domain_tiny --variants \
        synchronous= "partial=--partial-rollout-tokens 24" --figure curve.png

With `--variants`, each recipe is run with each variant's flags; the last lines have each variant's
mean over the seeds with its standard error, and its mean difference to the first variant.
`--figure` draws the validations of the variants, mean over seeds and domains.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeline.rollout.trajectory import succeeded
from scripts.bench.common import finish_run, machine, parser_of, results_of, write_json

CONTROL = Path(__file__).with_name("control.py")
HEADING = (
    f"{'run':<36}{'before':>8}{'after':>8}{'change (95 %)':>20}  {'domains at the end':<34}"
    f"{'greedy':>16}{'seconds':>9}"
)


def main(argv: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--recipes", nargs="+", default=["three_domain_tiny", "mixed"])
    parser.add_argument(
        "--control", action="store_true", help="also run the control with permuted rewards"
    )
    parser.add_argument("--num-gpus", type=int, default=2, help="ranks of each run")
    parser.add_argument("--split", default="test", choices=["validation", "test"])
    parser.add_argument("--output-dir", type=Path, default=Path("runs/learning"))
    parser.add_argument("--reuse", action="store_true", help="keep runs that are finished already")
    parser.add_argument("--variants", nargs="+", default=["="], metavar="NAME=FLAGS")
    parser.add_argument("--figure", type=Path, help="a picture of the validations")
    parser.add_argument("passed_on", nargs="*", help="after --: flags of every run")
    options = parser.parse_args(argv)
    variants = dict(variant.split("=", 1) for variant in options.variants)
    jobs = [
        (recipe, seed, variant)
        for recipe in options.recipes
        for seed in options.seeds
        for variant in variants
    ]
    if options.control:
        jobs += [(options.recipes[0], seed, "control") for seed in options.seeds]
    found: dict[str, Any] = {}
    print(HEADING)
    for recipe, seed, variant in jobs:
        name = "-".join(filter(None, (recipe, variant, f"seed-{seed}")))
        flags = ["--config", recipe, "--seed", str(seed), "--eval-split", options.split]
        flags += [*options.passed_on, *shlex.split(variants.get(variant, ""))]
        place = {"script": CONTROL} if variant == "control" else {}
        found[name] = trained(options.output_dir / name, flags, options, **place)
        found[name]["variant"] = variant
        print(line_of(name, found[name]), flush=True)
    if len(variants) > 1:
        print(*compared(found, list(variants)), sep="\n")
    if options.figure:
        draw(found, options.figure)
    write_json(options.json, found, machine(), vars(options))
    return 0


def trained(folder: Path, flags: list[str], options: Any, **place: Any) -> dict[str, Any]:
    """Make a run in a folder, unless it is to be reused; return its figures and its seconds."""
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not (options.reuse and (folder / "report.md").exists()):
        flags = [*flags, "--num-gpus", str(options.num_gpus), "--output-dir", str(folder)]
        finish_run(flags, folder.with_name(f"{folder.name}.log"), **place)
    results = results_of(folder)
    return {**figures(results), "seconds": float(results["wall_s"]), "folder": str(folder)}


def figures(results: dict[str, Any]) -> dict[str, Any]:
    """Sampled and greedy success before GRPO and at the end: means, and values per domain."""
    before = [e for e in results["evaluations"] if e["after"] in ("start", "warm_start")][-1][
        "success"
    ]
    after = results["evaluations"][-1]["success"]

    def success_of(rewards: list[float]) -> float:
        return fmean(succeeded(reward, results["success_threshold"]) for reward in rewards)

    differences = [
        success_of(late) - success_of(before[domain]["tasks"][task])
        for domain, success in after.items()
        for task, late in success["tasks"].items()
    ]
    return {
        "before": fmean(s["mean"] for s in before.values()),
        "after": fmean(s["mean"] for s in after.values()),
        **{
            f"greedy_{when}": fmean(s["greedy"] for s in of.values())
            for when, of in (("before", before), ("after", after))
            if all("greedy" in s for s in of.values())  # missing with eval_greedy false
        },
        "domains": {domain: s["mean"] for domain, s in after.items()},
        "change": fmean(differences),
        "change_interval": 1.96 * stdev(differences) / len(differences) ** 0.5,
    }


def compared(found: dict[str, Any], variants: list[str]) -> Iterator[str]:
    """A line for each variant: mean and standard error over seeds, and the difference by seed."""
    after = {v: [row["after"] for row in found.values() if row["variant"] == v] for v in variants}
    first = after[variants[0]]
    for variant, of in after.items():
        differences = [a - b for a, b in zip(of, first, strict=True)]
        yield (
            f"{variant:<36}after {fmean(of):.3f} +- {error_of(of):.3f} (standard error), "
            f"against {variants[0]} {fmean(differences):+.3f} +- {error_of(differences):.3f}"
        )


def error_of(values: list[float]) -> float:
    """The standard error of the mean."""
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw the mean validation success of each variant over the steps."""
    from matplotlib.figure import Figure

    curves = defaultdict[str, dict[int, list[float]]](lambda: defaultdict(list))
    for row in found.values():
        for text in (Path(row["folder"]) / "metrics.jsonl").read_text().splitlines():
            line = json.loads(text)
            if line["kind"] == "validation":
                rates = [v for k, v in line.items() if k.endswith("/success")]
                curves[row["variant"]][line["step"]].append(fmean(rates))
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.subplots()
    for variant, of in curves.items():
        steps = sorted(of)
        means = [fmean(of[step]) for step in steps]
        errors = [error_of(of[step]) for step in steps]
        axes.errorbar(steps, means, yerr=errors, marker="o", capsize=3, label=variant)
    axes.set(xlabel="optimizer steps", ylabel="validation success, mean of domains")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


def line_of(name: str, row: dict[str, Any]) -> str:
    """Format the line of one run."""
    domains = "  ".join(f"{domain} {value:.2f}" for domain, value in row["domains"].items())
    change = f"{row['change']:+.3f} +- {row['change_interval']:.3f}"
    greedy = ""
    if "greedy_after" in row:
        greedy = f"{row['greedy_before']:.2f} -> {row['greedy_after']:.2f}"
    return (
        f"{name:<36}{row['before']:>8.3f}{row['after']:>8.3f}{change:>20}  {domains:<34}"
        f"{greedy:>16}{row['seconds']:>9.0f}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
