"""Names of files in a run folder and a model folder, and folders that come with the package."""

import json
from contextlib import suppress
from pathlib import Path

RUN_SETTINGS = "config.yaml"
METRICS = "metrics.jsonl"
TIMINGS = "timings.jsonl"
WARNINGS = "warnings.txt"
RANKS = "ranks.json"  # where each rank is, written each half second

ADAPTER_CONFIG = "adapter_config.json"
TOY_BYTES = 80 << 20  # of 20 million weights in float32

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


def is_toy(model: str) -> bool:
    """Return whether a model is `tiny`, or a folder or a run with weights of less than TOY_BYTES.

    Settings that suit the tiny model suit a toy. A model on the hub is none.
    """
    path = Path(model)
    if model == "tiny" or not path.is_dir():
        return model == "tiny"
    with suppress(OSError, ValueError, KeyError, TypeError):  # loading says it
        base = json.loads((path / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        name = str(base["base_model_name_or_path"])
        sibling = path.resolve().parent / Path(name).name  # moved together with the adapters
        return is_toy(str(sibling) if sibling.is_dir() else name)
    checkpoints = [c for c in path.glob("checkpoints/*") if any(c.glob("*.safetensors"))]
    if checkpoints and not (path / "config.json").is_file():
        return is_toy(str(checkpoints[-1]))
    return sum(file.stat().st_size for file in path.glob("*.safetensors")) < TOY_BYTES
