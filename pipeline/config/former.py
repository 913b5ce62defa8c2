"""Names that have another form here: TRL's settings per device, and those of earlier versions."""

from __future__ import annotations

from typing import Any

# Each was a setting of its own, and is an entry of `data.tasks` now.
TASK_FILES = {f"{name}_tasks": name for name in ("airline", "retail", "telecom", "telecom_chat")}
PER_DEVICE = ("gradient_accumulation_steps", "generation_batch_size", "steps_per_generation")


def instead(name: str) -> str:
    """Why such a setting or flag is refused, and what to write; empty for other names."""
    plain = name.lstrip("-").replace("-", "_")
    if plain.startswith("per_device_") or plain in PER_DEVICE:
        return (
            f"{name} is not used here: a step is tasks_per_step groups of num_generations over all "
            "ranks, whatever the number of ranks, and micro-batches come from "
            "max_tokens_per_microbatch; set these"
        )
    if plain not in TASK_FILES:
        return ""
    entry = f"{{{TASK_FILES[plain]}: SOURCE}}"
    now = f"--tasks '{entry}'" if name.startswith("-") else f"tasks: {entry} in section data"
    return f"{name} is an entry of tasks now; write {now}"


def translated(section: str, values: dict[str, Any]) -> dict[str, Any]:
    """A section of the settings that a run has saved, in today's form."""
    if section == "tracking" and "trackio" in (values.get("report_to") or ()):
        return {**values, "report_to": [name for name in values["report_to"] if name != "trackio"]}
    if section != "data" or not TASK_FILES.keys() & values.keys():
        return values
    kept = {name: value for name, value in values.items() if name not in TASK_FILES}
    sources = {TASK_FILES[n]: v for n, v in values.items() if n in TASK_FILES and v is not None}
    return {**kept, "tasks": {**sources, **(values.get("tasks") or {})}}
