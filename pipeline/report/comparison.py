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
from pipeline.plots.transfer import Configuration
from pipeline.report.numbers import METRICS, Rows, metric, number_table
from pipeline.tracking.run_files import RunData, load_run

# Sections of the configuration that do not change what a run learns.
IGNORED = ("run", "tracking")
KIND = "curriculum.curriculum"
# Settings of a curriculum in stages, which mixed training ignores.
OF_STAGES = ("order", "stage_weights", "stage_steps", "stage_tasks", "replay", "difficulties")
MAIN = ("average_accuracy", "stage_gain", "backward_transfer", "forward_transfer", "forgetting")
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


def configurations_of(runs: Sequence[RunData]) -> list[Configuration]:
    """Runs grouped by settings; mixed training is first, others keep the order of their seeds.

    Raises UserError if the seeds of a configuration have different stages, domains or tasks.
    """
    groups: dict[str, list[RunData]] = {}
    for run in sorted(runs, key=lambda run: int(run.config["run"]["seed"])):
        groups.setdefault(json.dumps(settings_of(run.config), sort_keys=True), []).append(run)
    settings = [json.loads(key) for key in groups]
    mixed = [of for mine, of in zip(settings, groups.values(), strict=True) if _is_mixed(mine)]
    configurations = []
    for mine, group in zip(settings, groups.values(), strict=True):
        is_mixed, transfer = _is_mixed(mine), summary([run.results for run in group])
        against_mixed = None if is_mixed else _against(group, transfer["episodes"], mixed)
        configurations.append(
            Configuration(
                label=_label(mine, settings),
                runs=group,
                transfer=transfer,
                is_mixed=is_mixed,
                against_mixed=against_mixed,
            )
        )
    return sorted(configurations, key=lambda configuration: not configuration.is_mixed)


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


def tables_of(
    configurations: Sequence[Configuration], unfinished: Sequence[RunData] = ()
) -> dict[str, Any]:
    """The data of the template `comparison.md.jinja`, except its title."""
    compared = {c.label: c.against_mixed for c in configurations if c.against_mixed}
    ends = {c.label: {d: of[-1] for d, of in c.transfer["rewards"].items()} for c in configurations}
    domains = dict.fromkeys(domain for of in ends.values() for domain in of)
    return {
        "configurations": configurations,
        "unfinished": unfinished,
        "main_metrics": MAIN,
        "main": _table(configurations, MAIN),
        "further": _table(configurations, FURTHER),
        "minus_mixed": number_table("minus mixed", compared, METRICS, sign="+"),
        "rewards": number_table("mean reward at the end", ends, domains),
    }


def _table(configurations: Sequence[Configuration], names: Sequence[str]) -> Rows:
    rows = [
        [
            f"{configuration.label} (reference)" if configuration.is_mixed else configuration.label,
            str(len(configuration.runs)),
            f"{configuration.transfer['episodes']:,}",
            *(metric(configuration.transfer["metrics"].get(name), name) for name in names),
        ]
        for configuration in configurations
    ]
    return [["configuration", "seeds", "episodes", *(METRICS[name] for name in names)], *rows]
