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
CALLED = "called "  # begins an answer that is a name alone
BAR = "\\|"  # a bar in a cell of a Markdown table
ACTIONS = {action.dest: action for action in build_parser(Config())._actions}
INTRODUCTION = f"""\
# Settings

This page answers: which settings exist, which flag sets each, and what is the default? The command
`python scripts/settings_page.py --write` makes it from the code; `three-domain-grpo train --help`
prints the same.

- A **recipe** (a YAML file, `--config RECIPE`) gives settings by section, and a **flag** overrides
  it. Without `--config`, a run takes `{RECIPE}`, whose values stand here too, or, with a
  pretrained model, `pretrained`.
- In a recipe, the name of a setting is its flag with underscores (in `warm_start` without the
  prefix). Flags may have underscores too.
- A flag without a value is a **switch**; `--no-FLAG` turns it off (`--no-peft`, `--no-grpo`).
- **Lists** have commas: `--domains airline,retail`; `none` is an empty list. **Mappings** are YAML,
  with a space after each colon: `--domain-weights '{{telecom: 2}}'`. `null` is no value.
"""
VARIABLES = {  # environment variables besides those of run_ddp.sh
    "`ACCELERATE_USE_CPU=true`": "run on CPU although the machine has GPUs",
    "`CUDA_VISIBLE_DEVICES`": "the GPUs that a run may use",
    "`PET_NNODES`, `PET_NODE_RANK`": "number of machines, and which of them this is, from 0",
    "`PET_MASTER_ADDR`, `PET_MASTER_PORT`": "machine 0, as the others reach it; port: 29500",
    "`OMP_NUM_THREADS`": "threads per rank on CPU; default: cores divided by ranks",
    "`GLOO_SOCKET_IFNAME`, `NCCL_SOCKET_IFNAME`": "network interface of ranks: [NCCL](nccl.md)",
    "`NCCL_DEBUG=INFO`": "NCCL prints the interfaces and transports that it takes",
    "`TORCH_ELASTIC_SHUTDOWN_TIMEOUT`": "seconds from SIGTERM to SIGKILL; default: 20",
    "`HF_TOKEN`": "access to private models and datasets of the hub",
    "`HF_HUB_OFFLINE=1`": "use only models and datasets that are already on this machine",
    "`OPENAI_API_KEY`": "the key for endpoints, if `customer_key` and the like name no other",
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
    lines = [head, "| flag | default | what it sets |", "| --- | --- | --- |"]
    for name, setting in type(default).model_fields.items():
        action = ACTIONS[f"{section}.{name}"]
        value = getattr(default, name)
        other = getattr(shipped, name)
        shown = _shown(value) + (f"; recipe: {_shown(other)}" if other != value else "")
        flags = [option for option in action.option_strings if not option.startswith("--no-")]
        named = [f"`{flags[0]} {action.metavar}`" if action.metavar else f"`{flags[0]}`"]
        named += [f"`{flag}`" for flag in flags[1:]]
        cells = ", ".join(named), shown, str(setting.description)
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
    answers = trl_names().items()
    rows = [(_names(there), here.split()[1]) for there, here in answers if here.startswith(CALLED)]
    names = "; ".join(f"{there}: {here}" for there, here in rows)
    return f"""\
## Names of TRL, transformers and PEFT

A name that TRL has too means here what it means in TRL. Other names of TRL are answered with what
to set here ([all of them](../pipeline/config/trl_names.yaml)). Only the name differs for {names}.
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
