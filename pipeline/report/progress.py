"""The lines of a run on the terminal: the start of the run, and the progress of a stage."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from shlex import quote
from statistics import median
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from pipeline.checkpoints.run_folder import Opened
from pipeline.common.console import command, in_words, say
from pipeline.config.settings import Config
from pipeline.data.curriculum import Stage

if TYPE_CHECKING:
    from pipeline.distributed.ranks import Ranks  # imports torch

RECENT_STEPS = 20  # number of steps whose median duration gives the time left


class StageProgress(AbstractContextManager["StageProgress"]):
    """Shows a stage's progress on rank 0's standard error: a bar on a terminal, else lines.

    `num_later` is the number of steps of all later stages. `unit` is `step`, or `episode`, which
    has only a line per minute without a terminal.
    """

    def __init__(
        self,
        stage: str,
        num_steps: int,
        *,
        is_main: bool,
        done: int = 0,
        num_later: int = 0,
        unit: str = "step",
    ) -> None:
        self._stage = stage
        self._num_steps = num_steps
        self._done = done
        self._is_main = is_main
        self._num_later = num_later
        self._unit = unit
        self._start = self._last_print = self._last_step = time.monotonic()
        self._seconds = deque[float](maxlen=RECENT_STEPS)  # duration of each recent step
        self._bar = tqdm(
            desc=stage,
            total=num_steps,
            initial=done,
            unit=unit,
            disable=None if is_main else True,  # None: unless standard error is a terminal
        )

    def step(self, metrics: Mapping[str, Any], count: int = 1) -> None:
        """Count finished steps or episodes; show the rewards, the loss and the counts in metrics.

        `reward/DOMAIN` are mean rewards of the step, and `loss` is the loss of the warm start.
        """
        now = time.monotonic()
        self._done += count
        self._seconds.append((now - self._last_step) / count)
        self._last_step = now
        names = [key for key in metrics if key.startswith("reward/") and key != "reward/mean"]
        rewards = [f" {name.removeprefix('reward/')} {metrics[name]:.2f}" for name in names]
        parts = ["reward" + "".join(rewards)] if rewards else []
        if (loss := metrics.get("loss")) is not None:
            parts.append(f"loss {loss:.3f}")
        if replaced := metrics.get("rollout/replaced_groups"):
            parts.append(f"replaced {replaced} groups")
        if left_out := metrics.get("rollout/left_out"):
            parts.append(f"left out {left_out:.0f} episodes")
        self._bar.set_postfix_str("  ".join([*parts, self._time_left()]), refresh=False)
        self._bar.update(count)
        # Without a terminal, print about ten lines per stage, and at least one line per minute.
        every = max(10, self._num_steps // 10)
        is_due = self._done % every == 0 or self._done == self._num_steps
        is_due = (is_due and self._unit == "step") or now - self._last_print > 60
        if self._is_main and self._bar.disable and is_due:
            self._last_print = now
            name = f"{self._stage} {self._done}/{self._num_steps}"
            name += " episodes" if self._unit == "episode" else ""
            times = [f"{now - self._start:.1f} s", self._time_left()]
            say("  ".join([name, *parts, ", ".join(filter(None, times))]))

    def _time_left(self) -> str:
        """Return the time left at the median pace of recent steps, without later evaluations.

        The first step alone gives no pace, because a stage's preparations count to the first step.
        Episodes that run at once may end all together, so they give none.
        """
        if self._unit == "episode" or len(self._seconds) < min(2, self._num_steps):
            return ""
        left = max(0, self._num_steps - self._done)
        pace = median(self._seconds)
        texts = [f"{in_words(left * pace)} left"] if left else []
        if self._num_later:
            texts.append(f"{in_words((left + self._num_later) * pace)} left in all stages")
        return f"{pace:.2g} s per step, about {', '.join(texts)}" if texts else ""

    def __exit__(self, *exception: object) -> None:
        self._bar.close()


@contextmanager
def episode_progress(name: str, num_episodes: int, ranks: Ranks) -> Iterator[Callable[[int], None]]:
    """Show how many of its `num_episodes` episodes rank 0 has finished.

    Yields a function that counts finished episodes.
    """
    name += "" if ranks.num_ranks == 1 else f", rank 0 of {ranks.num_ranks}"
    with StageProgress(name, num_episodes, is_main=ranks.is_main, unit="episode") as progress:
        yield partial(progress.step, {})


def say_start(opened: Opened, step: int, config: Config, stages: Sequence[Stage]) -> None:
    """Print the run folder, the step from which the run resumes, and unusual settings."""
    watch = f"watch it: {command('watch')} {quote(str(opened.folder.resolve()))}"
    notes = [f"run folder: {opened.folder} ({watch})", *opened.notes]
    if opened.checkpoint is not None:
        notes.append(f"resuming from {opened.checkpoint.name}: {step} steps done")
    grpo = config.grpo
    wanted = config.rollout.tasks_per_step
    if grpo.use_grpo:
        # A step uses a task once, so a stage with few tasks has fewer groups than `tasks_per_step`.
        sizes = {s.name: (min if s.schedule else sum)(s.groups.values()) for s in stages}
        if short := {name: size for name, size in sizes.items() if 0 < size < wanted}:
            notes.append(
                f"tasks_per_step: {wanted}, but there are fewer tasks; groups per step: {short}"
            )
        if grpo.scale_lr != "none":
            notes.append(
                f"learning rate: {config.peak_learning_rate:g} ({grpo.learning_rate:g} for "
                f"{grpo.reference_tasks_per_step} tasks per step, scale_lr {grpo.scale_lr} to "
                f"{wanted})"
            )
    for note in notes:
        say(note, sys.stdout)
