"""The lines of a run on the terminal: its start, and the progress of a stage."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any, Self

from pipeline.checkpoints.run_folder import Opened
from pipeline.config.settings import Config
from pipeline.data.curriculum import Stage
from pipeline.files.console import say
from pipeline.tracking.trackers import Record


class StageProgress:
    """The progress of a stage on rank 0's standard error: a bar, or lines if it is no terminal."""

    def __init__(self, stage: str, num_steps: int, *, is_main: bool, done: int = 0) -> None:
        self._stage, self._num_steps, self._done = stage, num_steps, done
        self._is_main = is_main
        self._start = self._last_line = time.monotonic()
        self._bar: Any = None
        if is_main and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                desc=stage, total=num_steps, initial=done, unit="step", dynamic_ncols=True
            )

    def step(self, record: Record) -> None:
        """One optimizer step is done; `record` is its line of metrics."""
        self._done += 1
        names = [key for key in record if key.startswith("reward/") and key != "reward/mean"]
        text = "".join(f" {name.removeprefix('reward/')} {record[name]:.2f}" for name in names)
        text = f"reward{text}" if text else ""
        if record.get("rollout/replaced_groups"):
            text += f"  replaced {record['rollout/replaced_groups']} groups"
        if record.get("rollout/left_out"):
            text += f"  left out {record['rollout/left_out']:.0f} episodes"
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update()
            return
        # About ten lines a stage, and at least one a minute.
        every, now = max(10, self._num_steps // 10), time.monotonic()
        is_due = self._done % every == 0 or self._done == self._num_steps
        if self._is_main and (is_due or now - self._last_line > 60):
            self._last_line = now
            parts = (f"{self._stage} {self._done}/{self._num_steps}", text)
            say("  ".join([*filter(None, parts), f"{now - self._start:.1f} s"]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()


def say_start(opened: Opened, step: int, config: Config, stages: Sequence[Stage]) -> None:
    """Print where the run is, from which step it resumes, and unusual settings."""
    notes = [f"run folder: {opened.folder}", *opened.notes]
    if opened.checkpoint is not None:
        notes.append(f"resuming from {opened.checkpoint.name}: {step} steps done")
    grpo, wanted = config.grpo, config.rollout.tasks_per_step
    # A step takes no task twice, so a stage with few tasks has smaller steps.
    sizes = {s.name: (min if s.turns else sum)(s.groups.values()) for s in stages}
    short = {name: size for name, size in sizes.items() if size < wanted}
    if short and grpo.use_grpo:
        notes.append(
            f"tasks_per_step: {wanted}, but there are fewer tasks; groups per step: {short}"
        )
    if grpo.use_grpo and grpo.scale_lr != "none":
        notes.append(
            f"learning rate: {config.peak_learning_rate:g} ({grpo.learning_rate:g} for "
            f"{grpo.reference_tasks_per_step} tasks per step, scale_lr {grpo.scale_lr} to {wanted})"
        )
    print("\n".join(notes), flush=True)
