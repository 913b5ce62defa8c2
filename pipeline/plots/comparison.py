"""The Pareto plot of a comparison; matplotlib is imported only to draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pipeline.plots.plots import COLOURS, WIDTH, tidy
from pipeline.tracking.run_files import RunData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEAST = 5.0  # percentage points from end to end of an axis
MARKERS = "osD^vPX<>ph"
MIXED = {"marker": "*", "color": "black", "markersize": 13}


@dataclass(frozen=True, kw_only=True)
class Row:
    """Runs with equal settings but for the seed, and their transfer numbers."""

    label: str
    runs: Sequence[RunData]
    transfer: Mapping[str, Any]  # `transfer.summary` of all seeds
    is_mixed: bool
    # Against mixed training with as many episodes; None where there is none, or this is it.
    against_mixed: Mapping[str, Any] | None

    @property
    def episodes(self) -> int:
        return int(self.transfer["episodes"])


def pareto(rows: Sequence[Row]) -> Figure:
    """New-domain gain against forgetting, a point for each configuration.

    Labels stand below the plot, so that they never lie on each other.
    """
    from matplotlib.figure import Figure

    shown = [row for row in rows if _known(row, "stage_gain")]
    figure = Figure(figsize=(WIDTH, 3.6 + 0.17 * len(shown)), layout="constrained")
    axes = figure.subplots()
    order = 0
    for row in shown:
        if row.is_mixed:
            style: dict[str, Any] = MIXED
            value = 100 * row.transfer["metrics"]["stage_gain"][0]
            axes.axhline(value, color="black", linestyle=":", linewidth=1)
        else:
            colour, marker = COLOURS[order % len(COLOURS)], MARKERS[order % len(MARKERS)]
            style = {"marker": marker, "color": colour, "markersize": 6}
            order += 1
        _point(axes, row, style)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.margins(0.08)
    _widen(axes)
    axes.set_xlabel("forgetting, percentage points (+ lost, - gained)")
    axes.set_ylabel("new-domain gain, percentage points")
    tidy(axes)
    axes.grid(axis="x", linewidth=0.5, alpha=0.4)
    axes.annotate("better", xy=(0.02, 0.98), xytext=(0.1, 0.9), **_ARROW)
    seeds = sorted({len(row.runs) for row in shown})
    words = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}" if seeds else "0"
    name = f"gain against forgetting, 95 % intervals over tasks and {words} seed(s)"
    figure.suptitle(name, fontsize="medium")
    columns = 2 if max((len(row.label) for row in shown), default=0) < 34 else 1
    figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize="small")
    return figure


_ARROW: dict[str, Any] = {
    "xycoords": "axes fraction",
    "textcoords": "axes fraction",
    "arrowprops": {"arrowstyle": "->", "color": "#808080"},
    "color": "#808080",
    "fontsize": "small",
}


def _widen(axes: Axes) -> None:
    """To a few percentage points at least, so that noise does not look like a difference."""
    for limits, put in ((axes.get_xlim(), axes.set_xlim), (axes.get_ylim(), axes.set_ylim)):
        middle, half = fmean(limits), max(LEAST / 2, (limits[1] - limits[0]) / 2)
        put(middle - half, middle + half)


def _known(row: Row, name: str) -> bool:
    number = row.transfer["metrics"].get(name)
    return number is not None and None not in number


def _point(axes: Axes, row: Row, style: dict[str, Any]) -> None:
    """A cross of intervals; without anything to forget it stands at zero, without one across."""
    gain, low, high = (100 * x for x in row.transfer["metrics"]["stage_gain"])
    lost, across = 0.0, None
    if _known(row, "forgetting"):
        lost, left, right = (100 * x for x in row.transfer["metrics"]["forgetting"])
        across = [[max(0.0, lost - left)], [max(0.0, right - lost)]]
    along = [[max(0.0, gain - low)], [max(0.0, high - gain)]]
    lines: dict[str, Any] = {"linestyle": "none", "elinewidth": 1, "capsize": 2.5, "zorder": 3}
    axes.errorbar(lost, gain, yerr=along, xerr=across, ecolor=style["color"], **lines)
    axes.plot(lost, gain, label=row.label, linestyle="none", zorder=4, **style)
