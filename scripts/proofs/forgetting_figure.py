"""The figure of `forgetting.py`: points forgotten in a stage against how far the policy moved."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, NullFormatter

from scripts.proofs.forgetting_measures import correlations

MODELS = {
    "tiny": "tiny model (0.5 M)",
    "remembering": "SmolLM2-135M, rules not in the prompt",
    "reading": "SmolLM2-135M, rules in the prompt",
}
PANELS = {"kl_old": "KL on the old domains", "kl_new": "KL on the new domain"}
# Petroff's colours (arXiv 2107.02270), distinct also for colour-blind readers.
COLOURS = (
    *("#3F90DA", "#FFA90E", "#BD1F01", "#832DB6", "#A96B59"),
    *("#94A4A2", "#E76300", "#717581", "#92DADD", "#B9AC70"),
)
MARKERS = "osD^vPX<>p"
LEAST = 1e-5  # nats; smaller divergences are drawn here


def draw(raw: Mapping[str, Any], path: Path, words: Mapping[str, str]) -> None:
    """Draw two panels for each model in `raw`; a dot is a later stage of a run."""
    models = [name for name in MODELS if name in raw]
    names = [
        n for n in words if any("dots" in run for m in models for run in raw[m]["rows"].get(n, ()))
    ]
    styles = {n: (COLOURS[i], MARKERS[i]) for i, n in enumerate(names)}
    size = (9, 3.5 * len(models) + 0.25 * -(-len(names) // 2))
    figure, rows = plt.subplots(
        len(models), 2, figsize=size, sharex="row", sharey="row", squeeze=False
    )
    handles = dict[str, Any]()
    for axes_of_model, model in zip(rows, models, strict=True):
        of_model = raw[model]["rows"]
        others = [
            r["dots"] for n, of in of_model.items() for r in of if "dots" in r and n != "replay"
        ]
        found = correlations(others) if others else {}
        for axes, (key, title) in zip(axes_of_model, PANELS.items(), strict=True):
            for name in names:
                dots = [dot for run in of_model.get(name, ()) for dot in run.get("dots", ())]
                if dots:
                    colour, marker = styles[name]
                    (handles[words[name]],) = axes.plot(
                        [max(dot[key], LEAST) for dot in dots],
                        [100 * dot["forgotten"] for dot in dots],
                        linestyle="none",
                        marker=marker,
                        color=colour,
                        markersize=7,
                        markeredgecolor="black",
                        markeredgewidth=0.6,
                        alpha=0.85,
                    )
            axes.axhline(0, color="black", linewidth=0.8)
            axes.set_xscale("log")
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.set_xlabel(f"{title}, nats per token")
            text = "no runs without replay"
            if found:
                rank = "{:+.2f} ({:+.2f} to {:+.2f})".format(*found[f"spearman_{key[3:]}"])
                text = f"without replay: rank correlation {rank}"
            axes.set_title(f"{MODELS[model]}\n{text}", fontsize="medium")
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        axes_of_model[0].set_ylabel("points forgotten in the stage")
    figure.legend(
        handles.values(), handles, loc="lower center", ncols=2, frameon=False, fontsize="medium"
    )
    figure.tight_layout(rect=(0, 0.25 * -(-len(names) // 2) / size[1], 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)
