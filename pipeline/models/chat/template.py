"""Converts messages to tokens and back with a tokenizer's chat template and tool-call format.

The chat template renders a conversation's prompt once. Each later tool result or user message is
rendered after a short test conversation, not after the real conversation, and the new ids are
appended to the sampled ids. So a chat template that rewrites earlier messages cannot change sampled
tokens. Special strings (texts of special tokens) in messages and tools are encoded as plain text.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cached_property, lru_cache, partial
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
    body_of,
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

MAX_CACHED = 1 << 13  # results; a prompt of 8,000 tokens takes 300 kB, but most are replies
MAX_RENDERED = 10_000_000  # largest number of characters that a chat template may write
MAX_ROLES = 8  # most roles of a conversation that a message names
Tools = Sequence[dict[str, Any]]  # JSON schemas


class Chat:
    """A tokenizer's chat template and tool-call format.

    `needs` says what the run's conversations have; a template is checked for nothing else. `notes`
    has what `fit_template` changed; `clock` is its argument. Raises UserError if the template fails
    a check in `template_checks.py`. Warns if the template drops earlier messages of the assistant
    or tool calls, or changes some arguments. `forgets`: it drops thoughts of earlier turns.
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
        fit = partial(
            fit_template,
            tokenizer,
            self._template,
            needs=needs,
            chat_template=chat_template,
            system_prompt=system_prompt,
            tools_as_text=tool_call_format == "text",
            clock=clock or held_clock(),
        )
        prepare = partial(self._prepare, fit, tool_call_format, needs)
        rehearse("model: its chat template", prepare, "give another --chat-template")
        prepare()

    def _prepare(self, fit: Callable[[], list[str]], tool_call_format: str, needs: Needs) -> None:
        tokenizer = self.tokenizer
        self.notes = fit()
        checks.refuse_random(tokenizer.chat_template)
        self.cached = lru_cache(MAX_CACHED)(self._computed)
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
        # The model's own token may end the only message of a conversation.
        own_end = "" if needs.tools or needs.replies else tokenizer.eos_token or ""
        self.end_of_turn = checks.end_of_turn_of(self._template, self._special, own_end)
        self.end_of_turn_id: int = tokenizer.convert_tokens_to_ids(self.end_of_turn)
        self._opening = self._template([ASKED], add_generation_prompt=True)
        self._reader: ResponseTemplate | None = None  # without a reader, `parse_hermes` reads calls
        self._prefix = ""  # the generation prompt if the response template needs it, else ""
        if tool_call_format == "auto" and TOOLS_BEGIN not in tokenizer.chat_template:
            self._find_reader()
        talks = checks.talks(needs.tools, needs.replies)
        self.forgets = self.is_append_only = False
        left_out = {role for talk in talks for role in checks.check_shown(self._template, talk)}
        if "assistant" in left_out:
            checks.warn_once(
                "the chat template leaves earlier messages of the assistant out: a server that "
                "renders each conversation anew will leave them out, while training keeps them"
            )
        if needs.tools or needs.replies:
            checks.check_deltas(self._template, self._after_stub, needs.tools)
            self.forgets = checks.drops_thoughts(self._template, self._opening)
            note = checks.history_note(self._template, self._opening, self.forgets)
            self.notes += [note] if note else []
            self.is_append_only = not note
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
        return list(self._once(self._prompt_ids, messages, tools))

    def prompt_without_thoughts(
        self, messages: Sequence[Message], tools: list[dict[str, Any]], first: int
    ) -> list[int] | None:
        """Return the ids of a prompt that lacks a thought of `messages[first:]`, else None.

        None means that the conversation goes on with its tokens. Warns if it does so because the
        template cannot write the whole conversation.
        """
        render = partial(self._template, tools=tools or None, add_generation_prompt=True)
        try:
            is_lost = self.forgets and checks.loses_thought(render, messages, first)
            return self.prompt_ids(messages, tools) if is_lost else None
        except UserError as error:
            self._once(self._tell_unwritten, str(error))
            return None

    def _tell_unwritten(self, problem: str) -> None:
        checks.warn_once(f"a conversation goes on with its thoughts: {problem}")

    def reply_ids(self, replies: Sequence[Message]) -> list[int]:
        """Return the ids of tool results or a user message, and of the next message's header.

        The sampled message before the returned ids may end with a token other than the template's
        end-of-turn token, for example with Llama's <|eom_id|>.
        """
        return list(self._once(self._reply_ids, replies))

    def message_ids(self, message: Message) -> list[int]:
        """Return the ids that a policy samples to write `message`, with the end-of-turn token."""
        return list(self._once(self._message_ids, message))

    def num_content_tokens(self, text: str) -> int:
        """Return the number of tokens of a text, in which special strings count as plain text."""
        return len(self._once(self._content_ids, text))

    def _once(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a method for JSON arguments, which must stay as it is."""
        return self.cached(method.__name__, json.dumps(arguments))

    def _computed(self, method: str, arguments: str) -> Any:
        return getattr(self, method)(*json.loads(arguments))

    def _content_ids(self, text: str) -> list[int]:
        guards = Guards()
        return self._encode_guarded(guards.put(text, self._special), guards)

    def _prompt_ids(self, messages: list[Message], tools: Tools) -> list[int]:
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
            raise checks.template_error(
                "renders an assistant message differently from what it asks to continue",
                "set other chat_template_kwargs",
            )
        if message.get("tool_calls") and not self._renders_calls:
            raise checks.template_error(
                "leaves tool calls out, so a demonstration would teach none",
                "set warm_start.steps 0",
            )
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
            raise checks.template_error(f"refuses a conversation of {roles} ({reason})") from None
        if len(text) > MAX_RENDERED:
            raise checks.template_error(
                f"writes {len(text)} characters, and the limit is {MAX_RENDERED}"
            )
        return text

    def _encode_guarded(self, text: str, guards: Guards, at_start: bool = False) -> list[int]:
        """Return the ids of a rendered text. The texts in `guards` are encoded as plain text."""
        tokens = self._special.tokens
        ids = list[int]()
        for number, piece in enumerate(GUARD.split(text)):
            is_guarded = number % 2 == 1
            piece = guards.texts[int(piece)] if is_guarded else piece
            if is_guarded and tokens.search(piece):
                ids += self._once(self._spell, piece)
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
        typed_by = list(tools) if values_are_text(self._reader) else []
        parsed: Parsed = self._once(self._parse, list(ids), finished, typed_by)
        return replace(parsed, calls=deepcopy(parsed.calls))  # tools may change a call's arguments

    def _parse(self, ids: list[int], finished: bool, tools: Tools) -> Parsed:
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
            self._reader = response_template_of(
                self.tokenizer, body_of(self.tokenizer.chat_template)
            )
            # If parsing would return the generation prompt as content, the prefix is empty.
            if self._reader is not None:
                nothing = parse_response(self.end_of_turn, self._reader, prefix=self._opening)
                self._prefix = "" if nothing.get("content") else self._opening
        except Exception as error:  # a response template may raise any exception
            raise UserError(
                f"model: its tokenizer's response template cannot be used ({reason_of(error)}); "
                "set tool_call_format: hermes, or mend it"
            ) from None

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
