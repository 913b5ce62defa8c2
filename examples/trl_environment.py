"""An environment in the form of TRL's `environment_factory`, and a file of demonstrations.

python examples/trl_environment.py   # writes tickets.jsonl
python pipeline/run.py --domains airline,tickets --demonstrations '{tickets: tickets.jsonl}' \
    --environments '{tickets: examples.trl_environment:TicketEnvironment}' --num-gpus 2
"""

import json
import random
from typing import Any

TEAMS = {"invoice": "finance", "password": "support", "parcel": "logistics"}


class TicketEnvironment:
    """Assign a ticket to the team for the ticket's topic; `reset` draws the ticket."""

    def reset(self, **kwargs: Any) -> str:
        self.ticket, self.topic = f"T{random.randrange(1000)}", random.choice([*TEAMS])
        self.assigned: list[tuple[str, str]] = []
        return f"Assign ticket {self.ticket} to a team."

    def read_ticket(self, ticket: str) -> str:
        """Read a ticket.

        Args:
            ticket: Number of the ticket.
        """
        if ticket != self.ticket:
            raise ValueError("no such ticket")
        return f"A question about: {self.topic}"

    def assign(self, ticket: str, team: str) -> str:
        """Assign a ticket to a team.

        Args:
            ticket: Number of the ticket.
            team: One of finance, support and logistics.
        """
        self.assigned.append((ticket, team))
        return "assigned"

    def get_reward(self) -> float:
        return float(self.assigned == [(self.ticket, TEAMS[self.topic])])


def demonstration() -> dict[str, Any]:
    """Return a conversation whose team is right in 3 of 10 cases, and random in the others.

    Random decisions keep each team likely, so that GRPO can find the right ones.
    """
    environment = TicketEnvironment()
    messages: list[dict[str, Any]] = [{"role": "user", "content": environment.reset()}]
    right = random.random() < 0.3
    team = TEAMS[environment.topic] if right else random.choice([*TEAMS.values()])
    ticket = environment.ticket
    for tool, arguments in (
        (environment.read_ticket, {"ticket": ticket}),
        (environment.assign, {"ticket": ticket, "team": team}),
    ):
        call = {"function": {"name": tool.__name__, "arguments": arguments}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "name": tool.__name__, "content": tool(**arguments)})
    return {"messages": [*messages, {"role": "assistant", "content": "Done."}]}


if __name__ == "__main__":
    with open("tickets.jsonl", "w", encoding="utf-8") as file:
        for _ in range(3000):
            file.write(json.dumps(demonstration()) + "\n")
