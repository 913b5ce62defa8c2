"""Transcripts are gzip files with one JSON line for each episode of a step or an evaluation."""

import gzip
import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, fields
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path

from pipeline.common.errors import UserError
from pipeline.common.untrusted import reason_of
from pipeline.rollout.trajectory import EpisodeRecord, Trajectory

_DAMAGED = (OSError, EOFError, ValueError, TypeError, AttributeError, zlib.error, RecursionError)


def save_transcripts(
    folder: Path,
    step: int,
    rank: int,
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float] | None = None,
) -> Path:
    """Write one rank's episodes of a step to a file, and return the path of the file.

    In each JSON line, `ids` and `logprobs` hold one list for each assistant message. A message with
    the role `conversation` stands before each further conversation of an episode.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:06d}.rank-{rank}.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=1) as file:
        for i, trajectory in enumerate(trajectories):
            turns = [turn for one in trajectory.sequences for turn in sampled_turns(one)]
            messages = list(trajectory.messages)
            conversations = [one for one in trajectory.further if one.messages]
            for number, one in enumerate(conversations, 2):
                messages += [
                    {"role": "conversation", "content": f"{number}: {one.begun_by}"},
                    *one.messages,
                ]
            record = asdict(trajectory.record())
            rewards = record.pop("rewards")
            causes = record.pop("new_sequences")
            line = {
                **record,
                "messages": messages,
                "advantage": None if advantages is None else round(advantages[i], 4),
                "reward_breakdown": trajectory.reward_breakdown,
                "difference": trajectory.difference,
                "ids": [ids for ids, _ in turns],
                "logprobs": [[round(number, 3) for number in numbers] for _, numbers in turns],
            }
            versions = [version for one in trajectory.sequences for version in one.versions]
            if versions:
                rest = iter(versions)
                line["versions"] = [[*islice(rest, len(ids))] for ids, _ in turns]
            line |= {"rewards": rewards, "extra": trajectory.extra} if rewards else {}
            line |= {"new_sequences": causes} if causes else {}
            line |= {"preface": trajectory.preface} if trajectory.preface else {}
            line |= {"customer": trajectory.customer} if trajectory.customer else {}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    return path


def sampled_turns(trajectory: Trajectory) -> list[tuple[list[int], list[float]]]:
    """Return the sampled ids of each assistant message with their log-probabilities."""
    tokens = zip(trajectory.loss_mask, trajectory.completion_ids, trajectory.logprobs, strict=True)
    turns = [zip(*of, strict=True) for sampled, of in groupby(tokens, itemgetter(0)) if sampled]
    return [(list(ids), list(logprobs)) for _, ids, logprobs in turns]


def read_transcripts(folder: Path, rank: int, num_ranks: int) -> list[EpisodeRecord]:
    """Return one rank's share of the episode records. Raises UserError for a damaged file."""
    names = {field.name for field in fields(EpisodeRecord)}
    records = []
    for path in sorted(folder.glob("step-*.jsonl.gz")):
        if int(path.name.split(".")[1].removeprefix("rank-")) % num_ranks != rank:
            continue
        try:
            with gzip.open(path, "rt", encoding="utf-8") as file:
                for line in map(json.loads, file):
                    records.append(
                        EpisodeRecord(**{name: line[name] for name in names & line.keys()})
                    )
        except _DAMAGED as error:
            raise UserError(
                f"resume_from_checkpoint: {path} cannot be read as transcripts "
                f"({reason_of(error)}); restore it, or start anew"
            ) from None
    return records
