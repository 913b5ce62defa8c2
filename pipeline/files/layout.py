"""Names in a run folder."""

from __future__ import annotations

from pathlib import Path

RUN_SETTINGS = "config.yaml"
METRICS = "metrics.jsonl"
TIMINGS = "timings.jsonl"


def run_of_checkpoint(name: str | None) -> Path | None:
    """The run folder that a path of a checkpoint leads to: <run folder>/checkpoints/<name>."""
    path = Path(name or "")
    named = path.parent.name == "checkpoints" and path.is_dir()
    return path.parent.parent if named else None
