"""Transcripts of a run folder -> the data of the page's reader: an index, and packed episodes.

A long run is shown in part: whole groups, evenly over stages, steps and domains. There is a chunk
of packed episodes for each stage and step; a chunk holds each of its texts once.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Reader:
    """The data that the page holds."""

    index: dict[str, Any]
    chunks: list[str]  # base64 of gzip of JSON


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
        num_characters = sum(map(len, reader.chunks))
        if num_characters <= max_characters or len(reader.index["groups"]) < 2:
            return reader
        limit = int(0.9 * reader.index["shown"] * max_characters / num_characters)


def _task_of(line: bytes) -> Task:
    """Domain and id of an episode's task; if they come first, the rest is not parsed."""
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
    chosen = set(choose(sizes, limit))
    index: list[list[Any]] = []
    chunks: list[str] = []
    for step, paths in files.items():
        groups: dict[Task, list[Episode]] = defaultdict(list)
        for line in (line for path in paths for line in whole_lines(path)):
            if (step, task := _task_of(line)) in chosen:
                groups[task].append(json.loads(line))
        if not groups:
            continue
        in_order = [sorted(groups[task], key=lambda e: e["trial"]) for task in sorted(groups)]
        for group in in_order:
            names = [group[0][name] for name in ("domain", "family", "branch", "task_id")]
            ends = [[episode[name] for episode in group] for name in ("reward", "stop_reason")]
            index.append([stages.index(step[0]), step[1], len(chunks), *names, *ends])
        chunks.append(packed(in_order, token_texts))
    shown, total = sum(sizes[group] for group in chosen), sizes.total()
    return Reader({"stages": stages, "groups": index, "shown": shown, "total": total}, chunks)


def choose(sizes: Counter[Group], limit: int) -> list[Group]:
    """Whole groups with at most `limit` episodes together, but at least one group.

    Stages get equal parts of the limit; the rest of a part goes to other stages. The groups of a
    stage are taken evenly over its steps, by chance within a step.
    """
    of_stage: dict[str, list[Group]] = defaultdict(list)
    for group in sizes:
        of_stage[group[0][0]].append(group)
    chosen: list[Group] = []
    left = limit
    # Small stages first, because they leave a rest.
    stages = sorted(of_stage.values(), key=lambda groups: sum(sizes[group] for group in groups))
    for i, groups in enumerate(stages):
        groups.sort(key=lambda group: (group[0][1], crc32(repr(group[1]).encode())))
        share = left // (len(stages) - i)
        largest = max(sizes[group] for group in groups)
        fits = sum(sizes[group] for group in groups) <= share
        count = len(groups) if fits else share // largest
        taken = [groups[j * len(groups) // count] for j in range(count)]
        chosen += taken
        left -= sum(sizes[group] for group in taken)
    return chosen or list(sizes)[:1]


def packed(groups: Sequence[Sequence[Episode]], token_texts: TokenTexts | None) -> str:
    """Base64 of gzip of JSON: the texts, and the episodes, in which a text is its number."""
    texts: dict[str, int] = {}

    def number(text: Any) -> int:
        if not isinstance(text, str):
            text = "" if text is None else json.dumps(text, ensure_ascii=False)
        return texts.setdefault(text, len(texts))

    episodes = [[_packed_episode(e, number, token_texts) for e in group] for group in groups]
    text = json.dumps({"texts": list(texts), "groups": episodes}, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _packed_episode(
    episode: Episode, number: Callable[[Any], int], token_texts: TokenTexts | None
) -> dict[str, Any]:
    sampled = iter(zip(episode.get("ids", ()), episode.get("logprobs", ()), strict=False))
    messages = []
    for message in episode["messages"]:
        role = message.get("role", "")
        packed: dict[str, Any] = {"role": role, "text": number(message.get("content"))}
        if message.get("name"):
            packed["name"] = str(message["name"])
        if message.get("tool_calls"):
            calls = [call.get("function", call) for call in message["tool_calls"]]
            packed["calls"] = [[number(c.get("name")), number(c.get("arguments"))] for c in calls]
        if role == "assistant":
            ids, logprobs = next(sampled, ([], []))
            if ids and token_texts is not None:
                packed["tokens"] = [number(text) for text in token_texts(ids)]
                packed["logprobs"] = [round(logprob, 2) for logprob in logprobs]
        messages.append(packed)
    names = ("trial", "reward", "stop_reason", "num_turns", "num_sampled_tokens", "error")
    return {
        **{name: episode.get(name) for name in names},
        "left_out": episode.get("left_out") or "",
        "advantage": episode.get("advantage"),
        "parts": episode.get("reward_breakdown") or {},
        "difference": episode.get("difference") or {},
        "messages": messages,
    }
