"""Lets a checkpoint of a run serve a customer in the terminal, with the run's own settings."""

import argparse
from pathlib import Path

from pipeline.config.cli import Parser, seed_of
from pipeline.errors import UserError
from pipeline.export.checkpoint import open_checkpoint
from pipeline.files.console import command
from pipeline.files.imports import importing
from pipeline.files.untrusted import shown


def main(argv: list[str]) -> int:
    """Run `chat RUN`; raises UserError for a mistake of the user."""
    options = _parser().parse_args(argv)
    checkpoint = open_checkpoint(options.run, options.checkpoint)
    config = checkpoint.config
    names = checkpoint.config.data.domains
    name = options.domain or names[0]
    if name not in names:
        raise UserError(f"--domain: got {shown(name)}; domains of the run: {', '.join(names)}")
    seed = config.run.seed if options.seed is None else options.seed
    with importing():
        from pipeline.commands.terminal import (
            NO_DEADLINE_S,
            Terminal,
            chat_of,
            find_task,
            load_rollout,
            play,
            tell,
        )
        from pipeline.customers import Customers, served_domains
        from pipeline.endpoints.language_model import LanguageModel
        from pipeline.environments.domains import load_domains

    domain = load_domains(config.data)[name]
    terminal = Terminal(options.human, chat_of(checkpoint, domain))
    task = find_task(config, domain, options.task, seed, terminal.chat)
    how = "greedy" if options.greedy else f"sampled at temperature {config.rollout.temperature:g}"
    of = ", ".join(names)
    tell("model", f"{checkpoint}; {how}, seed {seed}")
    tell("domain", name if options.domain or not names[1:] else f"{name}, the first of {of}")
    tell("task", f"{task.id}{f' ({task.family})' if task.family else ''}")
    welcomes = {}
    if not options.human and served_domains(config.data, {name: domain}, {name: [task]}):
        tell("customer", config.data.customer_name)
        model = LanguageModel("customer", config, checkpoint.run, name="chat")
        welcomes = Customers(model, [name]).welcomes
    judge = None
    if config.data.judge_url is not None:
        judge = LanguageModel("judge", config, checkpoint.run, name="chat").ask
    limits = config.rollout
    if options.human:
        limits = limits.model_copy(update={"call_timeout": NO_DEADLINE_S, "rollout_timeout": None})
    rollout = load_rollout(
        checkpoint,
        domain,
        terminal.chat,
        limits,
        welcomes=welcomes,
        judge=judge,
        reply=terminal.reply,
        watch=terminal.watch,
    )
    try:
        play(rollout, terminal, task, seed, options.greedy)
    except (KeyboardInterrupt, EOFError):
        print("\nended before the conversation did")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog=command("chat"), description=__doc__, allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--domain", help="a domain of the run [the first]")
    parser.add_argument("--task", metavar="ID", help="id of a task [a held-out task]")
    about = "you type the customer's messages; an empty line ends the conversation"
    parser.add_argument("--human", action="store_true", help=about)
    parser.add_argument("--greedy", action="store_true", help="always take the likeliest token")
    about = "chooses the task and the random numbers [the run's seed]"
    parser.add_argument("--seed", type=seed_of, metavar="N", help=about)
    about = "name of a checkpoint, latest, or best (of --keep-best) [latest]"
    parser.add_argument("--checkpoint", default="latest", metavar="NAME", help=about)
    return parser
