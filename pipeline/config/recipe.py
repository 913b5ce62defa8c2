"""Recipes: YAML files that fill the tree of settings, and the resolved tree written back as one.

Every mistake in a recipe is a `UserError` that names the file and the setting. Flags (`cli.py`)
come in as overrides, so that both are validated at once and a refusal names the one that is wrong.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from pipeline.config import former
from pipeline.config.settings import Config, Section
from pipeline.errors import UserError, nearest
from pipeline.files.layout import RUN_SETTINGS
from pipeline.files.untrusted import is_plain, masked, one_line, open_file, shown, texts_in

SHIPPED = Path(__file__).resolve().parents[2] / "recipes"

Key = tuple[str, str]  # (section, setting)

SETTINGS: dict[Key, FieldInfo] = {
    (section, name): field
    for section, part in Config.model_fields.items()
    if isinstance(part.annotation, type) and issubclass(part.annotation, Section)
    for name, field in part.annotation.model_fields.items()
}
SECTIONS = tuple(dict.fromkeys(section for section, _ in SETTINGS))
MAX_BYTES = 1 << 16  # of a recipe, and of what its aliases repeat
MAX_DEPTH = 16  # of lists and mappings inside each other
MAX_WHOLE_NUMBER = (1 << 32) - 1  # what every library that is given a seed or a count can take
MAX_NAME = 100  # characters of the recipe's name, which run folders are called after
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
    if os.path.isfile(path):  # Path's own raises for names that are too long
        return path
    name = path.name if path.suffix == ".yaml" else f"{path.name}.yaml"
    if path.parent in (Path(), Path("recipes")) and os.path.isfile(SHIPPED / name):
        return SHIPPED / name
    shipped = sorted(file.stem for file in SHIPPED.glob("*.yaml"))
    near = nearest(path.stem, shipped)
    raise UserError(
        f"--config: got {shown(str(source))}, which is no file; give the path of a recipe or one "
        f"of {', '.join(shipped)}" + (f"; did you mean {near}?" if near else "")
    )


def read_recipe(path: Path) -> dict[str, Any]:
    """The values of a recipe by section, every section present; names are checked, values not.

    In the settings that a run has saved, names of earlier versions are translated.
    """
    tree = _parse(path)
    if not isinstance(tree, dict):
        raise UserError(f"{path}: got no mapping; write sections ({', '.join(SECTIONS)})")
    for section, values in tree.items():
        if section == "recipe":
            continue
        if section not in SECTIONS:
            raise UserError(one_line(f"{path}: {unknown_name(str(section))}"))
        if values is not None and not isinstance(values, dict):
            raise UserError(
                f"{path}: {section}: got {shown(values)}, but {section} is a section; "
                "write its settings below it, indented"
            )
        if values and path.name == RUN_SETTINGS:
            tree[section] = values = former.translated(section, values)
        for name in values or ():
            if (section, name) not in SETTINGS:
                raise UserError(one_line(f"{path}: {unknown_name(str(name), section)}"))
    sections = {section: dict(tree.get(section) or {}) for section in SECTIONS}
    return {"recipe": tree.get("recipe", path.stem), **sections}


def resolve(path: Path, tree: Mapping[str, Any], flags: Mapping[Key, str] | None = None) -> Config:
    """The validated settings; `flags` says which values of the tree came from which flag."""
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    else:
        _refuse_odd_values(path, config, flags or {})
        return config
    if first["type"] == "value_error":  # a check of the tree itself, whose message says all
        raise UserError(one_line(str(first["ctx"]["error"])))
    location = [str(part) for part in first["loc"]]
    key = (location[0], location[1]) if len(location) > 1 else ("", "")
    where = (flags or {}).get(key) or f"{path}: {'.'.join(location)}"
    field = SETTINGS[key] if key in SETTINGS else Config.model_fields["recipe"]
    expected = accepted(field.annotation, field.metadata)
    if first["type"] == "string_type":
        expected += " (text in quotes)"
    raise UserError(one_line(f"{where}: got {_as_yaml(first['input'])}; give {expected}"))


def _refuse_odd_values(path: Path, config: Config, flags: Mapping[Key, str]) -> None:
    """UserError for values of the right type that no setting can use, or that must stay secret."""
    name = config.recipe
    if "/" in name or len(name) > MAX_NAME or name.startswith(".") or not name.isprintable():
        raise UserError(
            f"{path}: recipe: got {shown(name)}, after which run folders are called; give a name "
            f"of at most {MAX_NAME} characters without / (recipe: NAME)"
        )
    for section, setting in SETTINGS:
        value = getattr(getattr(config, section), setting)
        if problem := _problem(str(value) if isinstance(value, Path) else value):
            where = flags.get((section, setting)) or f"{path}: {section}.{setting}"
            raise UserError(f"{where}: {problem}")


def _problem(value: Any) -> str:
    """What is odd in the value of a setting; empty if nothing is."""
    if any(masked(text) != text for text in texts_in(value)):
        return (
            "holds a password or a token, which the run's files would show; give it in the "
            "environment, as HF_TOKEN or WANDB_API_KEY"
        )
    for number in _numbers_in(value):
        if isinstance(number, float) and not math.isfinite(number):
            return f"got {number}; give a finite number"
        if isinstance(number, int) and abs(number) > MAX_WHOLE_NUMBER:
            return f"got {shown(number)}; give at most {MAX_WHOLE_NUMBER}"
    if not is_plain(value) or any("\0" in text for text in texts_in(value)):
        return f"got {shown(value)}; give text that UTF-8 can write"
    return ""


def _numbers_in(value: Any) -> Iterator[int | float]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _numbers_in(inner)
    elif isinstance(value, int | float):
        yield value


def unknown_name(name: str, section: str = "") -> str:
    """What to say of a name that `section` (the top of the recipe if empty) does not have."""
    if why := per_device_refusal(name) or former.instead(name):
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
    return shown(value)


def parse_yaml(text: str) -> Any:
    """The value of a YAML text, by the rules of `_Loader`; raises `yaml.YAMLError`."""
    return yaml.load(text, Loader=_Loader)


def _parse(path: Path) -> Any:
    try:
        with open_file(path) as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise UserError(
                f"{path}: got more than {MAX_BYTES >> 10} KiB, which is no recipe; give the path "
                "of one"
            )
        return parse_yaml(text.decode("utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); give a UTF-8 text file") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise UserError(one_line(f"{path}{line}: {error.problem}; correct the YAML")) from error
    except yaml.YAMLError as error:
        raise UserError(one_line(f"{path}: {error}; correct the YAML")) from error


class _Loader(yaml.SafeLoader):
    """YAML 1.2's core types: `1e-6` is a number, `no` and dates are text; keys are unique.

    An alias stands for one value, not for a list or mapping, so that a short text stays short.
    """

    _depth = 0
    _repeated = 0  # characters

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _mistake(f"nested more than {MAX_DEPTH} levels deep", event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(event, yaml.AliasEvent):
            self._repeated += len(node.value) if isinstance(node, yaml.ScalarNode) else MAX_BYTES
            if self._repeated >= MAX_BYTES:
                raise _mistake(
                    f"*{event.anchor} stands for a list, a mapping or a long text; write it out",
                    event.start_mark,
                )
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, IndexError) as error:  # as of `!!int x`
            problem = f"{shown(node.value)} cannot be read as {node.tag.rpartition(':')[2]}"
            raise _mistake(problem, node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in keys:
                    raise _mistake(f"{key.value} is given twice", key.start_mark)
                keys.add(key.value)
        return super().construct_mapping(node, deep)


def _mistake(problem: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


class _Dumper(yaml.SafeDumper):
    """Quotes every text that `_Loader`, or a YAML 1.1 reader, would take for something else."""


_KINDS = [f"tag:yaml.org,2002:{k}" for k in ("null", "bool", "int", "float", "str", "seq", "map")]
_Loader.yaml_constructors = {k: yaml.SafeLoader.yaml_constructors[k] for k in (None, *_KINDS)}
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
