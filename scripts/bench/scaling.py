"""Measure speed on several ranks: weak and strong scaling, and communication.

    python scripts/bench/scaling.py --json scaling.json

Every rank is a process with one thread on its own core (on CUDA: its own GPU). Each rank runs the
loop of `pipeline/train.py` from the same warm-started model. Measurements alternate between the
kinds of runs, in blocks of steps. Each ratio compares two consecutive blocks, and the output shows
the median ratio. The first block warms up and is not counted.

- weak: N connected ranks with `--tasks-per-rank` groups each, compared with N separate runs, which
  start together. Each separate run is a single process with the work of one rank, so the separate
  runs show the limit of the hardware. The output also shows the speed-up over one separate run.
- strong: `--tasks-per-step` groups in total, on N ranks and on one rank.
- waits: the share of a step that a rank spends in collectives, including the wait for other ranks;
  the mean over ranks. Conversations differ in length, so most of the time is unequal work.

The learning rate is 1e-12 and dynamic sampling is off, so the policy does not change, and connected
ranks sample the same tokens as separate runs. Published shapes have random weights and get forced
messages: four look-ups, then "Done.".

Flags after `--` are passed to every run.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

from common import machine, parser_with_device, write_json
from turns import PLAIN_RUN, Side, Work
from vs_trl import make_model

# Bounds: speed-up over one rank.
DESCRIBED = {2: 1.95, 4: 3.85, 8: 7.6}
DESCRIBED_APART = {2: 1.8}
LEAST = {2: 1.95, 4: 3.85}  # least speed-up in weak scaling
MOST = {2: 0.05}  # largest share of waits
ROWS = {
    "episodes_per_s": "{ranks}, weak: episodes/s",
    "weak_scaling": "  over the mean of as many runs apart",
    "weak_speed_up": "  over one of these alone",
    "weak_efficiency": "  efficiency",
    "apart_speed_up": "  runs apart, without gradients, over one of them alone",
    "step_s": "  s a step",
    "wait_s": "  of it communicating and waiting",
    "exchange_s": "  of it for gradients",
    "wait_share": "  share of a step communicating and waiting",
    "unequal_share": "  of it for unequal sampling alone, by the runs apart",
    "exchange_bytes": "  bytes of gradients that a rank hands over, a step",
    "control_bytes": "  bytes of counts, statistics and timings, a step",
    "moved_bytes": "  bytes of episodes moved to even out the update, a step",
    "cpu_over_apart": "  processor time over that of the runs apart",
    "peak_mb": "  peak memory of a rank above imports, MB",
    "strong_step_s": "{ranks}, strong: s a step",
    "strong_speed_up": "  over one rank",
    "strong_efficiency": "  efficiency",
    "strong_wait_share": "  share of a step communicating and waiting",
}
Facts = dict[str, float]
Found = Mapping[str, Sequence[Sequence[Facts]]]  # indices: kind of run, repeat, side


def main(argv: list[str]) -> int:
    options = read(argv)
    where = machine(options.device)
    with TemporaryDirectory(prefix="scaling-") as folder:
        bench = Bench(options=options, folder=Path(folder))
        bench.model = options.model or make_model(options, bench.folder)
        row("measured", "median", "range", "described", "target")
        row("---", "--:", "---", "--:", "---")
        for num_ranks in options.ranks:
            bench.measure(num_ranks)
    write_json(options.json, bench.figures, where, vars(options))
    return 0


def read(argv: list[str]) -> argparse.Namespace:
    parser = parser_with_device(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", help="missing: 1, 2, 4 and 8, if they fit")
    parser.add_argument("--repeats", type=int, default=7, help="blocks of each kind of run")
    parser.add_argument("--block", type=int, default=5, help="steps of a block")
    parser.add_argument("--tasks-per-rank", type=int, default=12, help="groups of a rank, weak")
    parser.add_argument("--tasks-per-step", type=int, default=24, help="groups in all, strong")
    parser.add_argument("--num-generations", type=int, default=8)
    parser.add_argument("--model", help="a warm-started folder; missing: it is made first")
    parser.add_argument("--warm-start-steps", type=int, default=440, help="where it is made")
    parser.add_argument("--layers", type=int, help="of random models, in place of the shape's")
    parser.add_argument("--vocab-size", type=int, help="of random models")
    parser.add_argument("passed_on", nargs="*", help="after --: flags of every run")
    options = parser.parse_args(argv)
    options.places = len(os.sched_getaffinity(0)) // options.threads
    if options.device == "cuda":
        import torch

        options.places = torch.cuda.device_count()
    options.ranks = options.ranks or [n for n in (1, 2, 4, 8) if n <= options.places] or [1]
    if options.device == "cuda" and max(options.ranks) > options.places:
        parser.error(f"--ranks: got {max(options.ranks)}, but a rank needs a GPU of its own")
    if options.tasks_per_step < max(options.ranks):
        parser.error("--tasks-per-step: give every rank a group")
    return options


@dataclass(kw_only=True)
class Bench:
    """Measures speed, and collects the results."""

    options: argparse.Namespace
    folder: Path
    model: str = ""
    figures: Facts = field(default_factory=dict)
    numbers: Any = field(default_factory=count)

    def side(self, num_ranks: int, tasks: int, rank: int = 0, of: int = 1) -> Side:
        """Start connected ranks, or one process that does the work of one of `of` ranks."""
        options = self.options
        name = f"{next(self.numbers)}"
        values = {
            "model": self.model,
            "tasks-per-step": tasks,
            "num-generations": options.num_generations,
            "num-gpus": num_ranks,
            "max-steps": (options.repeats + 1) * options.block + 1,
            "output-dir": self.folder / name,
            "learning-rate": 1e-12,
        }
        flags = [text for key, value in values.items() for text in (f"--{key}", str(value))]
        flags += [*PLAIN_RUN, "--no-dynamic-sampling"]
        if options.shape != "tiny":  # Random weights get no reward.
            flags.append("--no-drop-zero-std-groups")
        flags += options.passed_on
        work = Work(
            kind="block",
            flags=flags,
            num_units=options.repeats + 1,
            device=options.device,
            forced=options.shape != "tiny",
            block=options.block,
            rank=rank,
            of=of,
        )
        return Side("our_side.py", work, num_ranks, options.threads, self.folder / f"{name}.log")

    def measure(self, num_ranks: int) -> None:
        """Measure all kinds of runs on a number of ranks alternately."""
        weak = self.options.tasks_per_rank * num_ranks
        strong = self.options.tasks_per_step
        wanted: dict[str, list[tuple[int, int, int, int]]] = {
            "connected": [(num_ranks, weak, 0, 1)]
        }
        if num_ranks > 1:
            wanted["apart"] = [(1, weak, rank, num_ranks) for rank in range(num_ranks)]
            wanted["alone"] = [(1, weak, 0, num_ranks)]
            wanted["whole"] = [(1, strong, 0, 1)]
        if strong != weak:
            wanted["strong"] = [(num_ranks, strong, 0, 1)]
        found: dict[str, list[list[Facts]]] = {kind: [] for kind in wanted}
        with ExitStack() as stack:
            kinds = {
                kind: [stack.enter_context(self.side(*place)) for place in places]
                for kind, places in wanted.items()
            }
            for side in chain(*kinds.values()):
                side.wait()
            for number in range(self.options.repeats):
                for kind in list(kinds)[:: 1 if number % 2 == 0 else -1]:
                    found[kind].append(at_once(kinds[kind]))
        found.setdefault("strong", found["connected"])
        series = series_of(num_ranks, found, self.options.block)
        self.figures |= {f"{name}_{num_ranks}": median(each) for name, each in series.items()}
        show(series, num_ranks, num_ranks <= self.options.places)


def at_once(sides: Sequence[Side]) -> list[Facts]:
    """Run one unit of each side, all at the same time."""
    with ThreadPoolExecutor(len(sides)) as pool:
        return list(pool.map(Side.unit, sides))


def series_of(num_ranks: int, found: Found, block: int) -> dict[str, list[float]]:
    """Compute ratios for each repeat from the facts in `found`."""
    connected, strong = ([sides[0] for sides in found[kind]] for kind in ("connected", "strong"))
    each = num_ranks * block
    series = {
        "episodes_per_s": [rate(facts) for facts in connected],
        "step_s": [facts["seconds"] / block for facts in connected],
        "peak_mb": [facts["peak_mb"] for facts in connected],
        "strong_step_s": [facts["seconds"] / block for facts in strong],
    }
    if num_ranks == 1:
        return series
    series |= {
        "wait_s": [(facts["wait_s"] + facts["exchange_s"]) / each for facts in connected],
        "exchange_s": [facts["exchange_s"] / each for facts in connected],
        "wait_share": [share(facts, num_ranks) for facts in connected],
        "strong_wait_share": [share(facts, num_ranks) for facts in strong],
    }
    for name in ("exchange_bytes", "control_bytes", "moved_bytes"):
        series[name] = [facts[name] / each for facts in connected]
    alone, whole = ([rate(sides[0]) for sides in found[kind]] for kind in ("alone", "whole"))
    names = ("weak_scaling", "weak_speed_up", "apart_speed_up", "unequal_share", "cpu_over_apart")
    series |= {name: [] for name in names}
    for facts, sides, one in zip(connected, found["apart"], alone, strict=True):
        played, tokens = (sum(side[name] for side in sides) for name in ("played", "tokens"))
        if played != facts["played"] or abs(tokens - facts["tokens"]) > 0.01 * tokens:
            raise RuntimeError(f"{facts['tokens']:g} tokens connected, other {tokens:g} apart")
        apart = [rate(side) for side in sides]
        series["weak_scaling"].append(rate(facts) / fmean(apart))
        series["weak_speed_up"].append(rate(facts) / one)
        series["apart_speed_up"].append(sum(apart) / one)
        sampling = [[side[f"sample_{i}_s"] for side in sides] for i in range(block)]
        unequal_s = sum(max(seconds) - fmean(seconds) for seconds in sampling)
        series["unequal_share"].append(unequal_s / facts["seconds"])
        cpu_s = sum(side["cpu_s"] for side in sides)
        series["cpu_over_apart"].append(facts["cpu_s"] / cpu_s)
    series["strong_speed_up"] = [rate(a) / b for a, b in zip(strong, whole, strict=True)]
    for kind in ("weak", "strong"):
        series[f"{kind}_efficiency"] = [s / num_ranks for s in series[f"{kind}_speed_up"]]
    return series


def rate(facts: Facts) -> float:
    return facts["episodes"] / facts["seconds"]


def share(facts: Facts, num_ranks: int) -> float:
    """The share of a rank's time in collectives, including the wait for other ranks."""
    return (facts["wait_s"] + facts["exchange_s"]) / num_ranks / facts["seconds"]


def show(series: Mapping[str, Sequence[float]], num_ranks: int, fits: bool) -> None:
    """Print the rows of a number of ranks. Bounds hold only if each rank has its own core."""
    ranks = f"{num_ranks} rank{'s' * (num_ranks > 1)}" + " (oversubscribed)" * (not fits)
    described = {"weak_speed_up": DESCRIBED, "apart_speed_up": DESCRIBED_APART}
    for name, label in ROWS.items():
        if name not in series:
            continue
        middle = median(series[name])
        target = ""
        if name == "weak_scaling" and fits and num_ranks in LEAST:
            least = LEAST[num_ranks]
            target = f">= {least}" + ", missed" * (middle < least)
        if name == "wait_share" and fits and num_ranks in MOST:
            most = MOST[num_ranks]
            target = f"<= {most}" + ", missed" * (middle > most)
        low, shown, high = (
            f"{value:,.0f}" if value >= 1e4 else f"{value:.4g}"
            for value in (min(series[name]), middle, max(series[name]))
        )
        promised = described.get(name, {}).get(num_ranks, "")
        row(label.format(ranks=ranks), shown, f"{low} to {high}", str(promised), target)


def row(label: str, *cells: str) -> None:
    """Format a line of a table."""
    widths = (15, 18, 9, 15)
    shown = [f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=False)]
    print(f"| {label:<60} | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
