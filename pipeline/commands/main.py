"""The commands of the console: `three-domain-grpo COMMAND ...` or `python -m pipeline COMMAND ...`.

Exit codes are those of `pipeline/run.py`. A command is imported only when the command is called.
"""

import os
from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple, NoReturn

from pipeline.errors import UserError, nearest
from pipeline.files.console import STARTED_AS, command
from pipeline.files.untrusted import one_line, shown
from pipeline.run import guarded, start

TRAIN = "pipeline.run:main"


class Command(NamedTuple):
    """A command: the user's arguments, one line of help, and the function that runs the command.

    `function` is `module:name`, or empty for `main` of the module with the command's name. The
    function gets a list of arguments and returns an exit code. The arguments in `flags` come before
    the user's own.
    """

    arguments: str
    about: str
    function: str = ""
    flags: tuple[str, ...] = ()


COMMANDS = {
    "train": Command("[FLAGS]", "train a model: warm start, GRPO, evaluations, report", TRAIN),
    "evaluate": Command(
        "MODEL [FLAGS]", "evaluate a run, a checkpoint or another model on the held-out tasks"
    ),
    "check": Command("[FLAGS]", "say what a run would do and need", TRAIN, ("--check",)),
    "doctor": Command("[FLAGS]", "test the ranks, links and run folder", TRAIN, ("--doctor",)),
    "report": Command(
        "RUN [RUN ...] [--output FOLDER]",
        "write the report of a run again, or compare runs",
        "pipeline.report.write:main",
    ),
    "chat": Command("RUN [FLAGS]", "serve a customer in the terminal"),
    "sweep": Command(
        "[FLAGS] [-- FLAGS]", "run a recipe over a grid of settings and seeds, and compare the runs"
    ),
    "export": Command("RUN OUT [FLAGS]", "write a checkpoint as one Hugging Face folder"),
    "export-tau2": Command(
        "RUN OUT [--evaluation NAME]",
        "write an evaluation's episodes for the tools of τ²-bench",
        "pipeline.commands.export_tau2:main",
    ),
    "convert": Command("FILE OUT", "make a model folder of a GGUF file"),
    "make-tiny": Command("DEMONSTRATIONS OUT", "make a tiny model for domains of your own"),
}


def console() -> NoReturn:
    """The console script `three-domain-grpo`."""
    begin("three-domain-grpo")


def begin(form: str) -> NoReturn:
    """Run the command line of this process; `form` is how the user calls this program."""
    os.environ[STARTED_AS] = form
    start(main)


def main(argv: list[str]) -> int:
    """Run the command that `argv` begins with, and return the exit code."""
    return guarded(lambda: _run(argv))


def _run(argv: list[str]) -> int:
    name, arguments = (argv[0], argv[1:]) if argv else ("--help", [])
    if name in ("-h", "--help"):
        print(overview())
        return 0
    if name not in COMMANDS:
        raise UserError(one_line(_unknown(name, argv)))
    chosen = COMMANDS[name]
    if chosen.flags and {"-h", "--help"} & {*arguments}:
        print(usage(name))
        return 0
    code: int = function_of(name)([*chosen.flags, *arguments])
    return code


def function_of(name: str) -> Callable[[list[str]], int]:
    own = f"pipeline.commands.{name.replace('-', '_')}:main"
    module, _, function = (COMMANDS[name].function or own).partition(":")
    found: Callable[[list[str]], int] = getattr(import_module(module), function)
    return found


def overview() -> str:
    """Return the list of commands with a line each."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {each.about}" for name, each in COMMANDS.items()]
    head = f"usage: {command('COMMAND')} ...\n\nGRPO fine-tuning of tool-using language models.\n"
    return "\n".join([head, "commands:", *lines, "", f"{command('COMMAND')} --help tells more"])


def usage(name: str) -> str:
    """Return the help of a command that takes the flags of `train`."""
    chosen = COMMANDS[name]
    flags = f"FLAGS are those of a run; {command('train')} --help lists them."
    return f"usage: {command(name)} {chosen.arguments}\n\n{chosen.about}\n{flags}"


def _unknown(name: str, argv: list[str]) -> str:
    if name.startswith("-"):
        return f"got {shown(name)} in place of a command; write {command('train')} {' '.join(argv)}"
    near = nearest(name, COMMANDS)
    hint = f"did you mean {near}?" if near else f"the commands are {', '.join(COMMANDS)}"
    return f"unknown command {shown(name)}; {hint}"
