"""Converts messages to tokens and back with a tokenizer's chat template and tool-call format.

The chat template renders a conversation's prompt once. Each later tool result or user message is
rendered after a short test conversation, not after the real conversation, and the new ids are
appended to the sampled ids. So a chat template that rewrites earlier messages cannot change sampled
tokens. Special strings (texts of special tokens) in messages and tools are encoded as plain text.
"""

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cached_property, partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from transformers.utils.chat_parsing import parse_response

from pipeline.common.children import rehearse
from pipeline.common.errors import UserError
from pipeline.common.untrusted import one_line, reason_of
from pipeline.config.settings import ModelSettings
from pipeline.data.tasks import Message
from pipeline.environments.domains import Domain
from pipeline.models.chat import template_checks as checks
from pipeline.models.chat.fitting import (
    EVERYTHING,
    TOOLS_BEGIN,
    Needs,
    clock_of,
    fit_template,
    held_clock,
    needs_of,
)
from pipeline.models.chat.template_checks import ASKED, STUB_TURN
from pipeline.models.chat.text import (
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

MAX_CACHED_TOKENS = 1 << 21  # largest number of cached ids, which take about 80 MB
MAX_RENDERED = 10_000_000  # largest number of characters that a chat template may write
MAX_ROLES = 8  # most roles of a conversation that a message names
MAX_DIGESTS = 16  # largest number of lists of tools that a cache knows by identity
Tools = Sequence[dict[str, Any]]  # JSON schemas
ENTRY = 8  # The overhead of a cache entry takes the memory of about 8 ids.


class TokenCache(OrderedDict[bytes, tuple[Any, int]]):
    """A least-recently-used cache of function results, limited to about `max_tokens` token ids."""

    def __init__(self, max_tokens: int) -> None:
        super().__init__()
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._digests: dict[int, tuple[Tools, bytes]] = {}  # lists of tools by `id`

    def call(self, function: Callable[..., Any], *arguments: Any, tools: Tools = ()) -> Any:
        """Return the result of `function(*arguments)`, or with `tools` as the last argument.

        The arguments must be JSON values. The result stays in the cache, so the caller must not
        change the result. The schemas of tools may be long and are the same in all episodes of a
        domain, so a list of tools is read at its first use only, and must not change later.
        """
        text = json.dumps([function.__name__, *arguments]).encode()
        key = hashlib.blake2b(text + self._digest(tools), digest_size=16).digest()
        if key in self:
            self.move_to_end(key)
            return self[key][0]
        result = function(*json.loads(text)[1:], *([deepcopy(list(tools))] if tools else []))
        size = ENTRY + len(result if isinstance(result, list) else arguments[0])
        self[key] = result, size
        self.num_tokens += size
        while self.num_tokens > self.max_tokens:
            self.num_tokens -= self.popitem(last=False)[1][1]
        return result

    def _digest(self, tools: Tools) -> bytes:
        found = self._digests.get(id(tools))
        if found is None and len(self._digests) >= MAX_DIGESTS:
            self._digests.clear()
        if found is None:
            text = json.dumps(list(tools)).encode()
            found = self._digests[id(tools)] = tools, hashlib.blake2b(text).digest()
        return found[1]


class Chat:
    """A tokenizer's chat template and tool-call format.

    `needs` says what the run's conversations have; a template is checked for nothing else. `notes`
    has what `fit_template` changed; `clock` is its argument. Raises UserError if the template fails
    a check in `template_checks.py`. Warns if the template drops earlier thoughts or other messages
    of the assistant, drops tool calls, or changes some arguments.
    """

    def __init__(
        self,
        tokenizer: Any,
        template_kwargs: dict[str, Any] | None = None,
        tool_call_format: str = "auto",
        *,
        needs: Needs = EVERYTHING,
        chat_template: str | None = None,
        system_prompt: str | None = None,
        clock: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._kwargs = template_kwargs or {}
        clock = clock or held_clock()
        fit = {"chat_template": chat_template, "system_prompt": system_prompt, "clock": clock}
        prepare = partial(self._prepare, tool_call_format, needs, fit)
        rehearse("model: its chat template", prepare, "give another --chat-template")
        prepare()

    def _prepare(
        self,
        tool_call_format: str,
        needs: Needs,
        fit: dict[str, str | None],
    ) -> None:
        tokenizer = self.tokenizer
        self.notes = fit_template(
            tokenizer,
            self._template,
            needs=needs,
            tools_as_text=tool_call_format == "text",
            **fit,
        )
        checks.refuse_random(tokenizer.chat_template)
        self.cache = TokenCache(MAX_CACHED_TOKENS)
        added = {i: t for i, t in tokenizer.added_tokens_decoder.items() if t.content.strip()}
        self._special_ids = set(added) - {tokenizer.unk_token_id}
        self._special = Special({token.content for token in added.values()})
        # An assistant message may contain added tokens that are not special, such as <think>.
        self._control = Special({token.content for token in added.values() if token.special})
        # Some tokenizers add a space at the start of a text, but not after a line break.
        self._line_break: list[int] = []
        ids = self._encode("\n<")
        line_break = self._encode("\n")
        self._line_break = [] if ids == line_break + self._encode("<") else line_break
        is_closed = needs.tools or needs.replies  # else the model's own token may end a message
        own_end = "" if is_closed else tokenizer.eos_token or ""
        self.end_of_turn = checks.end_of_turn_of(self._template, self._special, own_end)
        self.end_of_turn_id: int = tokenizer.convert_tokens_to_ids(self.end_of_turn)
        self._opening = self._template([ASKED], add_generation_prompt=True)
        self._reader: ResponseTemplate | None = None  # without a reader, `parse_hermes` reads calls
        self._prefix = ""  # the generation prompt if the response template needs it, else ""
        if tool_call_format == "auto" and TOOLS_BEGIN not in tokenizer.chat_template:
            self._find_reader()
        talks = checks.talks(needs.tools, needs.replies)
        left_out = {role for talk in talks for role in checks.check_shown(self._template, talk)}
        if "assistant" in left_out:
            checks.warn_once(
                "the chat template leaves earlier messages of the assistant out: a server that "
                "renders each conversation anew will leave them out, while training keeps them"
            )
        if needs.tools or needs.replies:
            checks.check_deltas(self._template, self._after_stub, needs.tools)
            checks.warn_of_lost_thoughts(self._template, self._opening)
        self._renders_calls = needs.tools and "probe_tool" in self._template([ASKED, checks.CALL])
        if self._renders_calls:
            checks.check_calls(self._read_back, self._reader is not None, tool_call_format)
        elif needs.tools and not self._reader and tool_call_format == "auto":
            checks.warn_once(
                "the chat template leaves tool calls out and the tokenizer has no response template"
                ": calls are read as Hermes; set tool_call_format: text to write them, too, or "
                "hermes to silence this"
            )

    @cached_property
    def preface(self) -> str:
        """The text that the template writes by itself before a prompt without a system message."""
        request: Message = {"role": "user", "content": STUB}
        try:
            first = self._template([request])
            later = self._template([*STUB_TURN, request])
        except UserError:  # a template for prompts of one message
            return ""
        ends = [text.rpartition(STUB)[0][::-1] for text in (first, later)]
        # What both end with is the header of a user's message.
        same = takewhile(lambda pair: pair[0] == pair[1], zip(*ends, strict=False))
        text = self._special.tokens.sub("", ends[0][len([*same]) :][::-1]).strip()
        return text.removeprefix("system").strip()

    def check_shown(self, prompt: Sequence[Message], tools: Tools) -> dict[str, str]:
        """Return which roles' texts are left out of a prompt; see `template_checks.check_shown`."""
        return checks.check_shown(self._template, prompt, tools=list(tools) or None)

    def prompt_ids(self, messages: Sequence[Message], tools: list[dict[str, Any]]) -> list[int]:
        """Return the token ids of a conversation and of the next assistant message's header."""
        return list(self.cache.call(self._prompt_ids, messages, tools=tools))

    def reply_ids(self, replies: Sequence[Message]) -> list[int]:
        """Return the ids of tool results or a user message, and of the next message's header.

        The sampled message before the returned ids may end with a token other than the template's
        end-of-turn token, for example with Llama's <|eom_id|>.
        """
        return list(self.cache.call(self._reply_ids, replies))

    def message_ids(self, message: Message) -> list[int]:
        """Return the ids that a policy samples to write `message`, with the end-of-turn token."""
        return list(self.cache.call(self._message_ids, message))

    def num_content_tokens(self, text: str) -> int:
        """Return the number of tokens of a text, in which special strings count as plain text."""
        return len(self.cache.call(self._content_ids, text))

    def _content_ids(self, text: str) -> list[int]:
        guards = Guards()
        return self._encode_guarded(guards.put(text, self._special), guards)

    def _prompt_ids(self, messages: list[Message], tools: Tools = ()) -> list[int]:
        text, guards = self._render([], messages, tools=tools or None, add_generation_prompt=True)
        return self._encode_guarded(text, guards, at_start=True)

    def _reply_ids(self, replies: list[Message]) -> list[int]:
        text, guards = self._render(STUB_TURN, replies, add_generation_prompt=True)
        # A special token may absorb white space after it, so the end-of-turn token is encoded too.
        ids = self._encode_guarded(self._after_stub(text), guards)
        return ids[ids.index(self.end_of_turn_id) + 1 :]

    def _after_stub(self, text: str) -> str:
        _, end_of_turn, rest = text.partition(STUB)[2].partition(self.end_of_turn)
        return end_of_turn + rest

    def _message_ids(self, message: Message) -> list[int]:
        text, guards = self._continued(message)
        if not text:
            fault = "renders an assistant message differently from what it asks to continue"
            raise UserError(f"model: its chat template {fault}; set other chat_template_kwargs")
        if message.get("tool_calls") and not self._renders_calls:
            fault = "leaves tool calls out, so a demonstration would teach none"
            raise UserError(f"model: its chat template {fault}; set warm_start.steps 0")
        return self._encode_guarded(text, guards)

    def _continued(self, message: Message) -> tuple[str, Guards]:
        """Return the text that the template writes for `message` after the generation prompt."""
        text, guards = self._render([ASKED], [message])
        if not text.startswith(self._opening):
            return "", guards
        end = text.rindex(self.end_of_turn) + len(self.end_of_turn)
        return text[len(self._opening) : end], guards

    def _render(
        self, before: list[Message], messages: list[Message], **options: Any
    ) -> tuple[str, Guards]:
        """Return rendered text with placeholders for special strings, and the special strings."""
        guards = Guards()
        guarded = list(before)
        for message in messages:
            special = self._control if message["role"] == "assistant" else self._special
            seen = {key: value for key, value in message.items() if key != "raw_content"}
            put = {key: guards.put(value, special) for key, value in seen.items()}
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
        except MemoryError:
            raise
        except Exception as error:  # a chat template may raise any exception
            roles = ", ".join(message["role"] for message in messages[:MAX_ROLES])
            roles += f" and {len(messages) - MAX_ROLES} more" * (len(messages) > MAX_ROLES)
            reason = one_line(str(error)) or type(error).__name__
            fault = f"refuses a conversation of {roles} ({reason})"
            raise UserError(
                f"model: its chat template {fault}; give another --chat-template"
            ) from None
        if len(text) > MAX_RENDERED:
            fault = f"writes {len(text)} characters, and the limit is {MAX_RENDERED}"
            raise UserError(f"model: its chat template {fault}; give another --chat-template")
        return text

    def _encode_guarded(self, text: str, guards: Guards, at_start: bool = False) -> list[int]:
        """Return the ids of a rendered text. The texts in `guards` are encoded as plain text."""
        tokens = self._special.tokens
        ids = list[int]()
        for number, piece in enumerate(GUARD.split(text)):
            is_guarded = number % 2 == 1
            piece = guards.texts[int(piece)] if is_guarded else piece
            if is_guarded and tokens.search(piece):
                ids += self.cache.call(self._spell, piece)
                continue
            piece_ids = self._encode(piece, inside=is_guarded or bool(ids) or not at_start)
            if sum(i in self._special_ids for i in piece_ids) > len(tokens.findall(piece)):
                # The tokenizer's normalizer (NFKC, say) made a special token from plain text.
                piece_ids = []
                for n, part in enumerate(re.split(f"({tokens.pattern})", piece)):
                    plain = self._encode(part)
                    is_whole = n % 2 == 1 or self._special_ids.isdisjoint(plain)
                    piece_ids += plain if is_whole else self._spell(part)
            ids += piece_ids
        return ids

    def _spell(self, text: str) -> list[int]:
        # Encode single characters: `split_special_tokens` does not split tokens such as <think>.
        return [i for c in text for i in self._encode(c, split_special_tokens=True)]

    def _encode(self, text: str, inside: bool = True, **options: Any) -> list[int]:
        """Return the ids of a text. If `inside` is True, no space is added before the text."""
        before = self._line_break if inside else []
        context = "\n" if before else ""
        encoded = self.tokenizer(context + text, add_special_tokens=False, **options)
        ids: list[int] = encoded["input_ids"]
        is_joined = ids[: len(before)] != before  # the tokenizer joined the line break and the text
        return self._encode(text, False, **options) if is_joined else ids[len(before) :]

    def parse(
        self, ids: Sequence[int], tools: Sequence[dict[str, Any]] = (), finished: bool | None = None
    ) -> Parsed:
        """Parse the token ids of one sampled message.

        If the tool-call format writes all arguments as text, the types of arguments come from
        `tools`. `finished` is True if the last id ended the message. By default, `finished` is True
        if the last id is the template's end-of-turn token.
        """
        if finished is None:
            finished = bool(ids) and ids[-1] == self.end_of_turn_id
        typed_by = tools if values_are_text(self._reader) else ()
        parsed: Parsed = self.cache.call(self._parse, list(ids), finished, tools=typed_by)
        return replace(parsed, calls=deepcopy(parsed.calls))  # tools may change a call's arguments

    def _parse(self, ids: list[int], finished: bool, tools: Tools = ()) -> Parsed:
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
            # If parsing would return the generation prompt as content, the prefix is empty.
            if self._reader is not None:
                nothing = parse_response(self.end_of_turn, self._reader, prefix=self._opening)
                self._prefix = "" if nothing.get("content") else self._opening
        except Exception as error:  # a response template may raise any exception
            fault = f"its tokenizer's response template cannot be used ({reason_of(error)})"
            raise UserError(f"model: {fault}; set tool_call_format: hermes, or mend it") from None

    def _read_back(self, message: Message) -> Parsed | None:
        """Encode and parse a message; return None if the template cannot write the tool calls."""
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


def load_chat(
    settings: ModelSettings,
    tokenizer: Any,
    domains: Mapping[str, Domain],
    checkpoint: Path | None = None,
    clock: str | None = None,
) -> Chat:
    """Return the chat format of a run. A resumed run's clock is in the template of `checkpoint`."""
    template = checkpoint and checkpoint / "chat_template.jinja"
    if template and template.is_file():
        clock = clock_of(template.read_text()) or clock
    return Chat(
        tokenizer,
        settings.chat_template_kwargs,
        settings.tool_call_format,
        needs=needs_of(domains.values()),
        chat_template=settings.chat_template,
        system_prompt=settings.system_prompt,
        clock=clock,
    )
