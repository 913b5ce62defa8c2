"""An agent plans in one conversation and acts in another; the command is in docs/environments.md.

Both conversations of an episode are trained with its advantage: a plan that helps is made likelier.
"""

import re
from typing import Any


async def play(policy: Any, task: Any) -> float:
    """Return 1 if the last number of the answer is right."""
    question = task.prompt[-1]
    plan = await policy.message([question])
    note = {"role": "system", "content": plan["content"]}  # what the acting agent knows
    answer = await policy.message([note, question])
    return float(re.findall(r"\d+", answer["content"])[-1:] == [task.row()["answer"]])
