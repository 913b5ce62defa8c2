"""`pipeline/run.py` with a fault, for faults.py. The variable FAULT is kind,phase,rank,file.

The fault happens once, when the rank enters the phase. The file gets the time of the fault. Rewards
within a group are 0 and 1 in turns, so every group and every rank trains in each step.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeline import run
from pipeline.train import Training


def fault(kind: str) -> None:
    if kind == "raise":
        raise ValueError("injected fault")
    if kind == "hang":
        time.sleep(10_000)
    if kind == "hang outside Python":  # holds the GIL, so all threads stop
        ctypes.PyDLL(None).sleep(10_000)
    if kind == "exit":
        os._exit(3)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


def faulty(kind: str, phase: str, rank: int, note: Path) -> type[Training]:
    """A run with the fault on one rank, in which every group trains."""
    is_here = rank == int(os.environ["RANK"])

    def once() -> bool:
        is_first = is_here and not note.exists()
        if is_first:
            note.write_text(str(time.time()), encoding="utf-8")
        return is_first

    class Faulty(Training):
        def __init__(self, config: Any, accelerator: Any, ranks: Any, watchdog: Any) -> None:
            told = ranks.on_phase

            def on_phase() -> None:
                told()
                if ranks.current.name == phase and kind != "NaN" and once():
                    fault(kind)

            ranks.on_phase = on_phase
            if phase == "start" and once():
                fault(kind)
            super().__init__(config, accelerator, ranks, watchdog)

        def begin_grpo(self) -> Any:
            meter = super().begin_grpo()
            updater = self.learner.updater
            assert updater is not None
            if kind == "NaN" and phase == "update":
                compute = updater.loss

                def loss_with_nan(*arguments: Any) -> Any:
                    loss, stats = compute(*arguments)
                    return loss * float("nan") if once() else loss, stats

                updater.loss = loss_with_nan
            return meter

        def collect(self, stage: Any, step: int) -> Any:
            """Replace the rewards of training episodes, so that every group trains."""
            batch = super().collect(stage, step)
            for trajectory in batch.trajectories:
                trajectory.reward = float(trajectory.trial % 2)
            if kind == "NaN" and phase == "sample" and once():
                for trajectory in batch.trajectories:
                    trajectory.logprobs[:] = [float("nan")] * len(trajectory.logprobs)
            return batch

    return Faulty


def main() -> NoReturn:
    hooks: dict[str, Any] = {}
    if "RANK" in os.environ:
        kind, phase, rank, note = os.environ["FAULT"].split(",")
        hooks["make_training"] = faulty(kind, phase, int(rank), Path(note))
    run.leave(run.main(sys.argv[1:], entry=Path(__file__).resolve(), **hooks))


if __name__ == "__main__":
    main()
