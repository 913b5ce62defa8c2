"""Pages that a command serves to a browser on this machine, or to who has the address' token."""

import hmac
import platform
import secrets
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from pipeline.errors import UserError

PORT = 8765
HERE = ("127.0.0.1", "localhost")
ANYWHERE = ("0.0.0.0", "")  # no names that a browser could ask
MOST_BYTES = 100_000  # of what a person types

Answer = tuple[int, str, str]  # status, media type and text
NO_PAGE: Answer = (404, "text/plain", "there is no such page")


class Page:
    """What a server serves."""

    def get(self, path: str, query: dict[str, list[str]]) -> Answer:
        """Answer GET."""
        return NO_PAGE

    def take(self, words: str) -> None:
        """Take what a person has typed on the page."""


class Handler(BaseHTTPRequestHandler):
    """Answers a browser with `page`.

    Pages of other sites cannot ask: their name stands in the header Host. On an address that other
    machines reach, each request needs the token.
    """

    page: Page
    token = ""

    def handle(self) -> None:
        with suppress(ConnectionError, ValueError):  # a browser that leaves, or no real request
            super().handle()

    def parse_request(self) -> bool:
        """Read the head of a request; refuse a request that may not be answered."""
        if not super().parse_request():
            return False
        if self.token:
            (given,) = parse_qs(urlsplit(self.path).query).get("token", [""])[:1]
            is_allowed = hmac.compare_digest(given.encode(), self.token.encode())
        else:
            is_allowed = urlsplit(f"//{self.headers.get('Host', '')}").hostname in HERE
        if not is_allowed:
            why = "not this address; open the one that the command has printed"
            self.answer(403, "text/plain", why)
        return is_allowed

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        self.answer(*self.page.get(asked.path, parse_qs(asked.query)))

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        # A page of another site cannot send this header.
        if self.headers.get("X-Page") != "1" or not 0 <= size <= MOST_BYTES:
            return self.answer(403, "text/plain", "only the page may send, and no more than fits")
        self.page.take(self.rfile.read(size).decode(errors="replace").strip())
        self.answer(200, "text/plain", "")

    def answer(self, code: int, kind: str, text: str) -> None:
        content = text.encode()
        self.send_response(code)
        for name, value in {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print no line for each request."""


def server_of(page: Page, host: str, port: int | None) -> Any:
    """Return a server of a page; its attribute `address` is for a browser.

    Without a port, it is PORT or a free one. Raises UserError if it cannot listen there.
    """
    token = "" if host in HERE else secrets.token_urlsafe()
    handler = type("PageHandler", (Handler,), {"page": page, "token": token})
    for number in (PORT, 0) if port is None else (port,):
        try:
            server: Any = ThreadingHTTPServer((host, number), handler)
        except (OSError, OverflowError) as error:
            why = error
        else:
            name = platform.node() if host in ANYWHERE else host
            query = f"?token={token}" * bool(token)
            server.address = f"http://{name}:{server.server_port}/{query}"
            return server
    raise UserError(f"watch: got {host}, port {number} ({why}); give another --port or --host")
