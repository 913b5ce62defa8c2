"""The Checkpointer: when a run saves a checkpoint, and what the last one holds."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import IO, Any

import torch

from pipeline.checkpoints import checkpoint
from pipeline.checkpoints.checkpoint import TrainState
from pipeline.checkpoints.manifest import prune
from pipeline.checkpoints.run_folder import check_still_there, machine_fault
from pipeline.config.settings import RunSettings
from pipeline.distributed.gradients import consolidated_state_dict
from pipeline.distributed.ranks import Ranks
from pipeline.errors import SHUTDOWN_TIMEOUT, MachineError
from pipeline.files.durable import sync


class Checkpointer:
    """Saves the model, the optimizer and the `state_dict()` of each of its `owners`.

    Every rank makes one and calls it at the same points; rank 0 writes. `lock` is the lock file of
    the run folder, open on rank 0. `resumed` is the checkpoint that the run continues from.
    """

    def __init__(
        self,
        folder: Path,
        settings: RunSettings,
        ranks: Ranks,
        state: TrainState,
        tokenizer: Any,
        *,
        lock: IO[str] | None = None,
        resumed: Path | None = None,
    ) -> None:
        self.run_folder, self.folder, self.resumed = folder, folder / "checkpoints", resumed
        self.owners: list[Any] = [state]
        self._settings, self._ranks, self._state = settings, ranks, state
        self._tokenizer, self._lock = tokenizer, lock
        self._unsynced: list[Path] = []
        self._saved = None if resumed is None else state.position
        self._begun = self._saved_at = time.perf_counter()
        self._warned = False

    @property
    def wall_s(self) -> float:
        """Seconds so far, including the processes before a resume."""
        return self._state.wall_s + time.perf_counter() - self._begun

    @property
    def is_current(self) -> bool:
        """Whether the last checkpoint holds the current position of the run."""
        return self._saved == self._state.position

    @property
    def is_due(self) -> bool:
        """Every `save_steps` steps, and after `save_minutes` by the clock of rank 0."""
        settings = self._settings
        due = settings.save_steps > 0 and self._state.step % settings.save_steps == 0
        if settings.save_minutes is not None:
            waited_s = time.perf_counter() - self._saved_at
            late = self._ranks.is_main and waited_s > 60 * settings.save_minutes
            due = self._ranks.max(float(due or late)) > 0
        return due

    def check_folder(self) -> None:
        """MachineError if the run folder was removed or replaced."""
        check_still_there(self.run_folder, self._lock)

    def machine_fault(self, error: BaseException) -> MachineError | None:
        """The fault of the machine that caused `error`; None for another cause."""
        return machine_fault(error, self.run_folder, self._lock)

    def remember(self, path: Path) -> None:
        """Sync this file to the disk before the next checkpoint, which depends on it."""
        self._unsynced.append(path)

    def save(self, name: str, model: Any, optimizer: torch.optim.Optimizer | None = None) -> float:
        """Compare parameters over the ranks; rank 0 writes, all wait. Returns the seconds."""
        begun = time.perf_counter()
        self.check_folder()
        while self._unsynced:
            sync(self._unsynced.pop())
        self._ranks.check_same_parameters(model.named_parameters(), f"at checkpoint {name}")
        moments = (
            None if optimizer is None else consolidated_state_dict(optimizer, self._ranks.rank)
        )
        if self._ranks.is_main:
            path = self.write(name, model, moments)
            prune(self.folder, self._settings.save_total_limit, path)
        self._ranks.barrier(f"checkpoint {name}")
        self._saved, self._saved_at = self._state.position, time.perf_counter()
        seconds = self._saved_at - begun
        self._warn_of_slow_save(seconds)
        return seconds

    def write(self, name: str, model: Any, optimizer_state: dict[str, Any] | None = None) -> Path:
        """On rank 0 only: write the checkpoint, with the state of all owners."""
        self._state.wall_s, self._begun = self.wall_s, time.perf_counter()
        state: dict[str, Any] = {}
        for owner in self.owners:
            part = owner.state_dict()
            assert not state.keys() & part.keys(), "two owners save the same name"
            state |= part
        return checkpoint.save(self.folder, name, model, self._tokenizer, state, optimizer_state)

    def _warn_of_slow_save(self, save_s: float) -> None:
        """Warn once if the launcher would kill the ranks before a save after SIGTERM is done."""
        limit_s = float(os.environ.get(SHUTDOWN_TIMEOUT, 30))
        if "TORCHELASTIC_RUN_ID" not in os.environ or save_s <= limit_s or self._warned:
            return
        self._warned = True
        if self._ranks.is_main:
            print(
                f"warning: a checkpoint took {save_s:.0f} s, but the launcher ends ranks "
                f"{limit_s:.0f} s after SIGTERM; set {SHUTDOWN_TIMEOUT}={2 * save_s:.0f} for it",
                flush=True,
            )
