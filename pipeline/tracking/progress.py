"""What a run says on the terminal: how it starts, and the progress of a stage."""

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
        text = rewards(record)
        if record.get("rollout/replaced_groups"):
            text += f"  replaced {record['rollout/replaced_groups']} groups"
        if record.get("rollout/left_out"):
            text += f"  left out {record['rollout/left_out']:.0f} episodes"
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update()
        elif self._is_main and self._is_line_due():
            self._last_line = time.monotonic()
            elapsed = f"{self._last_line - self._start:.1f} s"
            parts = [f"{self._stage} {self._done}/{self._num_steps}", text, elapsed]
            say("  ".join(part for part in parts if part))

    def _is_line_due(self) -> bool:
        """Some ten lines a stage, and one a minute at least."""
        every = max(10, self._num_steps // 10)
        waited_s = time.monotonic() - self._last_line
        return self._done % every == 0 or self._done == self._num_steps or waited_s > 60

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()


def rewards(record: Record) -> str:
    """`reward airline 0.62 retail 0.41`, of the domains in the record."""
    names = [key for key in record if key.startswith("reward/") and key != "reward/mean"]
    text = "".join(f" {name.removeprefix('reward/')} {record[name]:.2f}" for name in names)
    return f"reward{text}" if text else ""


def say_start(opened: Opened, step: int, config: Config, stages: Sequence[Stage]) -> None:
    """What people want to know before the first step."""
    print(f"run folder: {opened.folder}", flush=True)
    for note in opened.notes:
        print(note, flush=True)
    if opened.checkpoint is not None:
        print(f"resuming from {opened.checkpoint.name}: {step} steps done", flush=True)
    _say_short_steps(config, stages)
    _say_learning_rate(config)


def _say_short_steps(config: Config, stages: Sequence[Stage]) -> None:
    """A step takes no task twice, so few tasks make it smaller than the recipe says."""
    wanted = config.rollout.tasks_per_step
    sizes = {s.name: _smallest_step(s) for s in stages}
    short = {name: size for name, size in sizes.items() if size < wanted}
    if short and config.grpo.use_grpo:
        print(f"tasks_per_step: {wanted}, but there are fewer tasks; groups per step: {short}")


def _smallest_step(stage: Stage) -> int:
    return (min if stage.turns else sum)(stage.groups.values())


def _say_learning_rate(config: Config) -> None:
    settings, peak = config.grpo, config.peak_learning_rate
    if settings.use_grpo and settings.scale_lr != "none":
        print(
            f"learning rate: {peak:g} ({settings.learning_rate:g} for "
            f"{settings.reference_tasks_per_step} tasks per step, scale_lr {settings.scale_lr} to "
            f"{config.rollout.tasks_per_step})"
        )
