"""Colours, axes, intervals and legends of all pictures; matplotlib is imported only to draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pipeline.tracking.run_files import RunData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 5.4  # inches, with text of FONT_SIZE: legible in a paper and on a phone
FONT_SIZE = 8.5
# Okabe and Ito's palette, which colour-blind readers can tell apart
DARK = ("#0072B2", "#D55E00", "#009E73")
COLOURS = (*DARK, "#CC79A7", "#E69F00", "#56B4E9")
GREY = "#767676"
# Not quite black and white: these text colours stay as they are on a dark page.
DARK_INK, LIGHT_INK = "#010101", "#fffffe"

Number = Sequence[float | None]  # value, low, high
Handle = tuple[str, dict[str, Any]]  # an entry of a legend: its text, its style


def new_figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def percent(number: Number | None) -> list[float]:
    """A number and its interval in per cent; empty if it has no interval."""
    return [] if number is None or None in number else [100 * (x or 0.0) for x in number]


def error_bar(value: float, low: float, high: float) -> list[list[float]]:
    """The interval of one value, as matplotlib's `errorbar` takes it."""
    return [[max(0.0, value - low)], [max(0.0, high - value)]]


def tidy(axes: Axes, grid: Literal["x", "y", "both"] = "y") -> None:
    """Draw fine grid lines behind the data, and no frame."""
    axes.set_axisbelow(True)
    axes.grid(axis=grid, linewidth=0.5, alpha=0.4)
    axes.spines[["top", "right"]].set_visible(False)


def mark_stages(axes: Axes, run: RunData, with_names: bool = True) -> None:
    """Draw lines between the stages, and their names above."""
    last = max((stage["first_step"] + stage["num_steps"] for stage in run.stages), default=1)
    for stage in run.stages:
        first, end = stage["first_step"] + 0.5, stage["first_step"] + stage["num_steps"] + 0.5
        if stage["first_step"]:
            axes.axvline(first, color="black", linewidth=1)
        room = int((end - first) / last * 50)  # characters, about
        if with_names and room > 3:
            name = stage["name"] if len(stage["name"]) <= room else f"{stage['name'][: room - 2]}.."
            above, middle = axes.get_xaxis_transform(), (first + end) / 2
            axes.text(middle, 1.02, name, transform=above, ha="center", fontsize="small")


def title(figure: Figure, run: RunData, words: str) -> None:
    name = f"{run.config['recipe']}, seed {run.config['run']['seed']}"
    figure.suptitle(f"{name}: {words}", wrap=True, fontsize="medium")


def legend(figure: Figure, handles: Sequence[Handle]) -> None:
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], **{"color": GREY, **style}, label=name) for name, style in handles]
    columns = max(1, int(figure.get_figwidth() // 2.2))
    place: dict[str, Any] = {"loc": "outside lower center", "fontsize": "small"}
    figure.legend(handles=lines, ncols=columns, frameon=False, **place)
