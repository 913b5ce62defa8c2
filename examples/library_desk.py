"""A domain with a user who must be asked, and a rule that decides: the loan desk of a library.

python pipeline/run.py --domains airline,library --num-gpus 2 \
    --environments '{library: examples.library_desk:LibraryEnvironment}'
"""

import json
from random import Random
from typing import Any, Literal, NamedTuple

from pipeline.data.tasks import SPLITS, Task
from pipeline.environments import Agent

WEEKS, STATUS = ("one", "two", "four"), ("fine", "overdue", "reserved")
SYSTEM = {"role": "system", "content": "library\n\nRefuse overdue or reserved; else ask how long."}


class Reader(NamedTuple):
    weeks: str

    def reply(self, message: str) -> str | None:
        return self.weeks if message.endswith("?") else None  # None ends the conversation


class LibraryEnvironment:
    def reset(self, payload: str, **row: Any) -> None:
        self.goal = json.loads(payload)["goal"]
        self.user, self.writes = Reader(self.goal["weeks"]), list[Any]()

    def get_loan(self, book: str) -> dict[str, str]:
        """Look up the loan of a book.

        Args:
            book: Number of the book.
        """
        return {"status": self.goal["status"] if book == self.goal["book"] else "no such book"}

    def renew(self, book: str, weeks: str) -> dict[str, str]:
        """Renew a loan.

        Args:
            book: Number of the book.
            weeks: For how many weeks.
        """
        self.writes.append(["renew", book, weeks])
        return {"ok": "yes"}

    def refuse(self, reason: Literal["overdue", "reserved"]) -> dict[str, str]:
        """Refuse to renew a loan.

        Args:
            reason: Why the loan is not renewed.
        """
        self.writes.append(["refuse", reason])
        return {"ok": "yes"}

    def get_reward(self) -> float:
        status, book, weeks = (self.goal[name] for name in ("status", "book", "weeks"))
        wanted = ["renew", book, weeks] if status == "fine" else ["refuse", status]
        return float(self.writes == [wanted])


def expert(agent: Agent, goal: dict[str, str]) -> str:
    status = agent.call("get_loan", book=goal["book"])["status"]
    if (chosen := agent.decide(status, STATUS)) == "fine":
        agent.call("renew", book=goal["book"], weeks=agent.ask("For how many weeks?"))
    else:
        agent.call("refuse", reason=chosen)
    return "Done."


def generate_tasks(seed: int, n: int, split: str, difficulty: str) -> list[Task]:
    random, tasks = Random(f"{seed} {split}"), []
    for number in range(n):
        book = random.randrange(SPLITS.index(split), 1000, len(SPLITS))  # of this split alone
        goal = dict(book=f"B{book}", weeks=random.choice(WEEKS), status=random.choice(STATUS))
        prompt = SYSTEM, {"role": "user", "content": f"please renew {goal['book']}"}
        payload = json.dumps({"goal": goal})
        tasks.append(Task(domain="library", id=f"{split}-{number}", prompt=prompt, payload=payload))
    return tasks
