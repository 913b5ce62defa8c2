"""Success after each stage, accuracy matrix, transfer, and gain against forgetting."""

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from textwrap import fill
from typing import Any, NamedTuple

from pipeline.data.curriculum import BEFORE_GRPO
from pipeline.evaluation.transfer import rate
from pipeline.plots import drawing
from pipeline.plots.drawing import COLOURS, WIDTH, Axes, Figure, Number, complete, error_bar, shown
from pipeline.plots.training import BASELINE, SQUARE, draw_baseline, draw_rate
from pipeline.tracking.run_files import RunData

INTERVAL: dict[str, Any] = {"fmt": "none", "ecolor": "black", "capsize": 2.5, "elinewidth": 1}
DIAMOND: dict[str, Any] = {"marker": "D", "color": "black", "mfc": "white", "linestyle": "none"}
RATES = [("sampled (pale: before GRPO)", SQUARE), ("greedy, always the likeliest token", DIAMOND)]
FRAME: dict[str, Any] = {"fill": False, "edgecolor": COLOURS[1], "linewidth": 2.5, "zorder": 3}
DIRECTIONS = {  # for each metric: title of the panel, meaning of negative and positive values
    "backward_transfer": ("backward transfer: effect of later stages", "- lost, + helped"),
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
EDGED: dict[str, Any] = {"mec": "black", "mew": 0.8, "linestyle": "none", "zorder": 4}
LEGEND_CHARACTERS = 56  # maximum length of a line of the legend

Bar = tuple[str, Number | None, str]  # name, value with interval, colour


def stage_performance(run: RunData) -> Figure:
    """Draw sampled success (bars) and greedy success (diamonds) of each domain after each stage."""
    names = [evaluation["after"].replace("_", " ") for evaluation in run.evaluations]
    columns = min(3, len(run.domains))
    rows = math.ceil(len(run.domains) / columns)
    width = max(WIDTH / columns, 0.28 * len(names) + 0.4)
    words = "held-out success after each stage, with 95 % intervals"
    figure = drawing.new_figure(run, words, columns * width, rows * 3.0 + 1.2)
    for index, (domain, colour) in enumerate(zip(run.domains, cycle(COLOURS), strict=False), 1):
        axes = figure.add_subplot(rows, columns, index)
        axes.set_ylim(-0.03, 1.03)
        drawing.tidy(axes)
        for x, evaluation in enumerate(run.evaluations):
            if domain in evaluation["success"]:
                kinds = ("mean", "greedy")
                is_pale = evaluation["after"] in BEFORE_GRPO
                numbers = [rate(evaluation, domain, k, run.success_threshold) for k in kinds]
                _draw_rates(axes, x, numbers, colour, is_pale)
        if not run.is_graded(domain):  # a mean of graded rewards is no success rate
            draw_baseline(axes, run, domain, colour)
        axes.set_title(domain, loc="left", color=colour, fontweight="bold")
        axes.set_xticks(range(len(names)), names, rotation=35, ha="right", rotation_mode="anchor")
        axes.set_xlim(-0.7, max(len(names), 1) - 0.3)
        axes.set_xlabel("evaluated after")
    figure.supylabel("success rate", fontsize="medium")
    drawing.legend(figure, [*RATES, *([BASELINE] if run.results["baselines"] else [])])
    return figure


def _draw_rates(axes: Axes, x: float, numbers: Sequence[Any], colour: str, pale: bool) -> None:
    sampled, greedy = numbers
    axes.bar(x, sampled[0], width=0.8, color=colour, alpha=0.4 if pale else 1.0)
    if sampled[0] >= 0.2:
        ink = drawing.LIGHT_INK if colour in drawing.DARK and not pale else "black"
        style: dict[str, Any] = {"ha": "center", "size": "small", "color": ink, "rotation": 90}
        axes.text(x, 0.02, f"{sampled[0]:.2f}", **style)
    draw_rate(axes, x - 0.15, sampled, fmt="none", ecolor="black")
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
            text = "-"
            ink = "black"
            if cell := complete(number):
                fill_colour = colormaps["cividis"](cell[0])
                axes.add_patch(patches.Rectangle((c - 0.5, r - 0.5), 1, 1, color=fill_colour))
                ink = drawing.DARK_INK if cell[0] > 0.55 else drawing.LIGHT_INK
                text = shown(cell).replace(" [", "\n[")
            axes.text(c, r, text, ha="center", va="center", color=ink, fontsize="small")
    trained = [(stage["name"], name) for stage in run.transfer["stages"] for name in stage["own"]]
    for r, c in ((points.index(stage), columns.index(name)) for stage, name in trained):
        axes.add_patch(patches.Rectangle((c - 0.46, r - 0.44), 0.92, 0.88, **FRAME))
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(points) - 0.5, -0.5)
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
    title = "changes, with 95 % intervals"
    height = 0.2 * sum(rows) + 0.65 * len(rows) + 0.4
    figure = drawing.new_figure(run, title, WIDTH, height)
    many = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[n + 1 for n in rows]).flat
    for axes, (bars, words_above, directions) in zip(many, panels, strict=True):
        _draw_bars(axes, bars)
        # A title aligned with the right edge may extend over the names of the bars on the left.
        axes.set_title(words_above, loc="right", fontsize="medium", fontweight="bold")
        axes.set_xlabel(f"difference of success rates; {directions}", fontsize="small")
    return figure


def _draw_bars(axes: Axes, bars: Sequence[Bar]) -> None:
    for y, (_, number, colour) in enumerate(bars):
        if not (points := complete(number)):
            axes.text(0, y, "no interval", va="center", fontsize="small")
            continue
        axes.barh(y, points[0], height=0.7, color=colour)
        axes.errorbar(points[0], y, xerr=error_bar(*points), **INTERVAL)
        beside: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "fontsize": "x-small"}
        axes.text(1.02, y, shown(points, "+"), va="center", **beside)
    axes.axvline(0, color="black", linewidth=1)
    axes.set_yticks(range(len(bars)), [name for name, _, _ in bars], fontsize="small")
    axes.set_ylim(len(bars) - 0.4, -0.6)
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, -0.01), max(high, 0.01))
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
    drawn = [c for c in configurations if complete(c.transfer["metrics"].get("stage_gain"))]
    names = [fill(c.label, LEGEND_CHARACTERS) for c in drawn]
    words = "new-domain gain against forgetting, 95 % intervals over tasks and seeds"
    height = 3.5 + 0.19 * sum(name.count("\n") + 1 for name in names)
    figure = drawing.new_figure(None, words, WIDTH, height)
    axes = figure.subplots()
    styles = zip(cycle(OF_CONFIGURATIONS), cycle(MARKERS), strict=False)
    for configuration, name in zip(drawn, names, strict=True):
        numbers = configuration.transfer["metrics"]
        gain = complete(numbers["stage_gain"])
        forgetting = complete(numbers.get("forgetting"))
        colour = "black"
        marker = "*"
        size = 13
        if configuration.is_mixed:
            axes.axhline(gain[0], color=colour, linestyle=":", linewidth=1)
        else:
            (colour, marker), size = next(styles), 7
        forgotten = forgetting[0] if forgetting else 0.0
        across = error_bar(*forgetting) if forgetting else None
        lines = {**INTERVAL, "ecolor": colour, "zorder": 3, "elinewidth": 1.4}
        axes.errorbar(forgotten, gain[0], yerr=error_bar(*gain), xerr=across, **lines)
        axes.plot(
            forgotten, gain[0], label=name, marker=marker, color=colour, markersize=size, **EDGED
        )
    axes.axvline(0, color="black", linewidth=0.8)
    axes.update_datalim([(-0.025, 0), (0.025, 0)])  # the least width of the x axis
    axes.autoscale_view()
    axes.margins(0.08)
    axes.set_xlabel("forgetting, difference of success rates (+ lost, - gained)")
    axes.set_ylabel("new-domain gain, difference of success rates")
    drawing.tidy(axes, grid="both")
    figure.legend(**drawing.BELOW | {"fontsize": "medium"})
    return figure
