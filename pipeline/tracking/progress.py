"""The lines of a run on the terminal: the start of the run, and the progress of a stage."""

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from tqdm import tqdm

from pipeline.checkpoints.run_folder import Opened
from pipeline.config.settings import Config
from pipeline.data.curriculum import Stage
from pipeline.files.console import say


class StageProgress(AbstractContextManager["StageProgress"]):
    """Shows a stage's progress on rank 0's standard error: a bar on a terminal, else lines."""

    def __init__(self, stage: str, num_steps: int, *, is_main: bool, done: int = 0) -> None:
        self._stage, self._num_steps, self._done, self._is_main = stage, num_steps, done, is_main
        self._start = self._last_print = time.monotonic()
        is_hidden = not (is_main and sys.stderr.isatty())
        self._bar = tqdm(desc=stage, total=num_steps, initial=done, unit="step", disable=is_hidden)

    def step(self, metrics: Mapping[str, Any]) -> None:
        self._done += 1
        names = [key for key in metrics if key.startswith("reward/") and key != "reward/mean"]
        rewards = [f" {name.removeprefix('reward/')} {metrics[name]:.2f}" for name in names]
        parts = ["reward" + "".join(rewards)] if rewards else []
        if count := metrics.get("rollout/replaced_groups"):
            parts.append(f"replaced {count} groups")
        if count := metrics.get("rollout/left_out"):
            parts.append(f"left out {count:.0f} episodes")
        self._bar.set_postfix_str("  ".join(parts), refresh=False)
        self._bar.update()
        # Without a terminal, print about ten lines per stage, and at least one line per minute.
        every, now = max(10, self._num_steps // 10), time.monotonic()
        is_due = self._done % every == 0 or self._done == self._num_steps
        if self._is_main and self._bar.disable and (is_due or now - self._last_print > 60):
            self._last_print = now
            name = f"{self._stage} {self._done}/{self._num_steps}"
            say("  ".join([name, *parts, f"{now - self._start:.1f} s"]))

    def __exit__(self, *exception: object) -> None:
        self._bar.close()


def say_start(opened: Opened, step: int, config: Config, stages: Sequence[Stage]) -> None:
    """Print the run folder, the step from which the run resumes, and unusual settings."""
    notes = [f"run folder: {opened.folder}", *opened.notes]
    if opened.checkpoint is not None:
        notes.append(f"resuming from {opened.checkpoint.name}: {step} steps done")
    grpo, wanted = config.grpo, config.rollout.tasks_per_step
    if grpo.use_grpo:
        # A step uses a task once, so a stage with few tasks has fewer groups than `tasks_per_step`.
        sizes = {s.name: (min if s.schedule else sum)(s.groups.values()) for s in stages}
        if short := {name: size for name, size in sizes.items() if size < wanted}:
            notes.append(
                f"tasks_per_step: {wanted}, but there are fewer tasks; groups per step: {short}"
            )
        if grpo.scale_lr != "none":
            notes.append(
                f"learning rate: {config.peak_learning_rate:g} ({grpo.learning_rate:g} for "
                f"{grpo.reference_tasks_per_step} tasks per step, scale_lr {grpo.scale_lr} to "
                f"{wanted})"
            )
    print("\n".join(notes), flush=True)
