"""A dataset with a reward function: sums of a number with two digits and a number with one digit.

python examples/sums_dataset.py   # writes sums.jsonl (tasks) and shown.jsonl (demonstrations)
python pipeline/run.py --domains sums --tasks '{sums: sums.jsonl}' --num-gpus 2 \
    --reward-funcs examples.sums_dataset:is_right --demonstrations '{sums: shown.jsonl}'

The demonstrations need a tiny model alone; half of their answers are wrong.
"""

import json
import random
from pathlib import Path


def is_right(completions, answer, **kwargs):
    """The own code of a user."""
    return [float(c[-1]["content"].strip() == a) for c, a in zip(completions, answer, strict=True)]


def rows() -> list[dict]:
    found = []
    for tens in range(1, 10):
        for ones in range(10):
            for more in range(10 - ones):
                question = f"{tens}{ones}+{more}="
                prompt = [{"role": "user", "content": question}]
                found.append({"prompt": prompt, "answer": f"{tens}{ones + more}"})
    return random.Random(0).sample(found, len(found))


def demonstrations(tasks: list[dict]) -> list[dict]:
    found, draw = [], random.Random(1)
    for task in tasks * 4:
        wrong = task["answer"][0] + str(draw.randrange(10))
        answer = draw.choice([task["answer"], wrong])
        found.append({"messages": [*task["prompt"], {"role": "assistant", "content": answer}]})
    return found


def write(path: str, lines: list[dict]) -> None:
    Path(path).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    tasks = rows()
    write("sums.jsonl", tasks)
    write("shown.jsonl", demonstrations(tasks[:-120]))
