"""A run that also writes each of its episodes exactly, beside its folder.

    python scripts/proofs/agents_run.py FLAGS

The flags are those of a run. Transcripts round log-probabilities, so `FOLDER.exact` gets, for each
step and rank, a file with one line of JSON for each episode, all digits included. The run writes no
report.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.pop(0)  # this folder: a client's package is called `agents`, too
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeline import run
from pipeline.rollout.trajectory import Trajectory


def told(episode: Trajectory) -> list[Any]:
    """All that must be equal of an episode: its sequences by their ids, and how it ended."""
    sequences = [
        [one.prompt_ids, one.completion_ids, one.loss_mask, one.logprobs, one.messages]
        for one in episode.sequences
    ]
    end = [episode.reward, str(episode.stop_reason), episode.num_turns, episode.error]
    return [episode.task_id, episode.trial, sorted(sequences, key=lambda s: s[:2]), end]


def keep(run: Any, name: str, episodes: Sequence[Trajectory]) -> None:
    folder = run.folder.with_name(f"{run.folder.name}.exact")
    folder.mkdir(exist_ok=True)
    lines = "".join(json.dumps(told(episode)) + "\n" for episode in episodes)
    path = folder / f"{name}-{run.state.step}-rank-{run.ranks.rank}.jsonl"
    path.write_text(lines, encoding="utf-8")


def open_run(*arguments: Any, **settings: Any) -> Any:
    from pipeline import run_state

    return run_state.open_run(*arguments, **settings, on_batch=keep)


def without_report(run: Any) -> None:
    if run.ranks.is_main:
        run.write_results()
    run.ranks.barrier("end")


if __name__ == "__main__":
    hooks = {"open_run": open_run, "end": without_report}
    run.leave(partial(run.main, entry=Path(__file__).resolve(), **hooks)(sys.argv[1:]))
