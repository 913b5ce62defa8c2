"""MCP: the tools of a server, which is a command (standard input and output) or a URL.

Tasks and rewards come from the settings `tasks` and `reward_funcs`. An episode's session begins at
its first call of a tool. One asyncio task must open and close a client of the package `mcp`, so
each session is a task in the environments' event loop.
"""

import asyncio
import os
import shlex
import weakref
from hashlib import sha256
from tempfile import TemporaryFile
from typing import Any

from pipeline.common.console import installed
from pipeline.common.errors import UserError
from pipeline.common.untrusted import one_line
from pipeline.environments.agent_process import (
    GUARDED,
    KEPT_ERRORS,
    SHOWN_ERRORS,
    check_command,
    files_of,
)
from pipeline.environments.calls import run_coroutine
from pipeline.environments.domains import Domain
from pipeline.environments.faults import Outage, describe
from pipeline.environments.tools import ToolError

INSTALL = "pip install 'three-domain-grpo[mcp]'"
START_S = 60.0  # for a server to start and to list its tools before the run
# How the client's errors begin that no server says about a call: it is gone, or answers 503, or 404
# to the session.
OUTAGES = ("Connection closed", "SSE stream", "Server returned an error response", "Session")


class _Session:
    """A session with a server, which must have the tools of the schemas, if there are any."""

    def __init__(self, server: str, schemas: list[dict[str, Any]]) -> None:
        self.server = server
        self.over = asyncio.Event()
        self.errors = TemporaryFile()  # noqa: SIM115  # as long as the session
        self.begun: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self._hold(schemas))

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Return a tool's result. Raises ToolError for an error of the server, or Outage."""
        client, _ = await asyncio.shield(self.begun)
        os.ftruncate(self.errors.fileno(), 0)  # what a server logs shall not fill the disk
        try:
            return await client.call_tool(name, arguments)
        except Exception as error:
            is_said = isinstance(error, installed("mcp", INSTALL).MCPError)
            if is_said and not str(error).startswith(OUTAGES):
                raise ToolError(str(error)) from None
            await self.end()
            raise self._outage(error) from None

    async def end(self) -> None:
        self.over.set()
        if not self.begun.done():
            self.task.cancel()
        await asyncio.wait([self.task])

    async def _hold(self, schemas: list[dict[str, Any]]) -> None:
        sdk = installed("mcp", INSTALL)
        transport: Any = self.server
        if not is_url(self.server):
            words = ["-c", GUARDED, "1", *shlex.split(self.server)]
            process = sdk.StdioServerParameters(command="/bin/sh", args=words, env={**os.environ})
            transport = sdk.stdio_client(process, errlog=self.errors)
        try:
            # In another mode, a server of version 2026-07-28 has no sessions.
            connected = sdk.Client(transport, mode="legacy")
            async with asyncio.timeout(START_S) as limit, connected as client:
                found = await _schemas_of(client)
                if schemas and found != schemas:
                    raise ValueError("its tools are others than before the run")
                limit.reschedule(None)
                self.begun.set_result((client, found))
                await self.over.wait()
        except Exception as error:
            if not self.begun.done():
                self.begun.set_exception(self._outage(error))

    def _outage(self, error: Exception) -> Outage:
        file = self.errors.fileno()  # whose position is the server's, too
        end = os.pread(file, KEPT_ERRORS, max(0, os.fstat(file).st_size - KEPT_ERRORS))
        said = one_line(end.strip(b"\0").decode(errors="replace"))[-SHOWN_ERRORS:]
        return Outage(f"{self.server}: {describe(error)}" + f": {said}" * bool(said))


async def _schemas_of(client: Any) -> list[dict[str, Any]]:
    """Return the schemas of all tools, in the order of their names."""
    page = await client.list_tools()
    tools = list(page.tools)
    while page.next_cursor:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.input_schema,
            },
        }
        for tool in sorted(tools, key=lambda tool: tool.name)
    ]


async def _listed(server: str) -> tuple[str, list[dict[str, Any]]]:
    """Return name and version of a server, and the schemas of its tools. Raises UserError."""
    session = _Session(server, [])
    try:
        client, schemas = await session.begun
        return f"{client.server_info.name} {client.server_info.version}".strip(), schemas
    except Outage as error:
        raise UserError(
            f"the server does not list its tools within {START_S:g} s ({error}); "
            + ("start it, or mend its URL" if is_url(server) else "mend the command or its file")
        ) from None
    finally:
        await session.end()


def is_url(server: str) -> bool:
    return server.startswith(("http://", "https://"))


def mcp(server: str, shared: bool = False) -> Domain:
    """Return a domain with the tools of a server: a command, or a URL of streamable HTTP.

    Each episode has a session of its own: a process of the command, or a session at the URL. A
    `shared` server has one session for all episodes of a rank. Raises UserError if the server does
    not list its tools.
    """
    installed("mcp", INSTALL)
    if not is_url(server):
        hint = "give a command, such as 'mcp:python server.py', or mcp:http://HOST:PORT/mcp"
        check_command("that is a command", server, hint)
    about, found = run_coroutine(_listed(server))
    if not found:
        raise UserError("the server has no tools; give it one, or take the server out")

    class Server:
        schemas = found
        uses_random_state = False
        session: _Session | None = None  # of the class if it is shared

        def reset(self) -> None: ...

        async def call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
            if all(name != schema["function"]["name"] for schema in found):
                raise ToolError(f"unknown tool {name}")
            owner = Server if shared else self
            if owner.session is None or (shared and owner.session.task.done()):
                owner.session = _Session(server, found)
                loop = owner.session.begun.get_loop()
                # No call is made to close an episode of a domain that hangs, or after a deadline.
                weakref.finalize(owner, loop.call_soon_threadsafe, owner.session.over.set)
            result = await owner.session.call(name, arguments)
            texts = (getattr(c, "text", f"[{c.type}, which is not shown]") for c in result.content)
            return "\n".join(texts), result.is_error

        async def close(self) -> None:
            if self.session is not None and not shared:
                await self.session.end()

    # Ranks, and a run and its checkpoint, must have the same tools.
    tools = [repr(found).encode(), *(path.read_bytes() for path in files_of(server))]
    digest = sha256(b"".join(tools)).hexdigest()[:12]
    return Domain(
        name="",
        environment=Server,
        about=lambda: {"environment": f"mcp:{server}", "server": about, "tools": digest},
        is_process=not (is_url(server) or shared),
    )
