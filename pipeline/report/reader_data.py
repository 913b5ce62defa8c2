"""Transcripts of a run folder -> what the page's reader shows: an index, and packed episodes.

Of a long run a part is taken: whole groups, evenly over stages, steps and domains. Packed episodes
stand in chunks, one for each stage and step; a text that occurs twice in a chunk stands there once.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any
from zlib import crc32

from pipeline.files.durable import whole_lines
from pipeline.report.token_texts import TokenTexts, token_texts_of
from pipeline.tracking.run_files import transcripts_in

MAX_EPISODES = 10_000
MAX_CHARACTERS = 11_000_000  # of all chunks: the page stays below 15 MB
KEY = re.compile(rb'\{"domain": ("(?:[^"\\]|\\.)*"), "task_id": ("(?:[^"\\]|\\.)*")')

Episode = Mapping[str, Any]
Step = tuple[str, int]  # stage or `evaluation-<after>`, step
Task = tuple[str, str]  # domain, id
Group = tuple[Step, Task]


@dataclass(frozen=True, kw_only=True)
class Reader:
    """What the page holds."""

    index: dict[str, Any]
    chunks: list[str]  # base64 of gzip of JSON

    @property
    def num_characters(self) -> int:
        return sum(map(len, self.chunks))


def read_episodes(
    folder: Path,
    success_threshold: float = 1.0,
    max_episodes: int = MAX_EPISODES,
    max_characters: int = MAX_CHARACTERS,
) -> Reader:
    """The episodes of a run folder: at most so many, in chunks of at most so many characters."""
    files = transcripts_in(folder)
    sizes: Counter[Group] = Counter()
    for step, paths in files.items():
        sizes.update((step, _task_of(line)) for path in paths for line in whole_lines(path))
    token_texts = token_texts_of(folder)
    limit = max_episodes
    while True:
        reader = _read(files, sizes, limit, token_texts)
        reader.index["success_threshold"] = success_threshold
        if reader.num_characters <= max_characters or len(reader.index["groups"]) < 2:
            return reader
        limit = int(0.9 * reader.index["shown"] * max_characters / reader.num_characters)


def _task_of(line: bytes) -> Task:
    """Domain and id of an episode's task, where they stand first without reading the rest."""
    if match := KEY.match(line):
        return json.loads(match[1]), json.loads(match[2])
    episode = json.loads(line)
    return episode["domain"], episode["task_id"]


def _read(
    files: Mapping[Step, Sequence[Path]],
    sizes: Counter[Group],
    limit: int,
    token_texts: TokenTexts | None,
) -> Reader:
    stages = list(dict.fromkeys(stage for stage, _ in files))
    chosen: dict[Step, set[Task]] = defaultdict(set)
    for step, task in choose(sizes, limit):
        chosen[step].add(task)
    groups: list[list[Any]] = []
    chunks: list[str] = []
    for step in (step for step in files if step in chosen):
        found = _groups(files[step], chosen[step])
        groups += [[stages.index(step[0]), step[1], len(chunks), *_row(of)] for of in found]
        chunks.append(packed(found, token_texts))
    index = {
        "stages": stages,
        "groups": groups,
        "shown": sum(sizes[step, task] for step in chosen for task in chosen[step]),
        "total": sizes.total(),
    }
    return Reader(index=index, chunks=chunks)


def _row(group: Sequence[Episode]) -> list[Any]:
    """What the index says of a group."""
    first = group[0]
    return [
        *(first[name] for name in ("domain", "family", "branch", "task_id")),
        [episode["reward"] for episode in group],
        [episode["stop_reason"] for episode in group],
    ]


def choose(sizes: Counter[Group], limit: int) -> list[Group]:
    """Whole groups with at most `limit` episodes together, but at least one group.

    Stages get equal parts of the limit, and what one does not need goes to the others. In a stage
    groups are taken evenly over its steps, by chance within a step.
    """
    of_stage: dict[str, list[Group]] = defaultdict(list)
    for group in sizes:
        of_stage[group[0][0]].append(group)
    needs = {stage: sum(sizes[group] for group in of) for stage, of in of_stage.items()}
    found: list[Group] = []
    left = limit
    for place, stage in enumerate(sorted(needs, key=lambda stage: needs[stage])):
        share = left // (len(needs) - place)
        groups = sorted(of_stage[stage], key=lambda of: (of[0][1], crc32(repr(of[1]).encode())))
        largest = max(sizes[group] for group in groups)
        count = len(groups) if needs[stage] <= share else share // largest
        taken = [groups[i * len(groups) // count] for i in range(count)]
        found += taken
        left -= sum(sizes[group] for group in taken)
    return found or list(sizes)[:1]


def _groups(paths: Sequence[Path], tasks: Collection[Task]) -> list[list[Episode]]:
    """The chosen groups of a step, by domain and task; of each its episodes in order of trials."""
    found: dict[Task, list[Episode]] = defaultdict(list)
    for line in chain.from_iterable(map(whole_lines, paths)):
        if (task := _task_of(line)) in tasks:
            found[task].append(json.loads(line))
    return [sorted(found[task], key=lambda episode: episode["trial"]) for task in sorted(found)]


def packed(groups: Sequence[Sequence[Episode]], token_texts: TokenTexts | None) -> str:
    """Base64 of gzip of JSON: the texts, and the episodes, which name texts by their places."""
    texts: dict[str, int] = {}

    def place(text: str) -> int:
        return texts.setdefault(text, len(texts))

    episodes = [[_packed_episode(e, place, token_texts) for e in group] for group in groups]
    text = json.dumps({"texts": list(texts), "groups": episodes}, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _packed_episode(
    episode: Episode, place: Callable[[str], int], token_texts: TokenTexts | None
) -> dict[str, Any]:
    sampled = iter(zip(episode.get("ids", ()), episode.get("logprobs", ()), strict=False))
    messages = []
    for message in episode["messages"]:
        found: dict[str, Any] = {
            "role": message.get("role", ""),
            "text": place(_as_text(message.get("content"))),
        }
        if message.get("name"):
            found["name"] = str(message["name"])
        if message.get("tool_calls"):
            found["calls"] = [_call(call, place) for call in message["tool_calls"]]
        if found["role"] == "assistant":
            ids, logprobs = next(sampled, ([], []))
            if ids and token_texts is not None:
                found["tokens"] = [place(text) for text in token_texts(ids)]
                found["logprobs"] = [round(number, 2) for number in logprobs]
        messages.append(found)
    names = ("trial", "reward", "stop_reason", "num_turns", "num_sampled_tokens", "error")
    return {
        **{name: episode.get(name) for name in names},
        "left_out": episode.get("left_out") or "",
        "advantage": episode.get("advantage"),
        "parts": episode.get("reward_breakdown") or {},
        "difference": episode.get("difference") or {},
        "messages": messages,
    }


def _call(call: Mapping[str, Any], place: Callable[[str], int]) -> list[int]:
    """A tool call's name and arguments."""
    function = call.get("function", call)
    return [place(str(function.get("name", ""))), place(_as_text(function.get("arguments")))]


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
