"""A domain that is a package of its own: a guest shows a ticket, and a rule says what happens.

pip install examples/domain_package
three-domain-grpo train --domains airline,cloakroom --num-gpus 2
"""

import json
from random import Random
from typing import Any

from pipeline.data.tasks import Task
from pipeline.environments import Agent

RULE = "Valid: hand the coat out. Torn: ask for a name. Void: call the manager."
RIGHT = {"valid": "hand_out", "torn": "ask_name", "void": "call_manager"}
SYSTEM = {"role": "system", "content": f"cloakroom\n\n{RULE}"}
SPLITS = ("train", "validation", "test")


class CloakroomEnvironment:
    def reset(self, payload: str, **row: Any) -> None:
        self.goal = json.loads(payload)["goal"]
        self.actions = list[list[str]]()

    def get_ticket(self, number: str) -> dict[str, str]:
        """Look up a ticket.

        Args:
            number: Number of the ticket.
        """
        if number != self.goal["number"]:
            return {"error": "no such ticket"}
        return {"state": self.goal["state"]}

    def serve(self, number: str, action: str) -> dict[str, str]:
        """Do something for the guest with a ticket.

        Args:
            number: Number of the ticket.
            action: One of hand_out, ask_name and call_manager.
        """
        self.actions.append([number, action])
        return {"ok": "yes"}

    def get_reward(self) -> float:
        return float(self.actions == [[self.goal["number"], RIGHT[self.goal["state"]]]])


def expert(agent: Agent, goal: dict[str, str]) -> str:
    state = agent.call("get_ticket", number=goal["number"])["state"]
    action = agent.decide(RIGHT[state], list(RIGHT.values()))
    agent.call("serve", number=goal["number"], action=action)
    return "Done."


def generate_tasks(seed: int, n: int, split: str, difficulty: str) -> list[Task]:
    random = Random(f"{seed} {split}")
    tasks = list[Task]()
    for index in range(n):
        number = f"T{3 * random.randrange(300) + SPLITS.index(split)}"  # splits share no ticket
        goal = {"number": number, "state": random.choice(list(RIGHT))}
        prompt = SYSTEM, {"role": "user", "content": f"here is my ticket {number}"}
        payload = json.dumps({"goal": goal})
        task_id = f"{split}-{index}"
        tasks.append(Task(domain="cloakroom", id=task_id, prompt=prompt, payload=payload))
    return tasks
