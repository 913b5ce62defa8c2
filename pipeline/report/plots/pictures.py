"""The pictures of a run (learning curves, matrix, transfer, times), and of a comparison of runs."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, cycle, pairwise, repeat
from statistics import fmean
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np

from pipeline.data.curriculum import BEFORE_GRPO
from pipeline.evaluation.transfer import mean_over_tasks, points_of, rate, successes_of
from pipeline.report.plots import drawing
from pipeline.report.plots.drawing import (
    COLOURS,
    WIDTH,
    Axes,
    Figure,
    Handle,
    Number,
    ci_text,
    error_bar,
    with_bounds,
)
from pipeline.report.run_files import RunData

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
OPTIMIZED = {  # metric of an update -> label
    "train/grad_norm": "gradient\nnorm",
    "train/entropy": "entropy,\nnats",
    "train/kl": "KL to the\nreference",
    "train/teacher_kl": "KL to the\nteachers",
    "train/clip_ratio": "clip ratio",
}

Records = Sequence[Mapping[str, Any]]
Values = np.ndarray[Any, Any]  # a number for each step
INTERVAL: dict[str, Any] = {"fmt": "none", "ecolor": "black", "capsize": 2.5, "elinewidth": 1}
DIAMOND: dict[str, Any] = {"marker": "D", "color": "black", "mfc": "white", "linestyle": "none"}
RATES = [("sampled (pale: before GRPO)", SQUARE), ("greedy, always the likeliest token", DIAMOND)]
FRAME: dict[str, Any] = {"fill": False, "edgecolor": COLOURS[1], "linewidth": 2.5, "zorder": 3}
DIRECTIONS = {  # for each metric: title of the panel, meaning of negative and positive values
    "backward_transfer": ("backward transfer: from its own stage to the end", "- lost, + helped"),
    "forward_transfer": ("forward transfer: effect of earlier stages", "- lost, + helped"),
    "forgetting": ("forgetting: best success minus that at the end", "+ lost, - gained"),
}
MARKERS = "osD^vPX<>ph"
# Petroff's ten colours (arXiv 2107.02270), distinct also for colour-blind readers. Markers have
# black edges, so that light and dark colours stand out from any page.
OF_CONFIGURATIONS = (
    *("#3F90DA", "#FFA90E", "#BD1F01", "#94A4A2", "#832DB6"),
    *("#A96B59", "#E76300", "#B9AC70", "#717581", "#92DADD"),
)
OF_MIXED = ("black", "*", 13)
EDGED: dict[str, Any] = {"mec": "black", "mew": 0.8, "linestyle": "none", "zorder": 4}
LEGEND_CHARACTERS = 56  # maximum length of a line of the legend

Bar = tuple[str, Number | None, str]  # name, value with interval, colour


def learning_curves(run: RunData) -> Figure:
    """Draw training reward, validation success and held-out success by domain over the steps.

    A low panel below a domain shows the domain's KL estimates (see `KLProbe`), if any.
    """
    divergences = {d: _points(run.validation, f"validation/{d}/kl") for d in run.domains}
    heights = [height for d in run.domains for height in ((3, 1) if divergences[d] else (3,))]
    figure, panels = drawing.panels_over_steps(
        run, "training reward and held-out success", heights, height=0.55 * sum(heights) + 1.3
    )
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
    words = smoothing([run])
    handles: list[tuple[Any, str, dict[str, Any]]] = [
        (run.train, "training reward of a step", STEP),
        (words, words, SMOOTHED),
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
    if run.leaves_rates(domain):  # other rewards get a second y axis
        rewards = axes.twinx()
        rewards.set_ylabel("mean reward", color=colour, fontsize="small")
        rewards.spines[["top"]].set_visible(False)
    _draw_smoothed(rewards, run, f"reward/{domain}", colour)
    draw_baseline(rewards, run, domain, colour)
    intervals = {v["step"]: _validated(run, v, domain) for v in run.results.get("validations", [])}
    ends = {evaluation["step"] for evaluation in run.evaluations}
    aside = 0.016 * max(ends, default=0)  # so that no point hides another of the same step
    for step, mean in _points(run.validation, f"validation/{domain}/success"):
        x = step - aside * (step in ends)
        draw_rate(axes, x, intervals.get(step) or [mean, None, None], color=colour, **VALIDATION)
    for evaluation in points_of(run.results):
        if number := rate(evaluation, domain, "mean", run.success_threshold):
            draw_rate(axes, evaluation["step"], number, color=colour, zorder=5, **HELD_OUT)


def _draw_smoothed(axes: Axes, run: RunData, key: str, colour: str) -> None:
    for stage in run.stages:
        if points := _points(run.of_stage(stage), key):
            steps, raw = zip(*points, strict=True)
            axes.plot(steps, raw, color=colour, **STEP)
            axes.plot(steps, smooth(raw), color=colour, marker=_marker(points), **SMOOTHED)


def _marker(points: Sequence[Any]) -> str:
    """Return the marker of a line, which one point alone needs to be seen."""
    return "." if len(points) == 1 else ""


def optimization(run: RunData) -> Figure | None:
    """Draw what the updates do: a panel for each metric of OPTIMIZED that the run has."""
    found = {key: words for key, words in OPTIMIZED.items() if _points(run.train, key)}
    if not found:
        return None
    heights = [1] * len(found)
    figure, panels = drawing.panels_over_steps(run, "updates", heights, 0.9 * len(found) + 1.1)
    for axes, (key, words), colour in zip(panels, found.items(), COLOURS, strict=False):
        _draw_smoothed(axes, run, key, colour)
        axes.set_ylim(bottom=0)
        axes.set_ylabel(words, fontsize="small")
        axes.locator_params(axis="y", nbins=4)
    handles = [("of a step", STEP), (smoothing([run]), SMOOTHED)]
    drawing.legend(figure, [handle for handle in handles if handle[0]])
    return figure


def _validated(run: RunData, validation: Mapping[str, Any], domain: str) -> Number | None:
    """Return the rate of a validation, which has one sampled trial of each task."""
    tasks = dict(sorted(validation["success"].get(domain, {}).items()))
    return mean_over_tasks([*successes_of(tasks, run.success_threshold).values()], domain)


def _points(records: Iterable[Mapping[str, Any]], key: str) -> list[tuple[int, float]]:
    return [(record["step"], record[key]) for record in records if record.get(key) is not None]


def smoothing(runs: Iterable[RunData]) -> str:
    """Return what a point of `smooth` is the mean of, or "" if it is one step's."""
    stages = [run.of_stage(stage) for run in runs for stage in run.stages]
    count = min(SMOOTHED_OVER, max(map(len, stages), default=0))
    is_thinned = any(b["step"] > a["step"] + 1 for of in stages for a, b in pairwise(of))
    return f"mean of {count} {'drawn ' * is_thinned}steps" if count > 1 else ""


def smooth(values: Sequence[float]) -> list[float]:
    """Return the centred moving average; the window is shorter at both ends."""
    half = SMOOTHED_OVER // 2
    return [fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def draw_baseline(axes: Axes, run: RunData, domain: str, colour: str) -> None:
    if rates := run.results["baselines"].get(domain):
        axes.axhline(max(rates.values()), color=colour, **BASELINE[1])


def draw_rate(axes: Axes, x: float, number: Number, **style: Any) -> None:
    bar = error_bar(*whole) if (whole := with_bounds(number)) else None
    style = {"capsize": 2, "elinewidth": 1, "clip_on": False, **style}
    axes.errorbar(x, number[0] or 0.0, bar, **style)


def stop_reasons(run: RunData) -> Figure | None:
    reasons = sorted({key.removeprefix(STOP) for of in run.train for key in of if STOP in key})
    layers = dict(zip(reasons, _columns(run.train, STOP, *reasons), strict=True))
    return _stacked(
        run,
        "why episodes ended",
        run.train,
        {"share of episodes": layers},
        chain(COLOURS, repeat(PALE)),
        top=1,
    )


def zero_std_groups(run: RunData) -> Figure | None:
    records = [record for record in run.train if "rollout/all_failed" in record]
    failed, solved, few = _columns(records, "rollout/", "all_failed", "all_solved", "too_few_left")
    layers = {
        "all failed": failed,
        "with a signal": 1 - failed - solved - few,
        "all solved": solved,
        "fewer than two left": few,
    }
    colours = (COLOURS[1], COLOURS[0], COLOURS[5], PALE)
    panels = {"share of groups": layers}
    return _stacked(run, "zero-std groups (equal rewards)", records, panels, colours, top=1)


def time_and_memory(run: RunData) -> Figure | None:
    sample, environment, update, wait, step, memory = _columns(
        run.timings,
        "perf/",
        "sample_s",
        "environment_s",
        "update_s",
        "wait_s",
        "step_s",
        "peak_memory_mb",
    )
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
                axes.stairs(
                    below + values, edges, baseline=below, fill=True, color=colour, linewidth=0
                )
                below = below + values
                handles += [(name, {**SQUARE, "color": colour})] if axes is grid[0] else []
        axes.set(xlim=(edges[0], edges[-1]), ylim=(0, top), ylabel=label)
    drawing.legend(figure, handles)
    return figure


def stage_performance(run: RunData) -> Figure:
    """Draw sampled success (bars), and greedy success (diamonds), of domains after each stage."""
    names = [evaluation["after"].replace("_", " ") for evaluation in run.evaluations]
    columns = min(3, len(run.domains))
    rows = math.ceil(len(run.domains) / columns)
    width = max(WIDTH / columns, 0.28 * len(names) + 0.4)
    figure = drawing.new_figure(
        run,
        "held-out success after each stage, with 95 % intervals",
        width=columns * width,
        height=rows * 3.0 + 1.2,
    )
    for index, (domain, colour) in enumerate(zip(run.domains, cycle(COLOURS), strict=False), 1):
        axes = figure.add_subplot(rows, columns, index)
        axes.set_ylim(-0.03, 1.03)
        drawing.tidy(axes)
        for x, evaluation in enumerate(run.evaluations):
            if domain in evaluation["success"]:
                sampled, greedy = (
                    rate(evaluation, domain, kind, run.success_threshold)
                    for kind in ("mean", "greedy")
                )
                _draw_rates(axes, x, sampled, greedy, colour, evaluation["after"] in BEFORE_GRPO)
        if not run.is_graded(domain):  # a mean of graded rewards is no success rate
            draw_baseline(axes, run, domain, colour)
        axes.set_title(domain, loc="left", color=colour, fontweight="bold")
        axes.set_xticks(range(len(names)), names, rotation=35, ha="right", rotation_mode="anchor")
        axes.set(xlim=(-0.7, max(len(names), 1) - 0.3), xlabel="evaluated after")
    figure.supylabel("success rate", fontsize="medium")
    is_greedy = any("greedy" in of for e in run.evaluations for of in e["success"].values())
    rates = RATES if is_greedy else RATES[:1]
    drawing.legend(figure, [*rates, *([BASELINE] if run.results["baselines"] else [])])
    return figure


def _draw_rates(axes: Axes, x: float, sampled: Any, greedy: Any, colour: str, pale: bool) -> None:
    axes.bar(x, sampled[0], width=0.8, color=colour, alpha=0.4 if pale else 1.0)
    if sampled[0] >= 0.2:
        ink = drawing.LIGHT_INK if colour in drawing.DARK and not pale else "black"
        axes.text(x, 0.02, f"{sampled[0]:.2f}", ha="center", size="small", color=ink, rotation=90)
    draw_rate(axes, x - 0.15, sampled, fmt="none", ecolor="black")
    if greedy:
        draw_rate(axes, x + 0.2, greedy, ecolor="black", **DIAMOND)


def accuracy_matrix(run: RunData) -> Figure | None:
    """Draw the success of each domain (columns) after each stage (rows)."""
    if not run.transfer:
        return None
    from matplotlib import colormaps, patches

    of = run.transfer["domains"]
    points = run.transfer["points"]
    columns = of["names"]
    width = max(WIDTH, 0.95 * len(of["names"]) + 1.9)
    figure = drawing.new_figure(run, "accuracy matrix", width, 0.5 * len(points) + 1.1)
    axes = figure.subplots()
    for r, row in enumerate(of["matrix"]):
        for c, number in enumerate(row):
            ink = "black"
            if cell := with_bounds(number):
                fill_colour = colormaps["cividis"](cell[0])
                axes.add_patch(patches.Rectangle((c - 0.5, r - 0.5), 1, 1, color=fill_colour))
                ink = drawing.DARK_INK if cell[0] > 0.55 else drawing.LIGHT_INK
            text = ci_text(number).replace(" [", "\n[")
            axes.text(c, r, text, ha="center", va="center", color=ink, fontsize="small")
    trained = [(stage["name"], name) for stage in run.transfer["stages"] for name in stage["own"]]
    for r, c in ((points.index(stage), columns.index(name)) for stage, name in trained):
        axes.add_patch(patches.Rectangle((c - 0.46, r - 0.44), 0.92, 0.88, **FRAME))
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(points) - 0.5, -0.5))
    axes.set_xticks(range(len(columns)), [fill(name, 13) for name in columns])
    axes.set_yticks(range(len(points)), run.points)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("success of sampled trials, with 95 % interval\nframed: trained in that stage")
    return figure


def transfer(run: RunData) -> Figure | None:
    """Draw bars: each domain's change in each stage, backward and forward transfer, forgetting."""
    if not run.transfer or not run.transfer["domains"]["effects"]:
        return None
    of = run.transfer["domains"]
    means = run.transfer["metrics"]
    colours = dict(zip(of["names"], cycle(COLOURS), strict=False))
    bars: list[Bar] = [
        (f"stage {stage['name']}: {name}{' (own)' * (name in stage['own'])}", number, colours[name])
        for stage, effects in zip(run.transfer["stages"], of["effects"], strict=True)
        for name, number in zip(of["names"], effects, strict=True)
    ]
    panels = [(bars, "change of each domain over each stage", "- lost, + gained")]
    for key, words in DIRECTIONS.items():
        bars = [(name, number, colours[name]) for name, number in of[key].items()]
        if len(bars) > 1 and key in means:
            bars.append(("mean", means[key], drawing.GREY))
        if bars:
            panels.append((bars, *words))
    rows = [len(bars) for bars, _, _ in panels]
    height = 0.2 * sum(rows) + 0.65 * len(rows) + 0.4
    figure = drawing.new_figure(run, "changes, with 95 % intervals", WIDTH, height)
    many = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[n + 1 for n in rows]).flat
    for axes, (bars, words_above, directions) in zip(many, panels, strict=True):
        _draw_bars(axes, bars)
        # A title aligned with the right edge may extend over the names of the bars on the left.
        axes.set_title(words_above, loc="right", fontsize="medium", fontweight="bold")
        axes.set_xlabel(f"difference of success rates; {directions}", fontsize="small")
    return figure


def _draw_bars(axes: Axes, bars: Sequence[Bar]) -> None:
    for y, (_, number, colour) in enumerate(bars):
        if not (points := with_bounds(number)):
            axes.text(0, y, "no interval", va="center", fontsize="small")
            continue
        axes.barh(y, points[0], height=0.7, color=colour)
        axes.errorbar(points[0], y, xerr=error_bar(*points), **INTERVAL)
        axes.text(
            1.02,
            y,
            ci_text(points, "+"),
            va="center",
            transform=axes.get_yaxis_transform(),
            fontsize="x-small",
        )
    axes.axvline(0, color="black", linewidth=1)
    axes.set_yticks(range(len(bars)), [name for name, _, _ in bars], fontsize="small")
    low, high = axes.get_xlim()
    axes.set(xlim=(min(low, -0.01), max(high, 0.01)), ylim=(len(bars) - 0.4, -0.6))
    drawing.tidy(axes, grid="x")


class Configuration(NamedTuple):
    """Runs whose settings differ only in the seed, and the transfer numbers of the runs."""

    label: str
    runs: Sequence[RunData]
    transfer: Mapping[str, Any]  # `evaluation.transfer.summary` of all seeds
    is_mixed: bool
    against_mixed: Mapping[str, Any] | None  # each metric minus the same metric of mixed training


def _styled(configurations: Sequence[Configuration]) -> list[tuple[Configuration, str, Any]]:
    """Return each configuration with its name and (colour, marker, size), equal in all pictures."""
    styles = zip(cycle(OF_CONFIGURATIONS), cycle(MARKERS), repeat(7), strict=False)
    return [
        (c, fill(c.label, LEGEND_CHARACTERS), OF_MIXED if c.is_mixed else next(styles))
        for c in configurations
    ]


def _height_of_legend(names: Iterable[str]) -> float:
    return 0.19 * sum(name.count("\n") + 1 for name in names)


def curves(configurations: Sequence[Configuration]) -> Figure:
    """Draw training reward and held-out success of all runs, with a row of panels per domain."""
    styled = _styled(configurations)
    domains = list(dict.fromkeys(d for c in configurations for run in c.runs for d in run.domains))
    height = 1.2 + 1.4 * len(domains) + _height_of_legend(name for _, name, _ in styled)
    figure = drawing.new_figure(None, "learning curves, a line for each run", WIDTH, height)
    grid = figure.subplots(len(domains), 2, sharex=True, squeeze=False)
    for (left, right), domain in zip(grid, domains, strict=True):
        left.set_ylabel(domain, fontweight="bold")
        is_other = any(run.leaves_rates(domain) for c in configurations for run in c.runs)
        for axes in (right,) if is_other else (left, right):
            axes.set_ylim(-0.03, 1.03)
        for configuration, name, (colour, marker, size) in styled:
            style = {"color": colour, "linewidth": 1.2, "clip_on": False}
            for run in configuration.runs:
                for stage in run.stages:
                    points = _points(run.of_stage(stage), f"reward/{domain}")
                    smoothed = smooth([y for _, y in points])
                    left.plot([x for x, _ in points], smoothed, marker=_marker(points), **style)
                ends = [
                    (evaluation["step"], number[0])
                    for evaluation in points_of(run.results)
                    if (number := rate(evaluation, domain, "mean", run.success_threshold))
                ]
                edge = {"marker": marker, "markersize": 0.7 * size, "mec": "black", "mew": 0.5}
                right.plot(*zip(*ends, strict=True), label=name, **style, **edge)
        drawing.tidy(left)
        drawing.tidy(right)
    words = smoothing(run for c in configurations for run in c.runs)
    grid[0, 0].set_title(", ".join(filter(None, ["training reward", words])), fontsize="small")
    grid[0, 1].set_title("held-out success, sampled", fontsize="small")
    for axes in grid[-1]:
        drawing.label_steps(axes)
    # One handle names a configuration, though it has a line for each run.
    of_names = dict(zip(*reversed(grid[0, 1].get_legend_handles_labels()), strict=True))
    figure.legend(of_names.values(), of_names, **drawing.BELOW | {"fontsize": "medium"})
    return figure


def pareto(configurations: Sequence[Configuration]) -> Figure:
    """Draw new-domain gain against forgetting. Each configuration is a point with two intervals.

    A configuration without the metric `forgetting` is drawn at a forgetting of zero.
    """
    drawn = [
        row
        for row in _styled(configurations)
        if with_bounds(row[0].transfer["metrics"].get("stage_gain"))
    ]
    figure = drawing.new_figure(
        None,
        "new-domain gain against forgetting, 95 % intervals over tasks and seeds",
        width=WIDTH,
        height=3.5 + _height_of_legend(name for _, name, _ in drawn),
    )
    axes = figure.subplots()
    for configuration, name, (colour, marker, size) in drawn:
        numbers = configuration.transfer["metrics"]
        gain = with_bounds(numbers["stage_gain"])
        forgetting = with_bounds(numbers.get("forgetting"))
        if configuration.is_mixed:
            axes.axhline(gain[0], color=colour, linestyle=":", linewidth=1)
        forgotten = forgetting[0] if forgetting else 0.0
        across = error_bar(*forgetting) if forgetting else None
        lines: dict[str, Any] = {**INTERVAL, "ecolor": colour, "zorder": 3, "elinewidth": 1.4}
        axes.errorbar(forgotten, gain[0], yerr=error_bar(*gain), xerr=across, **lines)
        axes.plot(
            forgotten, gain[0], label=name, marker=marker, color=colour, markersize=size, **EDGED
        )
    axes.axvline(0, color="black", linewidth=0.8)
    axes.update_datalim([(-0.025, 0), (0.025, 0)])  # the least width of the x axis
    axes.autoscale_view()
    axes.margins(0.08)
    axes.set(
        xlabel="forgetting, difference of success rates (+ lost, - gained)",
        ylabel="new-domain gain, difference of success rates",
    )
    drawing.tidy(axes, grid="both")
    handles, names = axes.get_legend_handles_labels()  # none, if no configuration has stages
    figure.legend(handles, names, **drawing.BELOW | {"fontsize": "medium"})
    return figure


OF_RUN: dict[str, Callable[[RunData], Figure | None]] = {
    "learning_curves": learning_curves,
    "optimization": optimization,
    "stage_performance": stage_performance,
    "accuracy_matrix": accuracy_matrix,
    "transfer": transfer,
    "stop_reasons": stop_reasons,
    "zero_std_groups": zero_std_groups,
    "time_and_memory": time_and_memory,
}
