"""Check that the number of ranks does not change results: the full grid on CPU ranks, in one table.

    python scripts/proofs/invariance.py

- update: one batch of 40 episodes of different lengths on every number of ranks, in 1, 2, 4 and 8
  micro-batches, padded, joined or by a token budget. One group has zero advantages, one episode has
  no sampled token, and in some cells one rank has no episode. The reference is one process with one
  padded micro-batch.
- losses: every loss_type at both levels of importance sampling, on two ranks and on one.
- distillation: the advantages of teachers of three domains, on 1, 2 and 3 ranks.
- warm start: parameters after 100 steps, and after 20 deterministic steps, on several ranks.
  Rounding grows with the number of steps. The next checks start from the whole warm start.
- replay: the tokens of a run on one rank are forced in runs on more ranks. Each step starts
  from the same weights, so rounding does not accumulate.
- deterministic: a whole run with `deterministic: true`, with equal tokens and equal bits.

The exit code is 1 if a bound is broken. `tests/end_to_end/test_invariance.py` is the small version.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.proofs.grid import (
    LAYOUTS,
    LEVELS,
    LOSS_TYPES,
    Cell,
    difference,
    play_updates,
    update_cells,
)
from scripts.proofs.runs import play_run

COUNTS = (1, 2, 4, 8)
# Layout, shard and deterministic of the updates with remedies against forgetting.
REMEDIES = (
    *(("padded", "none", False), ("balanced", "optimizer", False), ("token-budget", "full", False)),
    ("shared", "none", True),
)
RUN = ["--eval-tasks-per-domain", "8", "--eval-trials", "1", "--validation-steps", "0"]
RUN += ["--save-steps", "0"]


@dataclass(frozen=True)
class Row:
    """A line of the table: the claim, the measured cases, the worst value, and its bound."""

    claim: str
    measured: str
    worst: float
    bound: float
    least: bool = False  # Whether the bound is a lower bound.

    @property
    def holds(self) -> bool:
        return self.worst >= self.bound if self.least else self.worst <= self.bound


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4, 8])
    parser.add_argument("--steps", type=int, default=20, help="GRPO steps of the runs")
    parser.add_argument("--warm-start-steps", type=int, default=100, help="that are compared")
    parser.add_argument("--run-ranks", type=int, nargs="+", default=[1, 2, 4])
    options = parser.parse_args(argv)
    begun, broken = time.perf_counter(), 0
    print(f"| {'claim':<34} | {'measured on':<55} | {'worst':>8} | {'bound':>9} |")
    print(f"| {'---':<34} | {'---':<55} | {'--:':>8} | {'--:':>9} |")
    for row in measure(options):
        bound = f"{'≥' if row.least else '≤'} {row.bound:.3g}"
        line = f"| {row.claim:<34} | {row.measured:<55} | {row.worst:>8.2g} | {bound:>9} |"
        print(line if row.holds else f"{line} BROKEN", flush=True)
        broken += not row.holds
    print(f"{broken} bounds broken; {time.perf_counter() - begun:.0f} s")
    return int(broken > 0)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    yield from updates("small", options.ranks, COUNTS)
    yield from updates("tiny", [n for n in options.ranks if n <= 2], (1, 4))
    yield from losses()
    yield from distillation([n for n in options.ranks if n <= 3])
    with TemporaryDirectory(prefix="invariance-") as folder:
        yield from warm_starts(Path(folder), options.run_ranks, options.warm_start_steps)
        yield from runs(Path(folder), options.run_ranks, options.steps)


def updates(model: str, rank_counts: list[int], counts: tuple[int, ...]) -> Iterator[Row]:
    cells = update_cells(rank_counts, counts, model)
    singles = [Cell(model=model, dtype=dtype) for dtype in ("float64", "float32")]
    faulty = [Cell(model=model, num_ranks=n, means=True) for n in rank_counts if n > 1]
    found = play_updates([*cells, *faulty])
    exact, rounded = (found[cell] for cell in singles)
    rounding = difference(rounded.gradient, exact.gradient)
    size = f"{len(exact.parameters) / 1e6:.2g} M parameters"
    for dtype, single, bound in (("float64", exact, 1e-12), ("float32", rounded, 1e-6)):
        here = [found[c] for c in cells if c.dtype == dtype]
        on = f"{listed(rank_counts)} ranks, {len(here)} updates, {size}"
        gradient = max(difference(o.gradient, single.gradient) for o in here)
        parameters = max(difference(o.parameters, single.parameters) for o in here)
        yield Row(f"update, {dtype}: gradient", on, gradient, bound)
        yield Row(f"update, {dtype}: parameters", on, parameters, bound)
    error = max(difference(o.gradient, exact.gradient) for o in here) / rounding
    on = f"against float64; one process is {rounding:.1g} off"
    yield Row("update, float32: error ratio", on, error, 1.5)
    differing = sum(not outcome.same for outcome in found.values())
    yield Row("ranks with other parameters", f"all {len(found)} updates", differing, 0)
    means = [difference(found[cell].gradient, exact.gradient) for cell in faulty]
    if means:
        on = "the fault that must be seen"
        yield Row("means of each rank instead", on, min(means), 0.01, least=True)


def listed(rank_counts: list[int]) -> str:
    return ", ".join(map(str, rank_counts))


def losses() -> Iterator[Row]:
    kinds = [(loss_type, level) for loss_type in LOSS_TYPES for level in LEVELS]
    one, two = (
        [Cell(num_ranks=n, count=2, loss_type=t, level=v, layout="token-budget") for t, v in kinds]
        for n in (1, 2)
    )
    found = play_updates([*one, *two])
    pairs = [(found[b], found[a]) for a, b in zip(one, two, strict=True)]
    on = f"2 ranks, {len(kinds)} losses"
    worst = max(difference(b.gradient, a.gradient) for b, a in pairs)
    yield Row("every loss, float64: gradient", on, worst, 1e-12)
    yield from remedies([1, 2, 3])


def remedies(rank_counts: list[int]) -> Iterator[Row]:
    """Remedies against forgetting that are terms of the loss."""
    for name, learned_beta, movement_coef in (("learned_beta", 5.0, 0.0), ("movement", 0.0, 0.1)):
        cells = [
            Cell(
                num_ranks=n,
                layout=layout,
                shard=shard,
                deterministic=exact,
                learned_beta=learned_beta,
                movement_coef=movement_coef,
            )
            for n in rank_counts
            for layout, shard, exact in REMEDIES
        ]
        found = play_updates([*cells, Cell()])
        plain, first = found[Cell()], found[cells[0]]
        on = f"{listed(rank_counts)} ranks, {len(cells)} updates"
        worst = max(difference(found[cell].gradient, first.gradient) for cell in cells)
        yield Row(f"{name}, float64: gradient", on, worst, 1e-12)
        least = difference(first.gradient, plain.gradient)
        yield Row(f"{name}: change of the gradient", "1 rank", least, 0.01, least=True)
        exact = {found[cell].parameters.tobytes() for cell in cells if cell.deterministic}
        yield Row(f"{name}: other parameters", "deterministic, all ranks", len(exact) - 1, 0)
        metrics = "train/learned_kl" if learned_beta else "train/movement"
        values = [found[cell].statistics[metrics] for cell in cells]
        gap = max(abs(value / values[0] - 1) for value in values)
        yield Row(f"{name}: {metrics}", on, gap, 1e-6)


def distillation(rank_counts: list[int]) -> Iterator[Row]:
    cells = [
        Cell(num_ranks=n, count=4, layout=layout, taught=True)
        for n in rank_counts
        for layout in LAYOUTS
    ]
    found = play_updates([*cells, alone := Cell(taught=True)])
    on = f"{listed(rank_counts)} ranks, {len(cells)} updates"
    for name in ("gradient", "parameters"):
        exact = getattr(found[alone], name)
        worst = max(difference(getattr(found[cell], name), exact) for cell in cells)
        yield Row(f"distillation, float64: {name}", on, worst, 1e-12)


def warm_starts(folder: Path, rank_counts: list[int], num_steps: int) -> Iterator[Row]:
    first, others = rank_counts[0], rank_counts[1:]
    for flag, steps, bound in (("--no-deterministic", num_steps, 1e-5), ("--deterministic", 20, 0)):
        flags = [*RUN, flag, "--max-steps", "0", "--warm-start-steps", str(steps)]
        warm = {n: play_run(n, flags, folder / f"{n}{flag}").parameters for n in rank_counts}
        worst = max(float(np.abs(warm[n] - warm[first]).max()) for n in others)
        on = f"{listed(rank_counts)} ranks, {steps} steps {'' if bound else ', deterministic'}"
        yield Row("warm start: largest difference", on.replace(" ,", ","), worst, bound)


def runs(folder: Path, rank_counts: list[int], num_steps: int) -> Iterator[Row]:
    first, others = rank_counts[0], rank_counts[1:]
    play_run(2, [*RUN, "--max-steps", "0"], folder / "warm")
    start = ["--model", str(folder / "warm" / "checkpoints" / "warm-start"), *RUN]
    start += ["--warm-start-steps", "0", "--max-steps", str(num_steps), "--tasks-per-step", "12"]
    alone = play_run(first, start, folder / "alone")
    forced = alone.forced_streams(seed=1)
    for n in others:
        again = play_run(n, start, folder / f"again-{n}", forced, weights=folder / "alone")
        assert again.num_forced == sum(map(len, forced.values()))
        on = f"{n} ranks, {num_steps} steps, {again.num_forced} tokens"
        yield Row("replay: log-probabilities", on, alone.largest_gap(again), 1e-5)
        yield Row("replay: parameters after a step", on, again.update_gap, 1e-6)
        ties = f"{n} ranks, {len(again.ties)} other draws in {again.num_forced}"
        yield Row("replay: distance from a tie", ties, max(again.ties, default=0.0), 1e-5)
    flags = [*start, "--deterministic"]
    same = play_run(first, flags, folder / "same")
    for n in others:
        other = play_run(n, flags, folder / f"same-{n}")
        differing = sum(same.episodes[place] != said for place, said in other.episodes.items())
        differing += abs(len(same.episodes) - len(other.episodes))
        on = f"{n} ranks, {num_steps} steps, {other.num_tokens} tokens"
        yield Row("deterministic: other episodes", on, differing, 0)
        equal = np.array_equal(same.parameters, other.parameters)
        yield Row("deterministic: other parameters", on, 0 if equal else math.inf, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
