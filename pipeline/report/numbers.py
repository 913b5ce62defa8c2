"""Numbers with 95 % intervals as text, and the table that a run prints at its end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipeline.tracking.run_files import Evaluation, before_and_after, domains_of, number, rate

METRICS = {  # names of transfer metrics in `results.json` and in reports
    "average_accuracy": "average accuracy",
    "total_gain": "total gain",
    "stage_gain": "new-domain gain",
    "backward_transfer": "backward transfer",
    "forward_transfer": "forward transfer",
    "forgetting": "forgetting",
    "learning_efficiency": "learning efficiency",
    "area_under_curve": "area under the learning curve",
}
UNSIGNED = ("average_accuracy", "area_under_curve")
AT_THE_END = ("stage_gain", "backward_transfer", "forward_transfer", "forgetting")
KINDS = {"mean": "sampled", "greedy": "greedy"}  # kinds of success rates
NO_INTERVAL = "-"
HUGE = 1e6  # numbers above this size are written with an exponent

Rows = list[list[str]]  # cells of a table; the first row is the header


def shown(number: Sequence[Any] | None, sign: str = "", digits: int = 2) -> str:
    """`+0.55 [+0.47, +0.63]`; a dash for a number without an interval."""
    if number is None or None in number:
        return NO_INTERVAL
    rounded = [round(x, digits) + 0.0 for x in number]  # adding zero turns -0.00 into 0.00
    value, low, high = (f"{x:{sign}.{digits}{'g' if abs(x) > HUGE else 'f'}}" for x in rounded)
    return f"{value} [{low}, {high}]"


def metric(number: Sequence[Any] | None, name: str, sign: str = "") -> str:
    """A number as text, with the sign and the digits of the transfer metric `name`."""
    is_change = name in METRICS and name not in UNSIGNED
    return shown(number, sign or "+" * is_change, 3 if name == "learning_efficiency" else 2)


def number_table(
    title: str, numbers: Mapping[str, Mapping[str, Any]], names: Iterable[str], sign: str = ""
) -> Rows:
    """Return a row for each key of `numbers`, and a column for each name that has a number."""
    used = [name for name in names if any(of.get(name) for of in numbers.values())]
    rows = [[key, *(metric(of.get(n), n, sign) for n in used)] for key, of in numbers.items()]
    header = [title, *(METRICS.get(name, name) for name in used)]
    return [header, *(row for row in rows if {*row[1:]} - {NO_INTERVAL})]


def change(evaluations: Sequence[Evaluation], transfer: Mapping[str, Any]) -> Rows:
    """Success before GRPO, success after GRPO and the change with its interval.

    A run with evaluations only before or only after GRPO has one success rate and no change.
    """
    before, after = before_and_after(evaluations)
    found = [before, after] if before and after else [before or after]
    rates = {
        domain: [number(rate(e, domain, kind)) for kind in KINDS for e in found]
        for domain in [*domains_of(evaluations), "mean"]
    }
    if len(found) < 2:
        return [["success", *KINDS.values()], *([d, *of] for d, of in rates.items())]
    mean = transfer.get("metrics", {}).get("total_gain")
    gains = {**transfer.get("domains", {}).get("gain", {}), "mean": mean}
    kinds = ["sampled before", "sampled after", "change [95 %]", "greedy before", "greedy after"]
    rows = [[d, *of[:2], shown(gains.get(d), "+"), *of[2:]] for d, of in rates.items()]
    return [["success", *kinds], *rows]


def final_table(results: Mapping[str, Any]) -> str:
    """The text at the end of a run: success before and after GRPO, rewards, transfer metrics."""
    transfer = results.get("transfer", {})
    columns = []
    for i, column in enumerate(zip(*change(results["evaluations"], transfer), strict=True)):
        width = max(map(len, column))
        columns.append([cell.rjust(width) if i else cell.ljust(width) for cell in column])
    lines = ["  ".join(row) for row in zip(*columns, strict=True)]
    if rewards := transfer.get("rewards", {}):
        ends = {domain: map(shown, [*of[:1], *of[1:][-1:]]) for domain, of in rewards.items()}
        lines += ["", *(f"mean reward {d}  {' -> '.join(of)}" for d, of in ends.items())]
    if len(transfer.get("points", [])) > 2:
        numbers = {name: n for name in AT_THE_END if (n := transfer["metrics"].get(name))}
        width = max((len(METRICS[name]) for name in numbers), default=0)
        lines += ["", *(f"{METRICS[n]:{width}}  {metric(of, n)}" for n, of in numbers.items())]
    return "\n".join(lines)
