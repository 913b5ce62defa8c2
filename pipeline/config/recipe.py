"""Reads and writes recipes, which are YAML files of settings.

A mistake in a recipe raises UserError. Recipes are trusted, so malicious YAML is not detected.
"""

import os
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from pipeline.common.errors import UserError, nearest
from pipeline.common.layout import METRICS, shipped
from pipeline.common.untrusted import is_plain, masked_tree, one_line, read_file, shown
from pipeline.config import rules
from pipeline.config.domain_names import EMBEDDED_DOMAINS, with_installed
from pipeline.config.settings import Config, Section

SHIPPED = shipped("recipes")
MAX_BYTES = 1 << 16  # largest size of a recipe

SETTINGS: dict[tuple[str, str], FieldInfo] = {  # pydantic's field of each (section, setting)
    (section, name): field
    for section, part in Config()
    if isinstance(part, Section)
    for name, field in type(part).model_fields.items()
}
SECTIONS = tuple(dict.fromkeys(section for section, _ in SETTINGS))
REMOVED = {  # settings of earlier versions: a run's file may have them at the values that remain
    ("curriculum", "plateau_delta"): 0.01,
    ("grpo", "permute_rewards"): False,
}
PREFIXED = ("warm_start", "customer", "judge", "agent")  # sections whose settings share names


def full_name(section: str, name: str) -> str:
    """Return the name of a setting that no other has: `max_steps`, `warm_start_steps`."""
    return f"{section}_{name}" if section in PREFIXED else name


def load_recipe(source: str | Path) -> Config:
    """Return the settings of a recipe. `source` is a path or the name of a shipped recipe."""
    path = find_recipe(source)
    return resolve(path, read_recipe(path), {})


def dump(config: Config) -> str:
    """Return the settings as YAML text, from which `load_recipe` reads an equal `Config`."""
    return str(
        yaml.dump(
            config.model_dump(mode="json"),
            Dumper=_Dumper,
            sort_keys=False,
            allow_unicode=True,
            width=100,
        )
    )


def find_recipe(source: str | Path) -> Path:
    """Return the file of a recipe. `source` is a path or the name of a shipped recipe."""
    path = Path(source)
    if os.path.isfile(path):  # Path.is_file raises OSError for a name that is too long.
        return path
    known = {file.stem: file for file in sorted(SHIPPED.glob("*.yaml"))}
    name = path.name.removesuffix(".yaml")
    if path.parent in (Path(), Path("recipes")) and name in known:
        return known[name]
    near = nearest(name, known)
    listed = ", ".join(name for name in known if not name.endswith("gpu"))
    raise UserError(
        f"--config: got {shown(str(source))}, which is no file; give the path of a recipe or one "
        f"of {listed} (docs/training.md lists those for GPUs)"
        f"{f'; did you mean {near}?' * bool(near)}"
    )


def read_recipe(path: Path) -> dict[str, Any]:
    """Return the recipe's name and sections, as they are written."""
    try:
        tree = yaml.load(read_file(path, MAX_BYTES).decode("utf-8-sig"), Loader)
    except (OSError, ValueError, LookupError, RecursionError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", error)
        line = f", line {mark.line + 1}" if mark else ""
        raise UserError(one_line(f"{path}{line}: {reason}; correct the recipe")) from error
    if not isinstance(tree, dict):
        raise UserError(f"{path}: got no mapping; write sections ({', '.join(SECTIONS)})")
    sections: dict[str, Any] = {section: {} for section in SECTIONS}
    for section, values in tree.items():
        if section in SECTIONS and not isinstance(values, dict | None):
            raise UserError(
                f"{path}: {section}: got {shown(values)}, but is a section; write its settings "
                "below it, indented"
            )
        sections[str(section)] = {} if values is None else values
    is_of_run = (path.parent / METRICS).is_file()  # whose checkpoint has what it was made with
    for (section, name), value in REMOVED.items():
        if is_of_run or sections[section].get(name) == value:
            sections[section].pop(name, None)
    return {"recipe": path.stem, **sections}


def resolve(path: Path, tree: Mapping[str, Any], flags: Mapping[tuple[str, ...], str]) -> Config:
    """Return the validated settings, with installed domains in `environments`.

    `flags` maps settings from the command line to their flags. Raises UserError for a mistake.
    """
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        # The last is of the widest of several types; what is missing says more than what is odd.
        wrong = next((fault for fault in faults if fault["type"] == "missing"), faults[-1])
        location = tuple(str(part) for part in wrong["loc"])
        if wrong["type"] == "extra_forbidden" and len(location) <= 2:
            raise UserError(one_line(f"{path}: {_unknown(location)}")) from None
        where = flags.get(location[:2], f"{path}: {'.'.join(location)}")
        reason = wrong["msg"]
        if wrong["type"] in ("missing", "extra_forbidden"):
            reason = f"{location[-1]}: {reason}"
        raise UserError(one_line(f"{where}: got {shown(wrong['input'])}; {reason}")) from None
    plain = config.model_dump()  # whose JSON form would have null for NaN
    for section, name in SETTINGS:
        value = plain[section][name]
        value = str(value) if isinstance(value, Path) else value
        where = flags.get((section, name), f"{path}: {section}.{name}")
        if not is_plain(value):
            raise UserError(f"{where}: got {shown(value)}; give finite numbers and Unicode text")
        if masked_tree(value) != value:
            raise UserError(
                f"{where}: holds a password or a token; give it in the environment, as HF_TOKEN or "
                "WANDB_API_KEY"
            )
    config = with_installed(config)
    rules.check(config)
    return config


def instead(name: str) -> str:
    """Return what `trl_names.yaml` answers to the name of a setting or a flag, or "".

    A name with `*` does not stand for settings that are here.
    """
    plain = name.lstrip("-").replace("-", "_").removeprefix("no_")
    is_here = any(plain == full_name(*setting) for setting in SETTINGS)
    for names, answer in trl_names().items():
        known = [known for known in names.split() if not (is_here and "*" in known)]
        if any(fnmatchcase(plain, pattern) for pattern in known):
            return f"{name}: {answer}"
    return ""


def trl_names() -> dict[str, str]:
    """Return the answers to names of settings in TRL, transformers and PEFT."""
    text = Path(__file__).with_name("trl_names.yaml").read_text(encoding="utf-8")
    return dict[str, str](yaml.safe_load(text))


def own_domains(tree: Mapping[str, Any]) -> list[str]:
    """Return the user's own domains of a run whose shipped recipe has none of them.

    Only the recipe's other settings count in such a run, so its name would say nothing.
    """
    data = tree["data"]
    path = SHIPPED / f"{tree['recipe']}.yaml"
    if not path.is_file():
        return []  # the user's own recipe
    known = read_recipe(path)["data"].get("domains", ())
    own = {*data["tasks"], *data["environments"]}.difference(EMBEDDED_DOMAINS, known)
    return [name for name in data["domains"] if name in own]


def recipe_in_words(tree: Mapping[str, Any]) -> str:
    """Return the recipe of a run, or else the user's own domains with environment and tasks."""
    data = tree["data"]
    domains = list[str]()
    for name in own_domains(tree):
        environment = {**data.get("tools", {}), **data["environments"]}.get(name)
        if isinstance(environment, Mapping):
            environment = environment["factory"]
        sources = {"environment": environment, "tasks": data["tasks"].get(name)}
        named = (f"{what} `{source}`" for what, source in sources.items() if source)
        domains.append(f"{name} ({', '.join(named)})")
    if not domains:
        return f"Recipe `{tree['recipe']}`"
    rewards = ", ".join(f"`{target}`" for target in data.get("reward_funcs", ()))
    return f"Own domains: {'; '.join(domains)}{f', rewards {rewards}' * bool(rewards)}"


def _unknown(location: Sequence[str]) -> str:
    """Return the error message for the name of no section, or of no setting of a section."""
    *section, name = location
    if answer := instead(name):
        return answer
    here = [setting for owner, setting in SETTINGS if [owner] == section] or SECTIONS
    full_names = {full_name(*setting): setting for setting in SETTINGS}
    near = nearest(name, here) or nearest(name, full_names)
    hint = f"did you mean {near}" if near else "--help lists all"
    if near and near not in here:
        owner, near = full_names[near]
        hint = f"did you mean {near} in section {owner}"
    kind = "setting" if section else "section"
    return f"unknown {kind} {'.'.join(location)}; {hint}{'?' * bool(near)}"


class Loader(yaml.SafeLoader):
    """A loader of YAML 1.2: `1e-6` is a number, `no` and dates are text; no key may repeat."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in keys:
                    raise yaml.MarkedYAMLError(
                        problem=f"{key.value} is given twice", problem_mark=key.start_mark
                    )
                keys.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes each text that YAML 1.1 or 1.2 would read as another type."""


Loader.yaml_implicit_resolvers = {}  # YAML 1.1 reads `no` as false and `1e-6` as text.
_FLOAT = r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", list("-+0123456789")),
    ("float", rf"{_FLOAT}|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", list("-+.0123456789")),
):
    for _class in (Loader, _Dumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), _first
        )
