"""Measure transfer between domains, and remedies against forgetting.

    python scripts/proofs/transfer.py --seeds 1 2 3

The runs are sequential training in two orders, mixed training, and the remedies. All runs have the
same number of episodes, and runs of a seed share one warm start. Evaluations use held-out tasks of
the test split. The script prints two tables in Markdown. Each number is a mean over seeds in points
(hundredths of the success rate), with a 95 % interval from a bootstrap over tasks, which is paired
if two runs are compared. The brackets hold the number of each seed. Bold numbers exclude 0 in a
bootstrap over tasks and seeds. Finished runs are not repeated. `--quick` uses few steps and tasks,
only to test the script. Flags after `--` are passed to every run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeline.commands import sweep
from pipeline.common.errors import UserError
from pipeline.config.cli import parse
from pipeline.evaluation.transfer import Number, differences, summary
from scripts.bench.common import machine, parser_of, results_of, write_json

Runs = list[dict[str, Any]]
PLAIN = "airline, retail, telecom"
MIXED = "mixed"
ROWS: dict[str, dict[str, str]] = {
    PLAIN: {},
    "telecom, retail, airline": {"order": "telecom,retail,airline"},
    f"{PLAIN}; replay 0.1": {"replay": "0.1"},
    f"{PLAIN}; replay 0.3": {"replay": "0.3"},
    f"{PLAIN}; KL anchor, beta 0.05": {"beta": "0.05", "reference_per_stage": "true"},
    f"{PLAIN}; replay 0.1, advantages x 4 / 2 / 1": {
        "replay": "0.1",
        "domain_advantage_scale": "{airline: 4, retail: 2}",
    },
    f"{PLAIN}; LoRA, learning rate 2e-3": {"use_peft": "true", "learning_rate": "2e-3"},
    MIXED: sweep.MIXED,
}
QUICK = (
    "--max-steps 9 --tasks-per-step 4 --num-generations 2 --warm-start-steps 3 "
    "--validation-steps 3 --eval-tasks-per-domain 6 --validation-tasks 4 --eval-trials 2 "
    "--kl-probe-tasks 2"
)
COLUMNS = {
    "average_accuracy": "success at the end",
    "stage_gain": "gain of a stage's own domain",
    "backward_transfer": "backward transfer",
    "forward_transfer": "forward transfer",
    "forgetting": "forgetting",
}


TESTED = ("backward_transfer", "forward_transfer")  # metrics that are tested against zero


def main(argv: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--output-dir", type=Path, help="missing: runs/transfer[-quick]")
    names = ", ".join(f"{number} {name}" for number, name in enumerate(ROWS))
    parser.add_argument("--rows", type=int, nargs="+", help=f"of {names}; 0 must be among them")
    parser.add_argument("--quick", action="store_true", help="a few steps: does it work?")
    parser.add_argument("passed_on", nargs="*", help="after --: flags of every run")
    options = parser.parse_args(argv)
    wanted = options.rows or range(len(ROWS))
    if 0 not in wanted:
        parser.error("--rows: give 0 as well, which the others are compared with")
    rows = {name: each for number, (name, each) in enumerate(ROWS.items()) if number in wanted}
    quick = QUICK.split() if options.quick else []
    flags = ["--config", "forgetting", *quick, *options.passed_on]
    folder = options.output_dir or Path("runs/transfer-quick" if quick else "runs/transfer")
    begun = time.time()
    try:
        tracked = [*flags, "--report-to", "none"]
        has_warm_start = parse(tracked).warm_start.steps > 0
        if sweep.run_all(folder, 1, list(rows.values()), options.seeds, tracked, has_warm_start):
            return 1
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    runs = {
        name: [
            results_of(folder / f"{sweep.label(settings)}-seed-{seed}") for seed in options.seeds
        ]
        for name, settings in rows.items()
    }
    print(table(runs), end="\n\n")
    print(remedies(runs), end="\n\n")
    minutes = (time.time() - begun) / 60
    print(f"{len(options.seeds)} seeds, {minutes:.0f} minutes", flush=True)
    figures = {
        f"{name}: {metric}": value[0] or 0.0
        for name, of in runs.items()
        for metric, value in summary(of)["metrics"].items()
    }
    write_json(options.json, figures, machine(), {"seeds": options.seeds, "flags": flags})
    return 0


def table(runs: Mapping[str, Runs]) -> str:
    """Format a row of metrics for each curriculum, over all seeds."""
    rows = []
    for name, of in runs.items():
        found = summary(of, over_seeds=False)
        wider = summary(of)["metrics"]
        each = [summary([run])["metrics"] for run in of]
        ends = " / ".join(f"{100 * (n[0] or 0):.0f}" for n in found["domains"]["matrix"][-1])
        cells = [
            # The interval of forgetting is no test of zero: see `transfer_metrics`.
            points(m, found["metrics"], each, wider if m in TESTED else None)
            for m in COLUMNS
        ]
        rows.append([name, ends, *cells])
    names = " / ".join(summary(runs[PLAIN])["domains"]["names"])
    return markdown(["curriculum", f"{names} at the end", *COLUMNS.values()], rows)


def remedies(runs: Mapping[str, Runs]) -> str:
    """Format the paired differences between each row and the sequence without a remedy."""
    shown = ("backward_transfer", "forgetting", "stage_gain", "average_accuracy")
    rows = []
    plain = runs[PLAIN]
    for name, of in runs.items():
        if name != PLAIN:
            found = differences(of, plain, over_seeds=False)
            wider = differences(of, plain)
            each = [differences([a], [b]) for a, b in zip(of, plain, strict=True)]
            rows.append([name, *(points(metric, found, each, wider) for metric in shown)])
    return markdown([f"against {PLAIN}", *(COLUMNS[metric] for metric in shown)], rows)


Numbers = Mapping[str, Number]


def points(metric: str, found: Numbers, seeds: Sequence[Numbers], tested: Numbers | None) -> str:
    """Format a metric in points: `-5.1 (-8.0 to -2.2) [-6, -4]`; bold if `tested` excludes 0."""
    if metric not in found:
        return "-"
    sign = "" if metric == "average_accuracy" and tested is None else "+"
    value, low, high = (f"{100 * (x or 0):{sign}.1f}" for x in found[metric])
    each = ", ".join(f"{round(100 * (of[metric][0] or 0)):{sign}d}" for of in seeds)
    text = f"{value} ({low} to {high}) [{each}]"
    _, least, most = tested[metric] if tested else (0, 0, 0)
    return f"**{text}**" if (least or 0) > 0 or (most or 0) < 0 else text


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    aligned = ["---", *("--:" for _ in header[1:])]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, aligned, *rows])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
