"""A dataset with a reward function: sums of a number with two digits and a number with one digit.

python examples/sums_dataset.py   # writes sums.jsonl, held_out.jsonl and shown.jsonl
python pipeline/run.py --domains sums --tasks '{sums: sums.jsonl}' --num-gpus 2 \
    --eval-tasks '{sums: held_out.jsonl}' --demonstrations '{sums: shown.jsonl}' \
    --reward-funcs examples.sums_dataset:is_right

Only the tiny model needs demonstrations; half of their answers have a random last digit.
"""

import json
import random
from pathlib import Path
from typing import Any

NUM_HELD_OUT = 99


def is_right(completions: Any, answer: list[str], **columns: Any) -> list[float]:
    """Return 1 for each completion that is its task's answer. All other code makes the files."""
    pairs = zip(completions, answer, strict=True)
    return [float(messages[-1]["content"] == right) for messages, right in pairs]


def tasks() -> list[dict[str, Any]]:
    found = []
    for tens in range(1, 10):
        for ones in range(10):
            for more in range(10 - ones):
                question = f"{tens}{ones}+{more}="
                prompt = [{"role": "user", "content": question}]
                found.append({"prompt": prompt, "answer": f"{tens}{ones + more}"})
    return random.Random(0).sample(found, len(found))


def demonstrations(tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found, draw = [], random.Random(1)
    for task in tasks * 4:
        wrong = task["answer"][0] + str(draw.randrange(10))
        answer = draw.choice([task["answer"], wrong])
        found.append({"messages": [*task["prompt"], {"role": "assistant", "content": answer}]})
    return found


def write(path: str, lines: list[dict[str, Any]]) -> None:
    Path(path).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    made = tasks()
    write("sums.jsonl", made[:-NUM_HELD_OUT])
    write("held_out.jsonl", made[-NUM_HELD_OUT:])
    write("shown.jsonl", demonstrations(made[:-NUM_HELD_OUT]))
