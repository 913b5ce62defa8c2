"""Pages that a command serves to a browser on this machine, or to who has the address' token."""

import hmac
import secrets
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from pipeline.errors import UserError

PORT = 8765
HERE = ("127.0.0.1", "localhost", "::1")


class Handler(BaseHTTPRequestHandler):
    """Answers GET with what `get` returns: a status, a media type and a text.

    Other machines' pages cannot ask: their name stands in the header Host. On an address that other
    machines reach, each request needs the token.
    """

    token = ""

    def get(self, path: str, query: dict[str, list[str]]) -> tuple[int, str, str]:
        raise NotImplementedError

    def handle(self) -> None:
        with suppress(ConnectionError):  # a browser that leaves is no fault
            super().handle()

    def do_GET(self) -> None:
        if self.is_allowed():
            asked = urlsplit(self.path)
            self.answer(*self.get(asked.path, parse_qs(asked.query)))

    def is_allowed(self) -> bool:
        """Return whether this request may be answered; if not, refuse it."""
        query = parse_qs(urlsplit(self.path).query)
        if self.token:
            is_allowed = hmac.compare_digest(
                query.get("token", [""])[0].encode(), self.token.encode()
            )
        else:
            is_allowed = urlsplit(f"//{self.headers.get('Host', '')}").hostname in HERE
        if not is_allowed:
            self.answer(
                403, "text/plain", "not this address; open the one that the command has printed"
            )
        return is_allowed

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


def server_of(handler: type[Handler], host: str, port: int | None) -> Any:
    """Return a server, whose attribute `address` is for a browser.

    Without a port, it is PORT or a free one. Raises UserError if the port is taken.
    """
    handler.token = "" if host in HERE else secrets.token_urlsafe()
    server: Any = None
    for number in (PORT, 0) if port is None else (port,):
        try:
            server = server or ThreadingHTTPServer((host, number), handler)
        except OSError as error:
            if number == port:
                why = f"got port {port} on {host} ({error.strerror})"
                raise UserError(f"watch: {why}; give another --port or --host") from None
    query = f"?token={handler.token}" if handler.token else ""
    server.address = f"http://{host}:{server.server_port}/{query}"
    return server
