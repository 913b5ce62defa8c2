"""Messages to tokens and back, through a tokenizer's chat template and tool-call format.

Tokens in, tokens out: a conversation is rendered once, as its prompt. After that only the *delta*
of a reply is rendered, from a stub conversation, and appended to the sampled ids; templates that
rewrite history (Qwen3's drops earlier thinking) therefore cannot change what was sampled. Text in
messages and tools never becomes control tokens: special strings in it, and pieces that the text
around them could complete, are encoded as plain text.
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
ENTRY = 8  # a cached result takes about as much memory as its ids and so many more


class TokenCache:
    """Results of functions by their arguments; beyond `max_tokens` the least recently used go."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens, self.num_tokens = max_tokens, 0
        self._results: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._results)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """`function` of these arguments, as they come back from JSON; the result is not copied.

        A list of ids counts with its length, any other result with that of the first argument.
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
        self.tokenizer = tokenizer
        self.cache = TokenCache(MAX_CACHED_TOKENS)
        self._kwargs = template_kwargs or {}
        added = {i: t for i, t in tokenizer.added_tokens_decoder.items() if t.content.strip()}
        self._special_ids = set(added) - {tokenizer.unk_token_id}
        self._special = Special({token.content for token in added.values()})
        # An assistant message may hold tags that are not marked special, such as <think>.
        self._control = Special({token.content for token in added.values() if token.special})
        # Some tokenizers put a space before every text; after a line break they put none.
        line_break = self._encode("\n")
        is_plain = self._encode("\n<") == line_break + self._encode("<")
        self._line_break = [] if is_plain else line_break
        self.end_of_turn = checks.end_of_turn_of(self._template, self._special)
        self.end_of_turn_id: int = tokenizer.convert_tokens_to_ids(self.end_of_turn)
        checks.check_deltas(self._template, self._after_stub)
        self._renders_calls = checks.renders_calls(self._template)
        self._opening = self._template([ASKED], add_generation_prompt=True)
        self._opens_thought = self._opening.rstrip().endswith(THINK)
        self._prefix = ""  # of a message, for the response template
        self._reader = self._choose_reader(tool_call_format)
        is_hermes = tool_call_format == "hermes"
        if not (self._renders_calls or self._reader or is_hermes):
            checks.warn_once(
                "the chat template leaves tool calls out and the tokenizer carries no response "
                "template: tool calls are read as <tool_call>{...}</tool_call>; set "
                "tool_call_format: hermes to silence this"
            )
        if self._renders_calls:
            checks.check_calls(self._read_back, self._reader is not None, is_hermes)
        checks.warn_of_lost_thoughts(self._template, self._opening)

    # -- messages to tokens --

    def prompt_ids(self, messages: Sequence[Message], tools: list[dict[str, Any]]) -> list[int]:
        """The prompt of a conversation, which ends where the assistant's first token stands."""
        return list(self.cache.call(self._prompt_ids, list(messages), tools))

    def reply_ids(self, replies: Sequence[Message]) -> list[int]:
        """The ids between two sampled messages: the replies and the next header.

        Replies are tool results or a user message. If a token other than the template's end of
        turn ended the sampled message (Llama's <|eom_id|>), the replies follow that token; a
        server that renders the conversation anew would write the end of turn in its place.
        """
        return list(self.cache.call(self._reply_ids, list(replies)))

    def message_ids(self, message: Message) -> list[int]:
        """The ids that a policy would have sampled for `message`, its end of turn included."""
        return list(self.cache.call(self._message_ids, message))

    def num_content_tokens(self, text: str) -> int:
        """Tokens of a text inside a message, where nothing is special."""
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
        """A rendered text from the end of the stub's turn on; empty without such an end."""
        _, _, after = text.partition(STUB)
        _, end_of_turn, rest = after.partition(self.end_of_turn)
        return end_of_turn + rest

    def _message_ids(self, message: Message) -> list[int]:
        text, guards = self._render([ASKED], [message])
        if not text.startswith(self._opening):
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
        return self._encode_message(text[len(self._opening) :], guards)

    def _encode_message(self, text: str, guards: Guards) -> list[int]:
        """Ids of a text up to its last end of turn."""
        end = text.rindex(self.end_of_turn) + len(self.end_of_turn)
        return self._encode_guarded(text[:end], guards)

    def _render(
        self, before: list[Message], messages: list[Message], **options: Any
    ) -> tuple[str, Guards]:
        """Rendered text of all messages, with guards for special text in `messages` and tools."""
        guards, guarded = Guards(), list(before)
        for message in messages:
            said = self._control if message["role"] == "assistant" else self._special
            special = {"tool_calls": self._special}
            texts = {
                key: guards.put(value, special.get(key, said))
                for key, value in message.items()
                if key != "role"
            }
            guarded.append({**message, **texts})
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
        ids: list[int] = []
        for number, piece in enumerate(GUARD.split(text)):
            guarded = guards.texts[int(piece)] if number % 2 else ""
            if self._special.tokens.search(guarded):
                ids += self.cache.call(self._spell, guarded)
            elif number % 2:
                ids += self._encode_inside(guarded)
            elif piece:
                ids += self._encode(piece) if at_start and not ids else self._encode_inside(piece)
        return ids

    def _encode_inside(self, text: str) -> list[int]:
        """Ids of a text that stands after another, and whose special strings are the template's."""
        ids = self._encode_after(text)
        tokens = self._special.tokens
        if sum(token in self._special_ids for token in ids) <= len(tokens.findall(text)):
            return ids
        # The tokenizer's normalizer made another special token, as NFKC does of wide letters.
        ids = []
        for number, part in enumerate(re.split(f"({tokens.pattern})", text)):
            part_ids = self._encode_after(part)
            is_disguised = number % 2 == 0 and not self._special_ids.isdisjoint(part_ids)
            ids += self._spell(part) if is_disguised else part_ids
        return ids

    def _spell(self, text: str) -> list[int]:
        """Ids of a special string as plain text, one character after the other.

        `split_special_tokens` alone still finds added tokens that are not marked special.
        """
        return [i for c in text for i in self._encode_after(c, split_special_tokens=True)]

    def _encode_after(self, text: str, **options: Any) -> list[int]:
        """Ids of a text that does not start a line."""
        before = self._line_break
        ids = self._encode("\n" + text, **options) if before else []
        is_joined = not before or ids[: len(before)] != before
        return self._encode(text, **options) if is_joined else ids[len(before) :]

    def _encode(self, text: str, **options: Any) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, **options)["input_ids"]
        return ids

    # -- tokens to messages --

    def parse(
        self,
        ids: Sequence[int],
        tools: Sequence[dict[str, Any]] = (),
        finished: bool | None = None,
    ) -> Parsed:
        """Read a sampled message; the token that ended it, if one did, is no part of the content.

        `tools` give the types of arguments where the format of calls writes all values as text.
        `finished`: the last id ended the message, whichever it is; by default it did if it is the
        template's end of turn.
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
        in_thought = self._opens_thought and "</think>" in text
        return parse_hermes(THINK + text if in_thought else text)

    def _choose_reader(self, tool_call_format: str) -> ResponseTemplate | None:
        """The tokenizer's response template; None where `parse_hermes` reads the calls."""
        if tool_call_format == "hermes":
            return None
        try:
            reader = response_template_of(self.tokenizer)
            if reader is None:
                return None
            # A template may open a message itself, with <think>: the reader needs that text.
            nothing = parse_response(self.end_of_turn, reader, prefix=self._opening)
        except Exception as error:  # it came with the model and may hold anything
            raise UserError(
                f"model: its tokenizer's response template cannot be used ({reason_of(error)}); "
                "set tool_call_format: hermes, or mend it"
            ) from None
        if not nothing.get("content"):  # the reader finds where the message starts
            self._prefix = self._opening
        return reader

    def _read_back(self, message: Message) -> Parsed | None:
        """What is read of a message that is encoded as a policy would have to sample it.

        With a thought, if only then the template goes on as the model is asked to. None if the
        template does not write all calls, or refuses several.
        """
        names = [call["function"]["name"] for call in message["tool_calls"]]
        for said in (message, {**message, "reasoning_content": "-"}):
            try:
                text, guards = self._render([ASKED], [said])
            except UserError:
                if len(names) == 1:
                    raise
                return None
            if text.startswith(self._opening) and all(name in text for name in names):
                ids = self._encode_message(text[len(self._opening) :], guards)
                return self._parse(ids, True, checks.CALLED)
        return None
