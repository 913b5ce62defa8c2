"""The page of `chat --web`: a conversation in a browser instead of the terminal."""

import json
import queue
import threading
from collections.abc import Sequence

from pipeline.common.untrusted import printable
from pipeline.report.server import HERE, NO_PAGE, Answer, Page, server_of
from pipeline.report.write import filled, parts_of_page


class ChatPage(Page):
    """Shows lines, and waits for what a person types. `address` is where a browser finds it."""

    def __init__(self, title: str) -> None:
        parts = parts_of_page("chat.js")
        self._html = filled("chat.html", title=title, **parts)
        self._lines = list[tuple[str, str]]()
        self._is_waiting = False  # for the person
        self._typed = queue.Queue[str]()
        server = server_of(self, HERE[0], None)
        self.address = server.address
        threading.Thread(target=server.serve_forever, daemon=True).start()

    def get(self, path: str, query: dict[str, list[str]]) -> Answer:
        """Answer `/` and `/lines?since=NUMBER` (JSON: names and texts, and whose turn it is)."""
        if path == "/":
            return 200, "text/html", self._html
        since = query.get("since", ["0"])[0]
        if path == "/lines" and since.isdecimal():
            found = {"is_waiting": self._is_waiting, "lines": self._lines[int(since) :]}
            return 200, "application/json", json.dumps(found)
        return NO_PAGE

    def take(self, words: str) -> None:
        if self._is_waiting:
            self._is_waiting = False
            self._typed.put(words)

    def tell(self, name: str, content: str | Sequence[str]) -> None:
        """Show a text or lines; show nothing for no lines."""
        text = content if isinstance(content, str) else "\n".join(content)
        if text:
            self._lines.append((name, printable(text)))

    def typed(self) -> str:
        """Wait for a message, and show it."""
        self._is_waiting = True
        words = self._typed.get()
        self.tell("customer", words)
        return words
