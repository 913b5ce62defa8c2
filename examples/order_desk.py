"""A small domain for an agent: it looks an order up, and answers with the rule for its state.

The rules stand in the prompt, and differ from task to task. openai_agent.py has the agent, and
the recipe smollm2_orders trains it.
"""

import json
from random import Random
from typing import Any

from pipeline.data.tasks import SPLITS, Task
from pipeline.environments import Agent

STATES, ACTIONS = ("new", "used", "broken", "late"), ("refund", "exchange", "repair", "refuse")


class OrderEnvironment:
    def reset(self, payload: str, **row: Any) -> None:
        self.goal = json.loads(payload)["goal"]
        self.final_message, self.was_seen = "", False

    def get_order(self, order: str) -> dict[str, str]:
        """Look up an order.

        Args:
            order: Number of the order.
        """
        self.was_seen = order == self.goal["order"]
        return {"state": self.goal["state"] if self.was_seen else "no such order"}

    def get_reward(self) -> float:
        rule = f"{self.goal['state']}: {self.goal['action']}"
        return float(self.was_seen and self.final_message.strip() == rule)


def expert(agent: Agent, goal: dict[str, str]) -> str:
    state = agent.call("get_order", order=goal["order"])["state"]
    return f"{state}: {agent.decide(goal['action'], ACTIONS)}"


def generate_tasks(seed: int, n: int, split: str, difficulty: str) -> list[Task]:
    random, tasks = Random(f"{seed} {split}"), []
    for number in range(n):
        order = f"R{3 * random.randrange(300) + SPLITS.index(split)}"  # splits share no order
        rules = {state: random.choice(ACTIONS) for state in STATES}
        state = random.choice(STATES)
        goal = {"order": order, "state": state, "action": rules[state]}
        text = "\n".join(f"{state}: {action}" for state, action in rules.items())
        system = {"role": "system", "content": f"Look up the order, answer with its rule.\n{text}"}
        task = Task(
            domain="orders",
            id=f"{split}-{number}",
            prompt=(system, {"role": "user", "content": f"I return order {order}."}),
            payload=json.dumps({"goal": goal}),
            family="return",
            branch=rules[state],
        )
        tasks.append(task)
    return tasks
