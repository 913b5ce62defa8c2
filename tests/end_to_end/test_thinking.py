"""A run whose model thinks, on a template that drops thoughts of earlier turns."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.models.chat.text import Parsed
from pipeline.models.tiny import CHAT_TEMPLATE
from pipeline.rollout.rollout import SamplerPolicy
from pipeline.rollout.trajectory import Conversation, Said, Sampled
from pipeline.run_state import Run, open_run
from tests.support.warm import assert_same, episodes, metrics, play

pytestmark = pytest.mark.whole_run

DESK = '''
class Customer:
    def __init__(self):
        self._left = ["a cup?", "a pen?"]

    def reply(self, message: str) -> str | None:
        return self._left.pop(0) if self._left else None


class Desk:
    def reset(self, **row: object) -> None:
        self.user = Customer()
        self.final_message = ""

    def look(self, item: str) -> str:
        """Look an item up.

        Args:
            item: Its name.
        """
        return "seen"

    def get_reward(self) -> float:
        return len(self.final_message) % 3 / 2
'''
TASKS = "".join(
    f'{{"id": "t{n}", "prompt": [{{"role": "user", "content": "item {n}?"}}]}}\n' for n in range(6)
)
# Like Qwen3's: a thought stands in front of a message, and is dropped before the latest question.
THINKS = CHAT_TEMPLATE.replace(
    "{{ message.content }}",
    "{% if message.reasoning_content is string and loop.index0 > last.index %}"
    "<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}",
)
LATEST = (
    "{% set last = namespace(index=-1) %}{% for message in messages %}"
    "{% if message.role == 'user' %}{% set last.index = loop.index0 %}{% endif %}{% endfor %}"
)
FLAGS = [
    *("--domains", "desk", "--environments", "{desk: my_desk:Desk}", "--chat-template", "my.jinja"),
    *("--tasks", "{desk: tasks.jsonl}", "--warm-start-steps", "0", "--max-steps", "2"),
    *("--tasks-per-step", "2", "--num-generations", "3", "--eval-tasks-per-domain", "2"),
    *("--eval-trials", "1", "--validation-steps", "0", "--max-tokens-per-turn", "8"),
    *("--no-drop-zero-std-groups", "--report-to", "none", "--deterministic"),
    *("--save-steps", "1", "--output-dir", "out"),
]


def thinking(policy: SamplerPolicy, sampled: Sampled, conversation: Conversation) -> Said:
    """Read half of whatever was sampled as a thought, and the rest as the message."""
    half = len(sampled.ids) // 2
    decode = policy.chat.tokenizer.decode
    thoughts, text = (
        decode(ids, skip_special_tokens=True) for ids in (sampled.ids[:half], sampled.ids[half:])
    )
    return Said(parsed=Parsed(content=text, thoughts=thoughts))


def open_thinking(*given: Any, **options: Any) -> Run:
    SamplerPolicy._said = thinking  # type: ignore[method-assign]  # in the process of one rank
    return open_run(*given, **options)


def in_folder(folder: Path, *flags: str, **options: Any) -> Sequence[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    (folder / "my_desk.py").write_text(DESK)
    (folder / "tasks.jsonl").write_text(TASKS)
    (folder / "my.jinja").write_text(LATEST + THINKS)
    done = play(*FLAGS, *flags, cwd=folder, open_run=open_thinking, **options)
    assert "note: chat template: it drops thoughts of earlier turns" in done.stdout
    return episodes(folder / "out")


def test_ranks_and_a_resumed_run_train_the_same_sequences(tmp_path: Path) -> None:
    one = in_folder(tmp_path / "one", num_ranks=1)
    assert len(one) > 2 * 2 * 3  # two steps, and two evaluations
    for row in one:
        assert row["new_sequences"] == {"thoughts": 2} and row["num_turns"] == 3
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["user", "assistant"] * 3
        assert len(row["ids"]) == 3 and row["num_sampled_tokens"] == sum(map(len, row["ids"]))
        assert all("reasoning_content" in message for message in row["messages"][1::2])
        assert len({tuple(ids) for ids in row["ids"]}) == 3  # no draw is used twice
    assert [line["train/grad_norm"] > 0 for line in metrics(tmp_path / "one" / "out")] == [True] * 2
    in_folder(tmp_path / "two", num_ranks=2)
    assert_same(tmp_path / "two" / "out", tmp_path / "one" / "out")
    in_folder(tmp_path / "killed", num_ranks=2, code=75, sigterm_at='"step": 1')
    in_folder(tmp_path / "killed", "--resume-from-checkpoint", "auto", num_ranks=2)
    assert_same(tmp_path / "killed" / "out", tmp_path / "one" / "out")
