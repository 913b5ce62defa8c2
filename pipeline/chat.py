"""Messages to tokens and back: the one place that knows chat templates and tool-call formats.

Tokens in, tokens out: a conversation is rendered once, as its prompt. After that only the *delta*
of a reply is rendered, from a stub conversation, and appended to the ids that were sampled;
templates that rewrite history (Qwen3's drops earlier thinking) therefore cannot change what was
sampled. Text in messages never becomes control tokens: special strings inside them are encoded as
plain text.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeGuard

from jinja2 import TemplateError

from pipeline.config import UserError
from pipeline.tasks import Message

STUB = "\ue000stub\ue001"  # private-use characters: no template holds them
_GUARD = re.compile("(\ue002\\d+\ue003)")
_CACHE_SIZE = 65536  # renderings and parses kept: what a small model says, it says many times


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


class Chat:
    """A tokenizer's chat template and tool-call format.

    Raises UserError for a tokenizer without a template, a template that ignores tools or refuses a
    conversation with them, that does not close an assistant message with a special token, or whose
    rendering of a reply depends on earlier text.
    """

    def __init__(
        self,
        tokenizer: Any,
        template_kwargs: dict[str, Any] | None = None,
        tool_call_format: str = "auto",
    ) -> None:
        if not tokenizer.chat_template:
            raise UserError(
                "model: its tokenizer has no chat template; use a chat model or set "
                "tokenizer.chat_template"
            )
        self.tokenizer = tokenizer
        self._kwargs = template_kwargs or {}
        added = [t for t in tokenizer.added_tokens_decoder.values() if t.content.strip()]
        self._special = _any_of({token.content for token in added})
        # an assistant message may hold tags that a policy says itself, such as <think>
        self._control = _any_of({token.content for token in added if token.special})
        self.end_of_turn = self._find_end_of_turn()
        self.end_of_turn_id: int = tokenizer.convert_tokens_to_ids(self.end_of_turn)
        self._uses_response_template = self._choose_parser(tool_call_format)
        self._check_deltas()
        self._reply_ids = lru_cache(_CACHE_SIZE)(self._render_reply)
        self._message_ids = lru_cache(_CACHE_SIZE)(self._render_message)
        self._prompt_ids = lru_cache(_CACHE_SIZE)(self._render_prompt)
        self._parse = lru_cache(_CACHE_SIZE)(self._parse_text)

    # -- messages to tokens --

    def prompt_ids(self, messages: Sequence[Message], tools: list[dict[str, Any]]) -> list[int]:
        """The prompt of a conversation, up to where the assistant's first token stands."""
        return list(self._prompt_ids(json.dumps(list(messages)), json.dumps(tools)))

    def reply_ids(self, replies: Sequence[Message]) -> list[int]:
        """What follows a sampled end of turn: the replies and the next header.

        Replies are tool results or a user message.
        """
        return list(self._reply_ids(json.dumps(list(replies))))

    def message_ids(self, message: Message) -> list[int]:
        """What a policy would have sampled to say `message`, its end of turn included."""
        return list(self._message_ids(json.dumps(message)))

    def num_content_tokens(self, text: str) -> int:
        return len(self._encode(text))

    def _render_prompt(self, messages: str, tools: str) -> list[int]:
        return self._ids(
            json.loads(messages), tools=json.loads(tools) or None, add_generation_prompt=True
        )

    def _render_reply(self, replies: str) -> list[int]:
        return self._delta([{"role": "user", "content": "-"}], json.loads(replies))

    def _delta(self, history: list[Message], replies: list[Message]) -> list[int]:
        messages = [*history, {"role": "assistant", "content": STUB}, *replies]
        text, guards = self._render(messages, add_generation_prompt=True)
        start = text.index(STUB)
        return self._encode_guarded(
            text[text.index(self.end_of_turn, start) + len(self.end_of_turn) :], guards
        )

    def _render_message(self, message: str) -> list[int]:
        stub = {"role": "user", "content": "-"}
        before, _ = self._render([stub], add_generation_prompt=True)
        text, guards = self._render([stub, json.loads(message)])
        if not text.startswith(before):
            raise UserError(
                "model: its chat template renders an assistant message differently from what "
                "it asks the model to continue; try chat_template_kwargs such as "
                "{enable_thinking: false}"
            )
        end = text.rindex(self.end_of_turn) + len(self.end_of_turn)
        return self._encode_guarded(text[len(before) : end], guards)

    def _ids(self, messages: list[Message], **options: Any) -> list[int]:
        return self._encode_guarded(*self._render(messages, **options))

    def _render(self, messages: list[Message], **options: Any) -> tuple[str, list[str]]:
        """Rendered text, with guards for special strings in messages, and what they stand for."""
        guards: list[str] = []

        def guard(match: re.Match[str]) -> str:
            guards.append(match.group())
            return f"\ue002{len(guards) - 1}\ue003"

        def guarded(value: Any, pattern: re.Pattern[str]) -> Any:
            if isinstance(value, str):
                return pattern.sub(guard, value)
            if isinstance(value, list):
                return [guarded(item, pattern) for item in value]
            if isinstance(value, dict):
                return {guarded(k, pattern): guarded(v, pattern) for k, v in value.items()}
            return value

        plain = []
        for message in messages:
            pattern = self._control if message["role"] == "assistant" else self._special
            plain.append({k: v if k == "role" else guarded(v, pattern) for k, v in message.items()})
        try:
            text: str = self.tokenizer.apply_chat_template(
                plain, tokenize=False, **options, **self._kwargs
            )
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise UserError(
                f"model: its chat template refuses a conversation of {roles} ({error}); "
                "use a model whose template takes tools"
            ) from None
        return text, guards

    def _encode_guarded(self, text: str, guards: list[str]) -> list[int]:
        ids: list[int] = []
        for piece in _GUARD.split(text):
            if _GUARD.fullmatch(piece):
                ids += self._encode_plain(guards[int(piece[1:-1])])
            elif piece:
                ids += self._encode(piece)
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        """Ids of a special string as plain text, one character after the other.

        `split_special_tokens` alone still finds added tokens that are not marked special.
        """
        encoded = [self._encode(character, split_special_tokens=True) for character in text]
        return [token for ids in encoded for token in ids]

    def _encode(self, text: str, **options: Any) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, **options)["input_ids"]
        return ids

    # -- tokens to messages --

    def parse(self, ids: Sequence[int]) -> Parsed:
        """Read a sampled message (its end of turn, if it has one, is dropped)."""
        kept = list(ids[:-1]) if ids and ids[-1] == self.end_of_turn_id else list(ids)
        text = self.tokenizer.decode(kept)
        try:
            return deepcopy(self._parse(text))  # tools may alter arguments
        except RecursionError:
            return Parsed(content=text, malformed="nested too deeply")

    def _parse_text(self, text: str) -> Parsed:
        if not self._uses_response_template:
            return parse_hermes(text)
        try:
            message = self.tokenizer.parse_response(text, prefix="")
        except (ValueError, TypeError, KeyError) as error:
            return Parsed(content=text, malformed=str(error).partition("\n")[0].rstrip("."))
        calls = []
        for call in message.get("tool_calls") or []:
            function = call.get("function", call) if isinstance(call, dict) else None
            if not _is_call(function):
                return Parsed(
                    content=text, malformed="a call needs a name and an object of arguments"
                )
            calls.append((function["name"], function.get("arguments") or {}))
        return Parsed(content=(message.get("content") or "").strip(), calls=calls)

    # -- checks at start --

    def _choose_parser(self, tool_call_format: str) -> bool:
        """True where the tokenizer's response template reads the calls, not our Hermes parser."""
        if tool_call_format == "hermes":
            return False
        if getattr(self.tokenizer, "response_template", None) is not None:
            return True
        from trl.chat_template_utils import add_response_schema

        try:
            add_response_schema(self.tokenizer)
        except ValueError:
            warnings.warn(
                "the tokenizer carries no response template and TRL knows none for its chat "
                "template: tool calls are read as <tool_call>{...}</tool_call>; set "
                "tool_call_format: hermes to silence this",
                stacklevel=2,
            )
            return False
        return True

    def _find_end_of_turn(self) -> str:
        text, _ = self._render(
            [{"role": "user", "content": "-"}, {"role": "assistant", "content": STUB}]
        )
        found = self._special.search(text, text.rindex(STUB) if STUB in text else len(text))
        if not found:
            raise UserError(
                "model: its chat template does not close an assistant message with a special token"
            )
        return found.group()

    def _check_deltas(self) -> None:
        tool = {
            "type": "function",
            "function": {"name": "probe_tool", "description": "", "parameters": {}},
        }
        short: list[Message] = [{"role": "user", "content": "-"}]
        result: Message = {"role": "tool", "name": "t", "content": "probe_result"}
        offered, _ = self._render(short, tools=[tool])
        answered, _ = self._render([*short, {"role": "assistant", "content": "-"}, result])
        if "probe_tool" not in offered or "probe_result" not in answered:
            raise UserError(
                "model: its chat template ignores tools or their results; use a model whose "
                "template renders them"
            )
        long: list[Message] = [
            {"role": "system", "content": "x"},
            {"role": "user", "content": "a longer request"},
            {"role": "assistant", "content": "an answer"},
            {"role": "user", "content": "and more"},
        ]
        for replies in ([{"role": "user", "content": "yes"}], [result]):
            if self._delta(short, replies) != self._delta(long, replies):
                raise UserError(
                    "model: its chat template renders a reply differently after other "
                    "conversations, so sampled tokens could not be kept; use another template"
                )


def _any_of(texts: set[str]) -> re.Pattern[str]:
    """Finds the longest of these texts, and the characters that guards are made of."""
    longest_first = sorted(texts, key=lambda text: (-len(text), text))
    return re.compile("|".join([*map(re.escape, longest_first), "[\ue002\ue003]"]))


def _is_call(value: Any) -> TypeGuard[dict[str, Any]]:
    """Whether a model's JSON is {"name": text, "arguments": object} in valid Unicode.

    Missing arguments count as none.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return False
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # "\ud800" is JSON, and half a character
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
            call = json.loads(body)
        except ValueError as error:
            return Parsed(content=text, malformed=f"not JSON: {getattr(error, 'msg', error)}")
        if not closed or after.strip():
            return Parsed(
                content=text, malformed="a call must be closed, and nothing may follow it"
            )
        if not _is_call(call):
            return Parsed(content=text, malformed="a call needs a name and an object of arguments")
        calls.append((call["name"], call.get("arguments") or {}))
    if "</tool_call>" in content:
        return Parsed(content=text, malformed="</tool_call> without <tool_call>")
    return Parsed(content=content.strip(), calls=calls)
