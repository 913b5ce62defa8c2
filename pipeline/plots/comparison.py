"""The Pareto plot of a comparison; matplotlib is imported only to draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pipeline.plots.plots import COLOURS, WIDTH, error_bar, new_figure, percent, tidy
from pipeline.tracking.run_files import RunData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEAST = 5.0  # percentage points from end to end of an axis
MARKERS = "osD^vPX<>ph"
MIXED = {"marker": "*", "color": "black", "markersize": 13}
ARROW: dict[str, Any] = {
    "xycoords": "axes fraction",
    "textcoords": "axes fraction",
    "arrowprops": {"arrowstyle": "->", "color": "#808080"},
    "color": "#808080",
    "fontsize": "small",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """Runs with equal settings except the seed, and their transfer numbers."""

    label: str
    runs: Sequence[RunData]
    transfer: Mapping[str, Any]  # `transfer.summary` of all seeds
    is_mixed: bool
    against_mixed: Mapping[str, Any] | None  # minus mixed training with as many episodes

    @property
    def episodes(self) -> int:
        return int(self.transfer["episodes"])


def pareto(rows: Sequence[Row]) -> Figure:
    """New-domain gain against forgetting, a point for each configuration.

    Labels stand below the plot, so that they never overlap.
    """
    shown = [row for row in rows if percent(row.transfer["metrics"].get("stage_gain"))]
    figure = new_figure(WIDTH, 3.6 + 0.17 * len(shown))
    axes = figure.subplots()
    styles = zip(cycle(COLOURS), cycle(MARKERS), strict=False)
    for row in shown:
        style: dict[str, Any] = MIXED
        if row.is_mixed:
            gain = 100 * row.transfer["metrics"]["stage_gain"][0]
            axes.axhline(gain, color="black", linestyle=":", linewidth=1)
        else:
            colour, marker = next(styles)
            style = {"marker": marker, "color": colour, "markersize": 6}
        _cross(axes, row, style)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.margins(0.08)
    # At least a few percentage points, so that noise does not look like a difference.
    for limits, put in ((axes.get_xlim(), axes.set_xlim), (axes.get_ylim(), axes.set_ylim)):
        middle, half = fmean(limits), max(LEAST / 2, (limits[1] - limits[0]) / 2)
        put(middle - half, middle + half)
    axes.set_xlabel("forgetting, percentage points (+ lost, - gained)")
    axes.set_ylabel("new-domain gain, percentage points")
    tidy(axes)
    axes.grid(axis="x", linewidth=0.5, alpha=0.4)
    axes.annotate("better", xy=(0.02, 0.98), xytext=(0.1, 0.9), **ARROW)
    seeds = sorted({len(row.runs) for row in shown}) or [0]
    words = " to ".join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))
    name = f"gain against forgetting, 95 % intervals over tasks and {words} seed(s)"
    figure.suptitle(name, fontsize="medium")
    columns = 2 if max((len(row.label) for row in shown), default=0) < 34 else 1
    figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize="small")
    return figure


def _cross(axes: Axes, row: Row, style: dict[str, Any]) -> None:
    """A cross of intervals; a row that has nothing to forget stands at zero."""
    metrics = row.transfer["metrics"]
    gain, forgetting = percent(metrics["stage_gain"]), percent(metrics.get("forgetting"))
    lost = forgetting[0] if forgetting else 0.0
    lines: dict[str, Any] = {"linestyle": "none", "elinewidth": 1, "capsize": 2.5, "zorder": 3}
    across = error_bar(*forgetting) if forgetting else None
    axes.errorbar(lost, gain[0], yerr=error_bar(*gain), xerr=across, ecolor=style["color"], **lines)
    axes.plot(lost, gain[0], label=row.label, linestyle="none", zorder=4, **style)
