"""Single-turn sums for `vs_trl.py --sums`: tasks and a reward function for both trainers."""

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NUM_TASKS = 400


def write_sums(path: Path) -> Path:
    """Write sums of two digits, which a small pretrained model can learn in some steps."""
    draw = random.Random(1)
    pairs = [(draw.randint(0, 9), draw.randint(0, 9)) for _ in range(NUM_TASKS)]
    prompts = [[{"role": "user", "content": f"{a} + {b} ="}] for a, b in pairs]
    rows = [
        {"prompt": prompt, "answer": str(a + b)}
        for prompt, (a, b) in zip(prompts, pairs, strict=True)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def correct(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """1 for a completion, a text or a list of messages, whose last number is the answer."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    numbers = [re.findall(r"\d+", text)[-1:] for text in texts]
    return [float(found == [right]) for found, right in zip(numbers, answer, strict=True)]
