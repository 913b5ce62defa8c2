"""The text of each token by itself, for people; imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

BROKEN = "\N{REPLACEMENT CHARACTER}"
MOST_TOKENS = 4  # of one character


class TokenTexts:
    """A tokenizer file, and the text of each token that was asked for so far."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer: Any = Tokenizer.from_file(str(path))
        # A decoder may drop the space that a first token begins with; so none is decoded alone.
        self._before = self._tokenizer.encode("a", add_special_tokens=False).ids
        self._length = len(self._tokenizer.decode(self._before, skip_special_tokens=False))
        self._known: dict[int, str] = {}

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """As many texts as ids; a character of several tokens stands at the last of them."""
        texts: list[str] = []
        start = 0  # of tokens that are not yet a character
        for end, token in enumerate(ids, 1):
            text = self._one(token)
            if BROKEN not in text:
                start = end
            elif end - start > 1:
                whole = self._decoded(ids[start:end])
                if BROKEN not in whole:
                    texts[start:] = [""] * (end - start - 1)
                    text, start = whole, end
                elif end - start == MOST_TOKENS:
                    start += 1
            texts.append(text)
        return texts

    def _one(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._decoded([token])
        return self._known[token]

    def _decoded(self, ids: Sequence[int]) -> str:
        text = self._tokenizer.decode([*self._before, *ids], skip_special_tokens=False)
        return str(text)[self._length :]


def token_texts_of(folder: Path) -> TokenTexts | None:
    """From the newest checkpoint of a run folder; None where there is no tokenizer file."""
    paths = sorted(
        folder.glob("checkpoints/*/tokenizer.json"), key=lambda path: path.stat().st_mtime
    )
    return TokenTexts(paths[-1]) if paths else None
