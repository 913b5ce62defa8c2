"""A loop of one's own: an agent plans in one conversation and acts in another.

    three-domain-grpo train --environments '{sums: examples.plan_and_act:play}' --domains sums \
        --tasks '{sums: examples/one_digit_sums.jsonl}'

The loop asks for messages as often as it wants and returns the reward. Both conversations of an
episode are trained with its advantage.
"""

import re
from typing import Any

PLAN = "Write how to compute this, without the result: {}"
ACT = "{}\nA colleague's plan: {}\nThe result is"


async def play(policy: Any, task: Any) -> float:
    """Return 1 if the last number of the answer is right."""
    question = task.prompt[-1]["content"]
    plan = await policy.message([{"role": "user", "content": PLAN.format(question)}])
    request = ACT.format(question, plan["content"])
    answer = await policy.message([{"role": "user", "content": request}])
    found = re.findall(r"\d+", answer["content"])[-1:]
    return float(found == [task.row()["answer"]])
