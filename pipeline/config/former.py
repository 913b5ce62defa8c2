"""Former names of settings and metrics, from TRL or earlier versions, with their present names.

A former name in a recipe or flag is an error. In the files of a run, former names are translated.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config.settings import DEFAULT_DOMAINS
from pipeline.files import layout
from pipeline.files.durable import read_records

# Former settings, which are now entries of `data.tasks`.
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
METRICS = {  # A metric's name may end with a domain, as in `rollout/dead_groups/airline`.
    "rollout/dead_groups": "rollout/frac_reward_zero_std",
    "train/logprob_gap": "train/sampling_logp_difference_max",
    "train/logprob_gap_mean": "train/sampling_logp_difference_mean",
}


def instead(name: str) -> str:
    """Return the error message for a former setting or flag, or "" for other names."""
    plain, is_flag = name.lstrip("-").replace("-", "_"), name.startswith("-")
    if plain.startswith("per_device_") or plain in PER_DEVICE:
        now = "tasks_per_step groups of num_generations over all ranks"
        return f"{name}: a step is {now}, in passes of max_tokens_per_microbatch; set these"
    if new := SETTINGS.get(plain.removeprefix("no_")):
        return f"{name} has another name; see {'--' + new.replace('_', '-') if is_flag else new}"
    if plain in ("warm_start_data", "data"):
        entry = "demonstrations: {DOMAIN: FILE} in section data"
        now = "--demonstrations '{DOMAIN: FILE}'" if is_flag else entry
        return f"{name} is an entry of demonstrations now; write {now}"
    if plain not in TASK_FILES:
        return ""
    entry = f"{{{TASK_FILES[plain]}: SOURCE}}"
    now = f"--tasks '{entry}'" if is_flag else f"tasks: {entry} in section data"
    return f"{name} is an entry of tasks now; write {now}"


def translated(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved settings of a run with the present names of settings."""
    tree = {
        section: {SETTINGS.get(name, name): value for name, value in values.items()}
        if isinstance(values, dict)
        else values
        for section, values in tree.items()
    }
    data, tracking = tree.get("data"), tree.get("tracking")
    if isinstance(tracking, dict) and "trackio" in (tracking.get("report_to") or ()):
        tracking["report_to"] = [name for name in tracking["report_to"] if name != "trackio"]
    if isinstance(curriculum := tree.get("curriculum"), dict):
        curriculum.setdefault("preview", 0.0)  # runs of earlier versions had no preview
    if isinstance(data, dict) and (names := [name for name in TASK_FILES if name in data]):
        sources = {TASK_FILES[name]: data.pop(name) for name in names}
        given = {name: source for name, source in sources.items() if source is not None}
        data["tasks"] = {**given, **(data.get("tasks") or {})}
    warm_start = tree.get("warm_start")
    if isinstance(warm_start, dict) and (path := warm_start.pop("data", None)) is not None:
        data = tree["data"] = dict(data or {})
        data["demonstrations"] = dict.fromkeys(data.get("domains", DEFAULT_DOMAINS), path)
    return tree


def read_metrics(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the lines of `metrics.jsonl` (with present metric names) and of `timings.jsonl`."""
    metrics = [
        {_present(name): value for name, value in line.items()}
        for line in read_records(folder / layout.METRICS)
    ]
    return metrics, read_records(folder / layout.TIMINGS)


def _present(metric: str) -> str:
    name = "/".join(metric.split("/", 2)[:2])
    return METRICS.get(name, name) + metric[len(name) :]
