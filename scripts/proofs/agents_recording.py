"""A proxy that keeps the requests of agents and the answers, for `agents.py`.

Recorded requests are played by `tests/rollout/address/test_recorded_clients.py`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

# Headers that a server may read; others name machines and versions.
HEADERS = (
    *("accept", "content-type", "authorization", "x-api-key", "anthropic-version"),
    *("anthropic-beta", "x-stainless-retry-count"),
)
LONGEST = 600  # characters of a system prompt; what is longer is cut
KEY = "KEY"  # in place of an episode's own


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A request and its answer. `path` begins behind the key."""

    path: str
    headers: dict[str, str]
    body: Any
    status: int
    kind: str  # the answer's content type
    answer: str

    def recorded(self) -> dict[str, Any]:
        """The request as a test plays it."""
        return {"path": self.path, "headers": self.headers, "body": shortened(self.body)}


def shortened(body: Any) -> Any:
    """Cut system prompts short, which smolagents writes at length."""
    for message in body.get("messages", ()):
        if message["role"] == "system" and isinstance(message["content"], list):
            for part in message["content"]:
                part["text"] = part["text"][:LONGEST]
        elif message["role"] == "system":
            message["content"] = message["content"][:LONGEST]
    return body


class Recorder(ThreadingHTTPServer):
    """Passes requests on to the base URL `real`, and keeps the exchanges in their order."""

    daemon_threads = True

    def __init__(self, real: str, exchanges: list[Exchange]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.real = urlsplit(real)
        self.url = self.real._replace(netloc=f"127.0.0.1:{self.server_port}").geturl()
        self.exchanges = exchanges
        self.key = self.real.path.split("/")[1]


class Handler(BaseHTTPRequestHandler):
    server: Recorder
    protocol_version = "HTTP/1.1"

    def pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        connection = HTTPConnection(self.server.real.netloc, timeout=60)
        headers = {name: value for name, value in self.headers.items() if name.lower() in HEADERS}
        connection.request(self.command, self.path, body, headers)
        reply = connection.getresponse()
        answer = reply.read()
        connection.close()
        kind = reply.headers.get("Content-Type", "")
        base = self.server.real.path.removesuffix("/v1")
        self.server.exchanges.append(
            Exchange(
                path=self.path.removeprefix(base),
                headers={
                    name.lower(): value.replace(self.server.key, KEY)
                    for name, value in headers.items()
                },
                body=json.loads(body) if body else None,
                status=reply.status,
                kind=kind,
                answer=answer.decode(),
            )
        )
        self.send_response(reply.status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_POST = do_GET = pass_on

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""


@contextmanager
def recording(exchanges: list[Exchange], real: str) -> Iterator[str]:
    """The address of a proxy in front of the base URL `real`; `exchanges` gets what it passes."""
    recorder = Recorder(real, exchanges)
    Thread(target=recorder.serve_forever, daemon=True).start()
    try:
        yield recorder.url
    finally:
        recorder.shutdown()
        recorder.server_close()


def fault_of(exchange: Exchange) -> str:
    """Return why an answer is not what its client's own types say; "" if it is."""
    from pydantic import ValidationError

    if exchange.status != 200:
        return f"{exchange.path}: status {exchange.status}: {exchange.answer[:200]}"
    whole, event = types_of(exchange.path)
    try:
        if "event-stream" not in exchange.kind:
            whole.validate_json(exchange.answer)
            return ""
        for data in events_of(exchange.answer):
            event.validate_json(data)
        return ""
    except ValidationError as error:
        by_type = defaultdict[Any, list[str]](list)  # an event is tried with every type
        for one in error.errors():
            by_type[one["loc"][:1]].append(f"{'.'.join(map(str, one['loc']))}: {one['msg']}")
        closest = [lines for lines in by_type.values() if not any(".type:" in x for x in lines)]
        return f"{exchange.path}: {'; '.join(min(closest, key=len, default=['another type'])[:3])}"


def events_of(text: str) -> Iterator[str]:
    """The data of server-sent events that a client reads as JSON."""
    for line in text.splitlines():
        data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
        if data and data != "[DONE]" and '"ping"' not in data:
            yield data


def types_of(path: str) -> tuple[Any, Any]:
    """The types of a whole answer and of an event, as the official clients have them."""
    from anthropic.types import Message, RawMessageStreamEvent
    from openai.types.chat import ChatCompletion, ChatCompletionChunk
    from openai.types.responses import Response, ResponseStreamEvent
    from pydantic import TypeAdapter

    kinds: dict[str, tuple[Any, Any]] = {
        "chat/completions": (ChatCompletion, ChatCompletionChunk),
        "messages": (Message, RawMessageStreamEvent),
        "responses": (Response, ResponseStreamEvent),
    }
    whole, event = kinds[urlsplit(path).path.removeprefix("/v1/")]
    return TypeAdapter(whole), TypeAdapter(event)
