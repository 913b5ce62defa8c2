"""Transcripts: every episode of a step or an evaluation, one gzipped JSON line each, for people.

A run that goes on reads the records of a stage from them, too.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from pipeline.errors import UserError
from pipeline.files.untrusted import reason_of
from pipeline.rollout.trajectory import RunRecord, Trajectory


def save_transcripts(
    folder: Path,
    step: int,
    rank: int,
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float] | None = None,
) -> Path:
    """Write one rank's episodes of a step; returns the file.

    `ids` and `logprobs` are those of the sampled tokens, a list for each assistant message.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:06d}.rank-{rank}.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=1) as file:
        for i, trajectory in enumerate(trajectories):
            turns = trajectory.sampled_turns()
            row = {
                **trajectory.record().as_dict(),
                "error": trajectory.error,
                "messages": trajectory.messages,
                "advantage": None if advantages is None else round(advantages[i], 4),
                "reward_breakdown": trajectory.reward_breakdown,
                "difference": trajectory.difference,
                "ids": [ids for ids, _ in turns],
                "logprobs": [[round(number, 3) for number in numbers] for _, numbers in turns],
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return path


def read_records(folder: Path, rank: int, num_ranks: int) -> list[RunRecord]:
    """A rank's share of the records of all ranks in a folder of transcripts.

    Raises UserError where a file is damaged.
    """
    records = []
    for path in sorted(folder.glob("step-*.jsonl.gz")):
        if int(path.name.split(".")[1].removeprefix("rank-")) % num_ranks == rank:
            records += _records_in(path)
    return records


def _records_in(path: Path) -> list[RunRecord]:
    """Of transcripts that may be of an earlier version, which left some of a record out."""
    names = {field.name for field in fields(RunRecord)}
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            rows = [json.loads(line).items() for line in file]
        return [RunRecord(**{name: of for name, of in row if name in names}) for row in rows]
    except (OSError, EOFError, ValueError, TypeError, AttributeError, zlib.error) as error:
        raise UserError(
            f"resume_from_checkpoint: {path} cannot be read as transcripts ({reason_of(error)}); "
            "restore it, or start anew"
        ) from None
