"""Parses sampled messages, and finds text in messages that must not become special tokens."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import regex  # type: ignore[import-untyped]  # the engine of transformers' response templates
from transformers.utils.chat_parsing import parse_response, response_templates
from transformers.utils.chat_parsing.response_templates import ResponseTemplate

from pipeline.common.untrusted import is_plain, parse_json
from pipeline.data.tasks import Message

THINK = "<think>"
END_OF_THOUGHT = "</think>"
MAX_NOTATION = 8192  # most characters of a non-JSON call, whose parsing takes quadratic time
MAX_SEARCH_S = 10.0  # longest search; an expression of a model folder may take exponential time
_LOOKAHEAD = r"(?=[\s\S]*?"  # start of a regular expression that looks ahead without a limit


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """A sampled message: text, tool calls as (name, arguments), and a syntax error, if any.

    `thoughts` are what a thinking model wrote before the text; None if it wrote no thought at all.
    """

    content: str
    thoughts: str | None = None
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    malformed: str = ""

    def message(self) -> Message:
        message: Message = {"role": "assistant", "content": self.content}
        if self.calls:
            functions = [{"name": name, "arguments": arguments} for name, arguments in self.calls]
            message["tool_calls"] = [{"type": "function", "function": f} for f in functions]
        return message


def _call_of(value: Any) -> tuple[str, dict[str, Any]]:
    name = value.get("name") if isinstance(value, dict) else None
    if isinstance(name, str) and is_plain(value):
        arguments = value.get("arguments") or {}
        if isinstance(arguments, dict):
            return name, arguments
    raise ValueError("a call needs a name and an object of arguments")


def parse_hermes(text: str) -> Parsed:
    """Parse a message with calls like `<tool_call>{"name": "f", "arguments": {}}</tool_call>`."""
    thought = re.match(r"\s*<think>(.*?)</think>", text, flags=re.DOTALL)
    thoughts = thought and thought[1].strip()
    text = text[thought.end() :] if thought else text
    content, *blocks = text.split("<tool_call>")
    try:
        calls = [_hermes_call(block) for block in blocks]
        if "</tool_call>" in content:
            raise ValueError("</tool_call> without <tool_call>")
    except ValueError as error:
        return Parsed(content=text, thoughts=thoughts, malformed=str(error))
    return Parsed(content=content.strip(), thoughts=thoughts, calls=calls)


def _hermes_call(block: str) -> tuple[str, dict[str, Any]]:
    body, closed, after = block.partition("</tool_call>")
    try:
        value = parse_json(body)
    except ValueError as error:
        raise ValueError(f"not JSON: {getattr(error, 'msg', error)}") from None
    if not closed or after.strip():
        raise ValueError("a call must be closed, and nothing may follow it")
    return _call_of(value)


def parse_with(
    template: ResponseTemplate, text: str, end: str, prefix: str, tools: Sequence[dict[str, Any]]
) -> Parsed:
    """Parse `prefix`, the sampled text and `end` together as one message."""
    try:
        message = parse_response(text + end, template, prefix=prefix, tools=list(tools))
        content = message.get("content") or ""
        values = message.get("tool_calls") or []
        if not isinstance(content, str) or not isinstance(values, list):
            raise ValueError("the response template gives no message")
        thoughts = message.get("reasoning_content") or message.get("thinking")
        if thoughts is None and END_OF_THOUGHT in text and END_OF_THOUGHT not in content:
            thoughts = ""  # a thought of no words, which readers leave out
        calls = [_call_of(v.get("function", v) if isinstance(v, dict) else v) for v in values]
    except Exception as error:  # a response template may raise any exception
        reason = str(error).partition("\n")[0].rstrip(".")
        return Parsed(content=text, malformed=reason or type(error).__name__)
    if thoughts is not None:
        thoughts = str(thoughts).removesuffix(end).strip()  # the end, if the thought was left open
    return Parsed(content=content.strip(), thoughts=thoughts, calls=calls)


def response_template_of(tokenizer: Any, body: str) -> ResponseTemplate | None:
    """Return the tokenizer's own response template, else the template in TRL, else None.

    TRL compares whole chat templates: `body` is what stands behind the part in front.
    """
    if getattr(tokenizer, "response_template", None) is None:
        from trl import chat_template_utils as known

        template = tokenizer.chat_template
        tokenizer.chat_template = body
        try:
            # TRL has no response templates for the training variants of its chat templates.
            for name, text in vars(known).items():
                if name.endswith("_training_chat_template") and text == body:
                    tokenizer.chat_template = getattr(known, name.replace("_training_", "_"), text)
            known.add_response_schema(tokenizer)
        except ValueError:
            return None
        finally:
            tokenizer.chat_template = template
    return steady(tokenizer.response_template)


def values_are_text(template: ResponseTemplate | None) -> bool:
    """Return whether the tool-call format writes arguments as text, without their types."""
    return template is not None and any(
        field.content in ("xml-inline", "kv-lines") for field in template.fields.values()
    )


def steady(template: dict[str, Any]) -> ResponseTemplate:
    """Return a copy of a response template; the copy parses a text in linear time."""
    loaded = response_templates.load_response_template(template)
    fields = {}
    for name, part in loaded.fields.items():
        is_notation = part.content == "xml-inline" or "string_delims" in part.content_args
        close = part.close_re and _Mark(part.close_re, MAX_NOTATION if is_notation else None)
        fields[name] = replace(part, open_re=part.open_re and _Mark(part.open_re), close_re=close)
    return replace(loaded, fields=fields)


class _Mark:
    """A compiled pattern that keeps its last match, so that no part of a text is searched twice."""

    def __init__(self, pattern: Any, limit: int | None = None) -> None:
        # With \G, a pattern that matches everywhere is tried at one position only. Without the
        # alternative (?!), the library regex would search the rest of the text at each position.
        start = r"\G" if pattern.pattern.startswith(_LOOKAHEAD) else ""
        self._pattern = regex.compile(rf"{start}(?:{pattern.pattern})|(?!)", pattern.flags)
        self._limit = limit
        self._last: tuple[str, bool, int, Any] = ("", False, 0, None)

    def search(self, text: str, start: int = 0, *, partial: bool = False) -> Any:
        last_text, last_partial, last_start, match = self._last
        is_next = last_start <= start and (match is None or match.start() >= start)
        if last_text is not text or last_partial != partial or not is_next:
            match = self._pattern.search(text, start, partial=partial, timeout=MAX_SEARCH_S)
            self._last = (text, partial, start, match)
        end = len(text) if match is None else match.start()
        if self._limit is not None and end - start > self._limit:
            raise ValueError(f"a call has more than {self._limit} characters")
        return match


STUB = "\ue000stub\ue001"  # a test answer that no real conversation contains
GUARD = re.compile("\u29d8(\\d+)\u29d9")  # a placeholder for a special string in a message


class Special:
    """The special strings: the texts of a tokenizer's special and added tokens."""

    def __init__(self, texts: set[str]) -> None:
        longest_first = sorted(texts, key=lambda text: (-len(text), text))
        self.tokens = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._whole = re.compile(f"{self.tokens.pattern}|[\ue000\ue001\u29d8\u29d9]")
        self._starts = {text[:n] for text in texts for n in range(1, len(text))}
        self._ends = {text[n:] for text in texts for n in range(1, len(text))}
        self._inside = "\n".join(texts)
        self._longest = max(map(len, texts), default=0)

    def guard(self, text: str, guard: Callable[[str], str]) -> str:
        """Return `text` with each special string `piece` replaced by `guard(piece)`.

        A part of a special string at the start or the end of `text` is replaced, too, because the
        chat template could write the rest of the special string beside `text`.
        """
        text = self._whole.sub(lambda match: guard(match.group()), text)
        body = text.strip()
        sizes = range(min(len(body), self._longest), 0, -1)
        head = next((n for n in sizes if body[:n] in self._ends), 0)
        tail = next((n for n in sizes if body[-n:] in self._starts), 0)
        if body in self._inside or head + tail > len(body):
            head = len(body)
            tail = 0
        end = len(body) - tail
        left, right = [guard(piece) if piece else "" for piece in (body[:head], body[end:])]
        before, after = text.split(body, 1) if body else (text, "")
        return f"{before}{left}{body[head:end]}{right}{after}"


class Guards:
    """Parts of messages that are encoded as plain text; a placeholder stands for each part."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def _add(self, text: str) -> str:
        self.texts.append(text)
        return f"\u29d8{len(self.texts) - 1}\u29d9"

    def put(self, value: Any, special: Special, key: str = "") -> Any:
        """Return `value` with placeholders for special strings; keys like `name` stay unchanged."""
        if isinstance(value, str):
            if key == "type" and value.isidentifier():  # the type of a message's part or of a tool
                return value
            text = value.encode(errors="replace").decode()  # tokenizers fail on lone surrogates
            return special.guard(text, self._add)
        if isinstance(value, list):
            return [self.put(item, special, key) for item in value]
        if isinstance(value, dict):
            return {
                k if k.isidentifier() else self.put(k, special): self.put(v, special, k)
                for k, v in value.items()
            }
        return value
