"""Finds a checkpoint of a run, with the run's settings, for use after training.

This module imports no torch.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.checkpoints.run_folder import find_checkpoint, newest_first, problem, read_state
from pipeline.common.console import say
from pipeline.common.errors import UserError
from pipeline.common.layout import ADAPTER_CONFIG, RUN_SETTINGS, run_of_checkpoint
from pipeline.config.recipe import load_recipe
from pipeline.config.settings import Config


@dataclass(frozen=True, kw_only=True)
class RunCheckpoint:
    """An undamaged checkpoint of a run."""

    run: Path
    path: Path
    config: Config  # the settings of the run
    state: dict[str, Any]  # the content of state.json

    @property
    def step(self) -> int:
        return int(self.state.get("step", 0))

    @property
    def is_adapter(self) -> bool:
        return (self.path / ADAPTER_CONFIG).is_file()

    def __str__(self) -> str:
        return f"checkpoint {self.path.name} (step {self.step}) of {self.run}"


def open_checkpoint(run: Path, name: str = "latest") -> RunCheckpoint:
    """Return a checkpoint of a run by its name, the newest one for `latest`, or the `best`.

    `run` may also be the folder of a checkpoint. Raises UserError for a folder without a run, and
    for an unknown or damaged checkpoint.
    """
    owner = run_of_checkpoint(str(run))
    if owner is not None and (owner / RUN_SETTINGS).is_file():
        run, name = owner, run.name
    elif not (run / RUN_SETTINGS).is_file():
        raise UserError(
            f"got {str(run)!r}, which holds no run (no {RUN_SETTINGS}); give the folder of a run"
        )
    config = load_recipe(run / RUN_SETTINGS)
    path = run / "checkpoints" / name
    if name == "best":
        if best := open_checkpoint(run).state.get("best"):
            return open_checkpoint(run, best["checkpoint"])
        raise UserError(f"--checkpoint: got 'best', but {run} kept none; train with --keep-best")
    if name == "latest":
        newest, notes = find_checkpoint(run, "auto")
        for note in notes if newest else ():
            say(note)
        if newest is None:
            why = notes[0].removeprefix("warning: ") if notes else "there is none"
            raise UserError(
                f"{run} holds no whole checkpoint ({why}); give a run that has saved one"
            )
        path = newest
    elif not path.is_dir() or path.parent != run / "checkpoints":
        known = ", ".join(sorted(p.name for p in newest_first(run / "checkpoints"))) or "none"
        raise UserError(f"--checkpoint: got {name!r}; checkpoints of {run}: {known}")
    elif damage := problem(path):
        raise UserError(f"--checkpoint: {path.name} is damaged ({damage}); give another one")
    return RunCheckpoint(run=run, path=path, config=config, state=read_state(path))
