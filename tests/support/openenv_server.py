"""A server that speaks OpenEnv's protocol; a proof compares its messages with the real one's.

Its environment is to count to a number that the seed draws.
"""

import asyncio
import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import WSMsgType, web
from pydantic import BaseModel, ConfigDict, Field, ValidationError


class Add(BaseModel):
    """Add to the counter."""

    model_config = ConfigDict(extra="forbid")
    metadata: dict[str, Any] = Field(
        default_factory=dict, description="Additional metadata for the action"
    )
    by: int = Field(description="how much to add")


class CallTool(BaseModel):
    """Call a tool."""

    metadata: dict[str, Any] = Field(default_factory=dict)
    type: str = Field(default="call_tool", json_schema_extra={"const": "call_tool"})
    tool_name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class Counter:
    """The environment of a session. `seeded` names what the seed decides: "all" or "text"."""

    def __init__(self, seeded: str) -> None:
        self._seeded = seeded

    def reset(self, seed: int | None = None, **_: Any) -> dict[str, Any]:
        own = random.Random(seed)
        self.target = own.randint(2, 4)
        self.hidden = random.random() if self._seeded == "text" else own.random()
        if self._seeded == "nothing":
            self.target = random.randrange(1 << 60)
        self.count = self.num_steps = 0
        return self.seen()

    def step(self, by: int) -> dict[str, Any]:
        if by == 13:
            raise ValueError("unlucky")
        self.count += by
        self.num_steps += 1
        return self.seen(float(self.count == self.target), self.count >= self.target)

    def seen(self, reward: float | None = None, done: bool = False) -> dict[str, Any]:
        observation = {"metadata": {}, "count": self.count, "target": self.target}
        return {"observation": observation, "reward": reward, "done": done}

    @property
    def state(self) -> dict[str, Any]:
        session = str(random.random())
        return {"episode_id": session, "step_count": self.num_steps, "hidden": self.hidden}


class OpenEnvServer:
    """Counts the open sessions, and keeps what they were reset with.

    A first entry of `faults` is used up instead of an answer: "die" to drop the connection, "wait"
    to give none, or the text of a message.
    """

    def __init__(self, *, sessions: int = 64, seeded: str = "all", mcp: bool = False) -> None:
        self.sessions, self.seeded, self.mcp = sessions, seeded, mcp
        self.heartbeat_s: float | None = None
        self.num_open = self.most_open = self.num_refused = 0
        self.resets: list[dict[str, Any]] = []
        self.faults: list[str] = []
        self.closed = threading.Event()  # set while no session is open
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.port = self._run(self._start())
        self.url = f"http://127.0.0.1:{self.port}"

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    async def _start(self) -> int:
        app = web.Application()
        app.router.add_get("/schema", self._schema)
        app.router.add_get("/metadata", self._metadata)
        app.router.add_post("/mcp", self._tools)
        app.router.add_get("/ws", self._session)
        self._runner = web.AppRunner(
            app, access_log=None, handle_signals=False, shutdown_timeout=0.1
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return self._runner.addresses[0][1]

    def stop(self) -> None:
        """End the server and its sessions; may be called again."""
        if self._thread.is_alive():
            self._run(self._runner.cleanup())
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(60)
            self.loop.close()

    async def _schema(self, _: web.Request) -> web.Response:
        action = CallTool if self.mcp else Add
        return web.json_response({"action": action.model_json_schema()})

    async def _metadata(self, _: web.Request) -> web.Response:
        return web.json_response({"name": "Counter", "description": "Counts", "version": "1.0.0"})

    async def _tools(self, request: web.Request) -> web.Response:
        asked = await request.json()
        schema = {"type": "object", "properties": {"by": {"type": "integer"}}, "required": ["by"]}
        tool = {"name": "add", "title": "Add", "description": "Add.", "inputSchema": schema}
        result = {"tools": [{**tool, "meta": None}]} if asked["method"] == "tools/list" else {}
        return web.json_response({"jsonrpc": "2.0", "id": asked["id"], "result": result})

    async def _session(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(heartbeat=self.heartbeat_s)
        await socket.prepare(request)
        if self.num_open >= self.sessions:
            self.num_refused += 1
            most = f"{self.num_open}/{self.sessions} sessions active"
            text = f"Server at capacity: {most}. Cannot accept new connections."
            counts = {"active_sessions": self.num_open, "max_sessions": self.sessions}
            error = {"message": text, "code": "CAPACITY_REACHED", **counts}
            await socket.send_json({"type": "error", "data": error})
            await socket.close()
            return socket
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        self.closed.clear()
        try:
            environment = Counter(self.seeded)
            async for message in socket:
                asked = json.loads(message.data) if message.type is WSMsgType.TEXT else {}
                if asked.get("type") == "close":
                    break
                await self._answer(socket, request, environment, asked)
        finally:
            self.num_open -= 1
            if not self.num_open:
                self.closed.set()
        return socket

    async def _answer(self, socket: Any, request: Any, environment: Counter, asked: Any) -> None:
        fault = self.faults.pop(0) if self.faults and asked["type"] == "step" else None
        if fault == "die":
            request.transport.abort()
        elif fault is not None:
            await (asyncio.sleep(3600) if fault == "wait" else socket.send_str(fault))
        else:
            await socket.send_json(self.answer(environment, asked))

    def answer(self, environment: Counter, asked: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a message, as the real server has it."""
        data = asked.get("data")
        try:
            if asked["type"] == "state":
                return {"type": "state", "data": environment.state}
            if asked["type"] == "reset":
                self.resets.append(data)
                return {"type": "observation", "data": environment.reset(**data)}
            if self.mcp:
                return {"type": "observation", "data": self._called(environment, data)}
            action = Add.model_validate(data)
            return {"type": "observation", "data": environment.step(action.by)}
        except ValidationError as error:
            told = {"message": "Invalid message", "code": "VALIDATION_ERROR"}
            return {"type": "error", "data": {**told, "errors": error.errors()}}
        except ValueError as error:
            return {"type": "error", "data": {"message": str(error), "code": "EXECUTION_ERROR"}}

    def _called(self, environment: Counter, action: dict[str, Any]) -> dict[str, Any]:
        """Return the observation of a call of an MCP tool."""
        by = action["arguments"].get("by")
        named = {"metadata": {}, "tool_name": action["tool_name"]}
        if not isinstance(by, int):
            error = {"error_type": "invalid_args", "message": "by is no integer"}
            seen = environment.seen() | {"observation": {**named, "result": None, "error": error}}
            return seen
        seen = environment.step(by)
        content = [{"type": "text", "text": f"the counter is at {environment.count}"}]
        result = {"content": content, "structured_content": None, "is_error": False}
        return seen | {"observation": {**named, "result": result, "error": None}}


@contextmanager
def serving(**settings: Any) -> Iterator[OpenEnvServer]:
    server = OpenEnvServer(**settings)
    try:
        yield server
    finally:
        server.stop()
