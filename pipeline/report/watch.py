"""`three-domain-grpo watch RUN`: the report of a run while it goes on, as a page on this machine.

The page is the report's, with the newest episodes and a section about now. The server reads the
files of the run folder and writes nothing. Scripts of the page ask it every two seconds for the
section about now, and for the rest when files have changed. Only who has the token of the address
can ask, and only on this machine without `--host`.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

from pipeline.common.console import command
from pipeline.common.layout import METRICS, TIMINGS, WARNINGS
from pipeline.common.untrusted import printable
from pipeline.config.cli import Parser
from pipeline.report.page_episodes import read_episodes
from pipeline.report.plots import drawing, pictures
from pipeline.report.run_files import RunData, load_run, read_settings, reading, transcripts_in
from pipeline.report.server import HERE, NO_PAGE, PORT, Answer, Page, address_in_words, server_of
from pipeline.report.status import Status, status_of, variables_of, with_ranks
from pipeline.report.tables import report_data
from pipeline.report.write import TEMPLATES, filled, page_of, render, sections_of, svgs_of

NEWEST = 4  # steps and evaluations whose episodes the page has
MOST_STEPS = 100  # of a run that does not go on
MOST_POINTS = 300  # steps in a picture: browsers and matplotlib are slow with thousands
MAX_EPISODES = 1_000
MAX_CHARACTERS = 2_000_000
FILES = (METRICS, TIMINGS, WARNINGS, "results.json", "curriculum.json", "config.yaml")
PAUSE_S = 1.0

Seen = list[tuple[float, int]]  # time and size of each file


class LivePage(Page):
    """The page of a run, made again when a browser asks and the run's files have changed.

    `version` grows with each page. Raises UserError if the folder holds no run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made_of: Seen | None = None
        self._drawn_of: Seen | None = None
        self._svgs: dict[str, Any] = {}
        self._drawn = ""  # the steps that the pictures show
        self._next_picture = time.monotonic() + PAUSE_S  # the first page is here at once
        self._status: Status = {}
        self._trouble: dict[str, str] = {}
        self._is_asked = threading.Event()
        self._lock = threading.Lock()
        self.html = ""
        self._write()

    def get(self, path: str, query: dict[str, list[str]]) -> Answer:
        """Answer `/` and `/now` (JSON: `version`, and the section about now as HTML)."""
        self._is_asked.set()
        if path == "/":
            self._try(self._write)
            return 200, "text/html", self.html
        if path != "/now":
            return NO_PAGE
        html = filled("sections.html", sections=self._now(self._status))
        return 200, "application/json", json.dumps({"version": self.version, "html": html})

    def renew(self) -> None:
        """Wait until a browser asks, at most PAUSE_S; then make the page again if files changed.

        Pictures take seconds: the page has its texts first, and then pictures, which are drawn
        again after ten times as long.
        """
        if self._is_asked.wait(PAUSE_S):
            self._is_asked.clear()
            self._try(self._write)
            if time.monotonic() >= self._next_picture:
                self._try(self._draw)

    def _try(self, make: Callable[[], None]) -> None:
        """Call a function; the page says what it raises, because the run's folder may be gone."""
        try:
            make()
            self._trouble.pop(make.__name__, None)
        except Exception as error:
            self._trouble[make.__name__] = str(error)

    def _now(self, status: Status) -> list[dict[str, Any]]:
        found = variables_of(with_ranks(status))
        trouble = "; ".join([*self._trouble.values()])
        return sections_of(printable(render("now.md.jinja", trouble=trouble, **found)))

    def _write(self, drawn: RunData | None = None) -> None:
        """Make the texts of the page again if files have changed, or if pictures were drawn."""
        with self._lock, reading(self._folder):
            seen = self._seen()
            is_new = drawn or seen != self._made_of
            if not is_new and with_ranks(self._status)["state"] == self._status["state"]:
                return
            run = drawn or load_run(self._folder)
            status = status_of(run)
            data = report_data(run, live=True)
            text = render("run.md.jinja", drawn=self._svgs, drawn_steps=self._drawn, **data)
            files = transcripts_in(self._folder)
            shown = _shown_of([*files.items()], status["state"] == "running")
            reader = read_episodes(
                self._folder,
                run.success_threshold,
                run.results.get("reward_parts"),
                max_episodes=MAX_EPISODES,
                max_characters=MAX_CHARACTERS,
                files=dict(shown),
                unseen=run.results.get("unseen"),
            )
            read_settings(self._folder)  # raises if the folder went away: half of it was read
            reader.index["steps"] = [len(shown), len(files)]
            self.version = time.time_ns() // 10**6  # other than those of an earlier server
            sections = [*self._now(status), *sections_of(printable(text))]
            self.html = page_of(data["title"], sections, self._svgs, reader, self.version)
            self._status = status
            self._made_of = seen

    def _draw(self) -> None:
        """Draw the pictures if files have changed, and make the page again."""
        seen = self._seen()
        if seen == self._drawn_of:
            return
        begun = time.monotonic()
        self._drawn_of = seen
        with reading(self._folder):
            run = load_run(self._folder)
            every = len(run.train) // MOST_POINTS or 1
            thinned = replace(run, train=run.train[::every], timings=run.timings[::every])
            self._svgs = svgs_of(drawing.draw(pictures.OF_RUN, thinned))
        last = run.train[-1]["step"] if run.train else 0
        self._drawn = f"Drawn at step {last}{f', one step of {every}' * (every > 1)}."
        self._next_picture = time.monotonic() + 10 * (time.monotonic() - begun)
        self._write(run)

    def _seen(self) -> Seen:
        paths = map(self._folder.joinpath, FILES)
        stats = [path.stat() for path in paths if path.is_file()]
        return [(stat.st_mtime, stat.st_size) for stat in stats]


def _shown_of(files: list[Any], is_running: bool) -> list[Any]:
    """Return the newest steps, and of a run that does not go on also some of all others."""
    others = [] if is_running else files[: -NEWEST : ceil(len(files) / MOST_STEPS) or 1]
    return others + files[-NEWEST:]


def main(arguments: Sequence[str]) -> int:
    """Run `watch RUN`; raises UserError for a mistake of the user."""
    parser = Parser(prog=command("watch"), description=__doc__, allow_abbrev=False)
    parser.add_argument("folder", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--port", type=int, help=f"[{PORT}, or a free one]")
    parser.add_argument("--host", default=HERE[0], help=f"address to listen on [{HERE[0]}]")
    parser.add_argument("--parent", type=int, metavar="PID", help="end with this process")
    options = parser.parse_args(arguments)
    page = LivePage(options.folder)
    server = server_of(page, options.host, options.port)
    end = "Ctrl-C ends the page" if options.parent is None else "as long as the run lasts"
    address = address_in_words(server.address, options.folder)
    print(f"watch {options.folder} in a browser: {address} ({end})", flush=True)
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
