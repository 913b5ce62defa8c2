"""Text that must not become control tokens, and guards that stand for it in a template.

A guard is a number between two rare characters, which no template holds. They are printable:
Python, and so a template that writes a list as Python does, would escape others.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

STUB = "\ue000stub\ue001"  # an answer that no conversation holds
GUARD = re.compile("(\u29d8\\d+\u29d9)")


class Special:
    """Strings that become one token each, found where they must not."""

    def __init__(self, texts: set[str]) -> None:
        longest_first = sorted(texts, key=lambda text: (-len(text), text))
        self.tokens = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._whole = re.compile(f"{self.tokens.pattern}|[\ue000\ue001\u29d8\u29d9]")
        self._starts = {text[:n] for text in texts for n in range(1, len(text))}
        self._ends = {text[n:] for text in texts for n in range(1, len(text))}
        self._inside = "\n".join(texts)
        self._longest = max(map(len, texts), default=0)

    def guard(self, text: str, take: Callable[[str], str]) -> str:
        """`text` with guards, which `take` makes, for what is special in it.

        That is also a piece at an end that could become special with what a template writes next
        to it, but for white space, which a template may strip.
        """
        text = self._whole.sub(lambda match: take(match.group()), text)
        body = text.strip()
        start = text.index(body)
        sizes = range(min(len(body), self._longest), 0, -1)
        head = next((n for n in sizes if body[:n] in self._ends), 0)
        tail = next((n for n in sizes if body[-n:] in self._starts), 0)
        if body in self._inside or head + tail > len(body):
            head, tail = len(body), 0
        pieces = [body[:head], body[len(body) - tail :]]
        left, right = [take(piece) if piece else "" for piece in pieces]
        middle = body[head : len(body) - tail]
        return text[:start] + left + middle + right + text[start + len(body) :]


class Guards:
    """Strings taken out of messages, where guards stand for them."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def _take(self, text: str) -> str:
        self.texts.append(text)
        return f"\u29d8{len(self.texts) - 1}\u29d9"

    def put(self, value: Any, special: Special, key: str = "") -> Any:
        """`value` with guards in all its strings but names that templates look up."""
        if isinstance(value, str):
            if key == "type" and value.isidentifier():  # of a part of a message, or of a tool
                return value
            text = value.encode(errors="replace").decode()  # half a character breaks tokenizers
            return special.guard(text, self._take)
        if isinstance(value, list):
            return [self.put(item, special, key) for item in value]
        if isinstance(value, dict):
            return {
                k if k.isidentifier() else self.put(k, special): self.put(v, special, k)
                for k, v in value.items()
            }
        return value
