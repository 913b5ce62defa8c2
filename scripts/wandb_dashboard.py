"""Create a W&B workspace for the runs of a project: transfer, learning curves, rollouts, speed.

    python scripts/wandb_dashboard.py --entity NAME --project three-domain-grpo

Runs are grouped by curriculum, and the x axis of every plot is the step of the run. Each call
creates a new view of the project. With --print, the script prints the view as JSON and sends
nothing; with --picture FILE, it draws the view's sections and panels into an SVG or PNG file
(docs/dashboard.svg), without any data, and sends nothing. Needs the extra `dashboard`, and, to make
the view, `wandb login` or WANDB_API_KEY. The panels of episodes and the JSON were not tried on
W&B's own servers.

Exit codes: 0 created, 1 refused by W&B, 2 a mistake (explained in one line).
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.common.console import say
from pipeline.common.errors import UserError
from pipeline.config.settings import Config
from scripts.wandb_sync import exit_code_of

TRANSFER = (
    *("average_accuracy", "total_gain", "stage_gain", "backward_transfer", "forward_transfer"),
    *("forgetting", "learning_efficiency", "area_under_curve"),
)
BY_DOMAIN = ("backward_transfer", "forward_transfer", "forgetting")
STOPS = (
    *("completed", "max_turns", "max_tokens", "malformed_call"),
    *("repeated_call", "environment_error", "agent_error"),
)
ROLLOUT = {
    "how episodes end, shares": [f"stop/{name}" for name in STOPS],
    "groups without a signal": ["frac_reward_zero_std", "all_failed", "all_solved"],
    "deviation of rewards": ["reward_std"],
    "turns of an episode": ["turns"],
    "errors of a step": ["tool_errors", "environment_errors"],
}
TRL = {  # names that are TRL's
    "sampled tokens of an episode": [f"completions/{of}_length" for of in ("mean", "min", "max")],
    "of those that no maximum ended": [
        f"completions/{of}_terminated_length" for of in ("mean", "min", "max")
    ],
    "calls of tools": ["tools/call_frequency", "tools/failure_frequency"],
}
UPDATE = {
    **{
        f"train/{name}": [f"train/{name}"]
        for name in ("loss", "grad_norm", "entropy", "sampling_logp_difference_mean", "skipped")
    },
    "clipped tokens, shares": [f"clip_ratio/{of}_mean" for of in ("low", "high", "region")],
    "tokens of the run": ["train/num_tokens"],
    "tasks by their last groups": [
        f"tasks/{name}" for name in ("always_solved", "mixed", "never_solved")
    ],
}
SPEED = {
    "seconds of a step": ("step_s", "sample_s", "environment_s", "update_s", "wait_s"),
    "episodes a second": ("episodes_per_s",),
    "tokens a second": ("sample_tokens_per_s", "update_tokens_per_s"),
    "peak memory, MB": ("peak_memory_mb",),
    "seconds of evaluations and checkpoints": ("evaluation_s", "validation_s", "checkpoint_s"),
}


def main(argv: Sequence[str]) -> int:
    defaults = Config()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--entity", default="", help="W&B user or team")
    parser.add_argument("--project", default=defaults.tracking.project)
    parser.add_argument("--name", default="curricula", help="of the view")
    parser.add_argument("--domains", nargs="+", default=defaults.data.domains)
    parser.add_argument("--print", action="store_true", help="write the view's JSON, send nothing")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the view, send nothing")
    given = parser.parse_args(argv)
    return exit_code_of(lambda: _make(given))


def _make(given: argparse.Namespace) -> None:
    if importlib.util.find_spec("wandb_workspaces") is None:
        raise UserError('wandb-workspaces: not installed; pip install -e ".[dashboard]"')
    if given.picture and given.picture.suffix not in (".svg", ".png"):
        raise UserError(f"--picture: got {given.picture}; give a name that ends with .svg or .png")
    if not (given.print or given.picture or given.entity):
        raise UserError("--entity: got none; give the W&B user or team whose project it is")
    view = workspace(given.entity, given.project, given.name, given.domains)
    if given.print:
        print(view._to_model().spec.model_dump_json(by_alias=True, exclude_none=True, indent=1))
    elif given.picture:
        draw(view, given.picture)
    else:
        view.save()
        say(f"made: {view.url}")


def workspace(entity: str, project: str, name: str, domains: Sequence[str]) -> Any:
    """Create the view, a `wandb_workspaces.workspaces.Workspace`."""
    import wandb_workspaces.workspaces as ws
    from wandb_workspaces.expr import Metric

    sections = {
        "Transfer": _transfer(domains),
        **{f"Learning: {domain}": _learning(domain) for domain in domains},
        "Rollouts": _rollouts(domains),
        "Updates": [_lines(title, *names) for title, names in UPDATE.items()],
        "Speed and memory": [
            _lines(title, *(f"perf/{name}" for name in names)) for title, names in SPEED.items()
        ],
        "Episodes": _episodes(),
    }
    return ws.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[
            ws.Section(name=title, panels=panels, is_open=title != "Episodes")
            for title, panels in sections.items()
        ],
        settings=ws.WorkspaceSettings(x_axis="step"),
        runset_settings=ws.RunsetSettings(
            groupby=[Metric("Group")],
            pinned_columns=[f"summary:final/{domain}/success" for domain in domains],
        ),
    )


def _transfer(domains: Sequence[str]) -> list[Any]:
    """The panels of the transfer metrics in results.json and of the success rates."""
    bars = [_bars(name.replace("_", " "), f"transfer/metrics/{name}") for name in TRANSFER]
    bars += [
        _bars(
            f"{name.replace('_', ' ')}, by domain",
            *(f"transfer/domains/{name}/{domain}" for domain in domains),
        )
        for name in BY_DOMAIN
    ]
    held_out = [f"eval/{domain}/success" for domain in domains]
    moved = [f"validation/{domain}/kl" for domain in domains]
    final = [f"final/{domain}/success" for domain in domains]
    return [
        _bars("success at the end", *final),
        _lines("held-out success after each stage", *held_out),
        *bars,
        _lines("divergence from what each stage had learned", *moved),
    ]


def _learning(domain: str) -> list[Any]:
    return [
        _lines("training reward", f"reward/{domain}"),
        _lines("validation success", f"validation/{domain}/success"),
        _lines("held-out success", f"eval/{domain}/success", f"eval/{domain}/greedy"),
        _lines("groups without a signal", f"rollout/frac_reward_zero_std/{domain}"),
    ]


def _rollouts(domains: Sequence[str]) -> list[Any]:
    rewards = [f"reward/{domain}" for domain in domains]
    return [
        _lines("reward", "reward/mean", *rewards),
        *(
            _lines(title, *(f"rollout/{name}" for name in names))
            for title, names in ROLLOUT.items()
        ),
        *(_lines(title, *names) for title, names in TRL.items()),
    ]


def _episodes() -> list[Any]:
    import wandb_workspaces.reports.v2 as wr

    tables = "completions", "trajectories"  # of the latest step with one; of the whole run
    layout = wr.Layout(w=24, h=16)
    return [wr.WeavePanelSummaryTable(table_name=name, layout=layout) for name in tables]


def _lines(title: str, *metrics: str) -> Any:
    import wandb_workspaces.reports.v2 as wr

    return wr.LinePlot(title=title, x="step", y=list(metrics))


def _bars(title: str, *metrics: str) -> Any:
    import wandb_workspaces.reports.v2 as wr

    return wr.BarPlot(title=title, metrics=list(metrics))


def draw(view: Any, path: Path) -> None:
    """Draw the sections and panels of a Workspace, each panel with the names of its metrics."""
    from matplotlib import patches, rc_context
    from matplotlib.figure import Figure

    columns, width, height = 4, 3.2, 1.15  # panels in a row; inches of a panel
    rows = [(s, [*_rows(s.panels, columns)]) for s in view.sections]
    total = sum(0.4 + height * len(of) for _, of in rows)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "dashboard", "font.size": 7}):
        figure = Figure(figsize=(columns * width, total))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, columns * width), ylim=(total, 0))
        axes.axis("off")
        y = 0.0
        for section, of in rows:
            axes.text(0.1, y + 0.27, section.name, fontweight="bold", fontsize=10)
            y += 0.4
            for row in of:
                for column, panel in enumerate(row):
                    x = column * width
                    frame = (x + 0.06, y + 0.05), width - 0.12, height - 0.1
                    axes.add_patch(patches.Rectangle(*frame, fc="#f6f8fa", ec="#8c959f", lw=0.7))
                    kind, title, names = _content(panel)
                    axes.text(x + 0.15, y + 0.24, title, fontweight="bold")
                    axes.text(x + width - 0.15, y + 0.24, kind, ha="right", color="#57606a")
                    more = [f"and {len(names) - 4} more"] if len(names) > 5 else names[4:]
                    for line, name in enumerate([*names[:4], *more]):
                        axes.text(x + 0.15, y + 0.42 + 0.14 * line, name, family="monospace")
                y += height
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _rows(panels: Sequence[Any], columns: int) -> list[Sequence[Any]]:
    return [panels[i : i + columns] for i in range(0, len(panels), columns)]


def _content(panel: Any) -> tuple[str, str, list[str]]:
    """Return what a panel is, its title, and the names of its metrics."""
    if hasattr(panel, "table_name"):
        return "table", panel.table_name, ["task, conversation, rewards,", "advantage, stop reason"]
    names = panel.y if hasattr(panel, "y") else panel.metrics
    kind = "lines" if hasattr(panel, "y") else "bars"
    return kind, panel.title, [getattr(name, "name", name) for name in names]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
