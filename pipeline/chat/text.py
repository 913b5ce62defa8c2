"""Between text and tokens: what a sampled message says, and text that is never control tokens."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

import regex  # type: ignore[import-untyped]  # with which transformers reads replies
from transformers.utils.chat_parsing.response_templates import (
    ResponseTemplate,
    ResponseTemplateField,
    load_response_template,
)

from pipeline.data.tasks import Message
from pipeline.files.untrusted import is_nested_deeply, is_plain, parse_json


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """What a sampled message says: text, tool calls (name, arguments), and what is malformed."""

    content: str
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    malformed: str = ""

    def message(self) -> Message:
        message: Message = {"role": "assistant", "content": self.content}
        if self.calls:
            functions = [{"name": name, "arguments": arguments} for name, arguments in self.calls]
            message["tool_calls"] = [{"type": "function", "function": f} for f in functions]
        return message


def is_call(value: Any) -> TypeGuard[dict[str, Any]]:
    """Whether a model's JSON is {"name": text, "arguments": object}, not deep and without NaN.

    Missing arguments count as none.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return False
    if is_nested_deeply(value) or not is_plain(value):
        return False
    return isinstance(value.get("arguments") or {}, dict)


def parse_hermes(text: str) -> Parsed:
    """Read tool calls in the Hermes format, which Qwen uses.

    A call is a block `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
    """
    text = re.sub(r"^\s*<think>.*?</think>", "", text, flags=re.DOTALL)
    calls: list[tuple[str, dict[str, Any]]] = []
    content, *blocks = text.split("<tool_call>")
    for block in blocks:
        body, closed, after = block.partition("</tool_call>")
        try:
            call = parse_json(body)
        except ValueError as error:
            return Parsed(content=text, malformed=f"not JSON: {getattr(error, 'msg', error)}")
        if not closed or after.strip():
            return Parsed(
                content=text, malformed="a call must be closed, and nothing may follow it"
            )
        if not is_call(call):
            return Parsed(content=text, malformed="a call needs a name and an object of arguments")
        calls.append((call["name"], call.get("arguments") or {}))
    if "</tool_call>" in content:
        return Parsed(content=text, malformed="</tool_call> without <tool_call>")
    return Parsed(content=content.strip(), calls=calls)


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
        # \G: what matches everywhere need be tried at one place only. (?!): at each place `regex`
        # would search the whole rest of the text for what a single alternative must contain.
        start = r"\G" if pattern.pattern.startswith(_IS_AHEAD) else ""
        self._pattern = regex.compile(rf"{start}(?:{pattern.pattern})|(?!)", pattern.flags)
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
