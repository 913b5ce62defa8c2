"""Learning curves and success after each stage; matplotlib is imported only to draw."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from pipeline.evaluation.transfer import BEFORE_GRPO
from pipeline.evaluation.transfer_metrics import wilson
from pipeline.tracking.run_files import Evaluation, RunData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMOOTHED_OVER = 9  # steps, centred
WIDTH = 5.4  # inches, with text of FONT_SIZE: legible in a paper and on a phone
FONT_SIZE = 8.5
LEAST_KL = 1e-3  # nats at the top of a probe's axis
# Okabe and Ito's palette, which colour-blind readers can tell apart
DARK = ("#0072B2", "#D55E00", "#009E73")
# Not quite black and white: text colours that stay as they are on a dark page
DARK_INK, LIGHT_INK = "#010101", "#fffffe"
COLOURS = (*DARK, "#CC79A7", "#E69F00", "#56B4E9")

Number = Sequence[float | None]  # value, low, high
Handle = tuple[str, dict[str, Any]]  # an entry of a legend: its text, its style
SAMPLED: Handle = (
    "sampled, 95 % interval (pale: before GRPO)",
    {"marker": "s", "linestyle": "none", "markersize": 9},
)
GREEDY: Handle = (
    "greedy",
    {"marker": "D", "color": "black", "markerfacecolor": "white", "linestyle": "none"},
)
BASELINE: Handle = ("best policy that never reads the record", {"linestyle": ":", "linewidth": 1})


def new_figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def percent(number: Number | None) -> list[float]:
    """A number and its interval in per cent; empty if it has no interval."""
    return [] if number is None or None in number else [100 * (x or 0.0) for x in number]


def error_bar(value: float, low: float, high: float) -> list[list[float]]:
    """The interval of one value as matplotlib's errorbar takes it."""
    return [[max(0.0, value - low)], [max(0.0, high - value)]]


def learning_curves(run: RunData) -> Figure:
    """One panel a domain: training reward, validation and held-out success over the steps.

    If validations measured it, a thin panel below shows how far the policy has moved on the tasks
    that it had learned.
    """
    probed = [d for d in run.domains if any(f"validation/{d}/kl" in r for r in run.validation)]
    ratios = [height for d in run.domains for height in ([3, 1] if d in probed else [3])]
    figure = new_figure(WIDTH, 0.55 * sum(ratios) + 1.3)
    grid = figure.subplots(len(ratios), 1, sharex=True, squeeze=False, height_ratios=ratios)
    panels = list(grid.flat)
    title(figure, run, "training reward and held-out success")
    last = max([1, *(record["step"] for record in [*run.train, *run.evaluations])])
    below = iter(panels)
    for domain, colour in zip(run.domains, cycle(COLOURS), strict=False):
        axes = next(below)
        axes.set_ylim(-0.03, 1.03)
        tidy(axes)
        stage_bands(axes, run, with_names=axes is panels[0])
        rewards = axes
        if run.is_graded(domain):  # rewards beside success rates get an axis of their own
            rewards = axes.twinx()
            rewards.set_ylabel("mean reward", color=colour, fontsize="small")
            rewards.spines[["top"]].set_visible(False)
        for stage in run.stages:
            _rewards(rewards, run.of_stage(stage), f"reward/{domain}", colour)
        _baseline(rewards, run, domain, colour)
        _points(axes, run, domain, colour)
        axes.set_ylabel(domain, color=colour, fontweight="bold")
        axes.set_xlim(-0.03 * last, 1.03 * last)
        if not run.train:
            axes.set_xlim(-1, 1)
            axes.set_xticks([0])
            axes.text(0.75, 0.5, "no training steps", transform=axes.transAxes, ha="center")
        if domain in probed:
            _probe(next(below), run, domain, colour)
    panels[-1].set_xlabel("optimizer step")
    figure.supylabel("mean reward, success rate", fontsize="medium")
    legend(figure, _learning_handles(run, bool(probed)))
    return figure


def _probe(axes: Axes, run: RunData, domain: str, colour: str) -> None:
    tidy(axes)
    stage_bands(axes, run, with_names=False)
    key = f"validation/{domain}/kl"
    points = [(r["step"], r[key]) for r in run.validation if r.get(key) is not None]
    style: dict[str, Any] = {"color": colour, "markersize": 4, "linewidth": 1, "clip_on": False}
    axes.plot(*zip(*points, strict=True), "v--", **style)
    axes.set_ylim(0, 1.25 * max([LEAST_KL, *(value for _, value in points)]))
    axes.set_ylabel("KL", fontsize="small")
    axes.locator_params(axis="y", nbins=2)


def stage_bands(axes: Axes, run: RunData, with_names: bool = True, lines: bool = False) -> None:
    """Draw stages as grey bands, or as lines between them, with their names above."""
    last = max((stage["first_step"] + stage["num_steps"] for stage in run.stages), default=1)
    for index, stage in enumerate(run.stages):
        first, end = stage["first_step"] + 0.5, stage["first_step"] + stage["num_steps"] + 0.5
        if lines and index:
            axes.axvline(first, color="black", linewidth=1)
        elif not lines:
            axes.axvspan(first, end, color="black", alpha=(0.04, 0.11)[index % 2], linewidth=0)
        room = int((end - first) / last * 50)  # characters, about
        if with_names and room > 3:
            top, at = axes.get_xaxis_transform(), (first + end) / 2
            words = f"stage {stage['name']}" if len(stage["name"]) + 6 <= room else stage["name"]
            words = words if len(words) <= room else f"{words[: room - 2]}.."
            axes.text(at, 1.02, words, transform=top, ha="center", fontsize="small")


def _rewards(axes: Axes, records: list[dict[str, Any]], key: str, colour: str) -> None:
    points = [(r["step"], r[key]) for r in records if r.get(key) is not None]
    if points:
        steps, raw = zip(*points, strict=True)
        axes.plot(steps, raw, color=colour, linewidth=0.8, alpha=0.35)
        axes.plot(steps, smooth(raw), color=colour, linewidth=2)


def smooth(values: Sequence[float]) -> list[float]:
    """Centred moving average; the window is shorter at both ends."""
    half = SMOOTHED_OVER // 2
    return [fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def _points(axes: Axes, run: RunData, domain: str, colour: str) -> None:
    """Validation and the held-out evaluations (sampled)."""
    key = f"validation/{domain}/success"
    validations = run.results.get("validations", [])
    counts = {v["step"]: len(v["success"].get(domain, ())) for v in validations}
    hollow = {"color": colour, "markerfacecolor": "white", "markersize": 4.5, "alpha": 0.9}
    for record in run.validation:
        if record.get(key) is not None:
            success = {"mean": record[key], "num_tasks": counts.get(record["step"], 0)}
            _interval(axes, record["step"], success, fmt="s", **hollow)
    dot = {"color": colour, "markeredgecolor": "black", "markersize": 8, "zorder": 5}
    for evaluation in run.evaluations:
        if domain in evaluation["success"]:
            _interval(axes, evaluation["step"], evaluation["success"][domain], fmt="o", **dot)


def _learning_handles(run: RunData, has_probes: bool) -> list[Handle]:
    handles: list[Handle] = []
    if run.train:
        handles.append(("training reward of a step", {"linewidth": 0.8, "alpha": 0.5}))
        handles.append((f"mean of {SMOOTHED_OVER} steps", {"linewidth": 2}))
    if run.validation:
        hollow = {"marker": "s", "markerfacecolor": "white", "linestyle": "none"}
        handles.append(("validation, sampled, 95 % interval", hollow))
    dot = {"marker": "o", "markeredgecolor": "black", "markersize": 8, "linestyle": "none"}
    handles.append((f"{run.results.get('split', 'test')}, sampled, 95 % interval", dot))
    if has_probes:
        dashes = {"marker": "v", "markersize": 4, "linewidth": 1, "linestyle": "--"}
        handles.append(("KL per token (nats) from the\npolicy when it was learned", dashes))
    return [*handles, BASELINE] if run.results["baselines"] else handles


def stage_performance(run: RunData) -> Figure:
    """One panel a domain: sampled success after each stage as bars, greedy success as diamonds."""
    count, columns = len(run.evaluations), min(3, len(run.domains))
    rows = math.ceil(len(run.domains) / columns)
    width = max(WIDTH / columns, 0.28 * count + 0.4)
    figure = new_figure(columns * width, rows * 3.0 + 1.2)
    panels = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    for axes in panels[len(run.domains) :]:
        axes.remove()
    title(figure, run, "held-out success after each stage")
    for domain, colour, axes in zip(run.domains, cycle(COLOURS), panels, strict=False):
        axes.set_ylim(-0.03, 1.03)
        tidy(axes)
        for x, evaluation in enumerate(run.evaluations):
            if domain in evaluation["success"]:
                _bar(axes, x, evaluation, domain, colour)
        if not run.is_graded(domain):  # else their mean reward is not a success rate
            _baseline(axes, run, domain, colour)
        axes.set_title(domain, loc="left", color=colour, fontweight="bold")
        names = [evaluation["after"].replace("_", " ") for evaluation in run.evaluations]
        axes.set_xticks(range(count), names, rotation=35, ha="right", rotation_mode="anchor")
        axes.set_xlim(-0.7, max(count, 1) - 0.3)
        axes.tick_params(labelbottom=True)
        axes.set_xlabel("evaluated after")
    figure.supylabel("success rate", fontsize="medium")
    legend(figure, [SAMPLED, GREEDY, *([BASELINE] if run.results["baselines"] else [])])
    return figure


def _bar(axes: Axes, x: float, evaluation: Evaluation, domain: str, colour: str) -> None:
    of = evaluation["success"][domain]
    pale = evaluation["after"] in BEFORE_GRPO
    axes.bar(x, of["mean"], width=0.8, color=colour, alpha=0.4 if pale else 1.0)
    if of["mean"] >= 0.15:
        ink = LIGHT_INK if colour in DARK and not pale else "black"
        axes.text(x, 0.02, f"{of['mean']:.2f}", ha="center", size="small", color=ink)
    _interval(axes, x - 0.15, of, fmt="none", ecolor="black")
    axes.plot(x + 0.2, of["greedy"], "D", color="black", markerfacecolor="white", clip_on=False)


def _baseline(axes: Axes, run: RunData, domain: str, colour: str) -> None:
    baseline = max(run.results["baselines"].get(domain, {}).values(), default=None)
    if baseline is not None:
        axes.axhline(baseline, color=colour, linestyle=":", linewidth=1)


def _interval(axes: Axes, x: float, success: Mapping[str, Any], **style: Any) -> None:
    mean, low, high = (success["mean"],) * 3
    if success["num_tasks"] > 0 and 0 <= mean <= 1:  # older runs have mean rewards there
        low, high = wilson(mean, success["num_tasks"])
    axes.errorbar(x, mean, error_bar(mean, low, high), capsize=2, elinewidth=1, **style)


def tidy(axes: Axes, grid: Literal["x", "y"] = "y") -> None:
    """Draw fine grid lines for one axis behind the data, and no frame."""
    axes.set_axisbelow(True)
    axes.grid(axis=grid, linewidth=0.5, alpha=0.4)
    axes.spines[["top", "right"]].set_visible(False)


def title(figure: Figure, run: RunData, words: str) -> None:
    name = f"{run.config['recipe']}, seed {run.config['run']['seed']}"
    figure.suptitle(f"{name}: {words}", wrap=True, fontsize="medium")


def legend(figure: Figure, handles: Sequence[Handle]) -> None:
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], **{"color": "#808080", **style}, label=name) for name, style in handles]
    columns = max(1, int(figure.get_figwidth() // 2.2))
    figure.legend(
        handles=lines, loc="outside lower center", ncols=columns, frameon=False, fontsize="small"
    )
