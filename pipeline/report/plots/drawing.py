"""Colours, axes, intervals and legends of all pictures; PNG files, and SVG elements of a page.

matplotlib is imported only to draw.
"""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.report.run_files import RunData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
else:
    Axes = Figure = Any

WIDTH = 5.4  # width in inches; the text is legible in a printed paper
FONT_SIZE = 8.5
DPI = 175
# Okabe and Ito's palette: colour-blind readers can tell the colours apart.
DARK = ("#0072B2", "#D55E00", "#009E73")
COLOURS = (*DARK, "#CC79A7", "#E69F00", "#56B4E9")
GREY = "#767676"
# Almost black and white; `inline_svg` would replace exact black and white.
DARK_INK = "#010101"
LIGHT_INK = "#fffffe"
PAGE_COLOURS = {"#ffffff": "var(--paper)", "#000000": "currentColor"}

BELOW: dict[str, Any] = {"loc": "outside lower center", "frameon": False, "fontsize": "small"}

NO_INTERVAL = "-"
HUGE = 1e6  # numbers above this size are written with an exponent

Number = Sequence[float | None]  # a value and both bounds of the interval
Handle = Sequence[Any]  # text and line style of a legend entry


def new_figure(run: RunData | None, words: str, width: float, height: float) -> Figure:
    """Return a figure (size in inches); the title shows the name and the seed of `run`."""
    from matplotlib import figure

    drawn = figure.Figure(figsize=(width, height), layout="constrained")
    name = f"{run.name}, seed {run.config['run']['seed']}: " if run else ""
    drawn.suptitle(name + words, wrap=True, fontsize="medium")
    return drawn


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
    label_steps(panels[-1])
    return figure, panels


def label_steps(axes: Axes) -> None:
    axes.set_xlabel("optimizer step")
    axes.locator_params(axis="x", integer=True)


def with_bounds(number: Number | None) -> list[float]:
    """Return value, low and high, or [] if one of the three is missing."""
    return [] if number is None or None in number else [x or 0.0 for x in number]


def ci_text(number: Number | None, sign: str = "", digits: int = 2) -> str:
    """Format (value, low, high) as `+0.55 [+0.47, +0.63]`, or as a dash if a number is missing."""
    # Adding zero removes the - of -0.
    rounded = [round(x, digits) + 0.0 for x in with_bounds(number)]
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
    last = run.train[-1]["step"] + 0.5 if run.train else 1.0  # a stage may go on
    for stage in run.stages:
        first = stage["first_step"] + 0.5
        end = min(first + stage["num_steps"], last)
        if stage["first_step"]:
            axes.axvline(first, color="black", linewidth=1)
        room = int((end - first) / last * 50)  # about how many characters the stage has room for
        if with_names and room > 3:
            name = stage["name"] if len(stage["name"]) <= room else f"{stage['name'][: room - 2]}.."
            axes.text(
                (first + end) / 2,
                1.02,
                name,
                transform=axes.get_xaxis_transform(),
                ha="center",
                fontsize="small",
            )


def legend(figure: Figure, handles: Sequence[Handle]) -> None:
    from matplotlib.lines import Line2D

    usual: dict[str, Any] = {"color": GREY}
    lines = [Line2D([], [], **{**usual, **style}, label=name) for name, style in handles]
    columns = max(1, int(figure.get_figwidth() // 2.2))
    figure.legend(handles=lines, ncols=columns, **BELOW)


def draw(
    functions: Mapping[str, Callable[[Any], Figure | None]], content: Any
) -> dict[str, Figure]:
    """Call each function; return the figures by name, without functions that drew nothing."""
    from matplotlib import rc_context

    with rc_context({"font.size": FONT_SIZE}):
        figures = {name: function(content) for name, function in functions.items()}
    return {name: figure for name, figure in figures.items() if figure is not None}


def save_pictures(figures: Mapping[str, Figure], folder: Path) -> None:
    for name, figure in figures.items():
        figure.savefig(folder / f"{name}.png", dpi=DPI)
        figure.set_layout_engine(None)  # the SVG element keeps the layout of the PNG file


def inline_svg(figure: Figure, name: str) -> str:
    """Return the figure as an SVG element with the text and background colours of the page.

    The element has no links. Ids are hashes of `name` and of the content, so that pictures on the
    same page have different ids.
    """
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r'^<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1">', text)
    used = set(re.findall(r'(?:url\(|href=")#([\w.-]+)', text))
    text = re.sub(r' id="([\w.-]+)"', lambda found: found[0] if found[1] in used else "", text)
    for colour, of_page in PAGE_COLOURS.items():
        text = text.replace(colour, of_page)
    for index, colour in enumerate(COLOURS):
        of_domain = rf"\1var(--domain-{index})"
        text = re.sub(rf"(<text [^>]*fill: ){colour}", of_domain, text, flags=re.IGNORECASE)
    return re.sub(r"\n\s*", "\n", text)
