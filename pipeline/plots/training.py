"""Learning curves, stop reasons, zero-std groups, time and memory over the training steps."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, cycle, repeat
from statistics import fmean
from typing import Any

import numpy as np

from pipeline.evaluation.transfer import points_of, rate
from pipeline.plots import drawing
from pipeline.plots.drawing import COLOURS, Axes, Figure, Handle, Number
from pipeline.tracking.run_files import RunData

SMOOTHED_OVER = 9  # number of steps in the window of the moving average
LEAST_KL = 1e-3  # The KL axis extends at least to this value, in nats.
PALE = "#999999"
STEP: dict[str, Any] = {"linewidth": 0.8, "alpha": 0.4}
SMOOTHED: dict[str, Any] = {"linewidth": 2}
VALIDATION: dict[str, Any] = {"marker": "s", "markersize": 4.5, "mfc": "white", "linestyle": "none"}
HELD_OUT: dict[str, Any] = {"marker": "o", "markersize": 6, "mec": "black", "linestyle": "none"}
KL: dict[str, Any] = {"marker": "v", "markersize": 4, "linewidth": 1, "linestyle": "--"}
BASELINE: Handle = ("best baseline (a fixed policy)", {"linestyle": ":", "linewidth": 1})
SQUARE: dict[str, Any] = {"marker": "s", "markersize": 9, "linestyle": "none"}
STOP = "rollout/stop/"

Records = Sequence[Mapping[str, Any]]
Values = np.ndarray[Any, Any]  # a number for each step


def learning_curves(run: RunData) -> Figure:
    """Draw training reward, validation success and held-out success by domain over the steps.

    A low panel below a domain shows the domain's KL estimates (see `kl_probe.py`), if any.
    """
    divergences = {d: _points(run.validation, f"validation/{d}/kl") for d in run.domains}
    heights = [height for d in run.domains for height in ((3, 1) if divergences[d] else (3,))]
    words = "training reward and held-out success"
    height = 0.55 * sum(heights) + 1.3
    figure, panels = drawing.panels_over_steps(run, words, heights, height)
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
    drawing.legend(figure, [handle for is_shown, *handle in handles if is_shown])
    return figure


def _draw_success(axes: Axes, run: RunData, domain: str, colour: str) -> None:
    axes.set_ylim(-0.03, 1.03)
    axes.set_ylabel(domain, color=colour, fontweight="bold")
    rewards = axes
    if run.is_graded(domain):  # graded rewards get a second y axis
        rewards = axes.twinx()
        rewards.set_ylabel("mean reward", color=colour, fontsize="small")
        rewards.spines[["top"]].set_visible(False)
    for stage in run.stages:
        if points := _points(run.of_stage(stage), f"reward/{domain}"):
            steps, raw = zip(*points, strict=True)
            rewards.plot(steps, raw, color=colour, **STEP)
            rewards.plot(steps, smooth(raw), color=colour, **SMOOTHED)
    draw_baseline(rewards, run, domain, colour)
    intervals = {v["step"]: _validated(run, v, domain) for v in run.results.get("validations", [])}
    ends = {evaluation["step"] for evaluation in run.evaluations}
    aside = 0.016 * max(ends, default=0)  # so that no point hides another of the same step
    for step, mean in _points(run.validation, f"validation/{domain}/success"):
        x = step - aside * (step in ends)
        draw_rate(axes, x, intervals.get(step) or [mean, None, None], color=colour, **VALIDATION)
    for evaluation in points_of(run.results):
        if number := rate(evaluation, domain, "mean", run.success_threshold):
            style = {"color": colour, "zorder": 5, **HELD_OUT}
            draw_rate(axes, evaluation["step"], number, **style)


def _validated(run: RunData, validation: Mapping[str, Any], domain: str) -> Number | None:
    """Return the rate of a validation, which has one sampled trial of each task."""
    tasks = {task: [reward] for task, reward in validation["success"].get(domain, {}).items()}
    success = {domain: {"greedy": 0.0, "tasks": tasks}} if tasks else {}
    return rate({"success": success}, domain, "mean", run.success_threshold)


def _points(records: Iterable[Mapping[str, Any]], key: str) -> list[tuple[int, float]]:
    return [(record["step"], record[key]) for record in records if record.get(key) is not None]


def smooth(values: Sequence[float]) -> list[float]:
    """Return the centred moving average; the window is shorter at both ends."""
    half = SMOOTHED_OVER // 2
    return [fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def draw_baseline(axes: Axes, run: RunData, domain: str, colour: str) -> None:
    if rates := run.results["baselines"].get(domain):
        axes.axhline(max(rates.values()), color=colour, **BASELINE[1])


def draw_rate(axes: Axes, x: float, number: Number, **style: Any) -> None:
    bar = drawing.error_bar(*whole) if (whole := drawing.complete(number)) else None
    style = {"capsize": 2, "elinewidth": 1, "clip_on": False, **style}
    axes.errorbar(x, number[0] or 0.0, bar, **style)


def stop_reasons(run: RunData) -> Figure | None:
    reasons = sorted({key.removeprefix(STOP) for of in run.train for key in of if STOP in key})
    layers = dict(zip(reasons, _columns(run.train, STOP, *reasons), strict=True))
    panels = {"share of episodes": layers}
    colours = chain(COLOURS, repeat(PALE))
    return _stacked(run, "why episodes ended", run.train, panels, colours, top=1)


def zero_std_groups(run: RunData) -> Figure | None:
    records = [record for record in run.train if "rollout/all_failed" in record]
    names = ("all_failed", "all_solved", "too_few_left")
    failed, solved, few = _columns(records, "rollout/", *names)
    signal = 1 - failed - solved - few
    layers = {"all failed": failed, "with a signal": signal, "all solved": solved}
    panels = {"share of groups": {**layers, "fewer than two left": few}}
    colours = (COLOURS[1], COLOURS[0], COLOURS[5], PALE)
    return _stacked(run, "zero-std groups (equal rewards)", records, panels, colours, top=1)


def time_and_memory(run: RunData) -> Figure | None:
    names = ("sample_s", "environment_s", "update_s", "wait_s", "step_s", "peak_memory_mb")
    columns = _columns(run.timings, "perf/", *names)
    sample, environment, update, wait, step, memory = columns
    other = np.maximum(0, step - sample - update - wait)
    layers = {"sampling": sample - environment, "environment": environment, "update": update}
    panels = {
        "seconds of a step": {**layers, "waiting for ranks": wait, "other": other},
        "peak memory\nof a rank, GB": {"memory": memory / 1000},
    }
    colours = (*(COLOURS[i] for i in (0, 4, 2, 3)), PALE, COLOURS[5])
    return _stacked(run, "time and memory", run.timings, panels, colours)


def _columns(records: Records, prefix: str, *names: str) -> list[Values]:
    return [np.array([of.get(prefix + name) or 0.0 for of in records]) for name in names]


def _stacked(
    run: RunData,
    words: str,
    records: Records,
    panels: Mapping[str, Mapping[str, Values]],
    colours: Iterable[str],
    top: float | None = None,
) -> Figure | None:
    if not any(values.any() for values in next(iter(panels.values())).values()):
        return None
    heights = [2, *[1] * (len(panels) - 1)]
    figure, grid = drawing.panels_over_steps(run, words, heights, 1.5 + 1.2 * len(panels))
    edges = [records[0]["step"] - 0.5, *(record["step"] + 0.5 for record in records)]
    of_layers = iter(colours)
    handles = []
    for axes, (label, layers) in zip(grid, panels.items(), strict=True):
        below = np.zeros(len(records))
        for (name, values), colour in zip(layers.items(), of_layers, strict=False):
            if values.any():
                style: dict[str, Any] = {"baseline": below, "fill": True, "color": colour}
                axes.stairs(below + values, edges, linewidth=0, **style)
                below = below + values
                handles += [(name, {**SQUARE, "color": colour})] if axes is grid[0] else []
        axes.set_xlim(edges[0], edges[-1])
        axes.set_ylim(0, top)
        axes.set_ylabel(label)
    drawing.legend(figure, handles)
    return figure
