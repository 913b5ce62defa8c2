"""A server of OpenEnv's own package, in the form of its documentation; the Python of it runs this.

    PYTHON scripts/proofs/openenv_server.py PORT SESSIONS [mcp]

Its environment is to count to a number that the seed draws, with an action or with tools of MCP.
`tests/support/openenv_server.py` is the same without the package.
"""

import random
import sys
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from pydantic import Field


class Add(Action):
    """Add to the counter."""

    by: int = Field(description="how much to add")


class Count(Observation):
    count: int = 0
    target: int = 0


class Counter(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Count:
        own = random.Random(seed)
        self.count, self.target, self.hidden = 0, own.randint(2, 4), own.random()
        self.num_steps = 0
        return Count(count=0, target=self.target)

    def step(self, action: Add, timeout_s: float | None = None, **_: Any) -> Count:
        if action.by == 13:
            raise ValueError("unlucky")
        self.count += action.by
        self.num_steps += 1
        reward, done = float(self.count == self.target), self.count >= self.target
        return Count(count=self.count, target=self.target, reward=reward, done=done)

    @property
    def state(self) -> State:
        number = str(random.random())
        return State(episode_id=number, step_count=self.num_steps, hidden=self.hidden)


class Desk(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self.count = self.target = 0
        tools = FastMCP("counter")
        tools.tool(self.add)
        super().__init__(tools)

    def add(self, by: int) -> str:
        """Add to the counter."""
        self.count += by
        return f"the counter is at {self.count}"

    def reset(self, seed: int | None = None, **_: Any) -> Observation:
        self.count, self.target = 0, random.Random(seed).randint(2, 4)
        return Observation(metadata={"target": self.target})

    async def step_async(self, action: Action, **given: Any) -> Observation:
        seen = await super().step_async(action, **given)
        seen.reward, seen.done = float(self.count == self.target), self.count >= self.target
        return seen

    def _step_impl(self, action: Action, **_: Any) -> Observation:
        raise ValueError("only tools")

    @property
    def state(self) -> State:
        return State(step_count=0)


if __name__ == "__main__":
    port, sessions = map(int, sys.argv[1:3])
    served = (Desk, CallToolAction, CallToolObservation) if sys.argv[3:] else (Counter, Add, Count)
    app = create_fastapi_app(*served, max_concurrent_envs=sessions)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
