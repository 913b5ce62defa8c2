"""Messages to tokens and back, through a tokenizer's chat template and tool-call format.

Tokens in, tokens out: the prompt of a conversation is rendered once. Later, only the *delta* of a
reply is rendered, from a stub conversation, and appended to the sampled ids, so a template that
rewrites history (Qwen3's drops earlier thinking) cannot change sampled tokens. Text in messages
and tools never becomes control tokens: special strings in it are encoded as plain text, and so are
pieces that the text beside them could complete to a special string.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from transformers.utils.chat_parsing import parse_response

from pipeline.chat import template_checks as checks
from pipeline.chat.template_checks import ASKED, STUB_TURN
from pipeline.chat.text import (
    GUARD,
    STUB,
    THINK,
    Guards,
    Parsed,
    ResponseTemplate,
    Special,
    parse_hermes,
    parse_with,
    response_template_of,
    values_are_text,
)
from pipeline.data.tasks import Message
from pipeline.errors import UserError
from pipeline.files.untrusted import reason_of

MAX_CACHED_TOKENS = 1 << 21  # about 80 MB
ENTRY = 8  # memory of a cached result beside its ids, as a number of ids


class TokenCache:
    """Results of functions by their arguments; the least recently used go beyond `max_tokens`."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens, self.num_tokens = max_tokens, 0
        self._results: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._results)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of `function` for these arguments, which go through JSON; it is no copy.

        The size of a list of ids is its length; other results have the size of the first argument.
        """
        text = json.dumps([function.__name__, *arguments])
        key = hashlib.blake2b(text.encode(), digest_size=16).digest()
        if key in self._results:
            self._results.move_to_end(key)
            return self._results[key][0]
        result = function(*json.loads(text)[1:])
        size = ENTRY + len(result if isinstance(result, list) else arguments[0])
        self._results[key] = result, size
        self.num_tokens += size
        while self.num_tokens > self.max_tokens:
            self.num_tokens -= self._results.popitem(last=False)[1][1]
        return result


class Chat:
    """A tokenizer's chat template and tool-call format.

    Raises UserError for a tokenizer without a template, and for a template that ignores tools,
    refuses a conversation with them, does not close an assistant message with a special token,
    renders a reply differently after other text, or writes calls that are not read back. Warns
    where a template drops earlier thoughts, leaves calls out, or cannot hold some arguments.
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
        self.tokenizer, self._kwargs = tokenizer, template_kwargs or {}
        self.cache = TokenCache(MAX_CACHED_TOKENS)
        added = {i: t for i, t in tokenizer.added_tokens_decoder.items() if t.content.strip()}
        self._special_ids = set(added) - {tokenizer.unk_token_id}
        self._special = Special({token.content for token in added.values()})
        # An assistant message may hold tags that are not marked special, such as <think>.
        self._control = Special({token.content for token in added.values() if token.special})
        # Some tokenizers put a space before every text; after a line break they put none.
        self._line_break: list[int] = []
        line_break = self._encode("\n")
        if self._encode("\n<") != line_break + self._encode("<"):
            self._line_break = line_break
        self.end_of_turn = checks.end_of_turn_of(self._template, self._special)
        self.end_of_turn_id: int = tokenizer.convert_tokens_to_ids(self.end_of_turn)
        checks.check_deltas(self._template, self._after_stub)
        self._opening = self._template([ASKED], add_generation_prompt=True)
        self._reader: ResponseTemplate | None = None  # without one, `parse_hermes` reads calls
        self._prefix = ""  # of a message, for the response template
        is_hermes = tool_call_format == "hermes"
        if not is_hermes:
            self._find_reader()
        self._renders_calls = "probe_tool" in self._template([ASKED, checks.CALL])
        if self._renders_calls:
            checks.check_calls(self._read_back, self._reader is not None, is_hermes)
        elif not (self._reader or is_hermes):
            checks.warn_once(
                "the chat template leaves tool calls out and the tokenizer carries no response "
                "template: tool calls are read as <tool_call>{...}</tool_call>; set "
                "tool_call_format: hermes to silence this"
            )
        checks.warn_of_lost_thoughts(self._template, self._opening)

    # -- messages to tokens --

    def prompt_ids(self, messages: Sequence[Message], tools: list[dict[str, Any]]) -> list[int]:
        """The ids of a conversation, with the header of the assistant's next message at the end."""
        return list(self.cache.call(self._prompt_ids, list(messages), tools))

    def reply_ids(self, replies: Sequence[Message]) -> list[int]:
        """The ids between two sampled messages: the replies and the next header.

        Replies are tool results or a user message. If a token other than the template's end of
        turn ended the sampled message (Llama's <|eom_id|>), the replies follow that token; a
        server that renders the conversation anew would write the end of turn in its place.
        """
        return list(self.cache.call(self._reply_ids, list(replies)))

    def message_ids(self, message: Message) -> list[int]:
        """The ids of `message` as a policy samples them, with its end of turn."""
        return list(self.cache.call(self._message_ids, message))

    def num_content_tokens(self, text: str) -> int:
        """The number of tokens of a text inside a message, where special strings are plain text."""
        return len(self.cache.call(self._content_ids, text))

    def _content_ids(self, text: str) -> list[int]:
        guards = Guards()
        return self._encode_guarded(guards.put(text, self._special), guards)

    def _prompt_ids(self, messages: list[Message], tools: list[dict[str, Any]]) -> list[int]:
        text, guards = self._render([], messages, tools=tools or None, add_generation_prompt=True)
        return self._encode_guarded(text, guards, at_start=True)

    def _reply_ids(self, replies: list[Message]) -> list[int]:
        text, guards = self._render(STUB_TURN, replies, add_generation_prompt=True)
        # The end of turn is encoded with it: some special tokens swallow the space around them.
        ids = self._encode_guarded(self._after_stub(text), guards)
        return ids[ids.index(self.end_of_turn_id) + 1 :]

    def _after_stub(self, text: str) -> str:
        """The part of a rendered text from the end of the stub's turn; empty if there is no end."""
        _, end_of_turn, rest = text.partition(STUB)[2].partition(self.end_of_turn)
        return end_of_turn + rest

    def _message_ids(self, message: Message) -> list[int]:
        text, guards = self._continued(message)
        if not text:
            raise UserError(
                "model: its chat template renders an assistant message differently from what "
                "it asks the model to continue; try chat_template_kwargs such as "
                "{enable_thinking: false}"
            )
        if message.get("tool_calls") and not self._renders_calls:
            raise UserError(
                "model: its chat template leaves tool calls out, so a demonstration would teach "
                "none; write them into the content, or set warm_start.steps 0"
            )
        return self._encode_guarded(text, guards)

    def _continued(self, message: Message) -> tuple[str, Guards]:
        """The rendered text of a message after the generation prompt, up to its last end of turn.

        Empty if the template does not write that prompt before the message.
        """
        text, guards = self._render([ASKED], [message])
        if not text.startswith(self._opening):
            return "", guards
        end = text.rindex(self.end_of_turn) + len(self.end_of_turn)
        return text[len(self._opening) : end], guards

    def _render(
        self, before: list[Message], messages: list[Message], **options: Any
    ) -> tuple[str, Guards]:
        """Rendered text of all messages, with guards for special text in `messages` and tools."""
        guards, guarded = Guards(), list(before)
        for message in messages:
            special = self._control if message["role"] == "assistant" else self._special
            put = {key: guards.put(value, special) for key, value in message.items()}
            if "tool_calls" in message:
                put["tool_calls"] = guards.put(message["tool_calls"], self._special)
            guarded.append({**put, "role": message["role"]})
        if options.get("tools"):
            options["tools"] = guards.put(options["tools"], self._special)
        return self._template(guarded, **options), guards

    def _template(self, messages: Sequence[Message], **options: Any) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, **options, **self._kwargs
            )
        except Exception as error:  # the template's code may raise anything
            roles = ", ".join(message["role"] for message in messages)
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(
                f"model: its chat template refuses a conversation of {roles} ({reason}); "
                "use a model whose template takes tools"
            ) from None
        return text

    def _encode_guarded(self, text: str, guards: Guards, at_start: bool = False) -> list[int]:
        """Ids of a rendered text, in which only the template's own special strings are special."""
        tokens, ids = self._special.tokens, list[int]()
        for number, piece in enumerate(GUARD.split(text)):
            if is_guarded := number % 2 == 1:
                piece = guards.texts[int(piece)]
                if tokens.search(piece):
                    ids += self.cache.call(self._spell, piece)
                    continue
            elif not piece:
                continue
            piece_ids = self._encode(piece, inside=is_guarded or bool(ids) or not at_start)
            if sum(i in self._special_ids for i in piece_ids) > len(tokens.findall(piece)):
                # The normalizer made a special token of plain text, as NFKC does of wide letters.
                parts = re.split(f"({tokens.pattern})", piece)
                piece_ids = [i for n, part in enumerate(parts) for i in self._plain(part, n % 2)]
            ids += piece_ids
        return ids

    def _plain(self, text: str, is_special: int) -> list[int]:
        ids = self._encode(text)
        return ids if is_special or self._special_ids.isdisjoint(ids) else self._spell(text)

    def _spell(self, text: str) -> list[int]:
        """Ids of a special string as plain text, one character after the other.

        `split_special_tokens` alone still finds added tokens that are not marked special.
        """
        return [i for c in text for i in self._encode(c, split_special_tokens=True)]

    def _encode(self, text: str, inside: bool = True, **options: Any) -> list[int]:
        """Ids of a text; one that stands `inside` a conversation gets no space before it."""
        before = self._line_break if inside else []
        context = "\n" if before else ""
        encoded = self.tokenizer(context + text, add_special_tokens=False, **options)
        ids: list[int] = encoded["input_ids"]
        is_joined = ids[: len(before)] != before  # the line break became a token with the text
        return self._encode(text, False, **options) if is_joined else ids[len(before) :]

    # -- tokens to messages --

    def parse(
        self,
        ids: Sequence[int],
        tools: Sequence[dict[str, Any]] = (),
        finished: bool | None = None,
    ) -> Parsed:
        """Read a sampled message; the content excludes the token that ended the message.

        `tools` give the types of arguments if the format of calls writes all values as text.
        `finished`: whether the last id ended the message; by default, whether it is the template's
        end of turn.
        """
        if finished is None:
            finished = bool(ids) and ids[-1] == self.end_of_turn_id
        typed_by = list(tools) if values_are_text(self._reader) else []
        parsed: Parsed = self.cache.call(self._parse, list(ids), finished, typed_by)
        return replace(parsed, calls=deepcopy(parsed.calls))  # tools may alter arguments

    def _parse(self, ids: list[int], finished: bool, tools: list[dict[str, Any]]) -> Parsed:
        text: str = self.tokenizer.decode(
            ids[:-1] if finished else ids, clean_up_tokenization_spaces=False
        )
        if self._reader is not None:
            end = self.end_of_turn if finished else ""
            return parse_with(self._reader, text, end, self._prefix, tools)
        in_thought = self._opening.rstrip().endswith(THINK) and "</think>" in text
        return parse_hermes(THINK + text if in_thought else text)

    def _find_reader(self) -> None:
        try:
            self._reader = response_template_of(self.tokenizer)
            # The template may open a message itself, with <think>. The reader then needs that
            # text, unless the reader would return it as content.
            if self._reader is not None:
                nothing = parse_response(self.end_of_turn, self._reader, prefix=self._opening)
                self._prefix = "" if nothing.get("content") else self._opening
        except Exception as error:  # the template comes with the model and may raise anything
            raise UserError(
                f"model: its tokenizer's response template cannot be used ({reason_of(error)}); "
                "set tool_call_format: hermes, or mend it"
            ) from None

    def _read_back(self, message: Message) -> Parsed | None:
        """Encode a message as a policy must sample it, and parse the ids.

        The message gets a thought if the template requires one. None if the template does not
        write all calls, or refuses several.
        """
        names = [call["function"]["name"] for call in message["tool_calls"]]
        for variant in (message, {**message, "reasoning_content": "-"}):
            try:
                text, guards = self._continued(variant)
            except UserError:
                if len(names) == 1:
                    raise
                return None
            if text and all(name in text for name in names):
                return self._parse(self._encode_guarded(text, guards), True, checks.CALLED)
        return None
