"""The command line: one flat flag per setting, made from the tree of settings, over a recipe."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

import yaml

from pipeline.config.former import instead
from pipeline.config.recipe import (
    SECTIONS,
    SETTINGS,
    Key,
    find_recipe,
    load_recipe,
    parse_yaml,
    per_device_refusal,
    read_recipe,
    resolve,
)
from pipeline.config.settings import Config
from pipeline.errors import UserError, nearest
from pipeline.files.layout import run_of_checkpoint
from pipeline.files.untrusted import one_line, shown

DEFAULT_RECIPE = "three_domain_tiny"


def parse(argv: list[str]) -> Config:
    """The settings of a command line: the recipe's, overridden by the flags.

    Raises `UserError` for every mistake, and `SystemExit(0)` after printing the help.
    """
    try:
        return _parse(argv)
    except UserError as error:  # names in it may be anything
        raise UserError(one_line(str(error))) from None


def _parse(argv: list[str]) -> Config:
    parser = build_parser(Config())
    namespace, unknown = parser.parse_known_args(argv)
    given = vars(namespace)
    recipe, wants_help = given.pop("config"), given.pop("help")
    if wants_help:
        build_parser(load_recipe(recipe or DEFAULT_RECIPE)).print_help()
        sys.exit(0)
    if unknown:
        raise UserError(_unknown_argument(unknown[0], parser))
    resumed = _resumed_run(given)
    own = resumed / "config.yaml" if resumed is not None else None
    path = find_recipe(recipe or (own if own and own.is_file() else DEFAULT_RECIPE))
    tree = read_recipe(path)
    flags = {}
    if resumed is not None:
        tree["run"]["output_dir"] = str(resumed)
    for dest, value in given.items():
        section, name = dest.split(".")
        tree[section][name] = _value(value, SETTINGS[section, name].annotation)
        flags[section, name] = flag(section, name)
    config = resolve(path, tree, flags)
    _require_files(config, path, flags)
    fresh = Path("runs") if config.run.resume_from_checkpoint is None else None
    folder = config.run.output_dir or fresh
    if folder is not None and not config.run.doctor and os.environ.get("RANK", "0") == "0":
        _require_folder(folder)
    return config


def _resumed_run(given: dict[str, Any]) -> Path | None:
    """The folder of the run to resume, whose settings it goes on with."""
    name, folder = given.get("run.resume_from_checkpoint"), given.get("run.output_dir")
    if name is None:
        return None
    return run_of_checkpoint(name) if folder is None else Path(folder)


def flag(section: str, name: str) -> str:
    """The flag of a setting: `--learning-rate`, `--warm-start-learning-rate`."""
    prefix = "warm-start-" if section == "warm_start" else ""
    return f"--{prefix}{name.replace('_', '-')}"


def build_parser(shown: Config) -> argparse.ArgumentParser:
    """The parser of all flags; the help shows the values of `shown` as the defaults."""
    parser = _Parser(
        usage="pipeline/run.py [--config RECIPE] [--FLAG VALUE ...]",
        description="Warm start, GRPO and evaluation of a tool-using model in several domains. "
        "A recipe gives every setting, flags override it; values in brackets are the recipe's.",
        add_help=False,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=100),
    )
    parser.add_argument(
        "-h", "--help", action="store_true", help="this list; with --config, of that recipe"
    )
    parser.add_argument(
        "--config",
        metavar="RECIPE",
        default=None,
        help=f"a recipe file, or the name of a shipped recipe [{shown.recipe}]",
    )
    for section in SECTIONS:
        values = getattr(shown, section)
        group = parser.add_argument_group(type(values).__doc__ or section)
        for (owner, name), field in SETTINGS.items():
            if owner == section:
                text = f"{field.description}{_shown(getattr(values, name))}"
                _add_flag(group, (section, name), field.annotation, text.replace("%", "%%"))
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')}; --help shows what each flag takes")


class _Switch(argparse.Action):
    """`--x` sets true, `--no-x` false."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, not str(option_string).startswith("--no-"))


def _add_flag(group: argparse._ArgumentGroup, key: Key, annotation: Any, text: str) -> None:
    names = [flag(*key)]
    dest = ".".join(key)
    if annotation is bool:
        names.append(f"--no-{names[0].removeprefix('--').removeprefix('use-')}")
        group.add_argument(
            *names, dest=dest, action=_Switch, nargs=0, default=argparse.SUPPRESS, help=text
        )
        return
    if key[1] == "num_generations":
        names.append("--group-size")
    group.add_argument(
        *names, dest=dest, metavar=_metavar(annotation), default=argparse.SUPPRESS, help=text
    )


def _metavar(annotation: Any) -> str:
    base = _without_null(annotation)
    if get_origin(base) is Literal:
        return "|".join(get_args(base))
    words = {int: "N", float: "X", Path: "PATH", list: "A,B", dict: "YAML"}
    return words.get(get_origin(base) or base, "TEXT")


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return f" [{','.join(map(str, value)) or 'none'}]"
    return f" [{str(value).lower() if isinstance(value, bool) else value}]"


def _value(text: str | bool, annotation: Any) -> Any:
    """A flag's text as a recipe would hold it; lists are separated by commas, `none` is empty."""
    base = _without_null(annotation)
    if isinstance(text, bool) or (text == "null" and base is not annotation):
        return None if text == "null" else text
    if get_origin(base) is list:
        return [] if text == "none" else [part.strip() for part in text.split(",")]
    if base in (str, Path) or get_origin(base) is Literal:
        return text
    try:
        return parse_yaml(text)
    except yaml.YAMLError:
        return text  # refused by the validation, which says what the setting takes


def _without_null(annotation: Any) -> Any:
    """`int` of `int | None` and of `Annotated[int, ...] | None`; other types as they are."""
    arguments = get_args(annotation)
    if type(None) not in arguments:
        return annotation
    return getattr(arguments[0], "__origin__", arguments[0])


def _unknown_argument(argument: str, parser: argparse.ArgumentParser) -> str:
    name = argument.split("=")[0]
    if not name.startswith("-"):
        return (
            f"unexpected argument {shown(argument)}; lists are separated by commas, "
            "and a recipe is given as --config RECIPE"
        )
    if why := per_device_refusal(name) or instead(name):
        return why
    known = [option[2:] for option in parser._option_string_actions if option.startswith("--")]
    plain = name.lstrip("-").replace("_", "-")
    near = {"recipe": "config", "no-use-grpo": "no-grpo"}.get(plain) or nearest(plain, known)
    return f"unknown flag {name}; " + (f"did you mean --{near}?" if near else "--help lists all")


def _require_files(config: Config, path: Path, flags: dict[Key, str]) -> None:
    for key, field in SETTINGS.items():
        value = getattr(getattr(config, key[0]), key[1])
        is_input = _without_null(field.annotation) is Path and key[1] != "output_dir"
        if is_input and value is not None and not os.path.isfile(value):
            where = flags.get(key) or f"{path}: {'.'.join(key)}"
            raise UserError(f"{where}: got '{value}', which is no file; give an existing file")


def _require_folder(folder: Path) -> None:
    """UserError where the run's folder could not be made, which is tried in a temporary one."""
    there = next(part for part in (folder, *folder.parents) if os.path.lexists(part))
    try:
        with tempfile.TemporaryDirectory(prefix=".writable-", dir=there) as trial:
            (trial / folder.relative_to(there)).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"cannot be written to ({error.strerror})"
        what = "is no folder" if os.path.isfile(there) else what
        raise UserError(
            f"output_dir: got '{folder}', but '{there}' {what}; name another folder"
        ) from None
