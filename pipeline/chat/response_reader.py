"""Response templates of transformers, read in time that grows with the length of a message.

A template's reader looks for each of its marks again after every mark that it finds, so that a
message of many marks takes time that grows with the square of its length, or the cube. Here each
mark remembers where it was found last, and what stands in a call's own notation has a limit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import regex  # type: ignore[import-untyped]  # transformers compiles templates with it
from transformers.utils.chat_parsing.response_templates import (
    ResponseTemplate,
    ResponseTemplateField,
    load_response_template,
)

MAX_NOTATION = 8192  # characters of a call that is no plain JSON: its patterns may try every pair
_IS_AHEAD = r"(?=[\s\S]*?"  # begins a pattern that matches everywhere before what it names


def take_from_trl(tokenizer: Any) -> bool:
    """Give a tokenizer the response template that TRL has for its chat template, if it has one.

    TRL has them for the templates of models; its own variants of these for training, which write
    calls in the same way, take theirs.
    """
    from trl import chat_template_utils as known

    template, texts = tokenizer.chat_template, vars(known)
    variants = {
        text: texts.get(name.replace("_training_", "_"))
        for name, text in texts.items()
        if name.endswith("_training_chat_template")
    }
    try:
        if isinstance(template, str):
            tokenizer.chat_template = variants.get(template) or template
        known.add_response_schema(tokenizer)
    except ValueError:
        return False
    finally:
        tokenizer.chat_template = template
    return True


def values_are_text(template: ResponseTemplate | None) -> bool:
    """Whether a format writes a call's arguments as text, whose types only the tool tells."""
    fields = {} if template is None else template.fields
    return any(field.content in ("xml-inline", "kv-lines") for field in fields.values())


def steady(template: dict[str, Any]) -> ResponseTemplate:
    """The same template, whose marks are searched for once."""
    loaded = load_response_template(template)
    fields = {name: _steady_field(field) for name, field in loaded.fields.items()}
    return replace(loaded, fields=fields)


def _steady_field(field: ResponseTemplateField) -> ResponseTemplateField:
    own_notation = field.content == "xml-inline" or "string_delims" in field.content_args
    limit = MAX_NOTATION if own_notation else None
    return replace(
        field,
        open_re=None if field.open_re is None else _Mark(field.open_re),
        close_re=None if field.close_re is None else _Mark(field.close_re, limit),
    )


class _Mark:
    """A compiled pattern that does not search again where it knows the next match of a text."""

    def __init__(self, pattern: Any, limit: int | None = None) -> None:
        if pattern.pattern.startswith(_IS_AHEAD):  # no other place need be tried
            pattern = regex.compile(rf"\G{pattern.pattern}", pattern.flags)
        self._pattern = pattern
        self._limit = limit  # of characters before the match
        self._known: tuple[str, bool, int, Any] = ("", False, 0, None)

    def search(self, text: str, start: int = 0, *, partial: bool = False) -> Any:
        known, was_partial, first, match = self._known
        is_next = first <= start and (match is None or match.start() >= start)
        if known is not text or was_partial != partial or not is_next:
            match = self._pattern.search(text, start, partial=partial)
            self._known = (text, partial, start, match)
        end = len(text) if match is None else match.start()
        if self._limit is not None and end - start > self._limit:
            raise ValueError(f"a call has more than {self._limit} characters")
        return match
