"""An index and packed episodes for the HTML page, from the transcripts in a run folder.

The page of a long run has only some groups of episodes, spread evenly over stages and steps. Each
step has one chunk of packed episodes. A chunk contains each text only once.
"""

import base64
import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, count
from pathlib import Path
from typing import Any
from zlib import crc32

from pipeline.common.durable import whole_lines
from pipeline.report.run_files import episodes_in, task_of, transcripts_in

MAX_EPISODES = 10_000
MAX_CHARACTERS = 11_000_000  # maximum length of all chunks together; keeps the page below 15 MB
BROKEN = "\N{REPLACEMENT CHARACTER}"
MOST_TOKENS = 4  # maximum number of tokens that make up one character
COPIED = ("trial", "reward", "stop_reason", "num_turns", "num_sampled_tokens", "error", "advantage")

EpisodeLine = Mapping[str, Any]
Step = tuple[str, int]  # (stage or `evaluation-<after>`, number of the step)
TaskKey = tuple[str, str]  # domain, task id
GroupKey = tuple[Step, TaskKey]
TokenTexts = Callable[[Sequence[int]], list[str]]


@dataclass(frozen=True)
class Reader:
    """The episodes for the HTML page."""

    index: dict[str, Any]
    chunks: list[str]  # a text for each step: base64 of gzip of JSON


def read_episodes(
    folder: Path,
    success_threshold: float = 1.0,
    meanings: Mapping[str, Mapping[str, str]] | None = None,
    *,
    max_episodes: int = MAX_EPISODES,
    max_characters: int = MAX_CHARACTERS,
    files: Mapping[Step, Sequence[Path]] | None = None,
    unseen: Mapping[str, str] | None = None,
) -> Reader:
    """Return at most `max_episodes` episodes, in at most `max_characters` characters altogether.

    The episodes are those of `files` (default: of all files of transcripts in the folder).
    `meanings` explains the parts of the reward: {domain: {part: text}}. `unseen` says which roles'
    texts the chat template leaves out of prompts: {role: "all" or "a part"}.
    """
    files = transcripts_in(folder) if files is None else files
    tasks = {
        path: [task_of(episode) for episode in episodes_in(path)]
        for paths in files.values()
        for path in paths
    }
    sizes = Counter((step, task) for step, of in files.items() for p in of for task in tasks[p])
    tokenizers = folder.glob("checkpoints/*/tokenizer.json")
    newest = max(tokenizers, key=lambda path: path.stat().st_mtime, default=None)
    token_texts = token_texts_of(newest) if newest else None
    while True:
        chosen = set(choose_groups(sizes, max_episodes))
        index, chunks = _read(files, tasks, chosen, token_texts)
        shown = sum(sizes[group] for group in chosen)
        num_characters = sum(map(len, chunks))
        if num_characters <= max_characters or len(chosen) < 2:
            index |= {
                "shown": shown,
                "total": sizes.total(),
                "success_threshold": success_threshold,
                "meanings": meanings or {},
                "unseen": dict(unseen or {}),
            }
            return Reader(index, chunks)
        max_episodes = int(0.9 * shown * max_characters / num_characters)


def choose_groups(sizes: Counter[GroupKey], limit: int) -> list[GroupKey]:
    """Choose groups with at most `limit` episodes in total, but at least one group.

    `choose_groups` takes one group from each stage in turn; within a stage, the steps take turns.
    """

    def in_turns(groups: list[GroupKey], owner: Callable[[GroupKey], Hashable]) -> list[GroupKey]:
        turns: dict[Hashable, count[int]] = defaultdict(count)
        return sorted(groups, key=lambda group: next(turns[owner(group)]))

    shuffled = sorted(sizes, key=lambda group: crc32(repr(group).encode()))
    by_step = in_turns(shuffled, lambda group: group[0])
    by_stage = in_turns(by_step, lambda group: group[0][0])
    totals = accumulate(sizes[group] for group in by_stage)
    within = [g for g, total in zip(by_stage, totals, strict=True) if total <= limit]
    return within or by_stage[:1]


def _read(
    files: Mapping[Step, Sequence[Path]],
    tasks: Mapping[Path, Sequence[TaskKey]],
    chosen: Container[GroupKey],
    token_texts: TokenTexts | None,
) -> tuple[dict[str, Any], list[str]]:
    """Return an index with an entry for each chosen group, and a list with a chunk per step."""
    stages = list(dict.fromkeys(stage for stage, _ in files))
    entries: list[list[Any]] = []
    chunks: list[str] = []
    for (stage, step), paths in files.items():
        found: dict[TaskKey, list[EpisodeLine]] = defaultdict(list)
        for path in paths:
            for line, task in zip(whole_lines(path), tasks[path], strict=False):
                if ((stage, step), task) in chosen:
                    found[task].append(json.loads(line))
        groups = [sorted(found[task], key=lambda e: e["trial"]) for task in sorted(found)]
        for group in groups:
            names = [group[0][name] for name in ("domain", "family", "branch", "task_id")]
            ends = [[episode[name] for episode in group] for name in ("reward", "stop_reason")]
            entries.append([stages.index(stage), step, len(chunks), *names, *ends])
        if groups:
            chunks.append(_packed(groups, token_texts))
    return {"stages": stages, "groups": entries}, chunks


def _packed(groups: Sequence[Sequence[EpisodeLine]], token_texts: TokenTexts | None) -> str:
    """Return a chunk (base64 of gzip of JSON): texts, and episodes that hold indices of texts."""
    texts: dict[str, int] = {}

    def index(text: Any) -> int:
        if not isinstance(text, str):
            text = "" if text is None else json.dumps(text, ensure_ascii=False)
        return texts.setdefault(text, len(texts))

    episodes = [[_packed_episode(e, index, token_texts) for e in group] for group in groups]
    text = json.dumps({"texts": list(texts), "groups": episodes}, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _packed_episode(
    episode: EpisodeLine, index: Callable[[Any], int], token_texts: TokenTexts | None
) -> dict[str, Any]:
    sampled = iter(zip(episode.get("ids", ()), episode.get("logprobs", ()), strict=False))
    messages: list[dict[str, Any]] = []
    if preface := episode.get("preface"):
        messages.append({"role": "system, by the chat template", "text": index(preface)})
    for message in episode["messages"]:
        packed = {"role": message.get("role", ""), "text": index(message.get("content"))}
        if name := message.get("name"):
            packed["name"] = str(name)
        if thoughts := message.get("reasoning_content"):
            packed["thoughts"] = index(thoughts)
        if calls := [call.get("function", call) for call in message.get("tool_calls") or ()]:
            packed["calls"] = [[index(c.get("name")), index(c.get("arguments"))] for c in calls]
        ids, logprobs = next(sampled, ((), ())) if packed["role"] == "assistant" else ((), ())
        if ids and token_texts:
            packed["tokens"] = [index(text) for text in token_texts(ids)]
            packed["logprobs"] = [round(logprob, 2) for logprob in logprobs]
        messages.append(packed)
    return {
        **{name: episode.get(name) for name in COPIED},
        "left_out": episode.get("left_out") or "",
        "parts": episode.get("reward_breakdown") or {},
        "difference": episode.get("difference") or {},
        "rewards": episode.get("rewards") or {},
        "extra": {name: index(text) for name, text in (episode.get("extra") or {}).items()},
        "messages": messages,
    }


def token_texts_of(path: Path) -> TokenTexts:
    """Return a function that returns the text of each token id; `path` is a tokenizer file.

    If several tokens make up a character, the last of these tokens gets the character as its text.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    # Some decoders drop the space before the first token, so an "a" precedes the decoded tokens.
    before = tokenizer.encode("a", add_special_tokens=False).ids
    length = len(tokenizer.decode(before, skip_special_tokens=False))

    @cache
    def decoded(ids: tuple[int, ...]) -> str:
        return str(tokenizer.decode([*before, *ids], skip_special_tokens=False))[length:]

    def token_texts(ids: Sequence[int]) -> list[str]:
        texts: list[str] = []
        while (at := len(texts)) < len(ids):
            ends = range(at + 1, min(at + MOST_TOKENS, len(ids)) + 1)
            whole = (end for end in ends if BROKEN not in decoded(tuple(ids[at:end])))
            end = next(whole, at + 1)
            texts += [""] * (end - at - 1) + [decoded(tuple(ids[at:end]))]
        return texts

    return token_texts
