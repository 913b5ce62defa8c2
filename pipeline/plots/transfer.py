"""Success after each stage, accuracy matrix, transfer, tool calls, and gain against forgetting."""

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from textwrap import fill
from typing import Any, NamedTuple

from pipeline.evaluation.transfer import BEFORE_GRPO
from pipeline.plots import drawing
from pipeline.plots.drawing import COLOURS, WIDTH, Axes, Figure, Number, error_bar, percent
from pipeline.plots.training import BASELINE, SQUARE, draw_baseline, draw_rate
from pipeline.tracking.run_files import RunData

INTERVAL: dict[str, Any] = {"fmt": "none", "ecolor": "black", "capsize": 2.5, "elinewidth": 1}
DIAMOND: dict[str, Any] = {"marker": "D", "color": "black", "mfc": "white", "linestyle": "none"}
RATES = [("sampled, 95 % interval (pale: before GRPO)", SQUARE), ("greedy", DIAMOND)]
FRAME: dict[str, Any] = {"fill": False, "edgecolor": COLOURS[1], "linewidth": 2.5, "zorder": 3}
DIRECTIONS = {  # for each metric: title of the panel, meaning of negative and positive values
    "backward_transfer": ("backward transfer: effect of later stages", "- lost, + helped"),
    "forward_transfer": ("forward transfer: effect of earlier stages", "- lost, + helped"),
    "forgetting": ("forgetting: best success minus that at the end", "+ lost, - gained"),
}
MARKERS = "osD^vPX<>ph"
MIXED: dict[str, Any] = {"marker": "*", "color": "black", "markersize": 13}

Bar = tuple[str, Number | None, str]  # name, value with interval, colour


def stage_performance(run: RunData) -> Figure:
    """Draw sampled success (bars) and greedy success (diamonds) of each domain after each stage."""
    names = [evaluation["after"].replace("_", " ") for evaluation in run.evaluations]
    columns = min(3, len(run.domains))
    rows = math.ceil(len(run.domains) / columns)
    width = max(WIDTH / columns, 0.28 * len(names) + 0.4)
    words = "held-out success after each stage"
    figure = drawing.new_figure(run, words, columns * width, rows * 3.0 + 1.2)
    for index, (domain, colour) in enumerate(zip(run.domains, cycle(COLOURS), strict=False), 1):
        axes = figure.add_subplot(rows, columns, index)
        axes.set_ylim(-0.03, 1.03)
        drawing.tidy(axes)
        for x, evaluation in enumerate(run.evaluations):
            if of := evaluation["success"].get(domain):
                _draw_rates(axes, x, of, colour, pale=evaluation["after"] in BEFORE_GRPO)
        if not run.is_graded(domain):  # a mean of graded rewards is no success rate
            draw_baseline(axes, run, domain, colour)
        axes.set_title(domain, loc="left", color=colour, fontweight="bold")
        axes.set_xticks(range(len(names)), names, rotation=35, ha="right", rotation_mode="anchor")
        axes.set_xlim(-0.7, max(len(names), 1) - 0.3)
        axes.set_xlabel("evaluated after")
    figure.supylabel("success rate", fontsize="medium")
    drawing.legend(figure, [*RATES, *([BASELINE] if run.results["baselines"] else [])])
    return figure


def _draw_rates(axes: Axes, x: float, of: Mapping[str, Any], colour: str, pale: bool) -> None:
    axes.bar(x, of["mean"], width=0.8, color=colour, alpha=0.4 if pale else 1.0)
    if of["mean"] >= 0.15:
        ink = drawing.LIGHT_INK if colour in drawing.DARK and not pale else "black"
        axes.text(x, 0.02, f"{of['mean']:.2f}", ha="center", size="small", color=ink)
    draw_rate(axes, x - 0.15, of["mean"], of["num_tasks"], fmt="none", ecolor="black")
    axes.plot(x + 0.2, of["greedy"], clip_on=False, **DIAMOND)


def accuracy_matrix(run: RunData) -> Figure | None:
    """Draw the success of each domain (columns) after each stage (rows), in per cent."""
    if not run.transfer:
        return None
    of, points = run.transfer["domains"], run.transfer["points"]
    trained = [(stage["name"], name) for stage in run.transfer["stages"] for name in stage["own"]]
    framed = [(points.index(stage), of["names"].index(name)) for stage, name in trained]
    words = "success of sampled trials, %, with 95 % interval\nframed: trained in that stage"
    title, rows = "accuracy matrix", run.points
    return _heat_map(run, title, rows, of["names"], of["matrix"], words, height=0.5, framed=framed)


def tools(run: RunData) -> Figure | None:
    """Draw each tool's share of calls without an error; rows are tools, columns are stages."""
    of = run.transfer.get("tools", {"names": []})
    known = [c for c, name in enumerate(of["names"]) if not name.endswith("/unknown")]
    if not known:
        return None
    columns = [point.replace(" the ", " ") for point in run.points]
    numbers = [[row[c] for row in of["matrix"]] for c in known]
    words = "held-out calls answered without an error, %, with 95 % interval"
    title, names = "success of tool calls", [of["names"][c] for c in known]
    return _heat_map(run, title, names, columns, numbers, words, height=0.25)


def _heat_map(
    run: RunData,
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    numbers: Sequence[Sequence[Number | None]],
    words: str,
    *,
    height: float,
    framed: Sequence[tuple[int, int]] = (),
) -> Figure:
    from matplotlib import colormaps, patches

    width = max(WIDTH, 0.95 * len(columns) + 1.9)
    figure = drawing.new_figure(run, title, width, height * len(rows) + 1.1)
    axes = figure.subplots()
    apart, size = ("\n", "small") if height > 0.3 else (" ", "x-small")
    for r, row in enumerate(numbers):
        for c, number in enumerate(row):
            text, ink = "-", "black"
            if points := percent(number):
                value, low, high = points
                fill_colour = colormaps["cividis"](value / 100)
                axes.add_patch(patches.Rectangle((c - 0.5, r - 0.5), 1, 1, color=fill_colour))
                ink = drawing.DARK_INK if value > 55 else drawing.LIGHT_INK
                text = f"{value:.0f}{apart}[{low:.0f}, {high:.0f}]"
            axes.text(c, r, text, ha="center", va="center", color=ink, fontsize=size)
    for r, c in framed:
        axes.add_patch(patches.Rectangle((c - 0.46, r - 0.44), 0.92, 0.88, **FRAME))
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xticks(range(len(columns)), [fill(name, 13) for name in columns])
    axes.set_yticks(range(len(rows)), rows)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel(words)
    return figure


def transfer(run: RunData) -> Figure | None:
    """Draw bars: each domain's change in each stage, backward and forward transfer, forgetting."""
    if not run.transfer or not run.transfer["domains"]["effects"]:
        return None
    of, means = run.transfer["domains"], run.transfer["metrics"]
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
    title, height = "changes, with 95 % intervals", 0.2 * sum(rows) + 0.65 * len(rows) + 0.4
    figure = drawing.new_figure(run, title, WIDTH, height)
    many = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[n + 1 for n in rows]).flat
    for axes, (bars, words_above, directions) in zip(many, panels, strict=True):
        _draw_bars(axes, bars)
        # A title aligned with the right edge may extend over the names of the bars on the left.
        axes.set_title(words_above, loc="right", fontsize="medium", fontweight="bold")
        axes.set_xlabel(f"percentage points; {directions}", fontsize="small")
    return figure


def _draw_bars(axes: Axes, bars: Sequence[Bar]) -> None:
    for y, (_, number, colour) in enumerate(bars):
        if not (points := percent(number)):
            axes.text(0, y, "no interval", va="center", fontsize="small")
            continue
        axes.barh(y, points[0], height=0.7, color=colour)
        axes.errorbar(points[0], y, xerr=error_bar(*points), **INTERVAL)
        words = "{} [{}, {}]".format(*(f"{round(x, 1) + 0.0:+.1f}" for x in points))
        beside: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "fontsize": "x-small"}
        axes.text(1.02, y, words, va="center", **beside)
    axes.axvline(0, color="black", linewidth=1)
    axes.set_yticks(range(len(bars)), [name for name, _, _ in bars], fontsize="small")
    axes.set_ylim(len(bars) - 0.4, -0.6)
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, -1.0), max(high, 1.0))
    drawing.tidy(axes, grid="x")


class Configuration(NamedTuple):
    """Runs whose settings differ only in the seed, and the transfer numbers of the runs."""

    label: str
    runs: Sequence[RunData]
    transfer: Mapping[str, Any]  # `evaluation.transfer.summary` of all seeds
    is_mixed: bool
    against_mixed: Mapping[str, Any] | None  # each metric minus the same metric of mixed training


def pareto(configurations: Sequence[Configuration]) -> Figure:
    """Draw new-domain gain against forgetting. Each configuration is a point with two intervals.

    A configuration without the metric `forgetting` is drawn at a forgetting of zero.
    """
    shown = [c for c in configurations if percent(c.transfer["metrics"].get("stage_gain"))]
    words = "gain against forgetting, 95 % intervals over tasks and seeds"
    figure = drawing.new_figure(None, words, WIDTH, 3.6 + 0.17 * len(shown))
    axes = figure.subplots()
    styles = zip(cycle(COLOURS), cycle(MARKERS), strict=False)
    for configuration in shown:
        numbers = configuration.transfer["metrics"]
        gain, forgetting = percent(numbers["stage_gain"]), percent(numbers.get("forgetting"))
        style = MIXED
        if configuration.is_mixed:
            axes.axhline(gain[0], color="black", linestyle=":", linewidth=1)
        else:
            colour, marker = next(styles)
            style = {"marker": marker, "color": colour, "markersize": 6}
        point = (forgetting[0] if forgetting else 0.0, gain[0])
        across = error_bar(*forgetting) if forgetting else None
        lines = {**INTERVAL, "ecolor": style["color"], "zorder": 3}
        axes.errorbar(*point, yerr=error_bar(*gain), xerr=across, **lines)
        axes.plot(*point, label=configuration.label, linestyle="none", zorder=4, **style)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.update_datalim([(-2.5, 0), (2.5, 0)])  # the x axis spans at least 5 percentage points
    axes.autoscale_view()
    axes.margins(0.08)
    axes.set_xlabel("forgetting, percentage points (+ lost, - gained)")
    axes.set_ylabel("new-domain gain, percentage points")
    drawing.tidy(axes, grid="both")
    columns = 2 if max((len(c.label) for c in shown), default=0) < 34 else 1
    figure.legend(ncols=columns, **drawing.BELOW)
    return figure
