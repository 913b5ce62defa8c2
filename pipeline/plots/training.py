"""Stop reasons, zero-std groups, time and memory of training; imports matplotlib only to draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pipeline.plots.plots import COLOURS, WIDTH, legend, new_figure, stage_bands, tidy, title
from pipeline.tracking.run_files import RunData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_BARS = 120  # along the steps; of more, neighbours are averaged
PALE = "#999999"

Layer = tuple[str, Sequence[float], str]  # name, value of each step, colour


def stop_reasons(run: RunData) -> Figure:
    """Shares of the reasons for which episodes ended, step by step."""
    prefix = "rollout/stop/"
    reasons = sorted({key for record in run.train for key in record if key.startswith(prefix)})
    layers = [
        (reason.removeprefix(prefix), _column(run.train, reason), colour)
        for reason, colour in zip(reasons, chain(COLOURS, repeat(PALE)), strict=False)
    ]
    shown = [layer for layer in layers if any(layer[1])]
    return _shares(run, shown, "why episodes ended", "episodes")


def zero_std_groups(run: RunData) -> Figure:
    """Shares of groups that are all solved, all failed or too small, or have a signal."""
    failed = _column(run.train, "rollout/all_failed")
    solved = _column(run.train, "rollout/all_solved")
    few = _column(run.train, "rollout/too_few_left")
    rest = [1 - f - s - n for f, s, n in zip(failed, solved, few, strict=True)]
    layers = [
        ("all failed", failed, COLOURS[1]),
        ("with a signal", rest, COLOURS[0]),
        ("all solved", solved, COLOURS[5]),
        *([("fewer than two left", few, PALE)] if any(few) else []),
    ]
    return _shares(run, layers, "groups without a signal", "groups")


def time_and_memory(run: RunData) -> Figure:
    """Seconds of each phase and the peak memory of a rank, step by step."""
    figure = new_figure(WIDTH, 3.9)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    sample, environment, update, wait, step = (
        _column(run.timings, f"perf/{name}_s")
        for name in ("sample", "environment", "update", "wait", "step")
    )
    sampling = [s - e for s, e in zip(sample, environment, strict=True)]
    known = zip(sample, update, wait, strict=True)
    other = [max(0.0, t - sum(k)) for t, k in zip(step, known, strict=True)]
    layers: list[Layer] = [
        ("sampling", sampling, COLOURS[0]),
        ("environment", environment, COLOURS[4]),
        ("update", update, COLOURS[2]),
        ("waiting for ranks", wait, COLOURS[3]),
        ("other", other, PALE),
    ]
    steps = [record["step"] for record in run.timings]
    _stacked(above, steps, layers)
    above.set_ylabel("seconds of a step")
    memory = [number / 1000 for number in _column(run.timings, "perf/peak_memory_mb")]
    _stacked(below, steps, [("memory", memory, COLOURS[5])])
    below.set_ylabel("peak memory\nof a rank, GB")
    below.set_xlabel("optimizer step")
    for axes in (above, below):
        stage_bands(axes, run, with_names=axes is above, lines=True)
        tidy(axes)
    _describe(figure, run, "time and memory", layers)
    return figure


def _shares(run: RunData, layers: Sequence[Layer], words: str, of: str) -> Figure:
    figure = new_figure(WIDTH, 2.7)
    axes = figure.subplots()
    _stacked(axes, [record["step"] for record in run.train], layers)
    stage_bands(axes, run, lines=True)
    axes.set_ylim(0, 1)
    axes.set_ylabel(f"share of {of}")
    axes.set_xlabel("optimizer step")
    tidy(axes)
    _describe(figure, run, words, layers)
    return figure


def _stacked(axes: Axes, steps: Sequence[int], layers: Sequence[Layer]) -> None:
    """Stack the layers, with a bar for each step or for the mean of neighbouring steps."""
    width = -(-len(steps) // MAX_BARS)
    starts = range(0, len(steps), width)
    edges = [*(steps[i] - 0.5 for i in starts), steps[-1] + 0.5]
    below = [0.0] * len(starts)
    for _, values, colour in layers:
        means = [fmean(values[i : i + width]) for i in starts]
        top = [b + m for b, m in zip(below, means, strict=True)]
        axes.stairs(top, edges, baseline=below, fill=True, color=colour, linewidth=0)
        below = top
    axes.set_xlim(edges[0], edges[-1])


def _describe(figure: Figure, run: RunData, words: str, layers: Sequence[Layer]) -> None:
    square = {"marker": "s", "linestyle": "none", "markersize": 9}
    title(figure, run, words)
    legend(figure, [(name, {**square, "color": colour}) for name, _, colour in layers])


def _column(records: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [record.get(key) or 0.0 for record in records]
