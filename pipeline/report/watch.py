"""`three-domain-grpo watch RUN`: the report of a run while it goes on, as a page on this machine.

The page is the report's, with the newest episodes and a section about now. The server reads the
files of the run folder and writes nothing. Scripts of the page ask it every two seconds for the
section about now, and for the rest when files have changed. Without `--host`, only this machine
reaches the page; with another host, the address has a token.
"""

import argparse
import hmac
import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import compress
from operator import not_
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from pipeline.errors import UserError
from pipeline.files.console import command
from pipeline.files.layout import METRICS, TIMINGS
from pipeline.files.untrusted import printable
from pipeline.plots import drawing, pictures
from pipeline.report.reader_data import read_episodes
from pipeline.report.tables import data_of
from pipeline.report.write import TEMPLATES, html_of, page_of, render, sections_of
from pipeline.tracking import status as of_run
from pipeline.tracking.run_files import load_run, transcripts_in

PORT = 8765
HERE = ("127.0.0.1", "localhost", "::1")
NEWEST = 4  # steps and evaluations whose episodes the page has
MOST_POINTS = 300  # steps in a picture: browsers and matplotlib are slow with thousands
MAX_EPISODES = 1_000
MAX_CHARACTERS = 2_000_000
WATCHED = (METRICS, TIMINGS, "results.json", "curriculum.json", "config.yaml")
CURVES = ("learning_curves", "time_and_memory")
LEAST_PAUSE_S = 1.0


class LivePage:
    """The page of a run, made again when the run's files have changed.

    `version` grows with each page. Raises UserError if the folder holds no run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: list[tuple[float, int]] = []
        self._status: of_run.Status
        self._trouble = ""
        self.version = 0
        self.html = ""
        self._make({})

    def _make(self, functions: Any) -> None:
        self._files = self._seen()
        run = load_run(self._folder)
        self._status = of_run.status_of(run)
        every = len(run.train) // MOST_POINTS or 1
        thinned = replace(run, train=run.train[::every], timings=run.timings[::every])
        figures = drawing.draw(functions, thinned)
        meanings = run.results.get("reward_parts")
        keys = [*transcripts_in(self._folder).items()][-NEWEST:]
        reader = read_episodes(
            self._folder,
            run.success_threshold,
            meanings,
            MAX_EPISODES,
            MAX_CHARACTERS,
            files=dict(keys),
        )
        title = self._folder.resolve().name
        text = printable(render("run.md.jinja", drawn=figures, title=title, **data_of(run)))
        sections = sections_of(text)
        first = [*self.now(), _curves(sections)]
        sections = [section for section in [*first, *sections] if section["blocks"]]
        self.html = page_of(title, sections, figures, reader, self.version + 1)
        self.version += 1

    def _seen(self) -> list[tuple[float, int]]:
        found = [self._folder / name for name in WATCHED]
        stats = [path.stat() for path in found if path.is_file()]
        return [(stat.st_mtime, stat.st_size) for stat in stats]

    def now(self) -> list[dict[str, Any]]:
        """Return the section about now, with what the ranks do at this moment."""
        status = of_run.with_ranks(self._status)
        text = render(
            "now.md.jinja",
            status=status,
            trouble=self._trouble,
            place=of_run.place_of(status),
            domains=of_run.domains_of(status),
            ranks=of_run.ranks_of(status),
            facts=of_run.facts_of(status),
        )
        return sections_of(printable(text))

    def follow(self) -> None:
        """Make the page again and again, until the process ends."""
        while True:
            begun = time.monotonic()
            try:
                if self.version == 1 or self._seen() != self._files:
                    self._make(pictures.OF_RUN)
                self._trouble = ""
            except (OSError, UserError) as error:  # the folder may be gone, or half copied
                self._trouble = str(error)
            time.sleep(max(LEAST_PAUSE_S, 5 * (time.monotonic() - begun)))


def _curves(sections: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Take the CURVES out of the sections of a report; return them as a section."""
    curves = list[Any]()
    for section in sections:
        is_curve = [kind == "picture" and of["name"] in CURVES for kind, of in section["blocks"]]
        curves += compress(section["blocks"], is_curve)
        section["blocks"] = [*compress(section["blocks"], map(not_, is_curve))]
    return {"title": "Curves", "anchor": "curves", "blocks": curves}


class Handler(BaseHTTPRequestHandler):
    """Answers `/` (the page) and `/now` (JSON: `version`, and the section about now as HTML)."""

    page: LivePage
    token = ""

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        if not self._is_allowed(parse_qs(asked.query)):
            self._answer(403, "text/plain", "watch: the address needs its token")
        elif asked.path == "/":
            self._answer(200, "text/html", self.page.html)
        elif asked.path == "/now":
            html = html_of("sections.html", sections=self.page.now())
            found = {"version": self.page.version, "html": html}
            self._answer(200, "application/json", json.dumps(found))
        else:
            self._answer(404, "text/plain", "watch: there is no such page")

    def _is_allowed(self, query: dict[str, list[str]]) -> bool:
        if self.token:
            return hmac.compare_digest(query.get("token", [""])[0], self.token)
        # A page of another site could name this server; then its name would be here.
        return urlsplit(f"//{self.headers.get('Host', '')}").hostname in HERE

    def _answer(self, code: int, kind: str, text: str) -> None:
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


def serve(folder: Path, host: str, port: int | None) -> ThreadingHTTPServer:
    """Return the server of a run's page; without a `port`, on PORT or a free one.

    The attribute `address` is where a browser finds the page. Raises UserError if there is no run,
    or the port is taken.
    """
    page = LivePage(folder)
    token = "" if host in HERE else secrets.token_urlsafe()
    handler = type("Handler", (Handler,), {"page": page, "token": token})
    server: Any = None
    for number in (PORT, 0) if port is None else (port,):
        try:
            server = server or ThreadingHTTPServer((host, number), handler)
        except OSError as error:
            if number == port:
                why = f"got port {port} on {host} ({error.strerror})"
                raise UserError(f"watch: {why}; give another --port or --host") from None
    threading.Thread(target=page.follow, daemon=True).start()
    server.address = f"http://{host}:{server.server_port}/{token and f'?token={token}'}"
    return server


def main(arguments: Sequence[str]) -> int:
    """Run `watch RUN`; raises UserError for a mistake of the user."""
    parser = argparse.ArgumentParser(prog=command("watch"), description=__doc__)
    parser.add_argument("folder", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--port", type=int, help=f"[{PORT}, or a free one]")
    parser.add_argument("--host", default=HERE[0], help=f"address to listen on [{HERE[0]}]")
    parser.add_argument("--parent", type=int, metavar="PID", help="end with this process")
    options = parser.parse_args(arguments)
    server: Any = serve(options.folder, options.host, options.port)
    print(
        f"watch {options.folder} in a browser: {server.address} (Ctrl-C ends the page)", flush=True
    )
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        while options.parent in (None, os.getppid()):
            time.sleep(LEAST_PAUSE_S)
    return 0


@contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Serve the page of a run in another process, as long as the context lasts."""
    arguments = [str(folder.resolve()), "--parent", str(os.getpid())]
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeline", "watch", *arguments], cwd=TEMPLATES.parents[2]
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait()
