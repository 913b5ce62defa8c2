"""Recipes: YAML files that fill the tree of settings, and the resolved tree written back as one.

Every mistake in a recipe is a `UserError` that names the file and the setting. Flags (`cli.py`)
come in as overrides, so that both are validated at once and a refusal names the one that is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from pipeline.config import Config, Section, UserError, nearest

SHIPPED = Path(__file__).resolve().parent.parent / "recipes"

Key = tuple[str, str]  # (section, setting)

SETTINGS: dict[Key, FieldInfo] = {
    (section, name): field
    for section, part in Config.model_fields.items()
    if isinstance(part.annotation, type) and issubclass(part.annotation, Section)
    for name, field in part.annotation.model_fields.items()
}
SECTIONS = tuple(dict.fromkeys(section for section, _ in SETTINGS))
LIMITS = {Gt: ("gt", "above"), Ge: ("ge", "at least"), Lt: ("lt", "below"), Le: ("le", "at most")}


def load_recipe(source: str | Path) -> Config:
    """The settings of a recipe, given as a path or as the name of a shipped one."""
    path = find_recipe(source)
    return resolve(path, read_recipe(path))


def dump(config: Config) -> str:
    """The resolved settings as YAML, which `load_recipe` reads back to an equal `Config`."""
    values = config.model_dump(mode="json")
    return str(yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100))


def find_recipe(source: str | Path) -> Path:
    """The file that `mixed`, `recipes/mixed.yaml` or a path means, from any working directory."""
    path = Path(source)
    if path.is_file():
        return path
    name = path.name if path.suffix == ".yaml" else f"{path.name}.yaml"
    if path.parent in (Path(), Path("recipes")) and (SHIPPED / name).is_file():
        return SHIPPED / name
    shipped = sorted(file.stem for file in SHIPPED.glob("*.yaml"))
    near = nearest(path.stem, shipped)
    raise UserError(
        f"--config: got {str(source)!r}, which is no file; give the path of a recipe or one of "
        f"{', '.join(shipped)}" + (f"; did you mean {near}?" if near else "")
    )


def read_recipe(path: Path) -> dict[str, Any]:
    """The values of a recipe by section, every section present; names are checked, values not."""
    tree = _parse(path)
    if not isinstance(tree, dict):
        raise UserError(f"{path}: got no mapping; write sections ({', '.join(SECTIONS)})")
    for section, values in tree.items():
        if section == "recipe":
            continue
        if section not in SECTIONS:
            raise UserError(f"{path}: {unknown_name(str(section))}")
        if values is not None and not isinstance(values, dict):
            raise UserError(
                f"{path}: {section}: got {values!r}, but {section} is a section; "
                "write its settings below it, indented"
            )
        for name in values or ():
            if (section, name) not in SETTINGS:
                raise UserError(f"{path}: {unknown_name(str(name), section)}")
    sections = {section: dict(tree.get(section) or {}) for section in SECTIONS}
    return {"recipe": tree.get("recipe", path.stem), **sections}


def resolve(path: Path, tree: Mapping[str, Any], flags: Mapping[Key, str] | None = None) -> Config:
    """The validated settings; `flags` says which values of the tree came from which flag."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    if first["type"] == "value_error":  # a check of the tree itself, whose message says all
        raise UserError(str(first["ctx"]["error"]))
    location = [str(part) for part in first["loc"]]
    key = (location[0], location[1]) if len(location) > 1 else ("", "")
    where = (flags or {}).get(key) or f"{path}: {'.'.join(location)}"
    field = SETTINGS[key] if key in SETTINGS else Config.model_fields["recipe"]
    expected = accepted(field.annotation, field.metadata)
    if first["type"] == "string_type":
        expected += " (text in quotes)"
    raise UserError(f"{where}: got {_as_yaml(first['input'])}; give {expected}")


def unknown_name(name: str, section: str = "") -> str:
    """What to say of a name that `section` (the top of the recipe if empty) does not have."""
    if why := per_device_refusal(name):
        return why
    plain = name.replace("-", "_").replace("group_size", "num_generations")
    kind = f"setting {section}.{name}" if section else f"section {name}"
    if plain.startswith("warm_start_") and ("warm_start", plain[11:]) in SETTINGS:
        return f"unknown {kind}; write {plain[11:]} in section warm_start"
    owners = [owner for owner, setting in SETTINGS if setting == plain]
    if owners:
        return f"unknown {kind}; write {plain} in section {' or '.join(owners)}"
    here = [setting for owner, setting in SETTINGS if owner == section] or SECTIONS
    if near := nearest(plain, here):
        return f"unknown {kind}; did you mean {near}?"
    owner_of = {setting: owner for owner, setting in SETTINGS}
    if near := nearest(plain, owner_of):
        return f"unknown {kind}; did you mean {near} in section {owner_of[near]}?"
    return f"unknown {kind}; --help lists all"


def per_device_refusal(name: str) -> str:
    """Why TRL's names that depend on the number of ranks are refused; empty for other names."""
    plain = name.lstrip("-").replace("-", "_")
    if not plain.startswith("per_device_") and plain not in (
        "gradient_accumulation_steps",
        "generation_batch_size",
        "steps_per_generation",
    ):
        return ""
    return (
        f"{name} is not used here: a step is tasks_per_step groups of num_generations over all "
        "ranks, whatever the number of ranks, and micro-batches come from "
        "max_tokens_per_microbatch; set these"
    )


def accepted(annotation: Any, limits: Iterable[Any] = ()) -> str:
    """What a setting takes, in words, from its type: `a number above 0, or null`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return accepted(arguments[0], arguments[1:])
    if origin in (Union, UnionType):
        return f"{accepted(arguments[0], limits)}, or null"
    if origin is Literal:
        return f"{', '.join(arguments[:-1])} or {arguments[-1]}"
    if origin is list:
        entries = "names" if arguments[0] is str else accepted(arguments[0])
        if get_origin(arguments[0]) is Annotated:
            entries = f"entries, each {entries}"
        needed = any(isinstance(limit, MinLen) for limit in limits)
        return f"a list of {entries}" + (", at least one" if needed else "")
    if origin is dict:
        values = "" if arguments[1] is Any else f", each value {accepted(arguments[1])}"
        return f"a mapping {{name: value}}{values}"
    words = {bool: "true or false", int: "a whole number", float: "a number", Path: "a path"}
    bounds = [
        f"{word} {getattr(limit, attribute)}"
        for limit in limits
        for kind, (attribute, word) in LIMITS.items()
        if isinstance(limit, kind)
    ]
    return f"{words.get(annotation, 'text')} {' and '.join(bounds)}".strip()


def _as_yaml(value: Any) -> str:
    """A refused value as the user would have written it, on one line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)


def parse_yaml(text: str) -> Any:
    """The value of a YAML text, by the rules of `_Loader`; raises `yaml.YAMLError`."""
    return yaml.load(text, Loader=_Loader)


def _parse(path: Path) -> Any:
    try:
        return parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); give a UTF-8 text file") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"{path}{line}: {error.problem}; correct the YAML") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}; correct the YAML") from error


class _Loader(yaml.SafeLoader):
    """YAML 1.2's core types: `1e-6` is a number, `no` and dates are text; keys are unique."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: list[Any] = []
        for key, _ in node.value:
            if key.value in keys:
                problem = f"{key.value} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            keys.append(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes every text that `_Loader`, or a YAML 1.1 reader, would take for something else."""


_Loader.yaml_implicit_resolvers = {}  # YAML 1.1's, where `no` is false and `1e-6` a text
_FLOAT = r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", list("-+0123456789")),
    ("float", rf"{_FLOAT}|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", list("-+.0123456789")),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), _first
        )
