"""`evaluate MODEL`: the evaluation of a run or a model on the held-out tasks, without training."""

import os
from pathlib import Path

from pipeline.commands.main import usage
from pipeline.errors import UserError
from pipeline.files.console import command
from pipeline.files.layout import RUN_SETTINGS, run_of_checkpoint
from pipeline.run import main as run

# An evaluation takes the run's own settings, except the folder, the number of ranks, the name and
# the agent behind an endpoint, which has played the tasks in the run. The tokenizer of a checkpoint
# has the run's chat template and system prompt.
ANEW = "--no-grpo --warm-start-steps 0 --rft-rounds 0 --output-dir null --num-gpus null "
ANEW += "--run-name null --agent-url null --agent-model null --agent-temperature null "
ANEW += "--chat-template null --system-prompt null "
ANEW += "--agent-key OPENAI_API_KEY --max-agent-calls null --max-agent-tokens null"


def main(argv: list[str]) -> int:
    """Evaluate the model that `argv` begins with; flags follow."""
    if {"-h", "--help"} & {*argv}:
        print(usage("evaluate"))
        return 0
    if not argv or argv[0].startswith("-"):
        what = "give a run folder, a checkpoint, a model folder or a hub id first"
        raise UserError(f"evaluate: got no MODEL; {what}: {command('evaluate')} runs/NAME")
    model, *flags = argv
    return run([*settings_of(model), "--model", model, *flags])


def settings_of(model: str) -> list[str]:
    """Return the flags for the settings of the run that made a model, or of evaluate_only."""
    folder = run_of_checkpoint(model) or Path(model)
    settings = folder / RUN_SETTINGS
    if not os.path.isfile(settings):
        return ["--config", "evaluate_only"]
    return ["--config", str(settings), *ANEW.split()]
