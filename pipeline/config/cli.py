"""Parses the command line. Each setting has one flag, which overrides the recipe."""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

import yaml
from pydantic import BaseModel

from pipeline.common.console import command
from pipeline.common.errors import UserError, nearest
from pipeline.common.layout import RUN_SETTINGS, is_toy, run_of_checkpoint
from pipeline.common.untrusted import one_line, shown
from pipeline.config import recipe
from pipeline.config.domain_names import domain_name_of
from pipeline.config.recipe import PREFIXED, SECTIONS, SETTINGS, full_name
from pipeline.config.settings import MAX_SEED, Config

DEFAULT_RECIPE = "three_domain_tiny"
RECIPE_OF_A_MODEL = "pretrained"  # of a model that is no toy
MOST_USED = [
    *("model", "domains", "num_gpus", "max_steps", "num_generations", "learning_rate"),
    *("output_dir", "resume_from_checkpoint", "check"),
]
ENV = (("data", "domains"), ("data", "environments"))  # the settings that `--env` gives
ABOUT = """\
Train a tool-using model in several domains: a warm start on demonstrations, then GRPO, with
evaluations on held-out tasks. A recipe gives every setting, and flags override the recipe. The
values in brackets are the recipe's. Flags without a value are switches; --no-FLAG turns a switch
off. Flags may be written with underscores: --learning_rate is --learning-rate.

examples:
  {train} --num-gpus 2                  train the tiny model on two ranks
  {train} --model FOLDER --check        what a run of your model would do and need
  {train} --no-grpo --model runs/NAME   evaluate the latest checkpoint of a run"""


def parse(argv: list[str]) -> Config:
    """Return the settings from a recipe and from the flags, which override the recipe.

    Without `--config`, a resumed run uses `config.yaml` from the run folder, and a pretrained model
    the recipe `pretrained`. Raises UserError for a
    mistake, and SystemExit(0) after printing the help.
    """
    parser = build_parser(Config())
    namespace, unknown = parser.parse_known_args([_with_hyphens(word, parser) for word in argv])
    given = _with_environment(vars(namespace))
    source = given.pop("config")
    if given.pop("help"):
        build_parser(recipe.load_recipe(_default(given) if source is None else source)).print_help()
        sys.exit(0)
    if unknown:
        raise UserError(one_line(_unknown_argument(unknown[0], parser)))
    folder = given.get("run.output_dir")
    checkpoint = given.get("run.resume_from_checkpoint")
    resumed = Path(folder) if folder and checkpoint else run_of_checkpoint(checkpoint)
    if source is None and resumed is not None and (resumed / RUN_SETTINGS).is_file():
        source = resumed / RUN_SETTINGS
    path = recipe.find_recipe(_default(given) if source is None else source)
    tree = recipe.read_recipe(path)
    flags = dict[tuple[str, ...], str]()
    if resumed is not None:
        tree["run"]["output_dir"] = str(resumed)
    for dest, text in given.items():
        section, name = dest.split(".")
        flags[section, name] = flag(section, name)
        tree[section][name] = _value(text, SETTINGS[section, name].annotation, flag(section, name))
    return recipe.resolve(path, tree, flags)


def _with_environment(given: dict[str, Any]) -> dict[str, Any]:
    """Return the flags with what `--env` is short for: one domain, with its name."""
    environments = given.pop("env")
    if not environments:
        return given
    flags = [flag(*name) for name in ENV if ".".join(name) in given]
    if others := flags + [f"--env {other}" for other in environments[1:]]:
        got = f"--env: got {environments[0]} beside {others[0]}"
        raise UserError(one_line(f"{got}; give --domains and --environments for several domains"))
    name = domain_name_of(environments[0])
    values = (name, json.dumps({name: environments[0]}))
    return given | {".".join(of): value for of, value in zip(ENV, values, strict=True)}


def _default(flags: Mapping[str, str]) -> str:
    """Return the recipe for flags without `--config`."""
    return DEFAULT_RECIPE if is_toy(flags.get("model.model", "tiny")) else RECIPE_OF_A_MODEL


def flag(section: str, name: str) -> str:
    """Return the flag of a setting, such as `--learning-rate` or `--warm-start-learning-rate`."""
    return "--" + full_name(section, name).replace("_", "-")


def flags_of(values: Mapping[str, Any]) -> list[str]:
    """Return the flags that give settings values, or texts of values, by the full names."""
    flags: list[str] = []
    for name, value in values.items():
        words = name.replace("_", "-")
        switch = {"true": [f"--{words}"], "false": [f"--no-{words.removeprefix('use-')}"]}
        flags += switch.get(_text(value), [f"--{words}", _text(value)])
    return flags


def build_parser(shown: Config) -> argparse.ArgumentParser:
    """Return the parser of all flags. The help shows the settings in `shown` as defaults."""
    parser = Parser(
        usage=f"{command('train')} [--config RECIPE] [--FLAG VALUE ...]",
        description=ABOUT.format(train=command("train")),
        add_help=False,
        allow_abbrev=False,
        formatter_class=lambda prog: _Help(prog, max_help_position=34, width=100),
    )
    most_used = parser.add_argument_group("most used")
    most_used.add_argument("-h", "--help", action="store_true", help="show this list and exit")
    most_used.add_argument(
        "--config",
        "--recipe",
        metavar="RECIPE",
        help=f"a recipe file, or the name of a shipped recipe [{shown.recipe}]",
    )
    most_used.add_argument(
        "--env",
        metavar="NAME",
        action="append",
        help="train in one environment: of a library, such as reasoning_gym:chain_sum, or a class",
    )
    groups = {s: parser.add_argument_group(getattr(shown, s).__doc__) for s in SECTIONS}
    first = [(s, n) for n in MOST_USED for s, name in SETTINGS if n == name and s not in PREFIXED]
    for section, name in dict.fromkeys((*first, *SETTINGS)):
        setting = SETTINGS[section, name]
        value = getattr(getattr(shown, section), name)
        names = [flag(section, name)]
        kind: dict[str, Any] = {"metavar": _metavar(setting.annotation)}
        if setting.annotation is bool:
            kind = {"action": argparse.BooleanOptionalAction}
            if name.startswith("use_"):
                names.append(names[0].replace("--use-", "--"))  # for --no-grpo and --no-peft
        if name == "num_generations":
            names.append("--group-size")
        kind["help"] = f"{setting.description}{_shown(value)}".replace("%", "%%")
        group = most_used if (section, name) in first else groups[section]
        group.add_argument(*names, dest=f"{section}.{name}", default=argparse.SUPPRESS, **kind)
    return parser


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ")
        raise UserError(one_line(f"{message}; --help shows what each flag takes"))


def seed_of(text: str) -> int:
    """Return a seed from the command line, for `add_argument`."""
    if not 0 <= (number := int(text)) <= MAX_SEED:
        raise argparse.ArgumentTypeError(f"got {number}; give 0 to {MAX_SEED}")
    return number


class _Help(argparse.RawDescriptionHelpFormatter):
    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction):
            return action.option_strings[0]
        return super()._format_action_invocation(action)


def _metavar(annotation: Any) -> str:
    base = _without_null(annotation)
    if get_origin(base) is Literal:
        return "|".join(map(str, get_args(base)))
    words: dict[Any, str] = {int: "N", float: "X", Path: "PATH", list: "A,B", dict: "YAML"}
    return words.get(get_origin(base) or base, "TEXT")


def _shown(value: Any) -> str:
    return "" if value is None else f" [{_text(value)}]"


def _text(value: Any) -> str:
    """Return a value as the flag of a setting takes it."""
    if isinstance(value, list):
        return ",".join(map(str, value)) or "none"
    if value is None or isinstance(value, bool | dict):
        return json.dumps(value, ensure_ascii=False, default=_in_json)
    return str(value)


def _in_json(value: Any) -> Any:
    """Return a domain's factory, or another value of YAML such as a date, in JSON."""
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else str(value)


def _value(text: str | bool, annotation: Any, flag: str) -> Any:
    base = _without_null(annotation)
    if isinstance(text, bool):
        return text
    if text == "null" and base is not annotation:
        return None
    if get_origin(base) is list:
        return [] if text == "none" else [part.strip() for part in text.split(",")]
    if base in (str, Path) or get_origin(base) is Literal:
        return text
    try:
        value = yaml.load(text, recipe.Loader)
    except (ValueError, RecursionError, yaml.YAMLError):
        return text  # `recipe.resolve` raises UserError for text that is not YAML.
    if isinstance(value, dict) and any(":" in str(k) and v is None for k, v in value.items()):
        raise UserError(
            one_line(
                f"{flag}: got {shown(text)}; write a space after each colon, as in {{bank: FILE}}"
            )
        )
    return value


def _without_null(annotation: Any) -> Any:
    """Return a setting's type without None and limits: `int` for `PositiveInt | None`."""
    arguments = get_args(annotation)
    if type(None) not in arguments:
        return annotation
    return getattr(arguments[0], "__origin__", arguments[0])


def _with_hyphens(word: str, parser: argparse.ArgumentParser) -> str:
    """Return `word` with hyphens for underscores in the flag, if this makes a known flag."""
    name, equals, value = word.partition("=")
    flag = name.replace("_", "-")
    return f"{flag}{equals}{value}" if flag in parser._option_string_actions else word


def _unknown_argument(argument: str, parser: argparse.ArgumentParser) -> str:
    name = argument.split("=")[0]
    if not name.startswith("-"):
        return (
            f"unexpected argument {shown(argument)}; lists are separated by commas, and a recipe "
            "is given as --config RECIPE"
        )
    known = [option[2:] for option in parser._option_string_actions if option.startswith("--")]
    near = nearest(name.lstrip("-").replace("_", "-"), known)
    hint = f"did you mean --{near}?" if near else "--help lists all"
    return recipe.instead(name) or f"unknown flag {name}; {hint}"
