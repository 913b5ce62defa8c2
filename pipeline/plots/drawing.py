"""Colours, axes, intervals and legends of all pictures; matplotlib is imported only to draw."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pipeline.tracking.run_files import RunData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
else:
    Axes = Figure = Any

WIDTH = 5.4  # width in inches; the text is legible in a printed paper
FONT_SIZE = 8.5
# Okabe and Ito's palette: colour-blind readers can tell the colours apart.
DARK = ("#0072B2", "#D55E00", "#009E73")
COLOURS = (*DARK, "#CC79A7", "#E69F00", "#56B4E9")
GREY = "#767676"
# Almost black and white; `inline_svg` would replace exact black and white.
DARK_INK = "#010101"
LIGHT_INK = "#fffffe"

BELOW: dict[str, Any] = {"loc": "outside lower center", "frameon": False, "fontsize": "small"}

NO_INTERVAL = "-"
HUGE = 1e6  # numbers above this size are written with an exponent

Number = Sequence[float | None]  # a value and both bounds of the interval
Handle = Sequence[Any]  # text and line style of a legend entry


def new_figure(run: RunData | None, words: str, width: float, height: float) -> Figure:
    """Return a figure (size in inches); the title shows the name and the seed of `run`."""
    from matplotlib import figure

    made = figure.Figure(figsize=(width, height), layout="constrained")
    name = f"{run.name}, seed {run.config['run']['seed']}: " if run else ""
    made.suptitle(name + words, wrap=True, fontsize="medium")
    return made


def panels_over_steps(
    run: RunData, words: str, heights: Sequence[int], height: float
) -> tuple[Figure, list[Axes]]:
    """Return a figure with one panel for each number in `heights`; x axes show optimizer steps."""
    figure = new_figure(run, words, WIDTH, height)
    grid = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)
    panels: list[Axes] = list(grid.flat)
    for axes in panels:
        tidy(axes)
        _mark_stages(axes, run, with_names=axes is panels[0])
    panels[-1].set_xlabel("optimizer step")
    return figure, panels


def complete(number: Number | None) -> list[float]:
    """Return value, low and high, or [] if one of the three is missing."""
    return [] if number is None or None in number else [x or 0.0 for x in number]


def shown(number: Number | None, sign: str = "", digits: int = 2) -> str:
    """Format (value, low, high) as `+0.55 [+0.47, +0.63]`, or as a dash if a number is missing."""
    rounded = [round(x, digits) + 0.0 for x in complete(number)]  # adding zero removes the - of -0
    texts = [f"{x:{sign}.{digits}{'g' if abs(x) > HUGE else 'f'}}" for x in rounded]
    return "{} [{}, {}]".format(*texts) if texts else NO_INTERVAL


def error_bar(value: float, low: float, high: float) -> list[list[float]]:
    """Return an interval as the argument `xerr` or `yerr` of matplotlib's `errorbar`."""
    return [[max(0.0, value - low)], [max(0.0, high - value)]]


def tidy(axes: Axes, grid: Any = "y") -> None:
    axes.set_axisbelow(True)
    axes.grid(axis=grid, linewidth=0.5, alpha=0.4)
    axes.spines[["top", "right"]].set_visible(False)


def _mark_stages(axes: Axes, run: RunData, with_names: bool) -> None:
    last = max((stage["first_step"] + stage["num_steps"] for stage in run.stages), default=1)
    for stage in run.stages:
        first = stage["first_step"] + 0.5
        end = stage["first_step"] + stage["num_steps"] + 0.5
        if stage["first_step"]:
            axes.axvline(first, color="black", linewidth=1)
        room = int((end - first) / last * 50)  # about how many characters the stage has room for
        if with_names and room > 3:
            name = stage["name"] if len(stage["name"]) <= room else f"{stage['name'][: room - 2]}.."
            above = axes.get_xaxis_transform()
            middle = (first + end) / 2
            axes.text(middle, 1.02, name, transform=above, ha="center", fontsize="small")


def legend(figure: Figure, handles: Sequence[Handle]) -> None:
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], **{"color": GREY, **style}, label=name) for name, style in handles]
    columns = max(1, int(figure.get_figwidth() // 2.2))
    figure.legend(handles=lines, ncols=columns, **BELOW)
