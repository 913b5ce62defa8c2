"""The commands of the console: `three-domain-grpo COMMAND ...` or `python -m pipeline COMMAND ...`.

Exit codes are those of `pipeline/run.py`. A command is imported only when the command is called.
"""

import os
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, NoReturn

from pipeline import run
from pipeline.common.console import STARTED_AS, command
from pipeline.common.errors import UserError, nearest
from pipeline.common.layout import RUN_SETTINGS, run_of_checkpoint
from pipeline.common.untrusted import one_line, shown

TRAIN = "pipeline.run:main"
# Settings that an evaluation does not take from the run.
ANEW = ("output_dir", "num_gpus", "run_name", "chat_template", "system_prompt")


class Command(NamedTuple):
    """A command: the user's arguments, one line of help, and the function that runs the command.

    `function` is `module:name`; it gets a list of arguments and returns an exit code. The arguments
    in `flags` come before the user's own.
    """

    arguments: str
    about: str
    function: str
    flags: tuple[str, ...] = ()


COMMANDS = {
    "train": Command("[FLAGS]", "train a model: warm start, GRPO, evaluations, report", TRAIN),
    "evaluate": Command(
        "MODEL [FLAGS]",
        "evaluate a run, a checkpoint or another model on the held-out tasks",
        "pipeline.commands.main:evaluate_model",
    ),
    "check": Command("[FLAGS]", "say what a run would do and need", TRAIN, ("--check",)),
    "doctor": Command("[FLAGS]", "test the ranks, links and run folder", TRAIN, ("--doctor",)),
    "report": Command(
        "RUN [RUN ...] [--output FOLDER]",
        "write the report of a run again, or compare runs",
        "pipeline.report.write:main",
    ),
    "watch": Command(
        "RUN", "show a run in a browser while it goes on", "pipeline.report.watch:main"
    ),
    "status": Command("RUN [RUN ...]", "say where runs are", "pipeline.report.status:main"),
    "chat": Command(
        "RUN [FLAGS]", "serve a customer in the terminal", "pipeline.commands.chat:main"
    ),
    "rescore": Command(
        "RUN --reward-funcs A,B [FLAGS]",
        "score a run's saved episodes with other reward functions",
        "pipeline.commands.rescore:main",
    ),
    "sweep": Command(
        "[FLAGS] [-- FLAGS]",
        "run a recipe over a grid of settings and seeds, and compare the runs",
        "pipeline.commands.sweep:main",
    ),
    "export": Command(
        "RUN OUT [FLAGS]",
        "write a checkpoint as one Hugging Face folder",
        "pipeline.commands.folders:export_checkpoint",
    ),
    "export-tau2": Command(
        "RUN OUT [--evaluation NAME]",
        "write an evaluation's episodes for the tools of τ²-bench",
        "pipeline.commands.export_tau2:main",
    ),
    "convert": Command(
        "FILE OUT", "make a model folder of a GGUF file", "pipeline.commands.folders:convert"
    ),
    "make-tiny": Command(
        "DEMONSTRATIONS OUT",
        "make a tiny model for domains of your own",
        "pipeline.commands.folders:make_tiny",
    ),
}
WITH_FLAGS_OF_TRAIN = ("evaluate", "check", "doctor")


def console() -> NoReturn:
    """The console script `three-domain-grpo`."""
    start_as("three-domain-grpo")


def start_as(form: str) -> NoReturn:
    """Run the command line of this process; `form` is how the user calls this program."""
    os.environ[STARTED_AS] = form
    run.start(main)


def main(argv: list[str]) -> int:
    """Run the command that `argv` begins with, and return the exit code."""
    return run.exit_code_of(lambda: _run(argv), argv)


def _run(argv: list[str]) -> int:
    name, arguments = (argv[0], argv[1:]) if argv else ("--help", [])
    if name in ("-h", "--help"):
        print(overview())
        return 0
    if name not in COMMANDS:
        raise UserError(one_line(_unknown(name, argv)))
    chosen = COMMANDS[name]
    if name in WITH_FLAGS_OF_TRAIN and {"-h", "--help"} & {*arguments}:
        print(
            f"usage: {command(name)} {chosen.arguments}\n\n{chosen.about}\n"
            f"FLAGS are those of a run; {command('train')} --help lists them."
        )
        return 0
    module, _, function = chosen.function.partition(":")
    code: int = getattr(import_module(module), function)([*chosen.flags, *arguments])
    return code


def overview() -> str:
    """Return the list of commands with a line each."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {each.about}" for name, each in COMMANDS.items()]
    head = f"usage: {command('COMMAND')} ...\n\nGRPO fine-tuning of tool-using language models.\n"
    return "\n".join([head, "commands:", *lines, "", f"{command('COMMAND')} --help tells more"])


def evaluate_model(argv: list[str]) -> int:
    """Evaluate the model that `argv` begins with; flags follow."""
    if not argv or argv[0].startswith("-"):
        raise UserError(
            "evaluate: got no MODEL; give a run folder, a checkpoint, a model folder or a hub id "
            f"first: {command('evaluate')} runs/NAME"
        )
    model, *flags = argv
    return run.main([*run_flags(model), "--model", model, *flags])


def run_flags(model: str) -> list[str]:
    """Return the flags for the settings of the run that made a model, or of evaluate_only.

    An evaluation takes the run's own settings, except the folder, the number of ranks, the name and
    the agent behind an endpoint, which has played the tasks in the run. The tokenizer of a
    checkpoint has the run's chat template and system prompt.
    """
    from pipeline.config.cli import flags_of
    from pipeline.config.settings import AgentSettings

    settings = (run_of_checkpoint(model) or Path(model)) / RUN_SETTINGS
    if not os.path.isfile(settings):
        return ["--config", "evaluate_only"]
    values = {"use_grpo": False, "warm_start_steps": 0, "rft_rounds": 0, "eval_on_start": True}
    values |= dict.fromkeys(ANEW) | {f"agent_{name}": value for name, value in AgentSettings()}
    return ["--config", str(settings), *flags_of(values)]


def _unknown(name: str, argv: list[str]) -> str:
    if name.startswith("-"):
        return f"got {shown(name)} in place of a command; write {command('train')} {' '.join(argv)}"
    near = nearest(name, COMMANDS)
    hint = f"did you mean {near}?" if near else f"the commands are {', '.join(COMMANDS)}"
    return f"unknown command {shown(name)}; {hint}"
