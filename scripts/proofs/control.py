"""A run whose rewards are permuted among the episodes of each step: the control of `learning.py`.

    python scripts/proofs/control.py FLAGS

Its rewards carry no information about episodes. The flags are those of a run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeline import run, run_state, train
from pipeline.data.rng import permutation
from pipeline.distributed.ranks import Ranks
from pipeline.training.collect import RolloutBatch, kept_rewards


def permute_rewards(batch: RolloutBatch, ranks: Ranks, seed: int, step: int) -> None:
    """Permute the rewards of the episodes of all ranks that the step may train on."""
    kept = kept_rewards(batch, ranks)
    indices = sorted(kept)
    order = permutation(len(indices), seed, "permuted rewards", step)
    given = {indices[j]: kept[indices[i]] for j, i in enumerate(order)}
    for sample in batch.samples:
        sample.trajectory.reward = given.get(sample.index, sample.trajectory.reward)


def open_control(*arguments: Any, **settings: Any) -> Any:
    """Open a run whose steps collect permuted rewards."""
    collect = train.collect

    def collect_permuted(run: Any, stage: Any, step: int) -> RolloutBatch:
        batch = collect(run, stage, step)
        permute_rewards(batch, run.ranks, run.config.run.seed, step)
        return batch

    train.collect = collect_permuted
    return run_state.open_run(*arguments, **settings)


if __name__ == "__main__":
    run.leave(run.main(sys.argv[1:], entry=Path(__file__).resolve(), open_run=open_control))
