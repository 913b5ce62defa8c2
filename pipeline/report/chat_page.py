"""The page of `chat --web`: a conversation in a browser instead of the terminal."""

import json
import queue
import threading
from collections.abc import Sequence

from pipeline.files.untrusted import printable
from pipeline.report.server import HERE, Handler, server_of
from pipeline.report.write import html_of, parts_of_page

MOST_BYTES = 100_000  # of a message that a person types


class ChatPage:
    """Shows lines, and waits for what a person types. `address` is where a browser finds it."""

    def __init__(self, title: str, is_human: bool) -> None:
        lines = self._lines = list[tuple[str, str]]()
        typed = self._typed = queue.Queue[str]()
        page = html_of("chat.html", title=title, is_human=is_human, **parts_of_page("chat.js"))

        class ChatHandler(Handler):
            """Answers `/` and `/lines?since=NUMBER` (JSON: pairs of a name and a text)."""

            def get(self, path: str, query: dict[str, list[str]]) -> tuple[int, str, str]:
                if path == "/":
                    return 200, "text/html", page
                since = query.get("since", ["0"])[0]
                if path == "/lines" and since.isdecimal():
                    return 200, "application/json", json.dumps(lines[int(since) :])
                return 404, "text/plain", "there is no such page"

            def do_POST(self) -> None:
                """Take what a person has typed."""
                size = int(self.headers.get("Content-Length", 0))
                if self.headers.get("X-Chat") != "1" or not 0 <= size <= MOST_BYTES:
                    self.answer(403, "text/plain", "only the page may send, and no more than fits")
                elif self.is_allowed():
                    typed.put(self.rfile.read(size).decode(errors="replace").strip())
                    self.answer(200, "text/plain", "")

        server = server_of(ChatHandler, HERE[0], None)
        self.address = server.address
        threading.Thread(target=server.serve_forever, daemon=True).start()

    def tell(self, name: str, content: str | Sequence[str]) -> None:
        """Show a text or lines; show nothing for no lines."""
        text = content if isinstance(content, str) else "\n".join(content)
        if text:
            self._lines.append((name, printable(text)))

    def typed(self) -> str:
        """Wait for a message, and show it."""
        words = self._typed.get()
        self.tell("customer", words)
        return words
