"""Several runs beside each other: seeds of equal settings are one row, mixed training is one too.

What is compared is what learning new domains gained, and what it cost of those learned before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import UserError
from pipeline.evaluation.transfer import SUCCESS, differences, summary
from pipeline.plots.comparison import Row
from pipeline.report.sections import Block, Picture, Section, Table
from pipeline.report.transfer_sections import METRICS, NO_INTERVAL, UNSIGNED, shown
from pipeline.tracking.run_files import RunData, load_run

# How a run is played and watched, not what it learns.
IGNORED = ("run", "tracking")
# Of a curriculum in stages; mixed training has one stage and takes none of it.
OF_STAGES = ("order", "stage_weights", "stage_steps", "stage_tasks", "replay", "difficulties")
IN_TABLE = ("average_accuracy", "stage_gain", "backward_transfer", "forward_transfer", "forgetting")
FURTHER = ("total_gain", "learning_efficiency", "area_under_curve")


def runs_in(folders: Sequence[Path]) -> list[Path]:
    """The run folders that are meant: those given, or for one that is no run those inside it."""
    if len(folders) != 1 or (folders[0] / "config.yaml").is_file():
        return list(folders)
    if not folders[0].is_dir():
        raise UserError(f"report: {folders[0]} is no folder; give a run folder, or one of runs")
    return sorted(path.parent for path in folders[0].glob("*/config.yaml"))


def finished(folders: Sequence[Path]) -> tuple[list[RunData], list[RunData]]:
    """The runs that were evaluated after every stage, and the others; UserError if there is none.

    Others were interrupted, or have no stages.
    """
    runs = [load_run(folder) for folder in folders]
    done = [run for run in runs if _num_stages(run) and _num_stages(run) == _num_evaluated(run)]
    if not done:
        names = ", ".join(run.folder.name for run in runs)
        raise UserError(
            f"report: got no finished run with stages to compare ({names}); finish one with "
            "--output-dir FOLDER --resume-from-checkpoint latest"
        )
    return done, [run for run in runs if run not in done]


def _num_stages(run: RunData) -> int:
    return len(run.results.get("curriculum", {}).get("stages", ()))


def _num_evaluated(run: RunData) -> int:
    return len(run.transfer.get("points", ())) - 1


def rows_of(runs: Sequence[RunData]) -> list[Row]:
    """Mixed training first, then the others by their settings.

    Raises UserError for runs that cannot be put together.
    """
    groups: dict[str, list[RunData]] = {}
    for run in runs:
        groups.setdefault(json.dumps(settings_of(run.config), sort_keys=True), []).append(run)
    labels = _labels([json.loads(key) for key in groups])
    mixed = [of for of in groups.values() if _is_mixed(of[0])]
    rows = []
    for label, of in zip(labels, groups.values(), strict=True):
        of.sort(key=lambda run: int(run.config["run"]["seed"]))
        transfer = of[0].transfer if len(of) == 1 else summary([run.results for run in of])
        rows.append(
            Row(
                label=label,
                runs=of,
                transfer=transfer,
                is_mixed=_is_mixed(of[0]),
                against_mixed=_against(of, transfer, mixed),
            )
        )
    return sorted(rows, key=lambda row: (not row.is_mixed, _in_order(row.label)))


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What decides what a run learns, but for its seed: `section.name` to value.

    A model that is a checkpoint of another run counts by the settings of that run.
    """
    found: dict[str, Any] = {}
    mixed = config["curriculum"].get("curriculum") == "mixed"
    for section, values in config.items():
        if section == "evaluation":  # a run from before it was a setting
            values = {"success_threshold": SUCCESS, **values}
        if not isinstance(values, dict):
            found[section] = values
        elif section not in IGNORED:
            found |= {f"{section}.{name}": value for name, value in values.items()}
    if mixed:
        found = {k: v for k, v in found.items() if k.removeprefix("curriculum.") not in OF_STAGES}
    path = Path(found["model.model"])
    origin = path.parent.parent / "config.yaml"
    if path.parent.name == "checkpoints" and not origin.is_file():  # moved from elsewhere
        found["model.model"] = re.sub(r"seed-\d+", "seed", str(path))
    elif path.parent.name == "checkpoints":
        other = settings_of(yaml.safe_load(origin.read_text(encoding="utf-8")))
        kept = {k: v for k, v in other.items() if k.startswith(("model.", "warm_start.", "data."))}
        found["model.model"] = f"{path.name} of {json.dumps(kept, sort_keys=True)}"
    return found


def _is_mixed(run: RunData) -> bool:
    return bool(run.config["curriculum"].get("curriculum") == "mixed")


def _labels(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings in which each differs from most: `replay 0.3`; mixed training is called that."""
    staged = [of for of in settings if not _mixed_in(of)]
    kinds = {of.get("curriculum.curriculum") for of in staged}
    labels = []
    for mine in settings:
        kind = [of for of in settings if _mixed_in(of)] if _mixed_in(mine) else staged
        keys = [k for k in mine if 2 * sum(of.get(k) == mine[k] for of in kind) <= len(kind)]
        words = [
            f"{key.split('.')[-1]} {_short(mine[key])}"
            for key in keys
            if key != "curriculum.curriculum"
        ]
        if _mixed_in(mine) or len(kinds) > 1 or not words:
            words.insert(0, str(mine.get("curriculum.curriculum")))
        labels.append(", ".join(words))
    return labels


def _mixed_in(settings: Mapping[str, Any]) -> bool:
    return bool(settings.get("curriculum.curriculum") == "mixed")


def _short(value: Any) -> str:
    if isinstance(value, list):
        return "-".join(map(str, value)) or "as listed"
    if isinstance(value, dict):
        return " ".join(f"{name}={_short(of)}" for name, of in value.items()) or "none"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _in_order(label: str) -> list[tuple[bool, float, str]]:
    """`replay 0.05` before `replay 0.3`, and `steps 9` before `steps 10`."""
    words = re.split(r"([\d.]*\d)", label)
    return [
        (i % 2 == 0, float(word) if i % 2 and word.count(".") < 2 else 0.0, word)
        for i, word in enumerate(words)
    ]


def _against(
    runs: Sequence[RunData], transfer: Mapping[str, Any], mixed: Sequence[Sequence[RunData]]
) -> dict[str, Any] | None:
    """Differences to mixed training with as many episodes and seeds, on the same tasks."""
    if _is_mixed(runs[0]):
        return None
    for others in mixed:
        same = [
            [other for other in others if other.config["run"]["seed"] == run.config["run"]["seed"]]
            for run in runs
        ]
        theirs = [of[0].results for of in same if of]
        if len(theirs) == len(runs) and summary(theirs)["episodes"] == transfer["episodes"]:
            with suppress(UserError):  # evaluated on other tasks
                return differences([run.results for run in runs], theirs)
    return None


def sections_of(rows: Sequence[Row], left_out: Sequence[RunData] = ()) -> list[Section]:
    """The comparison in words, tables and the Pareto plot."""
    blocks: list[Block] = [
        "Runs with equal settings but for the seed are one row, named by the settings in which it "
        "differs from most rows. In brackets: 95 % intervals, "
        "percentile bootstrap over seeds and tasks, paired. With one seed they say nothing of "
        "other seeds; with two or three, little.",
        _table(rows, IN_TABLE),
        "\n".join(f"- *{METRICS[name][0]}*: {METRICS[name][1]}." for name in IN_TABLE),
    ]
    if left_out:
        names = ", ".join(f"`{run.folder.resolve().name}`" for run in left_out)
        blocks.append(f"**Left out**, for they are not finished: {names}.")
    reference = [row for row in rows if row.is_mixed]
    if not reference:
        blocks.append(
            "**There is no mixed training among these runs, so there is no reference row**: add a "
            "run with `--curriculum mixed` and the same number of episodes."
        )
    elif missing := [row for row in rows if not row.is_mixed and row.against_mixed is None]:
        blocks.append(
            f"**Without a reference**: {'; '.join(row.label for row in missing)}. No mixed "
            "training has the same number of episodes, seeds and tasks."
        )
    found = [
        Section(title="New domains against old ones", blocks=blocks),
        Section(
            title="Pareto plot",
            blocks=[
                Picture(name="pareto", caption="New-domain gain against forgetting"),
                "Up and to the left is better. Mixed training has one stage, in which all domains "
                "are new; after it there is nothing to forget, so it stands at zero.",
            ],
        ),
        *_differences(rows),
        Section(
            title="Further numbers", blocks=[_table(rows, FURTHER), *_rewards(rows), *_runs(rows)]
        ),
    ]
    return found


def _rewards(rows: Sequence[Row]) -> list[Block]:
    """The mean reward at the end, of domains whose rewards are not all 0 or 1."""
    names = list(dict.fromkeys(d for row in rows for d in row.transfer.get("rewards", {})))
    ends = [{d: of[-1] for d, of in row.transfer.get("rewards", {}).items()} for row in rows]
    cells = [
        [row.label, *(shown(of.get(name)) for name in names)]
        for row, of in zip(rows, ends, strict=True)
    ]
    return [Table(header=["mean reward at the end", *names], rows=cells)] if names else []


def _table(rows: Sequence[Row], names: Sequence[str]) -> Table:
    """A row for each configuration, the reference marked."""
    cells = []
    for row in rows:
        metrics = row.transfer["metrics"]
        numbers = [
            shown(metrics.get(n), "" if n in UNSIGNED else "+", 3 if n.startswith("learn") else 2)
            for n in names
        ]
        label = f"{row.label} (reference)" if row.is_mixed else row.label
        cells.append([label, str(len(row.runs)), f"{row.episodes:,}", *numbers])
    header = ["configuration", "seeds", "episodes", *(METRICS[name][0] for name in names)]
    return Table(header=header, rows=cells)


def _differences(rows: Sequence[Row]) -> list[Section]:
    """What each configuration has more than mixed training."""
    compared = [row for row in rows if row.against_mixed]
    names = [n for n in METRICS if any(n in (row.against_mixed or {}) for row in compared)]
    if not names:
        return []
    cells = []
    for row in compared:
        found = row.against_mixed or {}
        numbers = [shown(found.get(n), "+", 3 if n.startswith("learn") else 2) for n in names]
        cells.append([row.label, *numbers])
    text = (
        "What a configuration has more than mixed training with as many episodes, on the same "
        f"tasks and seeds; {NO_INTERVAL}: not defined for one stage."
    )
    table = Table(header=["minus mixed", *(METRICS[name][0] for name in names)], rows=cells)
    return [Section(title="Difference to mixed training", blocks=[text, table])]


def _runs(rows: Sequence[Row]) -> list[Block]:
    lines = [
        f"- {row.label}: " + ", ".join(f"`{run.folder.resolve().name}`" for run in row.runs)
        for row in rows
    ]
    return ["\n".join(lines)]
