"""Learning curves, stop reasons, zero-std groups, time and memory over the training steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, cycle, repeat
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pipeline.evaluation.transfer_metrics import wilson
from pipeline.plots.drawing import (
    COLOURS,
    WIDTH,
    Handle,
    error_bar,
    legend,
    new_figure,
    stage_bands,
    tidy,
    title,
)
from pipeline.tracking.run_files import RunData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMOOTHED_OVER = 9  # steps, centred
LEAST_KL = 1e-3  # nats at the top of a KL axis
MAX_BARS = 120  # along the steps; of more, neighbours are averaged
PALE = "#999999"

STEP: dict[str, Any] = {"linewidth": 0.8, "alpha": 0.4}
SMOOTHED: dict[str, Any] = {"linewidth": 2}
VALIDATION: dict[str, Any] = {
    "marker": "s",
    "markersize": 4.5,
    "markerfacecolor": "white",
    "linestyle": "none",
}
HELD_OUT: dict[str, Any] = {
    "marker": "o",
    "markersize": 8,
    "markeredgecolor": "black",
    "linestyle": "none",
}
KL: dict[str, Any] = {"marker": "v", "markersize": 4, "linewidth": 1, "linestyle": "--"}
BASELINE: Handle = ("best policy that never reads the record", {"linestyle": ":", "linewidth": 1})
SQUARE: dict[str, Any] = {"marker": "s", "markersize": 9, "linestyle": "none"}
STOP = "rollout/stop/"
PHASES = {
    "sample": ("sampling", COLOURS[0]),
    "environment": ("environment", COLOURS[4]),
    "update": ("update", COLOURS[2]),
    "wait": ("waiting for ranks", COLOURS[3]),
}

Layer = tuple[str, Sequence[float], str]  # name, value of each step, colour


def learning_curves(run: RunData) -> Figure:
    """One panel a domain: training reward, validation and held-out success over the steps.

    A thin panel below shows the KL divergence from the policy that had just learned the domain,
    if validations measured it.
    """
    divergences = {d: _points(run.validation, f"validation/{d}/kl") for d in run.domains}
    heights = [height for d in run.domains for height in ((3, 1) if divergences[d] else (3,))]
    figure = new_figure(WIDTH, 0.55 * sum(heights) + 1.3)
    grid = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)
    panels = list(grid.flat)
    title(figure, run, "training reward and held-out success")
    for axes in panels:
        tidy(axes)
        stage_bands(axes, run, with_names=axes is panels[0])
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
    if not run.train:
        panels[-1].set_xlim(-1, 1)
        panels[-1].set_xticks([0])
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
    legend(figure, [(name, style) for is_shown, name, style in handles if is_shown])
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
    counts = {
        v["step"]: len(v["success"].get(domain, ())) for v in run.results.get("validations", [])
    }
    for step, mean in _points(run.validation, f"validation/{domain}/success"):
        draw_rate(axes, step, mean, counts.get(step, 0), color=colour, **VALIDATION)
    for evaluation in run.evaluations:
        if of := evaluation["success"].get(domain):
            style = {"color": colour, "zorder": 5, **HELD_OUT}
            draw_rate(axes, evaluation["step"], of["mean"], of["num_tasks"], **style)
    if not run.train:
        axes.text(0.75, 0.5, "no training steps", transform=axes.transAxes, ha="center")


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
    axes.errorbar(x, mean, error_bar(mean, low, high), capsize=2, elinewidth=1, **style)


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
    failed, solved, few = (
        _column(run.train, f"rollout/{name}")
        for name in ("all_failed", "all_solved", "too_few_left")
    )
    rest = [1 - sum(without) for without in zip(failed, solved, few, strict=True)]
    layers = [
        ("all failed", failed, COLOURS[1]),
        ("with a signal", rest, COLOURS[0]),
        ("all solved", solved, COLOURS[5]),
        ("fewer than two left", few, PALE),
    ]
    return _stacked_shares(run, "groups without a signal", "share of groups", layers)


def _stacked_shares(run: RunData, words: str, label: str, layers: Sequence[Layer]) -> Figure | None:
    shown = [layer for layer in layers if any(layer[1])]
    return _stacked(run, words, run.train, [(label, shown)], 2.7, top=1) if shown else None


def time_and_memory(run: RunData) -> Figure | None:
    """Seconds of each phase and the peak memory of a rank, step by step."""
    if not any("perf/sample_s" in record for record in run.timings):
        return None
    seconds = {name: _column(run.timings, f"perf/{name}_s") for name in (*PHASES, "step")}
    pairs = zip(seconds["sample"], seconds["environment"], strict=True)
    seconds["sample"] = [sample - environment for sample, environment in pairs]
    known = zip(*(seconds[name] for name in PHASES), strict=True)
    other = [max(0.0, t - sum(k)) for t, k in zip(seconds["step"], known, strict=True)]
    layers = [(name, seconds[key], colour) for key, (name, colour) in PHASES.items()]
    memory = [number / 1000 for number in _column(run.timings, "perf/peak_memory_mb")]
    panels: list[tuple[str, list[Layer]]] = [
        ("seconds of a step", [*layers, ("other", other, PALE)]),
        ("peak memory\nof a rank, GB", [("memory", memory, COLOURS[5])]),
    ]
    return _stacked(run, "time and memory", run.timings, panels, 3.9)


def _column(records: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [record.get(key) or 0.0 for record in records]


def _stacked(
    run: RunData,
    words: str,
    records: Sequence[Mapping[str, Any]],
    panels: Sequence[tuple[str, Sequence[Layer]]],
    height: float,
    top: float | None = None,
) -> Figure:
    """Panels (label, layers) with a bar for each step, or for the mean of neighbouring steps.

    The first panel is twice as high as the others; its layers are in the legend.
    """
    steps = [record["step"] for record in records]
    width = -(-len(steps) // MAX_BARS)
    starts = range(0, len(steps), width)
    edges = [*(steps[i] - 0.5 for i in starts), steps[-1] + 0.5]
    figure = new_figure(WIDTH, height)
    ratios = [2, *[1] * (len(panels) - 1)]
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=ratios)
    for index, (axes, (label, layers)) in enumerate(zip(grid.flat, panels, strict=True)):
        below = [0.0] * len(starts)
        for _, values, colour in layers:
            means = [fmean(values[i : i + width]) for i in starts]
            above = [b + m for b, m in zip(below, means, strict=True)]
            axes.stairs(above, edges, baseline=below, fill=True, color=colour, linewidth=0)
            below = above
        stage_bands(axes, run, with_names=not index, lines=True)
        axes.set_xlim(edges[0], edges[-1])
        axes.set_ylim(0, top)
        axes.set_ylabel(label)
        tidy(axes)
    grid[-1, 0].set_xlabel("optimizer step")
    title(figure, run, words)
    legend(figure, [(name, {**SQUARE, "color": colour}) for name, _, colour in panels[0][1]])
    return figure
