"""Settings of earlier versions: refused in recipes and flags, translated in what a run saved."""

from __future__ import annotations

from typing import Any

# Each is an entry of `data.tasks` now.
TASK_FILES = {f"{name}_tasks": name for name in ("airline", "retail", "telecom", "telecom_chat")}


def instead(name: str) -> str:
    """What to say of a setting or a flag that has another form now; empty for other names."""
    domain = TASK_FILES.get(name.lstrip("-").replace("-", "_"))
    if domain is None:
        return ""
    now = f"--tasks '{{{domain}: SOURCE}}'"
    if not name.startswith("-"):
        now = f"tasks: {{{domain}: SOURCE}} in section data"
    return f"{name} is an entry of tasks now; write {now}"


def translated(section: str, values: dict[str, Any]) -> dict[str, Any]:
    """A section of settings that a run has saved, in today's form."""
    if section == "tracking" and "trackio" in (values.get("report_to") or ()):
        return {**values, "report_to": [name for name in values["report_to"] if name != "trackio"]}
    if section != "data" or not TASK_FILES.keys() & values.keys():
        return values
    kept = {name: value for name, value in values.items() if name not in TASK_FILES}
    found = {TASK_FILES[name]: value for name, value in values.items() if name in TASK_FILES}
    given = {domain: source for domain, source in found.items() if source is not None}
    return {**kept, "tasks": {**given, **(values.get("tasks") or {})}}
