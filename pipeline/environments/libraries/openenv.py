"""Environments of OpenEnv: a server at a URL, spoken to without OpenEnv's packages.

A session of the server is a WebSocket on which each message has one answer. The JSON schema of the
server's actions is one tool, `step`; if the actions are calls of MCP tools, these are the tools.
The messages are those of openenv-core 0.3 and openenv 0.10.
"""

import asyncio
import json
import weakref
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, Literal
from zlib import crc32

import requests
from requests.exceptions import SSLError

from pipeline.common.console import installed
from pipeline.common.errors import UserError
from pipeline.common.untrusted import parse_json, reason_of, shown
from pipeline.environments.discovery import tool_methods
from pipeline.environments.domains import Domain
from pipeline.environments.faults import Outage, describe
from pipeline.environments.tools import ToolError

START_S = 10.0  # until a server counts as away before a run
RETRY_S = 0.5  # between two tries to open a session
CLOSE_S = 2.0  # until a server that does not end a session is left alone
MAX_BYTES = 100 << 20  # of a message; OpenEnv's own client takes as many


class Full(Outage):
    """All sessions of the server are in use."""


ERRORS = {"VALIDATION_ERROR": ToolError, "EXECUTION_ERROR": RuntimeError, "CAPACITY_REACHED": Full}


class Episode:
    """A session of a server, from `reset` to `close`."""

    server: Any = None  # of the domain: its url, whether it has_mcp, and the arguments of `openenv`
    same_start = (  # the advice if two episodes of a task differ
        "let the server's reset(self, seed=None, **kwargs) draw from random.Random(seed), or, if "
        "only its state may differ, give the argument compare_state: false"
    )

    async def reset(self, id: str, domain: str, prompt: Any, payload: str, **columns: Any) -> str:
        self.reward = 0.0
        # Some generators of random numbers take seeds of 31 bits alone.
        given = {"seed": crc32(id.encode()) >> 1, **columns}
        seen = await self._begin({k: v for k, v in given.items() if v is not None})
        if self.server.compare_state:
            with suppress(RuntimeError):  # some servers cannot tell theirs
                self.state = await self._ask("state")
        return _text(seen)

    async def call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        if name not in tool_methods(type(self)):
            raise ToolError(f"unknown tool {name}")
        if not self.server.has_mcp:
            return _text(await self._ask("step", data=arguments)), False
        action = {"type": "call_tool", "tool_name": name, "arguments": arguments}
        seen = await self._ask("step", data=action)
        return _text(seen.get("error") or seen.get("result")), bool(seen.get("error"))

    def get_reward(self) -> float:
        return self.reward

    async def close(self) -> None:
        await self._socket.close()  # which ends the session; the next one may have to wait for it
        self._drop()

    async def _begin(self, given: dict[str, Any]) -> dict[str, Any]:
        """Reset in a new session. Raises Full if none becomes free in `wait_s`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self.server.wait_s
        while True:
            client = self.server.aiohttp.ClientSession(trust_env=True)
            await self._connect(client, loop)
            try:
                return await self._ask("reset", data=given)
            except Full as full:
                await self.close()
                if loop.time() > until:
                    raise Full(f"{full} Start it with a larger max_concurrent_envs") from None
            await asyncio.sleep(RETRY_S)

    async def _connect(self, client: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._drop = weakref.finalize(
            self, lambda: asyncio.run_coroutine_threadsafe(client.close(), loop)
        )
        try:
            self._socket = await client.ws_connect(
                f"{self.server.url}/ws",
                max_msg_size=MAX_BYTES,
                timeout=self.server.aiohttp.ClientWSTimeout(ws_close=CLOSE_S),
            )
        except (self.server.aiohttp.ClientError, OSError) as error:
            raise Outage(f"the server opens no session ({reason_of(error)})") from None
        # The client answers pings only while it waits for a message, and a server ends the session
        # of a client that does not answer. So it always waits for the next message.
        self._next = asyncio.ensure_future(self._socket.receive())

    async def _ask(self, kind: str, **message: Any) -> dict[str, Any]:
        """Send a message; return the observation or state. Notes the reward and the end.

        Raises ToolError for an action that does not follow the schema, RuntimeError for an
        exception of the environment, and Outage for any other failure.
        """
        with suppress(ConnectionError):  # the last message says why the server has closed
            await self._socket.send_str(json.dumps({"type": kind, **message}))
        said = (await self._next).data
        self._next = asyncio.ensure_future(self._socket.receive())
        try:
            answer = parse_json(said)
            data = answer["data"]
            if kind == "step" and data.get("reward") is not None:
                self.reward = float(data["reward"]) + self.reward * self.server.adds_up
            self.done = kind == "step" and bool(data.get("done"))
            if answer["type"] != "error":
                seen = data if kind == "state" else data["observation"]
                # What may tell the solution, and what differs in each session.
                return {k: v for k, v in seen.items() if k not in ("metadata", "episode_id")}
            wrong = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in data.get("errors", [])]
            error = ERRORS.get(data["code"], Outage)("; ".join([data["message"], *wrong]))
        except (AttributeError, KeyError, TypeError, ValueError):
            what = f"sent {shown(said)}" if isinstance(said, str) else "has closed the session"
            raise Outage(f"the server {what}") from None
        raise error


def openenv(
    url: str,
    reward: Literal["last", "sum"] = "last",
    wait_s: float = 60.0,
    compare_state: bool = True,
) -> Domain:
    """Return the domain of an OpenEnv server.

    An episode's reward is the last one that a step gave, as OpenEnv's own rollouts take it, or the
    sum over the steps. If all sessions are in use, an episode waits for one for `wait_s` seconds.
    Episodes of one task must begin with the same observation, and with `compare_state` in the same
    state. Raises UserError if there is no such server.
    """
    aiohttp = installed("aiohttp", "pip install 'three-domain-grpo[agents]'")
    url = url.rstrip("/")
    try:
        action = requests.get(f"{url}/schema", timeout=START_S).json()["action"]
        action["properties"].pop("metadata", None)
        tools = [{"name": "step", "description": "Act.", "input_schema": action} | action]
        has_mcp = action["properties"].get("type", {}).get("const") == "call_tool"
        if has_mcp:
            asked = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
            answer = requests.post(f"{url}/mcp", json=asked, timeout=START_S)
            tools = answer.json()["result"]["tools"]
        told = requests.get(f"{url}/metadata", timeout=START_S).json()
        about = {
            "environment": f"openenv:{url}",
            "server": told["name"],
            "version": told["version"],
        }
        schemas = tuple(map(_schema, tools))
    except (AttributeError, KeyError, TypeError, ValueError, SSLError) as error:
        hint = "give the address of one, such as openenv:http://localhost:8000"
        raise UserError(f"this is no server of OpenEnv ({describe(error)}); {hint}") from None
    except (requests.ConnectionError, requests.Timeout) as error:
        hint = "start it (uvicorn PACKAGE.server.app:app --port 8000, or its docker image)"
        raise UserError(f"no server answers ({type(error).__name__}); {hint}") from None
    server = SimpleNamespace(
        aiohttp=aiohttp,
        url=url,
        has_mcp=has_mcp,
        adds_up=reward == "sum",
        wait_s=wait_s,
        compare_state=compare_state,
    )
    environment = type("OpenEnv", (Episode,), {"server": server, "schemas": schemas})
    return Domain(name="", environment=environment, about=lambda: about)


def _schema(tool: dict[str, Any]) -> dict[str, Any]:
    given = tool.get("input_schema", tool.get("inputSchema"))  # by the version of MCP's package
    function = {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": {k: v for k, v in given.items() if k not in ("title", "description")},
    }
    return {"type": "function", "function": function}


def _text(seen: Any) -> str:
    """Return as text what the model sees: a text as it is, also if it is the only field, or JSON.

    Of a result of an MCP tool, these are the texts of its content.
    """
    if isinstance(seen, dict) and seen.keys() >= {"content", "structured_content"}:
        return "\n".join(part.get("text") or json.dumps(part) for part in seen["content"])
    if isinstance(seen, dict) and len(seen) == 1:
        seen = next((v for v in seen.values() if isinstance(v, str)), seen)
    return seen if isinstance(seen, str) else json.dumps(seen, ensure_ascii=False) * (seen != {})
