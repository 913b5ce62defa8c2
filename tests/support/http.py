"""What the small HTTP servers of the tests share."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import TypeVar

Server = TypeVar("Server", bound=ThreadingHTTPServer)


class Handler(BaseHTTPRequestHandler):
    """Answers with one body, and says nothing on the terminal."""

    def log_message(self, *_: object) -> None:
        pass

    def body(self) -> bytes:
        """What the client has sent."""
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def send(self, text: str, status: int = 200, **headers: str) -> None:
        """Headers are named with underscores in place of hyphens; empty ones are not sent."""
        body = text.encode()
        self.send_response(status)
        for name, value in {**headers, "Content_Length": str(len(body))}.items():
            if value:
                self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def running(server: Server) -> Iterator[Server]:
    """Serves until the block ends."""
    with server:
        thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
