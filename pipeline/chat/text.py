"""Between text and tokens: what a sampled message says, and text that is never control tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import regex  # type: ignore[import-untyped]  # the engine of transformers' response templates
from transformers.utils.chat_parsing import parse_response
from transformers.utils.chat_parsing.response_templates import (
    ResponseTemplate,
    load_response_template,
)

from pipeline.data.tasks import Message
from pipeline.files.untrusted import is_nested_deeply, is_plain, parse_json

THINK = "<think>"
MAX_NOTATION = 8192  # characters of a call that is no plain JSON: its patterns may try every pair
_IS_AHEAD = r"(?=[\s\S]*?"  # begins a pattern that matches everywhere before what it names
_NO_CALL = "a call needs a name and an object of arguments"


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """A sampled message: its text, its tool calls (name, arguments), and what is malformed."""

    content: str
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    malformed: str = ""

    def message(self) -> Message:
        message: Message = {"role": "assistant", "content": self.content}
        if self.calls:
            functions = [{"name": name, "arguments": arguments} for name, arguments in self.calls]
            message["tool_calls"] = [{"type": "function", "function": f} for f in functions]
        return message


def _is_call(value: Any) -> bool:
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
        if not _is_call(call):
            return Parsed(content=text, malformed=_NO_CALL)
        calls.append((call["name"], call.get("arguments") or {}))
    if "</tool_call>" in content:
        return Parsed(content=text, malformed="</tool_call> without <tool_call>")
    return Parsed(content=content.strip(), calls=calls)


def parse_with(
    template: ResponseTemplate, text: str, end: str, prefix: str, tools: Sequence[dict[str, Any]]
) -> Parsed:
    """Read a message with a response template; `prefix` and `end` stand around the sampled text."""
    try:
        message = parse_response(text + end, template, prefix=prefix, tools=list(tools))
    except RecursionError:
        return Parsed(content=text, malformed="nested too deeply")
    except Exception as error:  # the template came with the model, and the text may be anything
        reason = str(error).partition("\n")[0].rstrip(".")
        return Parsed(content=text, malformed=reason or type(error).__name__)
    content, values = message.get("content") or "", message.get("tool_calls") or []
    if not isinstance(content, str) or not isinstance(values, list):
        return Parsed(content=text, malformed="the response template gives no message")
    functions: list[Any] = [v.get("function", v) if isinstance(v, dict) else None for v in values]
    if not all(map(_is_call, functions)):
        return Parsed(content=text, malformed=_NO_CALL)
    calls = [(f["name"], f.get("arguments") or {}) for f in functions]
    return Parsed(content=content.strip(), calls=calls)


def response_template_of(tokenizer: Any) -> ResponseTemplate | None:
    """The response template of a tokenizer, else the one that TRL has for its chat template.

    TRL has them for the templates of models; its own variants of these for training, which write
    calls in the same way, get theirs.
    """
    if getattr(tokenizer, "response_template", None) is None:
        from trl import chat_template_utils as known

        template = tokenizer.chat_template
        try:
            for name, text in vars(known).items():
                if name.endswith("_training_chat_template") and text == template:
                    plain = getattr(known, name.replace("_training_", "_"), None)
                    tokenizer.chat_template = plain or template
            known.add_response_schema(tokenizer)
        except ValueError:
            return None
        finally:
            tokenizer.chat_template = template
    return steady(tokenizer.response_template)


def values_are_text(template: ResponseTemplate | None) -> bool:
    """Whether a format writes arguments of calls as text, so that only the tool has their types."""
    fields = {} if template is None else template.fields
    return any(field.content in ("xml-inline", "kv-lines") for field in fields.values())


def steady(template: dict[str, Any]) -> ResponseTemplate:
    """A response template that reads a text in time proportional to its length."""
    loaded = load_response_template(template)
    fields = {}
    for name, part in loaded.fields.items():
        is_notation = part.content == "xml-inline" or "string_delims" in part.content_args
        fields[name] = replace(
            part,
            open_re=part.open_re and _Mark(part.open_re),
            close_re=part.close_re and _Mark(part.close_re, MAX_NOTATION if is_notation else None),
        )
    return replace(loaded, fields=fields)


class _Mark:
    """A compiled pattern that keeps its last match, and so searches no part of a text twice.

    `limit`: the most characters between the start of a search and its match.
    """

    def __init__(self, pattern: Any, limit: int | None = None) -> None:
        # \G: what matches everywhere need be tried at one place only. (?!): at each place `regex`
        # would search the whole rest of the text for what a single alternative must contain.
        start = r"\G" if pattern.pattern.startswith(_IS_AHEAD) else ""
        self._pattern = regex.compile(rf"{start}(?:{pattern.pattern})|(?!)", pattern.flags)
        self._limit = limit
        self._last: tuple[str, bool, int, Any] = ("", False, 0, None)  # arguments and their match

    def search(self, text: str, start: int = 0, *, partial: bool = False) -> Any:
        last_text, last_partial, last_start, match = self._last
        is_next = last_start <= start and (match is None or match.start() >= start)
        if last_text is not text or last_partial != partial or not is_next:
            match = self._pattern.search(text, start, partial=partial)
            self._last = (text, partial, start, match)
        end = len(text) if match is None else match.start()
        if self._limit is not None and end - start > self._limit:
            raise ValueError(f"a call has more than {self._limit} characters")
        return match


STUB = "\ue000stub\ue001"  # an answer that no conversation holds
GUARD = re.compile("\u29d8(\\d+)\u29d9")  # a placeholder for a text in a message


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

    def guard(self, text: str, guard: Callable[[str], str]) -> str:
        """`text` with `guard(piece)` in place of each special piece.

        A piece at an end is special too if it could become a special string with the text that a
        template writes beside it. Templates may strip white space, so none counts at the ends.
        """
        text = self._whole.sub(lambda match: guard(match.group()), text)
        body = text.strip()
        start = text.index(body)
        sizes = range(min(len(body), self._longest), 0, -1)
        head = next((n for n in sizes if body[:n] in self._ends), 0)
        tail = next((n for n in sizes if body[-n:] in self._starts), 0)
        if body in self._inside or head + tail > len(body):
            head, tail = len(body), 0
        pieces = [body[:head], body[len(body) - tail :]]
        left, right = [guard(piece) if piece else "" for piece in pieces]
        middle = body[head : len(body) - tail]
        return text[:start] + left + middle + right + text[start + len(body) :]


class Guards:
    """Pieces of messages that are encoded as plain text, and the placeholders for them."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def _add(self, text: str) -> str:
        self.texts.append(text)
        return f"\u29d8{len(self.texts) - 1}\u29d9"

    def put(self, value: Any, special: Special, key: str = "") -> Any:
        """`value` with guards in all its strings except names that templates look up."""
        if isinstance(value, str):
            if key == "type" and value.isidentifier():  # of a part of a message, or of a tool
                return value
            text = value.encode(errors="replace").decode()  # half a character breaks tokenizers
            return special.guard(text, self._add)
        if isinstance(value, list):
            return [self.put(item, special, key) for item in value]
        if isinstance(value, dict):
            return {
                k if k.isidentifier() else self.put(k, special): self.put(v, special, k)
                for k, v in value.items()
            }
        return value
