"""All pictures of a run, as files and as parts of a page; matplotlib is imported only to draw."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.plots.plots import COLOURS, FONT_SIZE, learning_curves, stage_performance
from pipeline.plots.training import stop_reasons, time_and_memory, zero_std_groups
from pipeline.plots.transfer import accuracy_matrix, tools, transfer
from pipeline.tracking.run_files import RunData

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 175
PAPER, INK = "#ffffff", "#000000"


def pictures_of(run: RunData) -> dict[str, Figure]:
    """The pictures that have something to show, by the names of their files."""
    drawn: dict[str, Callable[[RunData], Figure]] = {
        "learning_curves": learning_curves,
        "stage_performance": stage_performance,
    }
    if run.transfer:
        drawn["accuracy_matrix"] = accuracy_matrix
        if run.transfer["domains"]["effects"]:
            drawn["transfer"] = transfer
        if any(not name.endswith("/unknown") for name in run.transfer["tools"]["names"]):
            drawn["tools"] = tools
    keys = {key for record in run.train for key in record}
    if any(key.startswith("rollout/stop/") for key in keys):
        drawn["stop_reasons"] = stop_reasons
    if "rollout/all_failed" in keys:
        drawn["zero_std_groups"] = zero_std_groups
    if any("perf/sample_s" in record for record in run.timings):
        drawn["time_and_memory"] = time_and_memory
    return drawings(**{name: partial(draw, run) for name, draw in drawn.items()})


def drawings(**draw: Callable[[], Figure]) -> dict[str, Figure]:
    """The figures that the functions draw, by name, all with text of one size."""
    from matplotlib import rc_context

    with rc_context({"font.size": FONT_SIZE}):
        return {name: function() for name, function in draw.items()}


def save(figures: Mapping[str, Figure], folder: Path) -> None:
    for name, figure in figures.items():
        figure.savefig(folder / f"{name}.png", dpi=DPI)
        figure.set_layout_engine(None)  # the page gets the same layout


def inline_svg(figure: Figure, name: str) -> str:
    """The figure as an SVG element that takes the text and paper colours of its page.

    It has no outside links, and its ids begin with `name`, so that a page can hold many.
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

    def new_id(match: re.Match[str]) -> str:
        return f' id="{name}-{match[1]}"' if match[1] in used else ""

    text = re.sub(r' id="([\w.-]+)"', new_id, text)
    text = re.sub(r'(url\(|href=")#', rf"\1#{name}-", text)
    text = text.replace(PAPER, "var(--paper)").replace(INK, "currentColor")
    for index, colour in enumerate(COLOURS):
        text = re.sub(
            rf"(<text [^>]*fill: ){colour}", rf"\1var(--domain-{index})", text, flags=re.IGNORECASE
        )
    return re.sub(r"\n\s*", "\n", text)
