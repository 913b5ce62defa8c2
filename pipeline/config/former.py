"""Names of settings and metrics in TRL and in earlier versions that have another form here.

In recipes and flags they are refused, with the new form; in files of a run they are translated.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.files import layout
from pipeline.files.durable import read_records

# Each was a setting of its own, and is an entry of `data.tasks` now.
TASK_FILES = {f"{name}_tasks": name for name in ("airline", "retail", "telecom", "telecom_chat")}
PER_DEVICE = ("gradient_accumulation_steps", "generation_batch_size", "steps_per_generation")
SETTINGS = {
    "anchor_tasks": "kl_probe_tasks",
    "drop_dead_groups": "drop_zero_std_groups",
    "logprob_gap_limit": "max_sampling_logp_difference",
    "lr_end_share": "min_lr_rate",
    "max_error_share": "max_error_rate",
    "max_live_episodes": "max_concurrent_episodes",
}
METRICS = {  # the names of single domains (`rollout/dead_groups/airline`) change alike
    "rollout/dead_groups": "rollout/frac_reward_zero_std",
    "train/logprob_gap": "train/sampling_logp_difference_max",
    "train/logprob_gap_mean": "train/sampling_logp_difference_mean",
}


def instead(name: str) -> str:
    """Why such a setting or flag is refused, and what to write; empty for other names."""
    plain, is_flag = name.lstrip("-").replace("-", "_"), name.startswith("-")
    if plain.startswith("per_device_") or plain in PER_DEVICE:
        now = "tasks_per_step groups of num_generations over all ranks"
        return f"{name}: a step is {now}, in passes of max_tokens_per_microbatch; set these"
    if plain.removeprefix("no_") in SETTINGS:
        no = "no_" if plain.startswith("no_") else ""
        now = no + SETTINGS[plain.removeprefix("no_")]
        return f"{name} has another name; write {'--' + now.replace('_', '-') if is_flag else now}"
    if plain not in TASK_FILES:
        return ""
    entry = f"{{{TASK_FILES[plain]}: SOURCE}}"
    now = f"--tasks '{entry}'" if is_flag else f"tasks: {entry} in section data"
    return f"{name} is an entry of tasks now; write {now}"


def translated(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """A section of the settings that a run has saved, in today's form."""
    values = {SETTINGS.get(name, name): value for name, value in values.items()}
    if section == "tracking" and "trackio" in (values.get("report_to") or ()):
        return {**values, "report_to": [name for name in values["report_to"] if name != "trackio"]}
    if section != "data" or not TASK_FILES.keys() & values.keys():
        return values
    kept = {name: value for name, value in values.items() if name not in TASK_FILES}
    sources = {TASK_FILES[n]: v for n, v in values.items() if n in TASK_FILES and v is not None}
    return {**kept, "tasks": {**sources, **(values.get("tasks") or {})}}


def translated_tree(tree: Mapping[str, Any]) -> dict[str, Any]:
    """All settings that a run has saved, in today's form."""
    return {
        name: translated(name, value) if isinstance(value, dict) else value
        for name, value in tree.items()
    }


def read_metrics(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The lines of a run's `metrics.jsonl`, with today's names, and of its `timings.jsonl`."""
    metrics = [_with_new_names(record) for record in read_records(folder / layout.METRICS)]
    return metrics, read_records(folder / layout.TIMINGS)


def _with_new_names(record: Mapping[str, Any]) -> dict[str, Any]:
    names = {name: "/".join(name.split("/", 2)[:2]) for name in record}
    return {METRICS.get(n, n) + name[len(n) :]: record[name] for name, n in names.items()}
