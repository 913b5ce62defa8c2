"""An environment of verifiers v0 as its documentation writes one: tools and a rubric."""

import verifiers as vf
from datasets import Dataset

COLOURS = {f"item{n}": ("blue", "red", "green")[n % 3] for n in range(30)}


def look(item: str) -> str:
    """Look an item up.

    Args:
        item: name of the item
    """
    return COLOURS.get(item, "no such item")


async def right(completion, answer) -> float:
    return float(answer in (completion[-1].content or ""))


def short(completion) -> float:
    return 1 / (1 + len(completion[-1].content or ""))


def noted(completion) -> float:
    return 7.0


def load_environment(size: int = 30) -> vf.Environment:
    rows = [{"question": f"Which colour has the {k}?", "answer": v} for k, v in COLOURS.items()]
    return vf.ToolEnv(
        dataset=Dataset.from_list(rows[:size]),
        tools=[look],
        max_turns=4,
        system_prompt="desk",
        rubric=vf.Rubric(funcs=[right, short, noted], weights=[1.0, 0.5, 0.0]),
    )
