"""An agent plans in one conversation and acts in another, which does not have the question.

The command stands in docs/environments.md. The agent that acts knows the question from the plan
alone, so both conversations must be learned; both are trained with the advantage of the episode.
"""

import re
from typing import Any

PLAN = "{} Write the numbers and the result for a colleague."
ACT = "A colleague writes: {}\nWhat is the result? Answer with the number alone."


async def play(policy: Any, task: Any) -> float:
    """Return 1 if the answer's last number is right."""
    question = task.prompt[-1]["content"]
    plan = await policy.message([{"role": "user", "content": PLAN.format(question)}])
    answer = await policy.message([{"role": "user", "content": ACT.format(plan["content"])}])
    return float(re.findall(r"\d+", answer["content"])[-1:] == [task.row()["answer"]])
