"""`pipeline/run.py` with a fault in it, for faults.py: FAULT=kind,phase,rank,file.

The fault happens once, when that rank enters that phase; the file gets the time. In training the
rewards of siblings are 0 and 1 in turns: every group lives, whatever the model has learned, so
each rank has episodes to train in each step.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

sys.path[0] = str(Path(__file__).resolve().parents[2])


def fault(kind: str) -> None:
    if kind == "raise":
        raise ValueError("injected fault")
    if kind == "hang":
        time.sleep(10_000)
    if kind == "hang outside Python":  # holds the interpreter's lock, so no thread of it runs
        ctypes.PyDLL(None).sleep(10_000)
    if kind == "exit":
        os._exit(3)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


def install(kind: str, phase: str, rank: int, note: Path) -> None:
    """Put the fault in its place on this rank."""
    from pipeline import session
    from pipeline.distributed.ranks import Ranks

    make_groups_live()
    if rank != int(os.environ["RANK"]):
        return

    def strike() -> None:
        if not note.exists():
            note.write_text(str(time.time()), encoding="utf-8")
            fault(kind)

    entered, load_start = Ranks.phase, session.load_start

    @contextmanager
    def phase_with_fault(self: Ranks, name: str, *place: Any) -> Iterator[None]:
        with entered(self, name, *place):
            if name == phase:
                strike()
            yield

    def load_with_fault(*arguments: Any) -> Any:
        strike()
        return load_start(*arguments)

    if kind == "NaN":
        install_nan(phase, note)
    elif phase == "start":
        session.load_start = load_with_fault
    else:
        Ranks.phase = phase_with_fault  # type: ignore[method-assign]


def make_groups_live() -> None:
    """Give siblings different rewards; evaluations, which have one trial a task, keep theirs."""
    from pipeline.rollout.rollout import Rollout

    play = Rollout.__call__

    def play_live(self: Rollout, *arguments: Any, **options: Any) -> Any:
        trajectories = play(self, *arguments, **options)
        if all(t.trial == 0 for t in trajectories):
            return trajectories
        return [replace(t, reward=float(t.trial % 2)) for t in trajectories]

    Rollout.__call__ = play_live  # type: ignore[method-assign]


def install_nan(phase: str, note: Path) -> None:
    """Make one loss of the update, or the sampler's log-probabilities of one step, NaN."""
    from pipeline.grpo import updater
    from pipeline.rollout.rollout import Rollout

    computed, play = updater.grpo_loss, Rollout.__call__

    def loss_with_nan(*arguments: Any) -> Any:
        loss, stats = computed(*arguments)
        if not note.exists():
            note.write_text(str(time.time()), encoding="utf-8")
            loss = loss * float("nan")
        return loss, stats

    def play_with_nan(self: Rollout, *arguments: Any, **options: Any) -> Any:
        trajectories = play(self, *arguments, **options)
        if not note.exists() and any(t.trial > 0 for t in trajectories):
            note.write_text(str(time.time()), encoding="utf-8")
            for trajectory in trajectories:
                trajectory.logprobs[:] = [float("nan")] * len(trajectory.logprobs)
        return trajectories

    if phase == "update":
        updater.grpo_loss = loss_with_nan
    else:
        Rollout.__call__ = play_with_nan  # type: ignore[method-assign]


def main() -> NoReturn:
    from pipeline import run
    from pipeline.distributed import launch

    launch.RUN = Path(__file__).resolve()
    if "RANK" in os.environ:
        kind, phase, rank, note = os.environ["FAULT"].split(",")
        install(kind, phase, int(rank), Path(note))
    run.leave(run.main(sys.argv[1:]))


if __name__ == "__main__":
    main()
