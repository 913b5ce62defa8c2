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

SMOOTHED_OVER = 9  # number of steps in a centred window
LEAST_KL = 1e-3  # nats; the KL axis ends at this value or above
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
    """Training reward, validation success and held-out success over the steps.

    Each domain has one panel. If validations measured the KL estimate from the policy that had just
    learned the domain, a low panel below shows the KL estimate.
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
    remaining = iter(panels)
    for domain, colour in zip(run.domains, cycle(COLOURS), strict=False):
        _draw_success(next(remaining), run, domain, colour)
        if points := divergences[domain]:
            axes = next(remaining)
            axes.plot(*zip(*points, strict=True), color=colour, clip_on=False, **KL)
            axes.set_ylim(0, 1.25 * max([LEAST_KL, *(value for _, value in points)]))
            axes.set_ylabel("KL", fontsize="small")
            axes.locator_params(axis="y", nbins=2)
    last = max([1, *(record["step"] for record in [*run.train, *run.evaluations])])
    panels[-1].set_xlim(-0.03 * last, 1.03 * last)
    panels[-1].set_xlabel("optimizer step")
    figure.supylabel("mean reward, success rate", fontsize="medium")
    kl = "KL per token (nats) from the\npolicy when it was learned"
    handles: list[tuple[Any, Handle]] = [
        (run.train, ("training reward of a step", STEP)),
        (run.train, (f"mean of {SMOOTHED_OVER} steps", SMOOTHED)),
        (run.validation, ("validation, sampled, 95 % interval", VALIDATION)),
        (True, (f"{run.results.get('split', 'test')}, sampled, 95 % interval", HELD_OUT)),
        (any(divergences.values()), (kl, KL)),
        (run.results["baselines"], BASELINE),
    ]
    drawing.legend(figure, [handle for is_shown, handle in handles if is_shown])
    return figure


def _draw_success(axes: Axes, run: RunData, domain: str, colour: str) -> None:
    axes.set_ylim(-0.03, 1.03)
    axes.set_ylabel(domain, color=colour, fontweight="bold")
    rewards = axes
    if run.is_graded(domain):  # graded rewards need another axis than success rates
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
    is_rate = num_tasks > 0 and 0 <= mean <= 1  # older runs have mean rewards instead of rates
    low, high = wilson(mean, num_tasks) if is_rate else (mean, mean)
    axes.errorbar(x, mean, drawing.error_bar(mean, low, high), capsize=2, elinewidth=1, **style)


def stop_reasons(run: RunData) -> Figure | None:
    """Shares of episodes by stop reason, for each step."""
    reasons = sorted({key for record in run.train for key in record if key.startswith(STOP)})
    colours = chain(COLOURS, repeat(PALE))
    values = [(reason.removeprefix(STOP), _column(run.train, reason)) for reason in reasons]
    layers = [(*of, colour) for of, colour in zip(values, colours, strict=False)]
    return _stacked(run, "why episodes ended", run.train, {"share of episodes": layers}, top=1)


def zero_std_groups(run: RunData) -> Figure | None:
    """Shares of groups: all failed, all solved, too few episodes left, or with a signal."""
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
    return _stacked(run, "groups without a signal", run.train, {"share of groups": layers}, top=1)


def time_and_memory(run: RunData) -> Figure | None:
    """Seconds of each phase and the peak memory of a rank, for each step."""
    names = ("sample_s", "environment_s", "update_s", "wait_s", "step_s", "peak_memory_mb")
    columns = (_column(run.timings, f"perf/{name}") for name in names)
    sample, environment, update, wait, step, memory = columns
    phases = [
        ("sampling", sample - environment, COLOURS[0]),
        ("environment", environment, COLOURS[4]),
        ("update", update, COLOURS[2]),
        ("waiting for ranks", wait, COLOURS[3]),
        ("other", np.maximum(0, step - sample - update - wait), PALE),
    ]
    panels = {"peak memory\nof a rank, GB": [("memory", memory / 1000, COLOURS[5])]}
    return _stacked(run, "time and memory", run.timings, {"seconds of a step": phases, **panels})


def _column(records: Records, key: str) -> np.ndarray[Any, Any]:
    return np.array([record.get(key) or 0.0 for record in records])


def _stacked(
    run: RunData,
    words: str,
    records: Records,
    panels: Mapping[str, Sequence[Layer]],
    top: float | None = None,
) -> Figure | None:
    """Draw panels of stacked layers over the steps; `panels` maps labels to layers.

    The first panel is twice as high as the others, and its layers are in the legend. Layers of
    zeros are left out; a first panel without layers gives no picture.
    """
    shown = {label: [of for of in panels[label] if of[1].any()] for label in panels}
    first = next(iter(shown.values()))
    if not first:
        return None
    figure = drawing.new_figure(WIDTH, 1.5 + 1.2 * len(shown))
    ratios = [2, *[1] * (len(shown) - 1)]
    grid = figure.subplots(len(shown), 1, sharex=True, squeeze=False, height_ratios=ratios)
    edges = [records[0]["step"] - 0.5, *(record["step"] + 0.5 for record in records)]
    for axes, (label, layers) in zip(grid.flat, shown.items(), strict=True):
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
    drawing.legend(figure, [(name, {**SQUARE, "color": colour}) for name, _, colour in first])
    return figure
