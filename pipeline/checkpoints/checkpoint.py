"""Writes atomic checkpoints of a run, and decides when the run saves a checkpoint.

A checkpoint is a folder with the model or its LoRA adapters, the tokenizer, `optimizer.pt`,
`state.json` and `manifest.json`. No state of a random generator is saved, because each random
number has its own key.
"""

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from pipeline.checkpoints.moments import NUM_MOMENTS, WHOLE, whole_moments, write_sharded
from pipeline.checkpoints.run_folder import (
    FORMAT,
    PREVIOUS,
    WRITING,
    newest_first,
    number_of,
    prune,
    write_manifest,
)
from pipeline.common.console import say
from pipeline.common.durable import sync, write_text
from pipeline.common.errors import FULL, SHUTDOWN_TIMEOUT, MachineError
from pipeline.config.settings import RunSettings
from pipeline.distributed.ranks import Ranks
from pipeline.distributed.sharding import is_sharded
from pipeline.models import lora
from pipeline.models.model_files import write_for_transformers_4
from pipeline.models.sampling_copy import has_adapters

SavedState = dict[str, Any]  # the content of state.json


@dataclass(kw_only=True)
class TrainState:
    """The progress and the results of a run, and what its warnings count: plain data, as saved."""

    stage: str = "start"
    step: int = 0  # number of optimizer steps done
    evaluations: list[dict[str, Any]] = field(default_factory=list)  # results of each evaluation
    validations: list[dict[str, Any]] = field(default_factory=list)  # results of each validation
    ended_early: dict[str, int] = field(default_factory=dict)  # stage name -> number of steps taken
    best: dict[str, Any] = field(default_factory=dict)  # with keep_best: checkpoint, step, success
    agents: dict[str, dict[str, Any]] = field(default_factory=dict)  # results of `agent_url`
    warm_start: dict[str, Any] = field(default_factory=dict)  # of one that has not ended; see sft
    rft: list[dict[str, Any]] = field(default_factory=list)  # results of each round of RFT
    training: dict[str, dict[str, Any]] = field(default_factory=dict)  # a summary of each stage
    start_report: dict[str, Any] = field(default_factory=dict)  # of the first step; on rank 0
    # Of the stage, see evaluation/advice.py: [episodes, errors] and steps in a row without signal
    # of each domain, and the fields of ActionCollapse.
    error_counts: dict[str, list[int]] = field(default_factory=dict)
    dead_steps: dict[str, int] = field(default_factory=dict)
    decisions: dict[str, Any] = field(default_factory=dict)
    task_memory: dict[str, Any] = field(default_factory=dict)  # fields of TaskMemory
    num_tokens: int = 0  # number of tokens, of prompts and sampled, of all steps
    num_reward_calls: int = 0  # number of calls of async reward functions
    wall_s: float = 0.0  # seconds that the run's processes took, up to the last save
    config: dict[str, Any] = field(default_factory=dict)  # the resolved settings of the run
    about: Mapping[str, Any] = field(default_factory=dict)  # facts about each domain
    made_of: Mapping[str, str] = field(default_factory=dict)  # hashes; see preflight/made_of.py

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self.__dataclass_fields__.keys() & state.keys():
            setattr(self, name, state[name])

    @property
    def position(self) -> tuple[int, int, int]:
        """The numbers of finished steps, finished evaluations and steps of the warm start."""
        return self.step, len(self.evaluations), len(self.warm_start.get("losses", ()))

    def evaluated(self, after: str) -> bool:
        return any(evaluation["after"] == after for evaluation in self.evaluations)

    def validated(self, step: int) -> bool:
        return any(validation["step"] == step for validation in self.validations)


def begin_writing(folder: Path, name: str) -> Path:
    """Make the hidden, empty folder in which the checkpoint `name` is written."""
    writing = folder / f"{WRITING}{name}"
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True)
    return writing


def save(
    folder: Path, name: str, model: Any, tokenizer: Any, state: SavedState, moments: Any = None
) -> Path:
    """Write the checkpoint `folder/name`. For a model with LoRA, write only the adapters.

    The files are written to a hidden folder, which is then renamed, so a failure damages no earlier
    checkpoint. `moments` is the state of the optimizer.
    """
    final = folder / name
    writing = begin_writing(folder, name) if not is_sharded(model) else folder / f"{WRITING}{name}"
    number = 1 + max(map(number_of, newest_first(folder)), default=0)
    config = json.dumps(state.get("config", {}), sort_keys=True).encode()
    content = {"format": FORMAT, **state, "config_hash": hashlib.sha256(config).hexdigest()}
    try:
        if is_sharded(model):
            pass  # `write_sharded` has written the weights
        elif has_adapters(model):
            lora.save(model, writing)
        else:
            model.save_pretrained(writing)
        tokenizer.save_pretrained(writing)
        write_for_transformers_4(writing)
        if moments is not None:
            with (writing / WHOLE).open("wb") as file:  # torch.save(path) hides OSErrors
                torch.save(moments, file)
        (writing / "state.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
        write_manifest(writing, number)
        for path in (*writing.rglob("*"), writing):
            sync(path)
    except BaseException:
        shutil.rmtree(writing, ignore_errors=True)
        raise
    if final.exists():  # The old checkpoint stays until the new checkpoint is renamed.
        previous = folder / f"{name}{PREVIOUS}"
        shutil.rmtree(previous, ignore_errors=True)
        final.rename(previous)
    writing.rename(final)
    sync(folder)
    write_text(folder / "latest", name + "\n")
    return final


def full_disk(folder: Path, error: BaseException, remedy: str) -> MachineError | None:
    """Return a MachineError if a full disk or a file's largest size caused `error`, else None."""
    # Exceptions of safetensors and tokenizers hold the system's error number only in the text.
    messages = f"{error} {error.__cause__} {error.__context__}"
    for number in FULL:
        if f"[Errno {number}]" in messages or f"(os error {number})" in messages:
            full = f"the disk of {folder} is full ({os.strerror(number)}); free some space"
            if number == errno.EFBIG:
                full = f"a file in {folder} would be larger than `ulimit -f` allows; raise it"
            return MachineError(f"output_dir: {full}, then {remedy}")
    return None


class Checkpointer:
    """Saves the model, the optimizer and the `state`.

    All ranks call `save`; rank 0 writes. `resumed` is the checkpoint that the run continues from.
    """

    def __init__(
        self,
        run_folder: Path,
        ranks: Ranks,
        settings: RunSettings,
        state: TrainState,
        tokenizer: Any,
        *,
        resumed: Path | None = None,
    ) -> None:
        self.run_folder = run_folder
        self.ranks = ranks
        self.resumed = resumed
        self.folder = run_folder / "checkpoints"
        self._settings = settings
        self.state = state
        self._tokenizer = tokenizer
        self.unsynced: list[Path] = []  # files to flush to disk before the next checkpoint
        self._saved = None if resumed is None else state.position
        self._begun = self._saved_at = time.perf_counter()
        name = state.best.get("checkpoint")
        # Later checkpoints may have replaced it.
        if name and not ranks.all_gather_objects((self.folder / name).is_dir(), "best")[0]:
            if ranks.is_main:
                say(f"warning: keep_best: {name} is gone; the best from now on is kept")
            state.best = {}

    @property
    def wall_s(self) -> float:
        """The seconds that the run has taken, including the time before a resume."""
        return self.state.wall_s + time.perf_counter() - self._begun

    @property
    def is_current(self) -> bool:
        """Whether the last checkpoint holds all finished steps and evaluations."""
        return self._saved == self.state.position

    @property
    def is_due(self) -> bool:
        """Whether to save a checkpoint now, because of `save_steps` or `save_minutes`."""
        steps = self._settings.save_steps
        return (steps > 0 and self.state.step % steps == 0) or self.is_late

    @property
    def is_late(self) -> bool:
        """Whether rank 0's last save is `save_minutes` ago, or a signal has come to any rank."""
        minutes = self._settings.save_minutes
        waited_s = time.perf_counter() - self._saved_at
        is_late = self.ranks.is_main and minutes is not None and waited_s > 60 * minutes
        return self.ranks.max(float(is_late or self.ranks.stop_wanted)) > 0

    def check_folder(self) -> None:
        """Raise MachineError if the run folder was removed or replaced."""
        if not (self.run_folder / ".lock").exists():
            raise MachineError(
                f"output_dir: {self.run_folder} was removed or replaced during the run; start again"
            )

    def machine_fault(self, error: BaseException) -> MachineError | None:
        """Return a MachineError if a lost run folder or a full disk caused `error`, else None."""
        try:
            self.check_folder()
        except MachineError as gone:
            return gone
        return full_disk(self.run_folder, error, "resume with --resume-from-checkpoint latest")

    def save(
        self,
        name: str,
        model: Any,
        optimizer: torch.optim.Optimizer | None = None,
        further: Mapping[str, Any] = MappingProxyType({}),
    ) -> float:
        """Save a checkpoint, with `further` state beside that of the run; return the duration.

        Raises RuntimeError if ranks' weights differ.
        """
        begun = time.perf_counter()
        self.check_folder()
        while self.unsynced:
            sync(self.unsynced.pop())
        self.ranks.check_same_parameters(model.named_parameters(), f"at checkpoint {name}")
        moments = None
        num_moments = len(optimizer.state) if optimizer is not None else 0
        if is_sharded(model):
            if self.ranks.is_main:
                begin_writing(self.folder, name)
            self.ranks.barrier(f"checkpoint {name}")
            folder = self.folder / f"{WRITING}{name}"
            try:
                with self.ranks.waiting(f"checkpoint {name}"):
                    write_sharded(folder, model, optimizer, self.ranks.is_main)
            except BaseException:
                if self.ranks.is_main:  # a full disk has room again
                    shutil.rmtree(folder, ignore_errors=True)
                raise
        elif optimizer is not None:
            moments = whole_moments(optimizer, self.ranks.is_main)
        if self.ranks.is_main:
            path = self.write(name, model, {NUM_MOMENTS: num_moments, **further}, moments)
            kept = {path.name, self.state.best.get("checkpoint")}
            prune(self.folder, self._settings.save_total_limit, kept)
        self.ranks.barrier(f"checkpoint {name}")
        self._saved = self.state.position
        self._saved_at = time.perf_counter()
        seconds = self._saved_at - begun
        limit_s = float(os.environ.get(SHUTDOWN_TIMEOUT, 30))
        is_launched = self.ranks.is_main and "TORCHELASTIC_RUN_ID" in os.environ
        if is_launched and seconds > limit_s:
            say(
                f"warning: a save took {seconds:.0f} s, but the launcher ends ranks {limit_s:.0f} "
                f"s after SIGTERM; set {SHUTDOWN_TIMEOUT}={2 * seconds:.0f}"
            )
        return seconds

    def write(
        self, name: str, model: Any, further: SavedState, moments: SavedState | None = None
    ) -> Path:
        """Write a checkpoint with `further` state beside that of the run; only rank 0 calls it."""
        self.state.wall_s = self.wall_s
        self._begun = time.perf_counter()
        state = self.state.state_dict()
        assert not state.keys() & further.keys(), "further state has a name of the run's"
        return save(self.folder, name, model, self._tokenizer, state | further, moments)
