"""Learning curves, stop reasons, zero-std groups, time and memory over the training steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, cycle, repeat
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.evaluation.transfer_metrics import wilson
from pipeline.plots import drawing
from pipeline.plots.drawing import COLOURS, WIDTH, Handle
from pipeline.tracking.run_files import RunData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMOOTHED_OVER = 9  # steps, centred
LEAST_KL = 1e-3  # nats: a KL axis reaches at least this value
PALE = "#999999"
STEP: dict[str, Any] = {"linewidth": 0.8, "alpha": 0.4}
SMOOTHED: dict[str, Any] = {"linewidth": 2}
VALIDATION: dict[str, Any] = {"marker": "s", "markersize": 4.5, "mfc": "white", "linestyle": "none"}
HELD_OUT: dict[str, Any] = {"marker": "o", "markersize": 8, "mec": "black", "linestyle": "none"}
KL: dict[str, Any] = {"marker": "v", "markersize": 4, "linewidth": 1, "linestyle": "--"}
BASELINE: Handle = ("best policy that never reads the record", {"linestyle": ":", "linewidth": 1})
SQUARE: dict[str, Any] = {"marker": "s", "markersize": 9, "linestyle": "none"}
STOP = "rollout/stop/"

Records = Sequence[Mapping[str, Any]]
Layer = tuple[str, np.ndarray[Any, Any], str]  # name, value of each step, colour


def learning_curves(run: RunData) -> Figure:
    """One panel a domain: training reward, validation and held-out success over the steps.

    A thin panel below shows the KL divergence from the policy that had just learned the domain,
    if validations measured it.
    """
    divergences = {d: _points(run.validation, f"validation/{d}/kl") for d in run.domains}
    heights = [height for d in run.domains for height in ((3, 1) if divergences[d] else (3,))]
    figure = drawing.new_figure(WIDTH, 0.55 * sum(heights) + 1.3)
    grid = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)
    panels = list(grid.flat)
    drawing.title(figure, run, "training reward and held-out success")
    for axes in panels:
        drawing.tidy(axes)
        drawing.mark_stages(axes, run, with_names=axes is panels[0])
    below = iter(panels)
    for domain, colour in zip(run.domains, cycle(COLOURS), strict=False):
        _draw_success(next(below), run, domain, colour)
        if points := divergences[domain]:
            axes = next(below)
            axes.plot(*zip(*points, strict=True), color=colour, clip_on=False, **KL)
            axes.set_ylim(0, 1.25 * max([LEAST_KL, *(value for _, value in points)]))
            axes.set_ylabel("KL", fontsize="small")
            axes.locator_params(axis="y", nbins=2)
    last = max([1, *(record["step"] for record in [*run.train, *run.evaluations])])
    panels[-1].set_xlim(-0.03 * last, 1.03 * last)
    panels[-1].set_xlabel("optimizer step")
    figure.supylabel("mean reward, success rate", fontsize="medium")
    kl = "KL per token (nats) from the\npolicy when it was learned"
    handles: list[tuple[Any, str, dict[str, Any]]] = [
        (run.train, "training reward of a step", STEP),
        (run.train, f"mean of {SMOOTHED_OVER} steps", SMOOTHED),
        (run.validation, "validation, sampled, 95 % interval", VALIDATION),
        (True, f"{run.results.get('split', 'test')}, sampled, 95 % interval", HELD_OUT),
        (any(divergences.values()), kl, KL),
        (run.results["baselines"], *BASELINE),
    ]
    drawing.legend(figure, [(name, style) for is_shown, name, style in handles if is_shown])
    return figure


def _draw_success(axes: Axes, run: RunData, domain: str, colour: str) -> None:
    axes.set_ylim(-0.03, 1.03)
    axes.set_ylabel(domain, color=colour, fontweight="bold")
    rewards = axes
    if run.is_graded(domain):  # rewards beside success rates get an axis of their own
        rewards = axes.twinx()
        rewards.set_ylabel("mean reward", color=colour, fontsize="small")
        rewards.spines[["top"]].set_visible(False)
    for stage in run.stages:
        if points := _points(run.of_stage(stage), f"reward/{domain}"):
            steps, raw = zip(*points, strict=True)
            rewards.plot(steps, raw, color=colour, **STEP)
            rewards.plot(steps, smooth(raw), color=colour, **SMOOTHED)
    draw_baseline(rewards, run, domain, colour)
    validations = run.results.get("validations", [])
    counts = {v["step"]: len(v["success"].get(domain, ())) for v in validations}
    for step, mean in _points(run.validation, f"validation/{domain}/success"):
        draw_rate(axes, step, mean, counts.get(step, 0), color=colour, **VALIDATION)
    for evaluation in run.evaluations:
        if of := evaluation["success"].get(domain):
            style = {"color": colour, "zorder": 5, **HELD_OUT}
            draw_rate(axes, evaluation["step"], of["mean"], of["num_tasks"], **style)


def _points(records: Iterable[Mapping[str, Any]], key: str) -> list[tuple[int, float]]:
    return [(record["step"], record[key]) for record in records if record.get(key) is not None]


def smooth(values: Sequence[float]) -> list[float]:
    """Centred moving average; the window is shorter at both ends."""
    half = SMOOTHED_OVER // 2
    return [fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def draw_baseline(axes: Axes, run: RunData, domain: str, colour: str) -> None:
    if rates := run.results["baselines"].get(domain):
        axes.axhline(max(rates.values()), color=colour, **BASELINE[1])


def draw_rate(axes: Axes, x: float, mean: float, num_tasks: int, **style: Any) -> None:
    """Draw a success rate with its Wilson interval."""
    is_rate = num_tasks > 0 and 0 <= mean <= 1  # older runs have mean rewards there
    low, high = wilson(mean, num_tasks) if is_rate else (mean, mean)
    axes.errorbar(x, mean, drawing.error_bar(mean, low, high), capsize=2, elinewidth=1, **style)


def stop_reasons(run: RunData) -> Figure | None:
    """Shares of the reasons for which episodes ended, step by step."""
    reasons = sorted({key for record in run.train for key in record if key.startswith(STOP)})
    layers = [
        (reason.removeprefix(STOP), _column(run.train, reason), colour)
        for reason, colour in zip(reasons, chain(COLOURS, repeat(PALE)), strict=False)
    ]
    return _stacked_shares(run, "why episodes ended", "share of episodes", layers)


def zero_std_groups(run: RunData) -> Figure | None:
    """Shares of groups that are all solved, all failed or too small, or have a signal."""
    if not any("rollout/all_failed" in record for record in run.train):
        return None
    names = ("all_failed", "all_solved", "too_few_left")
    failed, solved, few = (_column(run.train, f"rollout/{name}") for name in names)
    layers = [
        ("all failed", failed, COLOURS[1]),
        ("with a signal", 1 - failed - solved - few, COLOURS[0]),
        ("all solved", solved, COLOURS[5]),
        ("fewer than two left", few, PALE),
    ]
    return _stacked_shares(run, "groups without a signal", "share of groups", layers)


def _stacked_shares(run: RunData, words: str, label: str, layers: Sequence[Layer]) -> Figure | None:
    shown = [layer for layer in layers if layer[1].any()]
    return _stacked(run, words, run.train, {label: shown}, 2.7, top=1) if shown else None


def time_and_memory(run: RunData) -> Figure | None:
    """Seconds of each phase and the peak memory of a rank, step by step."""
    if not any("perf/sample_s" in record for record in run.timings):
        return None
    names = ("sample", "environment", "update", "wait", "step")
    sample, environment, update, wait, step = (
        _column(run.timings, f"perf/{name}_s") for name in names
    )
    phases: list[Layer] = [
        ("sampling", sample - environment, COLOURS[0]),
        ("environment", environment, COLOURS[4]),
        ("update", update, COLOURS[2]),
        ("waiting for ranks", wait, COLOURS[3]),
        ("other", np.maximum(0, step - sample - update - wait), PALE),
    ]
    memory = ("memory", _column(run.timings, "perf/peak_memory_mb") / 1000, COLOURS[5])
    panels = {"seconds of a step": phases, "peak memory\nof a rank, GB": [memory]}
    return _stacked(run, "time and memory", run.timings, panels, 3.9)


def _column(records: Records, key: str) -> np.ndarray[Any, Any]:
    return np.array([record.get(key) or 0.0 for record in records])


def _stacked(
    run: RunData,
    words: str,
    records: Records,
    panels: Mapping[str, Sequence[Layer]],
    height: float,
    top: float | None = None,
) -> Figure:
    """Panels of layers on top of each other, step by step, by their labels.

    The first panel is twice as high as the others; its layers are in the legend.
    """
    figure = drawing.new_figure(WIDTH, height)
    ratios = [2, *[1] * (len(panels) - 1)]
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=ratios)
    edges = [records[0]["step"] - 0.5, *(record["step"] + 0.5 for record in records)]
    for axes, (label, layers) in zip(grid.flat, panels.items(), strict=True):
        below = np.zeros(len(records))
        for _, values, colour in layers:
            style: dict[str, Any] = {"baseline": below, "fill": True, "color": colour}
            axes.stairs(below + values, edges, linewidth=0, **style)
            below = below + values
        drawing.mark_stages(axes, run, with_names=axes is grid[0, 0])
        axes.set_xlim(edges[0], edges[-1])
        axes.set_ylim(0, top)
        axes.set_ylabel(label)
        drawing.tidy(axes)
    grid[-1, 0].set_xlabel("optimizer step")
    drawing.title(figure, run, words)
    first = next(iter(panels.values()))
    drawing.legend(figure, [(name, {**SQUARE, "color": colour}) for name, _, colour in first])
    return figure
