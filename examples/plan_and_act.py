"""An agent plans in one conversation and acts in another; the command is in docs/environments.md.

Both conversations of an episode are trained with its advantage: a plan that helps is made likelier.
"""

import re
from typing import Any

PLAN = "How do you compute {}"
ACT = "Idea: {}\n{}"


async def play(policy: Any, task: Any) -> float:
    """Return 1 if the last number of the answer is right."""
    question = task.prompt[-1]["content"]
    plan = await policy.message([{"role": "user", "content": PLAN.format(question)}])
    request = ACT.format(plan["content"], question)
    answer = await policy.message([{"role": "user", "content": request}])
    return float(re.findall(r"\d+", answer["content"])[-1:] == [task.row()["answer"]])
