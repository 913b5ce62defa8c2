"""The comparison of several runs: runs that differ only in the seed make one configuration.

The comparison shows the gain on new domains beside the loss on earlier domains.
"""

import json
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import quote

from pipeline.common.console import say
from pipeline.common.errors import UserError
from pipeline.config.recipe import full_name
from pipeline.evaluation.transfer import differences, estimate, mean_samples, successes_of, summary
from pipeline.report.plots.pictures import Configuration
from pipeline.report.run_files import RunData, is_finished, load_run, read_settings
from pipeline.report.tables import METRIC_NAMES, Rows, number_table

IGNORED = ("run", "tracking")  # sections of settings that do not change what a run learns
KIND = "curriculum.curriculum"
MODEL = "model.model"
MOST_CHARACTERS = 72  # of the settings that name a configuration
# names of settings that mixed training ignores, because mixed training has no stages
OF_STAGES = (
    *("curriculum.order", "curriculum.stage_weights", "curriculum.stage_steps"),
    *("curriculum.stage_tasks", "curriculum.replay", "curriculum.preview"),
    *("curriculum.difficulties", "curriculum.merge_method", "curriculum.merge_weight"),
    "curriculum.merge_density",
)


def runs_in(folders: Sequence[Path]) -> list[Path]:
    """Return `folders`; if `folders` is one folder that contains runs, return the runs' folders."""
    if len(folders) != 1 or (folders[0] / "config.yaml").is_file():
        return [*{folder.resolve(): folder for folder in folders}.values()]
    if not folders[0].is_dir():
        raise UserError(f"{folders[0]} is no folder; give the folder of a run, or of runs")
    return sorted(path.parent for path in folders[0].glob("*/config.yaml"))


def finished(folders: Sequence[Path]) -> tuple[list[RunData], list[RunData]]:
    """Return two lists: the runs evaluated before GRPO and after every stage, and the other runs.

    A run is not finished if it was interrupted or has no stages. Raises UserError if no run is
    finished.
    """
    runs = [load_run(folder) for folder in folders]
    done = [run for run in runs if is_finished(run) and run.transfer]
    others = [run for run in runs if run not in done]
    if not done:
        names = ", ".join(run.folder.name for run in others)
        raise UserError(
            f"report: got no finished run with stages to compare ({names}); finish one with "
            "--output-dir FOLDER --resume-from-checkpoint latest; a run without an evaluation "
            "before GRPO (eval_on_start) cannot be compared"
        )
    return done, others


def configurations_of(runs: Sequence[RunData]) -> list[Configuration]:
    """Group runs with equal settings into configurations; mixed training comes first.

    A run with the settings and the seed of an earlier one, such as a copy, is left out. Raises
    UserError if runs of a configuration have different stages, domains or tasks.
    """
    groups: dict[str, list[RunData]] = {}
    for run in sorted(runs, key=lambda run: int(run.config["run"]["seed"])):
        group = groups.setdefault(json.dumps(learning_settings(run.config), sort_keys=True), [])
        if group and group[-1].config["run"]["seed"] == run.config["run"]["seed"]:
            say(
                f"warning: {run.folder} has the settings and the seed of {group[-1].folder}, so it "
                "is no further seed and is left out"
            )
        else:
            group.append(run)
    settings = [json.loads(key) for key in groups]
    pairs = sorted(zip(settings, groups.values(), strict=True), key=lambda p: not _is_mixed(p[0]))
    mixed = [group for mine, group in pairs if _is_mixed(mine)]
    configurations: list[Configuration] = []
    for mine, group in pairs:
        transfer = summary([run.results for run in group])
        is_mixed = _is_mixed(mine)
        against_mixed = None if is_mixed else _against(group, transfer["episodes"], mixed)
        label = _label(mine, settings, group[0].config) + " (reference)" * is_mixed
        if any(label == other.label for other in configurations):  # long values are cut off
            label += f" ({group[0].folder.resolve().name})"
        configurations.append(Configuration(label, group, transfer, is_mixed, against_mixed))
    return configurations


def learning_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that affect learning, except the seed; the keys are `section.name`.

    If the model is a checkpoint of another run, settings of the other run replace the model name.
    """
    settings = {"recipe": config["recipe"]} | {
        f"{section}.{name}": value
        for section, values in config.items()
        if isinstance(values, dict) and section not in IGNORED
        for name, value in values.items()
    }
    if _is_mixed(settings):
        settings = {key: value for key, value in settings.items() if key not in OF_STAGES}
    path = Path(settings[MODEL])
    if path.parent.name == "checkpoints":
        settings[MODEL] = re.sub(r"seed-\d+", "seed", str(path))  # one name for all seeds
        if (origin := path.parent.parent / "config.yaml").is_file():
            other = learning_settings(read_settings(origin.parent))
            sections = ("model.", "warm_start.", "rft.", "data.")
            kept = {key: value for key, value in other.items() if key.startswith(sections)}
            settings[MODEL] = f"{path.name} of {json.dumps(kept, sort_keys=True)}"
    return settings


def _is_mixed(settings: Mapping[str, Any]) -> bool:
    return settings.get(KIND) == "mixed"


def _label(
    mine: Mapping[str, Any], settings: Sequence[Mapping[str, Any]], config: Mapping[str, Any]
) -> str:
    """Return the settings that most other configurations do not share, such as `replay 0.3`."""
    kind = [of for of in settings if _is_mixed(of) == _is_mixed(mine)]
    keys = [k for k in mine if 2 * sum(of.get(k) == mine[k] for of in kind) <= len(kind)]
    keys.sort(key=lambda key: {"recipe": 0, MODEL: 1}.get(key, 2))
    names = {key: full_name(*key.rpartition(".")[::2]) for key in keys}
    values = {**mine, MODEL: _model(config["model"]["model"])}
    words = [f"{name} {_short(values[key])}" for key, name in names.items() if key != KIND]
    if _is_mixed(mine) or len({of.get(KIND) for of in kind}) > 1 or not words:
        words.insert(0, str(mine.get(KIND)))
    ends = [*accumulate(len(word) + 2 for word in words)]
    kept = max(1, sum(end <= MOST_CHARACTERS for end in ends))
    more = f" and {len(words) - kept} more" * (len(words) > kept)
    return ", ".join(words[:kept]) + more


def _model(name: str) -> str:
    """Return the name of a model, for a checkpoint also that of its run, the same for all seeds."""
    path = Path(name)
    of_run = re.sub(r"seed-\d+", "seed", path.parent.parent.name)
    return f"{path.name} of {of_run}" if path.parent.name == "checkpoints" else name


def _short(value: Any) -> str:
    if isinstance(value, list):
        return "-".join(map(str, value)) or "as listed"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _against(
    runs: Sequence[RunData], episodes: int, mixed: Sequence[Sequence[RunData]]
) -> dict[str, Any] | None:
    """Return metrics of `runs` minus those of mixed runs with equal seeds and episode counts."""
    seeds = [run.config["run"]["seed"] for run in runs]
    for others in mixed:
        of_seed = {other.config["run"]["seed"]: other.results for other in reversed(others)}
        theirs = [of_seed[seed] for seed in seeds if seed in of_seed]
        if len(theirs) == len(runs) and summary(theirs)["episodes"] == episodes:
            with suppress(UserError):  # raised if mixed training was evaluated on other tasks
                return differences([run.results for run in runs], theirs)
    return None


def _ends(runs: Sequence[RunData]) -> dict[str, dict[str, float]]:
    """Return the success of each held-out task at the end, mean over runs: {domain: {task: ...}}"""
    found = defaultdict[str, dict[str, list[float]]](dict)
    for run in runs:
        for domain, of in run.evaluations[-1]["success"].items():
            for task, share in successes_of(of["tasks"], run.success_threshold).items():
                found[domain].setdefault(task, []).append(share)
    return {d: {task: fmean(of) for task, of in tasks.items()} for d, tasks in found.items()}


def minus_first(
    configurations: Sequence[Configuration],
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return success at the end minus that of the first configuration, and unequal task sets.

    The differences, [value, low, high] by configuration and domain, are paired by task and are over
    the tasks that both have played. An entry of the list names a
    configuration with other tasks, and the numbers of tasks.
    """
    first, *others = configurations
    base = _ends(first.runs)
    found = dict[str, dict[str, Any]]()
    unequal = list[str]()
    for configuration in others:
        counts = list[str]()
        of_domains = found[configuration.label] = {}
        for domain, mine in _ends(configuration.runs).items():
            theirs = base.get(domain, {})
            changes = [mine[task] - theirs[task] for task in sorted(mine.keys() & theirs.keys())]
            if changes:
                of_domains[domain] = estimate(mean_samples(changes, f"end {domain}"))
            if mine.keys() != theirs.keys():
                counts.append(f"{domain} {len(mine)} and {len(theirs)} ({len(changes)} in both)")
        if counts:
            unequal.append(f"{configuration.label}: {', '.join(counts)}")
    return found, unequal


def comparison_data(
    configurations: Sequence[Configuration],
    unfinished: Sequence[RunData] = (),
    again: Sequence[RunData] = (),
    output: Path = Path(),
) -> dict[str, Any]:
    """Return the variables of the template `comparison.md.jinja`, except the title."""
    changes, unequal = minus_first(configurations)
    pages = {run.folder: run.folder / "report.html" for c in configurations for run in c.runs}
    compared = {
        c.label: {name: c.against_mixed.get(name) for name in METRIC_NAMES}
        for c in configurations
        if c.against_mixed
    }
    ends = {c.label: {d: of[-1] for d, of in c.transfer["rewards"].items()} for c in configurations}
    return {
        "configurations": configurations,
        "links": {  # to the runs' pages, from the folder of the comparison
            folder: quote(os.path.relpath(page.resolve(), output.resolve()))
            for folder, page in pages.items()
            if page.is_file()
        },
        "changes": number_table(f"minus {configurations[0].label}", changes, sign="+"),
        "unequal": unequal,
        "unfinished": unfinished,
        "again": again,
        "minus_mixed": number_table("minus mixed", compared, sign="+"),
        "differing": _differing(configurations),
        "rewards": number_table("mean reward at the end", ends),
    }


def _differing(configurations: Sequence[Configuration]) -> Rows:
    """Return a row for each setting in which configurations differ, if a name lacks any of them."""
    if not any(re.search(r" and \d+ more", c.label) for c in configurations):
        return []
    configs = [c.runs[0].config for c in configurations]
    settings = [
        learning_settings(config) | {MODEL: _model(config["model"]["model"])} for config in configs
    ]
    keys = dict.fromkeys(key for of in settings for key in of)
    rows = [
        [full_name(*key.rpartition(".")[::2]), *(_short(of.get(key, "-")) for of in settings)]
        for key in keys
        if any(of.get(key) != settings[0].get(key) for of in settings)
    ]
    return [["setting", *(c.label for c in configurations)], *rows]
