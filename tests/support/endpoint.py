"""A small server of OpenAI's chat protocol, which can be slow, wrong, busy or gone."""

import json
import ssl
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Event, Lock
from typing import Any

from pipeline.data.rng import stream_key
from tests.support import http

Answer = Callable[[dict[str, Any]], dict[str, Any] | str]
USELESS = {"choices": []}
CERTIFICATE = Path(__file__).with_name("localhost.pem")  # signed by itself, with its key


class ChatServer(ThreadingHTTPServer):
    """Answers with `answer(body)`, a text or a message.

    A first entry of `faults` is used up instead: a status, a pair of a status and Retry-After, a
    text as the body, "drop" to close the connection, "gzip" for a body that is not what its header
    says, or an Event to wait for. `paid` counts the
    requests that got a message, by their body.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, answer: Answer, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.answer, self.faults, self.lock = answer, list[Any](), Lock()
        self.bodies: list[dict[str, Any]] = []
        self.paths: set[str] = set()
        self.keys: set[str] = set()
        self.paid = Counter[str]()
        self.refusal = '{"error": "as the test wants"}'

    def handle_error(self, *_: Any) -> None:
        pass  # a client that is gone


class SafeServer(ChatServer):
    """Speaks TLS alone, with a certificate that signs itself."""

    def __init__(self, answer: Answer, port: int = 0) -> None:
        super().__init__(answer, port)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(CERTIFICATE)
        # With the handshake in the handler's thread, the main thread serves on.
        self.socket = context.wrap_socket(
            self.socket, server_side=True, do_handshake_on_connect=False
        )
        self.url = self.url.replace("http:", "https:")


class Handler(http.Handler):
    server: ChatServer
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # one packet for headers and body

    def do_POST(self) -> None:
        server = self.server
        text = self.body().decode()
        body = json.loads(text)
        with server.lock:
            server.bodies.append(body)
            server.paths.add(self.path)
            server.keys.add(self.headers.get("Authorization", ""))
            fault = server.faults.pop(0) if server.faults else None
        if isinstance(fault, Event):
            fault.wait(10)
        elif fault == "drop":
            self.close_connection = True
            return
        elif fault == "gzip":
            return self.send("plain", Content_Encoding="gzip")
        elif isinstance(fault, str):
            return self.send(fault)
        elif fault is not None:
            status, retry_after = fault if isinstance(fault, tuple) else (fault, "")
            return self.send(server.refusal, status, Retry_After=retry_after)
        said = server.answer(body)
        message = {"content": said} if isinstance(said, str) else said
        with server.lock:
            server.paid[text] += 1
        usage = {"total_tokens": 10}
        self.send(json.dumps({"choices": [{"message": message}], "usage": usage}))


def serving(
    answer: Answer = lambda body: "Yes.", port: int = 0, kind: type[ChatServer] = ChatServer
) -> AbstractContextManager[ChatServer]:
    return http.running(kind(answer, port))


def calling(name: str, number: int = 1, **arguments: Any) -> dict[str, Any]:
    """A message that calls a tool of the customer."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": f"call-{number}", "type": "function", "function": function}
    return {"content": None, "tool_calls": [call]}


def seed_of(domain: str, task_id: str, trial: int = 0, seed: int = 1) -> int:
    """The seed of the requests for an agent's trial in the evaluation of a run."""
    return stream_key(seed, "evaluation", domain, task_id, trial) % 2**31


def agent_of(scripts: Mapping[int, Sequence[dict[str, Any]]]) -> Answer:
    """An agent that says given messages in their order; `scripts` are by `seed_of`."""

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        said = sum(message["role"] == "assistant" for message in body["messages"])
        message = scripts[body["seed"]][said]
        calls = [
            {
                "id": f"id-{number}",
                "type": "function",
                "function": {**of, "arguments": json.dumps(of["arguments"])},
            }
            for number, of in enumerate(call["function"] for call in message.get("tool_calls", ()))
        ]
        return {"content": message["content"], "tool_calls": calls}

    return answer
