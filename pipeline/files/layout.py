"""Names of files in a run folder, and folders that come with the package."""

from pathlib import Path

RUN_SETTINGS = "config.yaml"
METRICS = "metrics.jsonl"
TIMINGS = "timings.jsonl"

_PACKAGE = Path(__file__).resolve().parents[1]


def shipped(name: str) -> Path:
    """Return a folder that comes with the package, such as `recipes`.

    An installed package contains the folder. In a checkout, the folder is beside the package.
    """
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def run_of_checkpoint(name: str | None) -> Path | None:
    """Return the folder RUN if `name` is a checkpoint folder RUN/checkpoints/NAME, else None."""
    path = Path(name or "")
    is_path = path.parent.name == "checkpoints" and path.is_dir()
    return path.parent.parent if is_path else None
