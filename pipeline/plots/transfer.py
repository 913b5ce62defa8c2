"""The accuracy matrix, transfer and tools as pictures; matplotlib is imported only to draw."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, product
from textwrap import fill
from typing import TYPE_CHECKING, Any

from pipeline.plots.plots import (
    COLOURS,
    DARK_INK,
    LIGHT_INK,
    WIDTH,
    Number,
    error_bar,
    new_figure,
    percent,
    tidy,
    title,
)
from pipeline.tracking.run_files import RunData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY = "#767676"  # of means over domains
POINTS = "percentage points"

Bar = tuple[str, Number, str]  # name, value with its interval, colour


def accuracy_matrix(run: RunData) -> Figure:
    """Success of each domain (columns) after each stage (rows), in per cent with intervals."""
    transfer = run.transfer
    names, points = transfer["domains"]["names"], transfer["points"]
    trained = {(stage["name"], name) for stage in transfer["stages"] for name in stage["own"]}
    cells = product(enumerate(points), enumerate(names))
    framed = {(p, c) for (p, point), (c, name) in cells if (point, name) in trained}
    figure, axes = _heat_map(run.points, names, transfer["domains"]["matrix"], framed, height=0.5)
    axes.set_xlabel(
        "success of sampled trials, %, with 95 % interval\nframed: trained in that stage"
    )
    title(figure, run, "accuracy matrix")
    return figure


def tools(run: RunData) -> Figure:
    """Share of each tool's calls without an error (rows) after each stage (columns)."""
    transfer = run.transfer
    of = transfer["tools"]
    columns = [point.replace(" the ", " ") for point in run.points]
    known = [c for c, name in enumerate(of["names"]) if not name.endswith("/unknown")]
    names = [of["names"][c] for c in known]
    numbers = [[row[c] for row in of["matrix"]] for c in known]
    figure, axes = _heat_map(names, columns, numbers, set(), height=0.25)
    axes.set_xlabel("held-out calls answered without an error, %, with 95 % interval")
    title(figure, run, "success of tool calls")
    return figure


def _heat_map(
    rows: Sequence[str],
    columns: Sequence[str],
    numbers: Sequence[Sequence[Number | None]],
    framed: set[tuple[int, int]],
    height: float,
) -> tuple[Figure, Axes]:
    """Cells with their numbers in per cent; a dash stands for no number or no interval."""
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    figure = new_figure(max(WIDTH, 0.95 * len(columns) + 1.9), height * len(rows) + 1.1)
    axes = figure.subplots()
    colours = colormaps["cividis"]
    apart = "\n" if height > 0.3 else " "
    for r, row in enumerate(numbers):
        for c, number in enumerate(row):
            if not (points := percent(number)):
                axes.text(c, r, "-", ha="center", va="center")
                continue
            value, low, high = points
            axes.add_patch(Rectangle((c - 0.5, r - 0.5), 1, 1, color=colours(value / 100)))
            ink = DARK_INK if value > 55 else LIGHT_INK
            words = f"{value:.0f}{apart}[{low:.0f}, {high:.0f}]"
            size = "small" if height > 0.3 else "x-small"
            axes.text(c, r, words, ha="center", va="center", color=ink, fontsize=size)
    frame: dict[str, Any] = {"fill": False, "edgecolor": COLOURS[1], "linewidth": 2.5, "zorder": 3}
    for r, c in framed:
        axes.add_patch(Rectangle((c - 0.46, r - 0.44), 0.92, 0.88, **frame))
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xticks(range(len(columns)), [fill(name, 13) for name in columns])
    axes.set_yticks(range(len(rows)), rows)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure, axes


def transfer(run: RunData) -> Figure:
    """Changes over each stage, backward transfer, forward transfer and forgetting, as bars."""
    panels = _bar_panels(run)
    rows = [len(bars) for _, bars, _ in panels]
    figure = new_figure(WIDTH, 0.2 * sum(rows) + 0.65 * len(rows) + 0.4)
    many = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[n + 1 for n in rows]).flat
    for axes, (words, bars, directions) in zip(many, panels, strict=True):
        _draw_bars(axes, bars)
        # On the right it has room over the names, however long these are.
        axes.set_title(words, loc="right", fontsize="medium", fontweight="bold")
        axes.set_xlabel(f"{POINTS}; {directions}", fontsize="small")
    title(figure, run, "changes, with 95 % intervals")
    return figure


def _bar_panels(run: RunData) -> list[tuple[str, list[Bar], str]]:
    of = run.transfer["domains"]
    colours = dict(zip(of["names"], cycle(COLOURS), strict=False))
    bars: list[Bar] = []
    for stage, effects in zip(run.transfer["stages"], of["effects"], strict=True):
        for name, number in zip(of["names"], effects, strict=True):
            kind = " (own)" if name in stage["own"] else ""
            bars.append((f"stage {stage['name']}: {name}{kind}", number, colours[name]))
    panels = [("change of each domain over each stage", bars, "- lost, + gained")]
    for name, words, directions in (
        ("backward_transfer", "backward transfer: what later stages did", ""),
        ("forward_transfer", "forward transfer: what earlier stages did", ""),
        ("forgetting", "forgetting: best success minus that at the end", "+ lost, - gained"),
    ):
        found: dict[str, Any] = of[name]
        if found:
            bars = [(column, number, colours[column]) for column, number in found.items()]
            if len(bars) > 1 and name in run.transfer["metrics"]:
                bars.append(("mean", run.transfer["metrics"][name], GREY))
            panels.append((words, bars, directions or "- lost, + helped"))
    return panels


def _draw_bars(axes: Axes, bars: Sequence[Bar]) -> None:
    """Draw horizontal bars in percentage points; a number without an interval gets no bar."""
    for y, (_, number, colour) in enumerate(bars):
        if not (points := percent(number)):
            axes.text(0, y, "no interval", va="center", fontsize="small")
            continue
        axes.barh(y, points[0], height=0.7, color=colour)
        line: dict[str, Any] = {"fmt": "none", "ecolor": "black", "capsize": 2.5, "elinewidth": 1}
        axes.errorbar(points[0], y, xerr=error_bar(*points), **line)
        words = "{} [{}, {}]".format(*(f"{round(x, 1) + 0.0:+.1f}" for x in points))
        beside: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "fontsize": "x-small"}
        axes.text(1.02, y, words, va="center", **beside)
    axes.axvline(0, color="black", linewidth=1)
    axes.set_yticks(range(len(bars)), [name for name, _, _ in bars], fontsize="small")
    axes.set_ylim(len(bars) - 0.4, -0.6)
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, -1.0), max(high, 1.0))
    tidy(axes, grid="x")
