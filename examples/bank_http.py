"""A domain whose tools call a service: the card desk of a bank, behind HTTP.

python examples/bank_http.py &
python pipeline/run.py --domains airline,bank --num-gpus 2 \
    --environments '{bank: examples.bank_http:BankEnvironment}'
"""

import asyncio
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from typing import Any
from urllib.request import urlopen
from uuid import uuid4

from pipeline.data.tasks import Task
from pipeline.environments import Agent

SYSTEM = {"role": "system", "content": "bank\n\nLock stolen, replace broken, unlock found cards."}
RULE, SESSIONS = {"stolen": "lock", "broken": "replace", "found": "unlock"}, dict[str, Any]()


class BankEnvironment:
    async def reset(self, payload: str, **row: Any) -> None:
        self.goal, self.url = json.loads(payload)["goal"], f"http://127.0.0.1:8765/{uuid4()}"
        await self._post(**self.goal)

    async def get_card(self, card: str) -> dict[str, str]:
        """Look up what is reported of a card.

        Args:
            card: Number of the card.
        """
        return {"report": (await self._post(card=card))["report"]}

    async def serve(self, card: str, action: str) -> Any:
        """Lock, replace or unlock a card.

        Args:
            card: Number of the card.
            action: The word lock, replace or unlock.
        """
        return (await self._post(card=card, action=action))["served"][-1]

    async def get_reward(self) -> float:
        wanted = {"card": self.goal["card"], "action": RULE[self.goal["report"]]}
        return float((await self._post())["served"] == [wanted])

    async def _post(self, **body: str) -> Any:
        with await asyncio.to_thread(urlopen, self.url, json.dumps(body).encode()) as answer:
            return json.load(answer)


def expert(agent: Agent, goal: dict[str, str]) -> str:
    report = agent.call("get_card", card=goal["card"])["report"]
    agent.call("serve", card=goal["card"], action=agent.decide(RULE[report], [*RULE.values()]))
    return "Done."


def generate_tasks(seed: int, n: int, split: str, difficulty: str) -> list[Task]:
    random, tasks = Random(f"{seed} {split}"), []
    for number in range(n):
        goal = {"card": str(random.randrange(1000, 10000)), "report": random.choice([*RULE])}
        prompt = SYSTEM, {"role": "user", "content": f"please see to card {goal['card']}"}
        payload = json.dumps({"goal": goal})
        tasks.append(Task(domain="bank", id=f"{split}-{number}", prompt=prompt, payload=payload))
    return tasks


class Bank(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        session = SESSIONS.setdefault(self.path, {**body, "served": []})
        session["served"] += [body] if "action" in body else []
        self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n" + json.dumps(session).encode())


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", 8765), Bank).serve_forever()
