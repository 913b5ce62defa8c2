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
from itertools import compress
from operator import not_
from pathlib import Path
from typing import Any

from pipeline.files.console import command
from pipeline.files.layout import METRICS, TIMINGS
from pipeline.files.untrusted import printable
from pipeline.plots import drawing, pictures
from pipeline.report import status as of_run
from pipeline.report.reader_data import read_episodes
from pipeline.report.server import HERE, PORT, Handler, server_of
from pipeline.report.tables import data_of
from pipeline.report.write import TEMPLATES, html_of, page_of, render, sections_of, svgs_of
from pipeline.tracking.run_files import RunData, load_run, transcripts_in

NEWEST = 4  # steps and evaluations whose episodes the page has
MOST_POINTS = 300  # steps in a picture: browsers and matplotlib are slow with thousands
MAX_EPISODES = 1_000
MAX_CHARACTERS = 2_000_000
WATCHED = (METRICS, TIMINGS, "results.json", "curriculum.json", "config.yaml")
CURVES = ("learning_curves", "time_and_memory")
PAUSE_S = 1.0


class LivePage:
    """The page of a run, made again when the run's files have changed.

    `version` grows with each page. Raises UserError if the folder holds no run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: list[tuple[float, int]] = []
        self._svgs: dict[str, Any] = {}
        self._status: of_run.Status
        self._trouble = ""
        self.is_over = threading.Event()  # ends `follow`
        self.version = 0
        self.html = ""
        self._make(load_run(folder))

    def _make(self, run: RunData) -> None:
        files = self._seen()
        self._status = of_run.status_of(run)
        meanings = run.results.get("reward_parts")
        reader = read_episodes(
            self._folder,
            run.success_threshold,
            meanings,
            MAX_EPISODES,
            MAX_CHARACTERS,
            files=dict([*transcripts_in(self._folder).items()][-NEWEST:]),
        )
        title = self._folder.resolve().name
        text = printable(render("run.md.jinja", drawn=self._svgs, title=title, **data_of(run)))
        sections = sections_of(text)
        first = [*self.now(), _curves(sections)]
        sections = [section for section in [*first, *sections] if section["blocks"]]
        self.html = page_of(title, sections, self._svgs, reader, self.version + 1)
        self.version += 1
        self._files = files

    def _draw(self, run: RunData) -> None:
        every = len(run.train) // MOST_POINTS or 1
        thinned = replace(run, train=run.train[::every], timings=run.timings[::every])
        self._svgs = svgs_of(drawing.draw(pictures.OF_RUN, thinned))

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
        """Make the page again when files have changed, until `is_over`.

        Pictures, which take seconds, are drawn again after ten times as long.
        """
        drawn_of = list[tuple[float, int]]()
        next_picture = 0.0
        while not self.is_over.wait(PAUSE_S):
            try:
                seen = self._seen()
                is_due = seen != drawn_of and time.monotonic() >= next_picture
                if is_due or seen != self._files:
                    begun = time.monotonic()
                    run = load_run(self._folder)
                    if is_due:
                        self._draw(run)
                        drawn_of = seen
                        next_picture = time.monotonic() + 10 * (time.monotonic() - begun)
                    self._make(run)
                    del run
                self._trouble = ""
            except Exception as error:  # the folder may be gone or half copied: the page says so
                self._trouble = f"{type(error).__name__}: {error}"


def _curves(sections: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Take the CURVES out of the sections of a report; return them as a section."""
    curves = list[Any]()
    for section in sections:
        is_curve = [kind == "picture" and of["name"] in CURVES for kind, of in section["blocks"]]
        curves += compress(section["blocks"], is_curve)
        section["blocks"] = [*compress(section["blocks"], map(not_, is_curve))]
    return {"title": "Curves", "anchor": "curves", "blocks": curves}


def serve(folder: Path, host: str, port: int | None) -> Any:
    """Return the server of a run's page, which its thread `follower` makes again.

    Raises UserError if there is no run, or the port is taken.
    """
    page = LivePage(folder)

    class PageHandler(Handler):
        """Answers `/` and `/now` (JSON: `version`, and the section about now as HTML)."""

        def get(self, path: str, query: dict[str, list[str]]) -> tuple[int, str, str]:
            if path == "/":
                return 200, "text/html", page.html
            if path == "/now":
                html = html_of("sections.html", sections=page.now())
                found = {"version": page.version, "html": html}
                return 200, "application/json", json.dumps(found)
            return 404, "text/plain", "there is no such page"

    server = server_of(PageHandler, host, port)
    server.follower = threading.Thread(target=page.follow, daemon=True)
    server.follower.start()
    server.page = page
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
    end = "Ctrl-C ends the page" if options.parent is None else "as long as the run lasts"
    print(f"watch {options.folder} in a browser: {server.address} ({end})", flush=True)
    with server, suppress(KeyboardInterrupt):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        while options.parent in (None, os.getppid()):
            time.sleep(PAUSE_S)
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
