"""Answers names of settings in TRL, transformers and PEFT with what `trl_names.yaml` says."""

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import yaml

from pipeline.config.settings import Config, Section


@cache
def tables() -> dict[str, dict[str, str]]:
    """Return the tables `called` and `instead` of `trl_names.yaml`."""
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    found: dict[str, dict[str, str]] = yaml.safe_load(text)
    return found


def instead(name: str) -> str:
    """Return the error message for a setting or flag of TRL, or ""."""
    plain = name.lstrip("-").replace("-", "_").removeprefix("no_")
    is_flag = name.startswith("-")

    def written(setting: str) -> str:
        if is_flag:
            return f"--{setting.replace('_', '-')}"
        key = setting.removeprefix("warm_start_")
        *_, owner = (s for s, part in Config() if isinstance(part, Section) and hasattr(part, key))
        return f"{owner}.{key}"

    if text := _entry(tables()["instead"], plain):
        return f"{name}: " + re.sub("`(.*?)`", lambda match: written(match[1]), text)
    new = _entry(tables()["called"], plain)
    return f"{name} is called {written(new)} here" if new else ""


def _entry(table: Mapping[str, str], name: str) -> str:
    fitting = (v for keys, v in table.items() if any(fnmatchcase(name, k) for k in keys.split()))
    return next(fitting, "")
