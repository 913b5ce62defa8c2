"""Servers of the official package of MCP, for `scripts/proofs/environments.py --only mcp mcp_http`.

The policy is a tiny model after a warm start from conversations in which a till is opened and then
counted. Runs on 1 and 2 ranks, and one that is killed, play alike with a process for each episode,
and with sessions at one address. What an episode takes out of the till is missing in its own only.
No process is left.
"""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.proofs.agents import Row

LIMIT_S = 60.0  # until a server listens
# The state belongs to a session: of a process, there is one, and it has no number.
SERVER = '''
import sys

from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("till")
taken = {}

@server.tool()
def take(coins: int, context: Context) -> str:
    """Take coins out of the till."""
    session = (context.headers or {}).get("mcp-session-id")
    taken[session] = taken.get(session, 0) + coins
    return str(20 - taken[session])

server.run(*sys.argv[1:2], **({"port": int(sys.argv[2])} if sys.argv[2:] else {}))
'''


def left(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """Return whether the last message says how many coins are left."""
    return [float(text.split() == [right]) for text, right in zip(completions, answer, strict=True)]


def mcp(folder: Path, options: Any) -> Iterator[Row]:
    """A process for each episode."""
    file = folder / "till_server.py"
    file.write_text(SERVER, encoding="utf-8")
    yield from trained("MCP", f"{sys.executable} {file}", folder)
    yield none_left(file)


def mcp_http(folder: Path, options: Any) -> Iterator[Row]:
    """A session at one address for each episode."""
    file = folder / "till_over_http.py"
    file.write_text(SERVER, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (folder / "till.log").open("wb") as log:
        command = [sys.executable, str(file), "streamable-http", str(port)]
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        until = time.monotonic() + LIMIT_S
        while socket.socket().connect_ex(("127.0.0.1", port)) and time.monotonic() < until:
            time.sleep(0.1)
        yield from trained("MCP over HTTP", f"http://127.0.0.1:{port}/mcp", folder)
    finally:
        server.kill()
        server.wait()


def trained(name: str, server: str, folder: Path) -> Iterator[Row]:
    from scripts.proofs.environments import plays_alike

    tasks, shown = folder / "till.jsonl", folder / "till_shown.jsonl"
    draws = [random.Random(number) for number in range(300)]
    rows = [(own.randint(1, 3), own.randint(1, 3), number) for number, own in enumerate(draws)]
    questions = [question(*row) for row in rows]
    tasks.write_text("".join(f"{json.dumps(row)}\n" for row in questions), encoding="utf-8")
    lines = [json.dumps(conversation(*row)) for row in rows]
    shown.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    settings = {"tasks": tasks, "tools": f"mcp:{server}", "demonstrations": shown}
    flags = ["--domains", "till", "--warm-start-steps", "60"]
    flags += ["--reward-funcs", "scripts.proofs.environments_mcp:left"]
    for setting, value in settings.items():
        flags += [f"--{setting}", json.dumps({"till": str(value)})]
    yield from plays_alike(name, flags, folder)


def question(first: int, second: int, number: int) -> dict[str, Any]:
    prompt = f"guest {number} takes {first} and then {second}"
    return {"prompt": prompt, "answer": str(20 - first - second)}


def conversation(first: int, second: int, number: int) -> dict[str, Any]:
    row = question(first, second, number)
    messages: list[dict[str, Any]] = [{"role": "user", "content": row["prompt"]}]
    for coins, rest in ((first, 20 - first), (second, 20 - first - second)):
        call = {"function": {"name": "take", "arguments": {"coins": coins}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "name": "take", "content": str(rest)})
    return {"messages": [*messages, {"role": "assistant", "content": row["answer"]}]}


def none_left(file: Path) -> Row:
    """Whether all processes of a server have ended, also those of the killed ranks."""
    import psutil

    time.sleep(2)
    words = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    number = sum(str(file) in line for line in words)
    return Row("MCP: processes left by all runs", str(number), number == 0)
