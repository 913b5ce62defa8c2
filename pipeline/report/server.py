"""Pages that a command serves to a browser; only those who have the token of the address may ask.

Other accounts of a machine reach its 127.0.0.1, so the token is needed there, too.
"""

import hmac
import os
import platform
import secrets
import socket
import stat
import sys
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any
from urllib.parse import parse_qs, urlsplit

from pipeline.common.errors import UserError

PORT = 8765
HERE = ("127.0.0.1", "localhost", "::1")
ANYWHERE = ("0.0.0.0", "", "::")  # no names that a browser could ask
MOST_BYTES = 100_000  # of what a person types
READING_S = 10.0  # the longest time that a request takes to come
WRITING_S = 600.0  # and its answer to go
ADDRESS = ".page-address"  # in a run folder

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
    """Answers a browser with `page`, if the request has the token.

    On this machine's own address, pages of other sites cannot ask even with it: their name stands
    in the header Host.
    """

    page: Page
    token: str
    is_here: bool
    timeout = WRITING_S

    def handle(self) -> None:
        late = threading.Timer(READING_S, self._stop_reading)
        late.daemon = True
        late.start()
        try:
            with suppress(ConnectionError, ValueError):  # a browser that leaves, no real request
                super().handle()
        finally:
            late.cancel()

    def _stop_reading(self) -> None:
        with suppress(OSError):  # the browser has left
            self.connection.shutdown(socket.SHUT_RD)

    def parse_request(self) -> bool:
        """Read the head of a request; refuse a request that may not be answered."""
        if not super().parse_request():
            return False
        (token,) = parse_qs(urlsplit(self.path).query).get("token", [""])[:1]
        is_allowed = hmac.compare_digest(token.encode(), self.token.encode())
        if self.is_here:
            is_allowed &= urlsplit(f"//{self.headers.get('Host', '')}").hostname in HERE
        if not is_allowed:
            self.answer(
                403, "text/plain", "not this address; open the one that the command has printed"
            )
        return is_allowed

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        self.answer(*self.page.get(asked.path, parse_qs(asked.query)))

    def do_POST(self) -> None:
        # A request that was cut off has no length, or fewer bytes.
        size = int(self.headers.get("Content-Length", -1))
        # A page of another site cannot send this header.
        if self.headers.get("X-Page") != "1" or not 0 <= size <= MOST_BYTES:
            return self.answer(403, "text/plain", "only the page may send, and no more than fits")
        words = self.rfile.read(size)
        if len(words) < size:
            return self.answer(400, "text/plain", "this is only a part of what was sent")
        self.page.take(words.decode(errors="replace").strip())
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
    token = secrets.token_urlsafe()
    of_page = {"page": page, "token": token, "is_here": host in HERE}
    handler = type("PageHandler", (Handler,), of_page)
    for number in (PORT, 0) if port is None else (port,):
        try:
            family = socket.getaddrinfo(host or None, 0, flags=socket.AI_PASSIVE)[0][0]
            kind = type("PageServer", (ThreadingHTTPServer,), {"address_family": family})
            server: Any = kind((host, number), handler)
        except (OSError, OverflowError, UnicodeError) as error:
            why = error
        else:
            name = platform.node() if host in ANYWHERE else host
            shown = f"[{name}]" if ":" in name else name
            server.address = f"http://{shown}:{server.server_port}/?token={token}"
            return server
    raise UserError(f"watch: got {host}, port {number} ({why}); give another --port or --host")


def address_in_words(address: str, folder: Path) -> str:
    """Return an address for stdout. Where others may read stdout, a file of `folder` has its token.

    Raises UserError if this file cannot be written.
    """
    mode = os.fstat(1).st_mode if sys.stdout else 0  # of a batch system's file, for example
    if not (stat.S_ISREG(mode) and mode & (stat.S_IRGRP | stat.S_IROTH)):
        return address
    try:
        with NamedTemporaryFile("w", dir=folder, delete=False) as file:  # only the owner reads it
            print(address, file=file)
        Path(file.name).replace(folder / ADDRESS)
    except OSError as error:
        raise UserError(
            f"watch: others may read what this prints, and {folder} takes no file "
            f"({error.strerror}); print to a terminal, or to a file of mode 600"
        ) from None
    return f"{address.partition('?')[0]} (whole, with its token, in {folder / ADDRESS})"
