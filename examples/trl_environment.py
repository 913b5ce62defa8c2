"""An environment in the form of TRL's `environment_factory`: a class that imports nothing of ours.

python examples/trl_environment.py tickets.jsonl   # writes demonstrations, 7 of 10 at random
python pipeline/run.py --domains airline,tickets --demonstrations '{tickets: tickets.jsonl}' \
    --environments '{tickets: examples.trl_environment:TicketEnvironment}' --num-gpus 2
"""

import json
import random
import sys

TEAMS = {"invoice": "finance", "password": "support", "parcel": "logistics"}


class TicketEnvironment:
    """Assign a ticket to the team for the ticket's topic; `reset` draws the ticket."""

    def reset(self, **kwargs) -> str:
        self.ticket, self.topic = f"T{random.randrange(1000)}", random.choice([*TEAMS])
        self.assigned = []
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


def demonstration() -> dict:
    """Return a conversation with correct calls, but with a random team in 7 of 10 cases."""
    environment = TicketEnvironment()
    messages = [{"role": "user", "content": environment.reset()}]
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
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        for _ in range(3000):
            file.write(json.dumps(demonstration()) + "\n")
