"""All pictures of a run or a comparison, as PNG files and as SVG elements of a page."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.plots import training, transfer
from pipeline.plots.drawing import COLOURS, FONT_SIZE
from pipeline.tracking.run_files import RunData

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 175
OF_RUN: dict[str, Callable[[RunData], Figure | None]] = {
    "learning_curves": training.learning_curves,
    "stage_performance": transfer.stage_performance,
    "accuracy_matrix": transfer.accuracy_matrix,
    "transfer": transfer.transfer,
    "stop_reasons": training.stop_reasons,
    "zero_std_groups": training.zero_std_groups,
    "time_and_memory": training.time_and_memory,
}
OF_COMPARISON = {"pareto": transfer.pareto}
PAGE_COLOURS = {"#ffffff": "var(--paper)", "#000000": "currentColor"}


def pictures_of(run: RunData) -> dict[str, Figure]:
    """Return the figures of a run by file name, without the figures that would be empty."""
    return draw(OF_RUN, run)


def draw(
    functions: Mapping[str, Callable[[Any], Figure | None]], content: Any
) -> dict[str, Figure]:
    """Call each function; return the figures by name, without functions that drew nothing."""
    from matplotlib import rc_context

    with rc_context({"font.size": FONT_SIZE}):
        figures = {name: function(content) for name, function in functions.items()}
    return {name: figure for name, figure in figures.items() if figure is not None}


def save(figures: Mapping[str, Figure], folder: Path) -> None:
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
