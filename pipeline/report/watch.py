"""`three-domain-grpo watch RUN`: the report of a run while it goes on, as a page on this machine.

The page is the report's, with the newest episodes and a section about now. The server reads the
files of the run folder and writes nothing. Scripts of the page ask it every two seconds for the
section about now, and for the rest when files have changed. Without `--host`, only this machine
reaches the page; with another host, the address has a token.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.files.console import command
from pipeline.files.layout import METRICS, TIMINGS, WARNINGS
from pipeline.files.untrusted import printable
from pipeline.plots import drawing, pictures
from pipeline.report.reader_data import read_episodes
from pipeline.report.server import HERE, NO_PAGE, PORT, Answer, Page, server_of
from pipeline.report.status import Status, status_of, variables_of, with_ranks
from pipeline.report.tables import data_of
from pipeline.report.write import TEMPLATES, filled, page_of, render, sections_of, svgs_of
from pipeline.tracking.run_files import RunData, load_run, transcripts_in

NEWEST = 4  # steps and evaluations whose episodes the page has
MOST_POINTS = 300  # steps in a picture: browsers and matplotlib are slow with thousands
MAX_EPISODES = 1_000
MAX_CHARACTERS = 2_000_000
FILES = (METRICS, TIMINGS, WARNINGS, "results.json", "curriculum.json", "config.yaml")
PAUSE_S = 1.0

Seen = list[tuple[float, int]]  # time and size of each file


class LivePage(Page):
    """The page of a run, made again when a browser asks for news and the run's files have changed.

    `version` grows with each page. Raises UserError if the folder holds no run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made_of: Seen | None = None
        self._drawn_of: Seen | None = None
        self._svgs: dict[str, Any] = {}
        self._next_picture = time.monotonic() + PAUSE_S  # the first page is here at once
        self._status: Status = {}
        self._trouble = ""
        self._is_asked = threading.Event()
        self.html = ""
        self._make()

    def get(self, path: str, query: dict[str, list[str]]) -> Answer:
        """Answer `/` and `/now` (JSON: `version`, and the section about now as HTML)."""
        self._is_asked.set()
        if path == "/":
            return 200, "text/html", self.html
        if path != "/now":
            return NO_PAGE
        html = filled("sections.html", sections=self._now())
        return 200, "application/json", json.dumps({"version": self.version, "html": html})

    def renew(self) -> None:
        """Wait until a browser asks, at most PAUSE_S; then make the page again if files changed."""
        if self._is_asked.wait(PAUSE_S):
            self._is_asked.clear()
            try:
                self._make()
                self._trouble = ""
            except Exception as error:  # the folder may be gone or half copied: the page says so
                self._trouble = f"{type(error).__name__}: {error}"

    def _now(self) -> list[dict[str, Any]]:
        found = variables_of(with_ranks(self._status))
        return sections_of(printable(render("now.md.jinja", trouble=self._trouble, **found)))

    def _make(self) -> None:
        """Make the page again if files have changed.

        Pictures take seconds: the page has its texts first, and then pictures, which are drawn
        again after ten times as long.
        """
        seen = self._seen()
        if seen != self._made_of:
            self._write(load_run(self._folder))
            self._made_of = seen
        if seen != self._drawn_of and time.monotonic() >= self._next_picture:
            begun = time.monotonic()
            self._drawn_of = seen
            run = load_run(self._folder)
            self._draw(run)
            self._next_picture = time.monotonic() + 10 * (time.monotonic() - begun)
            self._write(run)

    def _write(self, run: RunData) -> None:
        self._status = status_of(run)
        data = data_of(run, live=True)
        text = printable(render("run.md.jinja", drawn=self._svgs, **data))
        reader = read_episodes(
            self._folder,
            run.success_threshold,
            run.results.get("reward_parts"),
            MAX_EPISODES,
            MAX_CHARACTERS,
            files=dict([*transcripts_in(self._folder).items()][-NEWEST:]),
        )
        self.version = time.time_ns() // 10**6  # other than those of an earlier server
        sections = [*self._now(), *sections_of(text)]
        self.html = page_of(data["title"], sections, self._svgs, reader, self.version)

    def _draw(self, run: RunData) -> None:
        every = len(run.train) // MOST_POINTS or 1
        thinned = replace(run, train=run.train[::every], timings=run.timings[::every])
        self._svgs = svgs_of(drawing.draw(pictures.OF_RUN, thinned))

    def _seen(self) -> Seen:
        found = [self._folder / name for name in FILES]
        stats = [path.stat() for path in found if path.is_file()]
        return [(stat.st_mtime, stat.st_size) for stat in stats]


def main(arguments: Sequence[str]) -> int:
    """Run `watch RUN`; raises UserError for a mistake of the user."""
    parser = argparse.ArgumentParser(prog=command("watch"), description=__doc__)
    parser.add_argument("folder", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--port", type=int, help=f"[{PORT}, or a free one]")
    parser.add_argument("--host", default=HERE[0], help=f"address to listen on [{HERE[0]}]")
    parser.add_argument("--parent", type=int, metavar="PID", help="end with this process")
    options = parser.parse_args(arguments)
    page = LivePage(options.folder)
    server = server_of(page, options.host, options.port)
    end = "Ctrl-C ends the page" if options.parent is None else "as long as the run lasts"
    print(f"watch {options.folder} in a browser: {server.address} ({end})", flush=True)
    with server, suppress(KeyboardInterrupt):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        while options.parent in (None, os.getppid()):
            page.renew()
    return 0


@contextmanager
def page_beside(folder: Path) -> Iterator[None]:
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
