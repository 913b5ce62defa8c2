"""The comparison of several runs: runs that differ only in the seed are one row.

It compares the gain on new domains with the loss on domains learned before.
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
from pipeline.plots.transfer import Row
from pipeline.report.sections import Block, Picture, Section, Table, bullets
from pipeline.report.transfer_sections import METRICS, NO_INTERVAL, number_table, of_name
from pipeline.tracking.run_files import RunData, load_run

# Sections of the configuration that do not change what a run learns.
IGNORED = ("run", "tracking")
KIND = "curriculum.curriculum"
# Settings of a curriculum in stages, which mixed training ignores.
OF_STAGES = ("order", "stage_weights", "stage_steps", "stage_tasks", "replay", "difficulties")
IN_TABLE = ("average_accuracy", "stage_gain", "backward_transfer", "forward_transfer", "forgetting")
FURTHER = ("total_gain", "learning_efficiency", "area_under_curve")


def runs_in(folders: Sequence[Path]) -> list[Path]:
    """The given run folders, or the run folders inside the only given folder."""
    if len(folders) != 1 or (folders[0] / "config.yaml").is_file():
        return list(folders)
    if not folders[0].is_dir():
        raise UserError(f"report: {folders[0]} is no folder; give a run folder, or one of runs")
    return sorted(path.parent for path in folders[0].glob("*/config.yaml"))


def finished(folders: Sequence[Path]) -> tuple[list[RunData], list[RunData]]:
    """The runs that were evaluated after every stage, and the others.

    The others were interrupted, or have no stages. Raises UserError if no run is finished.
    """
    done: list[RunData] = []
    others: list[RunData] = []
    for run in map(load_run, folders):
        stages = run.results.get("curriculum", {}).get("stages", ())
        (done if stages and len(run.points) == len(stages) + 1 else others).append(run)
    if not done:
        names = ", ".join(run.folder.name for run in others)
        raise UserError(
            f"report: got no finished run with stages to compare ({names}); finish one with "
            "--output-dir FOLDER --resume-from-checkpoint latest"
        )
    return done, others


def rows_of(runs: Sequence[RunData]) -> list[Row]:
    """Mixed training first, then the others in the order of their folders.

    Raises UserError if the seeds of a row cannot be put together.
    """
    groups: dict[str, list[RunData]] = {}
    for run in sorted(runs, key=lambda run: int(run.config["run"]["seed"])):
        groups.setdefault(json.dumps(settings_of(run.config), sort_keys=True), []).append(run)
    settings = [json.loads(key) for key in groups]
    mixed = [of for mine, of in zip(settings, groups.values(), strict=True) if _is_mixed(mine)]
    rows = []
    for mine, group in zip(settings, groups.values(), strict=True):
        is_mixed, transfer = _is_mixed(mine), summary([run.results for run in group])
        row = Row(
            label=_label(mine, settings),
            runs=group,
            transfer=transfer,
            is_mixed=is_mixed,
            against_mixed=None if is_mixed else _against(group, transfer["episodes"], mixed),
        )
        rows.append(row)
    return sorted(rows, key=lambda row: not row.is_mixed)


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that decide what a run learns, except its seed: `section.name` to value.

    A model that is a checkpoint of another run counts by the settings of that run.
    """
    settings: dict[str, Any] = {"evaluation.success_threshold": SUCCESS}  # older runs lack it
    for section, values in config.items():
        if not isinstance(values, dict):
            settings[section] = values
        elif section not in IGNORED:
            settings |= {f"{section}.{name}": value for name, value in values.items()}
    if _is_mixed(settings):
        ignored = {f"curriculum.{name}" for name in OF_STAGES}
        settings = {key: value for key, value in settings.items() if key not in ignored}
    path = Path(settings["model.model"])
    if path.parent.name == "checkpoints":
        origin = path.parent.parent / "config.yaml"
        settings["model.model"] = re.sub(r"seed-\d+", "seed", str(path))  # if it was moved here
        if origin.is_file():
            other = settings_of(yaml.safe_load(origin.read_text(encoding="utf-8")))
            kept = {
                k: of for k, of in other.items() if k.startswith(("model.", "warm_start.", "data."))
            }
            settings["model.model"] = f"{path.name} of {json.dumps(kept, sort_keys=True)}"
    return settings


def _is_mixed(settings: Mapping[str, Any]) -> bool:
    return settings.get(KIND) == "mixed"


def _label(mine: Mapping[str, Any], settings: Sequence[Mapping[str, Any]]) -> str:
    """The settings in which a row differs from most rows of its kind, such as `replay 0.3`."""
    kind = [of for of in settings if _is_mixed(of) == _is_mixed(mine)]
    keys = [k for k in mine if 2 * sum(of.get(k) == mine[k] for of in kind) <= len(kind)]
    words = [f"{key.split('.')[-1]} {_short(mine[key])}" for key in keys if key != KIND]
    if _is_mixed(mine) or len({of.get(KIND) for of in kind}) > 1 or not words:
        words.insert(0, str(mine.get(KIND)))
    return ", ".join(words)


def _short(value: Any) -> str:
    if isinstance(value, list):
        return "-".join(map(str, value)) or "as listed"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _against(
    runs: Sequence[RunData], episodes: int, mixed: Sequence[Sequence[RunData]]
) -> dict[str, Any] | None:
    """Differences to mixed training with as many episodes and seeds, on the same tasks."""
    seeds = [run.config["run"]["seed"] for run in runs]
    for others in mixed:
        of_seed = {other.config["run"]["seed"]: other.results for other in reversed(others)}
        theirs = [of_seed[seed] for seed in seeds if seed in of_seed]
        if len(theirs) == len(runs) and summary(theirs)["episodes"] == episodes:
            with suppress(UserError):  # evaluated on other tasks
                return differences([run.results for run in runs], theirs)
    return None


def sections_of(rows: Sequence[Row], unfinished: Sequence[RunData] = ()) -> list[Section]:
    """The comparison in words, tables and the Pareto plot."""
    blocks: list[Block] = [
        "Runs with equal settings but for the seed are one row, named by the settings in which it "
        "differs from most rows. In brackets: 95 % intervals, percentile bootstrap over seeds and "
        "tasks, paired. With one seed they do not cover other seeds; with two or three, hardly.",
        _table(rows, IN_TABLE),
        bullets(f"*{name}*: {meaning}." for name, meaning in map(METRICS.__getitem__, IN_TABLE)),
    ]
    if unfinished:
        blocks.append(f"**Left out**, because they are not finished: {_folders(unfinished)}.")
    if not any(row.is_mixed for row in rows):
        blocks.append(
            "**There is no mixed training among these runs, so there is no reference row**: add a "
            "run with `--curriculum mixed` and the same number of episodes."
        )
    elif missing := [row for row in rows if not row.is_mixed and row.against_mixed is None]:
        blocks.append(
            f"**Without a reference**: {'; '.join(row.label for row in missing)}. No mixed "
            "training has the same number of episodes, seeds and tasks."
        )
    pareto: list[Block] = [
        Picture("pareto", "New-domain gain against forgetting"),
        "Up and to the left is better. Mixed training has one stage, in which all domains "
        "are new; after it there is nothing to forget, so it stands at zero.",
    ]
    difference = (
        "Each configuration minus mixed training with as many episodes, on the same tasks and "
        f"seeds; {NO_INTERVAL}: not defined for one stage."
    )
    compared = {row.label: row.against_mixed for row in rows if row.against_mixed}
    minus_mixed = number_table("minus mixed", compared, METRICS, sign="+")
    ends = {row.label: {d: of[-1] for d, of in row.transfer["rewards"].items()} for row in rows}
    domains = dict.fromkeys(domain for of in ends.values() for domain in of)
    rewards = number_table("mean reward at the end", ends, domains)
    runs = bullets(f"{row.label}: {_folders(row.runs)}" for row in rows)
    return [
        Section("New domains against old ones", blocks),
        Section("Pareto plot", pareto),
        Section("Difference to mixed training", [difference, minus_mixed]),
        Section("Further numbers", [_table(rows, FURTHER), rewards, runs]),
    ]


def _folders(runs: Sequence[RunData]) -> str:
    return ", ".join(f"`{run.folder.resolve().name}`" for run in runs)


def _table(rows: Sequence[Row], names: Sequence[str]) -> Table:
    """A row for each configuration; mixed training is marked as the reference."""
    cells = [
        [
            f"{row.label} (reference)" if row.is_mixed else row.label,
            str(len(row.runs)),
            f"{row.transfer['episodes']:,}",
            *(of_name(row.transfer["metrics"].get(name), name) for name in names),
        ]
        for row in rows
    ]
    return Table(["configuration", "seeds", "episodes", *(METRICS[n][0] for n in names)], cells)
