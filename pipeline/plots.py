"""The pictures of a report; matplotlib is imported only to draw."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pipeline.run_files import BEFORE_GRPO, Evaluation, Run, wilson

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMOOTHED_OVER = 9  # steps, centred
# Okabe and Ito's palette, which colour-blind readers can tell apart
DARK = ("#0072B2", "#D55E00", "#009E73")
COLOURS = (*DARK, "#CC79A7", "#E69F00", "#56B4E9")

Handle = tuple[str, dict[str, Any]]  # an entry of a legend: its words, its style
SAMPLED: Handle = (
    "sampled, 95 % interval\n(pale: before GRPO)",
    {"marker": "s", "linestyle": "none", "markersize": 9},
)
GREEDY: Handle = (
    "greedy",
    {"marker": "D", "color": "black", "markerfacecolor": "white", "linestyle": "none"},
)
FLOOR: Handle = ("best policy that never looks", {"linestyle": ":", "linewidth": 1})


def learning_curves(run: Run) -> Figure:
    """One panel a domain: training reward, validation and held-out success over the steps."""
    figure, panels = _panels(run, 1, (9.0, 2.1), "training reward and held-out success")
    last = max([1, *(record["step"] for record in [*run.train, *run.evaluations])])
    for domain, colour, axes in zip(run.domains, cycle(COLOURS), panels, strict=False):
        for number, stage in enumerate(run.stages):
            first, end = stage["first_step"] + 0.5, stage["first_step"] + stage["num_steps"] + 0.5
            axes.axvspan(first, end, color="black", alpha=(0.03, 0.08)[number % 2], linewidth=0)
            if axes is panels[0]:
                top, at = axes.get_xaxis_transform(), (first + end) / 2
                axes.text(at, 1.02, f"stage {stage['name']}", transform=top, ha="center")
            _rewards(axes, run.of_stage(stage), f"reward/{domain}", colour)
        _points(axes, run, domain, colour)
        axes.set_ylabel(domain, color=colour, fontweight="bold")
        axes.set_xlim(-0.03 * last, 1.03 * last)
        if not run.train:
            axes.set_xlim(-1, 1)
            axes.set_xticks([0])
            axes.text(0.75, 0.5, "no training steps", transform=axes.transAxes, ha="center")
    panels[-1].set_xlabel("optimizer step")
    figure.supylabel("mean reward, success rate", fontsize="medium")
    _legend(figure, _learning_handles(run))
    return figure


def _rewards(axes: Axes, records: list[dict[str, Any]], key: str, colour: str) -> None:
    points = [(r["step"], r[key]) for r in records if r.get(key) is not None]
    if points:
        steps, raw = zip(*points, strict=True)
        axes.plot(steps, raw, color=colour, linewidth=0.8, alpha=0.35)
        axes.plot(steps, smooth(raw), color=colour, linewidth=2)


def smooth(values: Sequence[float]) -> list[float]:
    """The mean of the values around each one, of fewer at the ends."""
    half = SMOOTHED_OVER // 2
    return [fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def _points(axes: Axes, run: Run, domain: str, colour: str) -> None:
    """Validation, the held-out evaluations (sampled) and the floor."""
    key = f"validation/{domain}/success"
    points = [(r["step"], r[key]) for r in run.validation if r.get(key) is not None]
    if points:
        axes.plot(
            *zip(*points, strict=True), "s", color=colour, markerfacecolor="white", markersize=5
        )
    for evaluation in run.evaluations:
        if domain in evaluation["success"]:
            of = evaluation["success"][domain]
            dot = {"color": colour, "markeredgecolor": "black", "markersize": 8, "zorder": 5}
            _interval(axes, evaluation["step"], of, fmt="o", **dot)
    _floor(axes, run, domain, colour)


def _learning_handles(run: Run) -> list[Handle]:
    handles: list[Handle] = []
    if run.train:
        handles.append(("training reward of a step", {"linewidth": 0.8, "alpha": 0.5}))
        handles.append((f"mean of {SMOOTHED_OVER} steps", {"linewidth": 2}))
    if run.validation:
        hollow = {"marker": "s", "markerfacecolor": "white", "linestyle": "none"}
        handles.append(("validation, sampled", hollow))
    dot = {"marker": "o", "markeredgecolor": "black", "markersize": 8, "linestyle": "none"}
    handles.append((f"{run.results.get('split', 'test')}, sampled, 95 % interval", dot))
    return [*handles, FLOOR] if run.results["floors"] else handles


def stage_performance(run: Run) -> Figure:
    """One panel a domain: sampled success after each stage as bars, greedy success as diamonds."""
    count, columns = len(run.evaluations), min(3, len(run.domains))
    size = (max(6.6 / columns, 0.55 * count + 1), 3.6)
    figure, panels = _panels(run, columns, size, "held-out success after each stage")
    for domain, colour, axes in zip(run.domains, cycle(COLOURS), panels, strict=False):
        for x, evaluation in enumerate(run.evaluations):
            if domain in evaluation["success"]:
                _bar(axes, x, evaluation, domain, colour)
        _floor(axes, run, domain, colour)
        axes.set_title(domain, loc="left", color=colour, fontweight="bold")
        names = [evaluation["after"].replace("_", " ") for evaluation in run.evaluations]
        axes.set_xticks(range(count), names, rotation=35, ha="right", rotation_mode="anchor")
        axes.set_xlim(-0.7, max(count, 1) - 0.3)
        axes.tick_params(labelbottom=True)
        axes.set_xlabel("evaluated after")
    figure.supylabel("success rate", fontsize="medium")
    _legend(figure, [SAMPLED, GREEDY, *([FLOOR] if run.results["floors"] else [])])
    return figure


def _bar(axes: Axes, x: float, evaluation: Evaluation, domain: str, colour: str) -> None:
    of = evaluation["success"][domain]
    pale = evaluation["after"] in BEFORE_GRPO
    axes.bar(x, of["mean"], width=0.8, color=colour, alpha=0.4 if pale else 1.0)
    if of["mean"] >= 0.15:
        ink = "white" if colour in DARK and not pale else "black"
        axes.text(x, 0.02, f"{of['mean']:.2f}", ha="center", size="small", color=ink)
    _interval(axes, x - 0.15, of, fmt="none", ecolor="black")
    axes.plot(x + 0.2, of["greedy"], "D", color="black", markerfacecolor="white", clip_on=False)


def _floor(axes: Axes, run: Run, domain: str, colour: str) -> None:
    floor = max(run.results["floors"].get(domain, {}).values(), default=None)
    if floor is not None:
        axes.axhline(floor, color=colour, linestyle=":", linewidth=1)


def _interval(axes: Axes, x: float, of: Mapping[str, Any], **style: Any) -> None:
    low, high = wilson(of["mean"], of["num_tasks"])
    error = [[max(0.0, of["mean"] - low)], [max(0.0, high - of["mean"])]]
    axes.errorbar(x, of["mean"], error, capsize=2, elinewidth=1, **style)


def _panels(
    run: Run, columns: int, size: tuple[float, float], title: str
) -> tuple[Figure, list[Axes]]:
    """A figure with a panel of `size` inches for each domain, all on the same axes."""
    from matplotlib.figure import Figure

    rows = math.ceil(len(run.domains) / columns)
    figure = Figure(figsize=(columns * size[0], rows * size[1] + 1.2), layout="constrained")
    panels = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    for axes in panels[len(run.domains) :]:
        axes.remove()
    for axes in panels:
        axes.set_ylim(-0.03, 1.03)
        axes.set_axisbelow(True)
        axes.grid(axis="y", linewidth=0.5, alpha=0.4)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{run.config['recipe']}, seed {run.config['run']['seed']}: {title}", wrap=True)
    return figure, panels[: len(run.domains)]


def _legend(figure: Figure, handles: list[Handle]) -> None:
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], **{"color": "dimgrey", **style}, label=name) for name, style in handles]
    columns = max(1, int(figure.get_figwidth() // 2.9))
    figure.legend(handles=lines, loc="outside lower center", ncols=columns, frameon=False)
