"""Names of files in a run folder."""

from pathlib import Path

RUN_SETTINGS = "config.yaml"
METRICS = "metrics.jsonl"
TIMINGS = "timings.jsonl"


def run_of_checkpoint(name: str | None) -> Path | None:
    """Return the folder RUN if `name` is a checkpoint folder RUN/checkpoints/NAME, else None."""
    path = Path(name or "")
    is_path = path.parent.name == "checkpoints" and path.is_dir()
    return path.parent.parent if is_path else None
