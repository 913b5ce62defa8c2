"""A domain whose policy text decides, and differs from task to task: the returns desk of a shop.

python pipeline/run.py --config smollm2_desk --num-gpus 2
"""

import json
from random import Random
from typing import Any

from pipeline.data.tasks import Task
from pipeline.environments import Agent

STATES, ACTIONS = ("new", "used", "broken", "late"), ("refund", "exchange", "repair", "refuse")
SPLITS = ("train", "validation", "test")
BEGINNING = "You serve the returns desk of a shop. Look up the order, quote its rule, follow it."


class ReturnsEnvironment:
    def reset(self, payload: str, **row: Any) -> None:
        self.goal, self.done = json.loads(payload)["goal"], False

    def get_order(self, order: str) -> dict[str, str]:
        """Look up an order.

        Args:
            order: Number of the order.
        """
        return {"state": self.goal["state"] if order == self.goal["order"] else "no such order"}

    def refund(self) -> dict[str, str]:
        """Pay the price back."""
        return self._decide("refund")

    def exchange(self) -> dict[str, str]:
        """Send the same goods once more."""
        return self._decide("exchange")

    def repair(self) -> dict[str, str]:
        """Mend the goods."""
        return self._decide("repair")

    def refuse(self) -> dict[str, str]:
        """Do not take the goods back."""
        return self._decide("refuse")

    def _decide(self, action: str) -> dict[str, str]:
        self.done, self.decision = True, action  # the first decision ends the episode
        return {"done": action}

    def get_reward(self) -> float:
        return float(self.done and self.decision == self.goal["action"])


def expert(agent: Agent, goal: dict[str, str]) -> str:
    agent.call("get_order", order=goal["order"])
    action = agent.decide(goal["action"], ACTIONS)
    agent.think(f"- {goal['state']}: {action}")
    agent.call(action)
    return "Done."


def generate_tasks(seed: int, n: int, split: str, difficulty: str) -> list[Task]:
    random, tasks = Random(f"{seed} {split}"), []
    for number in range(n):
        order = f"R{3 * random.randrange(300) + SPLITS.index(split)}"  # splits share no task
        policy = {state: random.choice(ACTIONS) for state in STATES}
        state = random.choice(STATES)
        goal = {"order": order, "state": state, "action": policy[state]}
        rules = "\n".join(f"- {state}: {action}" for state, action in policy.items())
        system = {"role": "system", "content": f"{BEGINNING}\nPolicy:\n{rules}"}
        task = Task(
            domain="desk",
            id=f"{split}-{number}",
            prompt=(system, {"role": "user", "content": f"I want to return order {order}."}),
            payload=json.dumps({"goal": goal}),
            family="return",
            branch=policy[state],
        )
        tasks.append(task)
    return tasks
