"""The text of each token by itself, for people; imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

BROKEN = "\N{REPLACEMENT CHARACTER}"
MOST_TOKENS = 4  # of one character


class TokenTexts:
    """The texts of single tokens, from a tokenizer file."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer: Any = Tokenizer.from_file(str(path))
        # A decoder may drop the space before a first token, so every token is decoded after this.
        self._before = self._tokenizer.encode("a", add_special_tokens=False).ids
        self._length = len(self._tokenizer.decode(self._before, skip_special_tokens=False))
        self._known: dict[tuple[int, ...], str] = {}

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """As many texts as ids; a character of several tokens is the text of the last of them."""
        texts: list[str] = []
        start = 0  # of the tokens that are not yet a character
        for end in range(1, len(ids) + 1):
            text = self._decoded(ids[end - 1 : end])
            if BROKEN not in text:
                start = end
            elif end - start > 1:
                character = self._decoded(ids[start:end])
                if BROKEN not in character:
                    texts[start:] = [""] * (end - start - 1)
                    text, start = character, end
                elif end - start == MOST_TOKENS:
                    start += 1
            texts.append(text)
        return texts

    def _decoded(self, ids: Sequence[int]) -> str:
        key = tuple(ids)
        if key not in self._known:
            text = self._tokenizer.decode([*self._before, *ids], skip_special_tokens=False)
            self._known[key] = str(text)[self._length :]
        return self._known[key]


def token_texts_of(folder: Path) -> TokenTexts | None:
    """From the newest checkpoint of a run folder; None if there is no tokenizer file."""
    paths = folder.glob("checkpoints/*/tokenizer.json")
    newest = max(paths, key=lambda path: path.stat().st_mtime, default=None)
    return None if newest is None else TokenTexts(newest)
