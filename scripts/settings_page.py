"""Print the page `docs/settings.md`, made from the code: every setting, flag and variable.

    python scripts/settings_page.py --write

Without `--write`, the page goes to the standard output.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeline.config.cli import build_parser
from pipeline.config.environment_variables import REFUSED
from pipeline.config.recipe import SECTIONS, load_recipe, trl_names
from pipeline.config.settings import Config

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "settings.md"
RECIPE = "three_domain_tiny"
BAR = "\\|"  # a bar in a cell of a Markdown table
ACTIONS = {action.dest: action for action in build_parser(Config())._actions}
INTRODUCTION = f"""\
# Settings

This page answers: which settings exist, which flag sets each, what is the default, and which
names of TRL have another name here. The command `python scripts/settings_page.py --write` makes
this page from the code. `three-domain-grpo train --help` prints the same list.

- A **recipe** (a YAML file, `--config RECIPE`) gives settings by section, and a **flag** overrides
  the recipe. A setting that a recipe does not name has the default.
- The column "default" also has the value of the recipe `{RECIPE}`, if the recipe sets
  another one. A run without `--config` uses this recipe, or, with a
  pretrained model, the recipe `pretrained`.
- A recipe of your own has the names of sections and settings as keys, as the files in `recipes/`
  show. The name of a setting is its flag with underscores (in `warm_start` without the prefix).
- The flag of a **switch** has no value; `--no-FLAG` turns a switch off (`--no-peft` and `--no-grpo`
  for `use_peft` and `use_grpo`). Flags may be written with underscores.
- **Lists** are separated by commas: `--domains airline,retail`; `none` is an empty list.
- **Mappings** are YAML, with a space after each colon: `--domain-weights '{{telecom: 2}}'`.
- `null` is no value.
"""
VARIABLES = {  # environment variables besides those of run_ddp.sh
    "`ACCELERATE_USE_CPU=true`": "run on CPU although the machine has GPUs",
    "`CUDA_VISIBLE_DEVICES`": "the GPUs that a run may use",
    "`PET_NNODES`, `PET_NODE_RANK`": "number of machines, and which of them this is, from 0",
    "`PET_MASTER_ADDR`, `PET_MASTER_PORT`": "machine 0, as the others reach it; port: 29500",
    "`OMP_NUM_THREADS`": "threads per rank on CPU; default: cores divided by ranks",
    "`TORCH_ELASTIC_SHUTDOWN_TIMEOUT`": "seconds from SIGTERM to SIGKILL; default: 20",
    "`HF_TOKEN`": "access to private models and datasets of the hub",
    "`HF_HUB_OFFLINE=1`": "use only models and datasets that are already on this machine",
    "`OPENAI_API_KEY`": "the key for customer_url and agent_url; or name another in customer_key",
    "`WANDB_API_KEY`": "the key for W&B; without a key, nothing is sent",
    "`WANDB_MODE`": "`online` after `wandb login`; `offline`: W&B's own offline folders",
}


def page() -> str:
    parts = [INTRODUCTION, *map(_section, SECTIONS), _variables(), _names_of_trl()]
    return "\n".join(parts)


def _section(section: str) -> str:
    default, shipped = (getattr(config, section) for config in (Config(), load_recipe(RECIPE)))
    title = str(type(default).__doc__)
    head = f"## {title[0].upper()}{title[1:]} (`{section}`)\n"
    lines = [head, "| flag | value | default | what it sets |", "| --- | --- | --- | --- |"]
    for name, setting in type(default).model_fields.items():
        action = ACTIONS[f"{section}.{name}"]
        value = getattr(default, name)
        other = getattr(shipped, name)
        shown = _shown(value) + (f"; recipe: {_shown(other)}" if other != value else "")
        flags = [option for option in action.option_strings if not option.startswith("--no-")]
        kind = _names((action.metavar or "").replace("|", " ")) or "switch"
        cells = _names(" ".join(flags)), kind, shown, str(setting.description)
        lines.append(f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |")
    return "\n".join([*lines, ""])


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return f"`{','.join(map(str, value)) or 'none'}`"
    return f"`{json.dumps(value) if isinstance(value, bool | dict) else value}`"


def _rows(rows: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"| {name} | {about} |" for name, about in rows)


def _variables() -> str:
    text = (ROOT / "scripts" / "run_ddp.sh").read_text(encoding="utf-8")
    found = re.findall(r"^(\w+)=\$\{\1:-\} *(?:# (.*))?$", text, re.MULTILINE)
    refused = "\n".join(f"- `{name}`" for name in REFUSED)
    return f"""\
## Variables of `scripts/run_ddp.sh`

Set them in the environment: `MAX_STEPS=20 SEED=2 bash scripts/run_ddp.sh`. \
Further flags go to the run.

| variable | what it sets |
| --- | --- |
{_rows((f"`{name}`", about or "the seed") for name, about in found)}

## Environment variables

| variable | what it does |
| --- | --- |
{_rows(VARIABLES.items())}

Variables that would change the results are refused, unless they are off:

{refused}

A variable that a library cannot read, such as `TORCH_LOGS=banana`, is named in one line.
"""


def _names_of_trl() -> str:
    rows = [(_names(names), answer) for names, answer in trl_names().items()]
    return f"""\
## Names of TRL, transformers and PEFT

A name that TRL has too means here what it means in TRL. These names are different:

| name there | here |
| --- | --- |
{_rows(rows)}
"""


def _names(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split())


def main(argv: list[str]) -> int:
    if argv == ["--write"]:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
