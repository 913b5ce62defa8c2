"""Tokens for a tiny model of telecom: the fields that occur in demonstrations.

A field is a piece of a message up to `, `, ` | ` or a line break: one argument of a call, one value
of a tool's result. With a token for each frequent field, an episode has about 240 tokens. The
tokens are constants of the benchmark (one customer, five tickets), so a model with these tokens
memorises the benchmark's world. The combinations of faults differ between training and test.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from pipeline.data.tasks import Message
from pipeline.environments.experts import run_expert
from pipeline.tau2.tasks import TaskSource
from pipeline.tau2.telecom_expert import expert

NUM_TASKS = 300  # training tasks whose demonstrations are read
LEAST = 3  # least number of occurrences of a field
MOST_WORDS = 1500
FIELD = re.compile(r".+?(?:, | \| |\n)|.+", re.DOTALL)


def words_of_telecom(source: TaskSource, environment: type[Any]) -> list[str]:
    """Return the fields of clean and of flawed demonstrations, the most frequent first."""
    tools = [schema["function"]["name"] for schema in environment.schemas]
    names = f"\ntools:{''.join(f' {name}' for name in tools)}"
    count = Counter[str]()
    for task in source(0, NUM_TASKS, "train", "medium"):
        for share in (1.0, 0.6):
            with suppress(
                LookupError, TypeError, ValueError
            ):  # a warm start refuses such an expert
                messages, _ = run_expert(environment(), expert, task, share)
                count.update(field for text in _texts(messages) for field in FIELD.findall(text))
    fields = [field for field, number in count.most_common(MOST_WORDS) if number >= LEAST]
    return [*fields, f"tau2 telecom{names}", "tau2 telecom", names]


def _texts(messages: Sequence[Message]) -> Iterator[str]:
    for message in messages:
        if message["role"] == "system":
            continue
        if message["content"]:
            yield message["content"]
        for call in message.get("tool_calls") or ():
            name, arguments = call["function"]["name"], json.dumps(call["function"]["arguments"])
            yield f'\n{{"name": "{name}", "arguments": {arguments}}}\n'
