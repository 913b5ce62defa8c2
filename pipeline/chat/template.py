"""Messages to tokens and back: the one place that knows chat templates and tool-call formats.

Tokens in, tokens out: a conversation is rendered once, as its prompt. After that only the *delta*
of a reply is rendered, from a stub conversation, and appended to the ids that were sampled;
templates that rewrite history (Qwen3's drops earlier thinking) therefore cannot change what was
sampled. Text in messages and tools never becomes control tokens: special strings inside them, and
pieces that the text around them could complete, are encoded as plain text.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache
from typing import Any

from pipeline.chat.probes import (
    ANSWER,
    ASKED,
    CALL,
    CALLED,
    REPLIES,
    RESULT,
    STUB_TURN,
    TOOL,
    conversations,
    in_hermes,
    lost_arguments,
    unread_call,
)
from pipeline.chat.text import (
    GUARD,
    STUB,
    Guards,
    Parsed,
    ResponseTemplate,
    Special,
    is_call,
    parse_hermes,
    steady,
    take_from_trl,
    values_are_text,
)
from pipeline.data.tasks import Message
from pipeline.errors import UserError
from pipeline.files.untrusted import reason_of

_CACHE_SIZE = 65536  # renderings and parses kept: what a small model says, it says many times

_THINK = "<think>"
_THOUGHT, _ANSWERED = "probe_thought", "probe_answer"
_THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")


class Chat:
    """A tokenizer's chat template and tool-call format.

    Raises UserError for a tokenizer without a template, a template that ignores tools or refuses a
    conversation with them, that does not close an assistant message with a special token, whose
    rendering of a reply depends on earlier text, or whose calls are not read back. Warns where a
    template drops earlier thoughts, leaves calls out, or cannot hold some arguments of calls.
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
        added = {i: t for i, t in tokenizer.added_tokens_decoder.items() if t.content.strip()}
        self._special_ids = set(added) - {tokenizer.unk_token_id}
        self._special = Special({token.content for token in added.values()})
        # an assistant message may hold tags that a policy says itself, such as <think>
        self._control = Special({token.content for token in added.values() if token.special})
        # Some tokenizers put a space before every text; what stands after a line break has none.
        line_break = self._encode("\n")
        joined = self._encode("\n<") == line_break + self._encode("<")
        self._line_break = [] if joined else line_break
        self.end_of_turn = self._find_end_of_turn()
        self.end_of_turn_id: int = tokenizer.convert_tokens_to_ids(self.end_of_turn)
        self._check_deltas()
        self._renders_calls = "probe_tool" in self._template([ASKED, CALL])
        self._opening = self._template([ASKED], add_generation_prompt=True)
        self._spell = lru_cache(_CACHE_SIZE)(self._spell_text)
        self._opens_thought = self._opening.rstrip().endswith(_THINK)
        self._reader: ResponseTemplate | None = None
        self._prefix = ""  # of a message, for the reader of calls
        self._reader = self._choose_reader(tool_call_format)
        self._check_calls(tool_call_format)
        self._warn_of_lost_thoughts()
        self._reply_ids = lru_cache(_CACHE_SIZE)(self._render_reply)
        self._message_ids = lru_cache(_CACHE_SIZE)(self._render_message)
        self._prompt_ids = lru_cache(_CACHE_SIZE)(self._render_prompt)
        self._parse = lru_cache(_CACHE_SIZE)(self._parse_text)
        self.num_content_tokens = lru_cache(_CACHE_SIZE)(self._num_content_tokens)

    # -- messages to tokens --

    def prompt_ids(self, messages: Sequence[Message], tools: list[dict[str, Any]]) -> list[int]:
        """The prompt of a conversation, up to where the assistant's first token stands."""
        return list(self._prompt_ids(json.dumps(list(messages)), json.dumps(tools)))

    def reply_ids(self, replies: Sequence[Message]) -> list[int]:
        """What follows the end of a sampled message: the replies and the next header.

        Replies are tool results or a user message. Where another token than the template's end of
        turn ended the message, the replies follow that token, as they do Llama's <|eom_id|>; a
        server that renders the conversation anew would write the end of turn in its place.
        """
        return list(self._reply_ids(json.dumps(list(replies))))

    def message_ids(self, message: Message) -> list[int]:
        """What a policy would have sampled to say `message`, its end of turn included."""
        return list(self._message_ids(json.dumps(message)))

    def _num_content_tokens(self, text: str) -> int:
        """Tokens of a text inside a message, where nothing is special."""
        guards = Guards()
        return len(self._encode_guarded(guards.put(text, self._special), guards))

    def _render_prompt(self, messages: str, tools: str) -> list[int]:
        options = {"tools": json.loads(tools) or None, "add_generation_prompt": True}
        text, guards = self._render([], json.loads(messages), **options)
        return self._encode_guarded(text, guards, at_start=True)

    def _render_reply(self, replies: str) -> list[int]:
        text, guards = self._render(STUB_TURN, json.loads(replies), add_generation_prompt=True)
        # The end of turn is encoded with it: some special tokens swallow the space around them.
        ids = self._encode_guarded(self._after_stub(text), guards)
        return ids[ids.index(self.end_of_turn_id) + 1 :]

    def _after_stub(self, text: str) -> str:
        """What a rendering holds from the end of the stub's turn on; empty without one."""
        _, _, after = text.partition(STUB)
        _, end_of_turn, rest = after.partition(self.end_of_turn)
        return end_of_turn + rest

    def _render_message(self, message: str) -> list[int]:
        said = json.loads(message)
        text, guards = self._render([ASKED], [said])
        if not text.startswith(self._opening):
            raise UserError(
                "model: its chat template renders an assistant message differently from what "
                "it asks the model to continue; try chat_template_kwargs such as "
                "{enable_thinking: false}"
            )
        if said.get("tool_calls") and not self._renders_calls:
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
        self, own: list[Message], messages: list[Message], **options: Any
    ) -> tuple[str, Guards]:
        """Rendered text, and the guards in it for what is special in `messages` and tools."""
        guards = Guards()
        guarded = list(own)
        for message in messages:
            said = self._control if message["role"] == "assistant" else self._special
            guarded.append(
                {
                    key: value
                    if key == "role"
                    else guards.put(value, self._special if key == "tool_calls" else said)
                    for key, value in message.items()
                }
            )
        if options.get("tools"):
            options["tools"] = guards.put(options["tools"], self._special)
        return self._template(guarded, **options), guards

    def _template(self, messages: Sequence[Message], **options: Any) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, **options, **self._kwargs
            )
        except Exception as error:  # code that is not ours: a template may raise anything
            roles = ", ".join(message["role"] for message in messages)
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(
                f"model: its chat template refuses a conversation of {roles} ({reason}); "
                "use a model whose template takes tools"
            ) from None
        return text

    def _encode_guarded(self, text: str, guards: Guards, at_start: bool = False) -> list[int]:
        ids: list[int] = []
        for piece in GUARD.split(text):
            if GUARD.fullmatch(piece):
                taken = guards.texts[int(piece[1:-1])]
                whole = self._special.tokens.search(taken)
                ids += self._spell(taken) if whole else self._encode_inside(taken)
            elif piece:
                ids += self._encode(piece) if at_start and not ids else self._encode_inside(piece)
        return ids

    def _encode_inside(self, text: str) -> list[int]:
        """Ids of a text that stands after another, and whose special strings are the template's."""
        ids = self._encode_after(text)
        tokens = self._special.tokens
        if sum(token in self._special_ids for token in ids) <= len(tokens.findall(text)):
            return ids
        # The tokenizer's normalizer made one more, as NFKC does of full-width letters.
        ids = []
        for number, part in enumerate(re.split(f"({tokens.pattern})", text)):
            found = self._encode_after(part)
            hidden = number % 2 == 0 and not self._special_ids.isdisjoint(found)
            ids += self._spell(part) if hidden else found
        return ids

    def _spell_text(self, text: str) -> tuple[int, ...]:
        """Ids of a special string as plain text, one character after the other.

        `split_special_tokens` alone still finds added tokens that are not marked special.
        """
        encoded = [self._encode_after(character, split_special_tokens=True) for character in text]
        return tuple(token for ids in encoded for token in ids)

    def _encode_after(self, text: str, **options: Any) -> list[int]:
        """Ids of a text that does not start a line."""
        before = self._line_break
        ids = self._encode("\n" + text, **options) if before else []
        joined = not before or ids[: len(before)] != before
        return self._encode(text, **options) if joined else ids[len(before) :]

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

        `tools` tell the types of arguments where the format of calls writes all as text. `finished`
        says that the last id ended the message, whichever it is; if missing, the template's end of
        turn does.
        """
        if finished is None:
            finished = bool(ids) and ids[-1] == self.end_of_turn_id
        text = self._decode(ids[:-1] if finished else ids)
        typed_by = json.dumps(list(tools)) if values_are_text(self._reader) else "[]"
        try:
            parsed = self._parse(text, finished, typed_by)
            calls = [(name, deepcopy(arguments)) for name, arguments in parsed.calls]
            return replace(parsed, calls=calls)  # tools may alter arguments
        except RecursionError:
            return Parsed(content=text, malformed="nested too deeply")

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
        return text

    def _parse_text(self, text: str, ended: bool, tools: str) -> Parsed:
        if self._reader is None:
            in_thought = self._opens_thought and "</think>" in text
            return parse_hermes(_THINK + text if in_thought else text)
        whole = text + self.end_of_turn if ended else text
        try:
            message = self._read(whole, self._prefix, json.loads(tools))
        except RecursionError:
            raise
        except Exception as error:  # a template is not ours, and what it reads may be anything
            reason = str(error).partition("\n")[0].rstrip(".")
            return Parsed(content=text, malformed=reason or type(error).__name__)
        said, found = message.get("content") or "", message.get("tool_calls") or []
        if not isinstance(said, str) or not isinstance(found, list):
            return Parsed(content=text, malformed="the response template gives no message")
        calls = []
        for call in found:
            function = call.get("function", call) if isinstance(call, dict) else None
            if not is_call(function):
                return Parsed(
                    content=text, malformed="a call needs a name and an object of arguments"
                )
            calls.append((function["name"], function.get("arguments") or {}))
        return Parsed(content=said.strip(), calls=calls)

    def _read(self, text: str, prefix: str, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
        message: dict[str, Any] = self.tokenizer.parse_response(
            text, self._reader, prefix=prefix, tools=list(tools)
        )
        return message

    # -- checks at start --

    def _choose_reader(self, tool_call_format: str) -> ResponseTemplate | None:
        """The tokenizer's response template; None where our Hermes parser reads the calls."""
        if tool_call_format == "hermes":
            return None
        own = getattr(self.tokenizer, "response_template", None)
        if own is None and not take_from_trl(self.tokenizer):
            return None
        try:
            self._reader = steady(self.tokenizer.response_template)
            # A template may open a message itself, with <think>, which its reader must know.
            nothing = self._read(self.end_of_turn, self._opening, ())
        except Exception as error:  # it came with the model and may hold anything
            raise UserError(
                f"model: its tokenizer's response template cannot be used ({reason_of(error)}); "
                "set tool_call_format: hermes, or mend it"
            ) from None
        if not nothing.get("content"):  # it finds where the message starts
            self._prefix = self._opening
        return self._reader

    def _check_calls(self, tool_call_format: str) -> None:
        """UserError where calls that the template writes are not read back as they were said."""
        if not self._renders_calls and self._reader is None and tool_call_format == "auto":
            _warn(
                "the chat template leaves tool calls out and the tokenizer carries no response "
                "template: tool calls are read as <tool_call>{...}</tool_call>; set "
                "tool_call_format: hermes to silence this"
            )
        unread = unread_call(self._read_back)
        if unread:
            reader = "as Hermes" if self._reader is None else "by its response template"
            raise UserError(
                f"model: its chat template writes tool calls that are not read back {reader} "
                f"({unread}), so none would work; {self._remedy(tool_call_format)}"
            )
        if lost := lost_arguments(self._read_back):
            _warn(
                f"the chat template's tool calls cannot hold {' or '.join(lost)} in arguments: "
                "where a model writes them, a tool is given something else"
            )

    def _remedy(self, tool_call_format: str) -> str:
        if tool_call_format == "hermes":
            return "leave tool_call_format at auto, or use another template"
        if self._reader is not None:
            self._reader = None
            if not unread_call(self._read_back):
                return "set tool_call_format: hermes"
        return "set tokenizer.response_template to one that reads them, or use another template"

    def _read_back(self, message: Message) -> Parsed | None:
        """What is read of a message that was encoded as a policy would have to sample it.

        None where the template does not write all its calls, or refuses several.
        """
        calls = message["tool_calls"]
        if self._renders_calls:
            try:
                text, guards = self._render([ASKED], [message])
            except UserError:
                if len(calls) == 1:
                    raise
                return None
            if any(call["function"]["name"] not in text for call in calls):
                return None
            ids = self._encode_message(self._continuation(text), guards)
        elif self._reader is None:
            ids = self._encode(in_hermes(message) + self.end_of_turn)
        else:  # nobody says how it would be written
            return None
        return self._parse_text(self._decode(ids[:-1]), True, json.dumps(CALLED))

    def _continuation(self, text: str) -> str:
        """What a policy would say of a rendered message, also where the template adds to both.

        It closes a thought that it is asked to begin, if the message has none.
        """
        in_thought = self._opens_thought and not text.startswith(self._opening)
        opening = self._opening
        if in_thought:
            opening = opening.rstrip().removesuffix(_THINK)
        shared = os.path.commonprefix([text, opening])  # noqa: RUF071  # these are texts
        said = text[len(shared) :]
        if in_thought:
            said = said.removeprefix(_THINK)
            said = said if "</think>" in said else "</think>" + said
        return said

    def _warn_of_lost_thoughts(self) -> None:
        tagged = {"content": f"<think>\n{_THOUGHT}\n</think>\n\n{_ANSWERED}"}
        fields = [{"content": _ANSWERED, key: _THOUGHT} for key in _THOUGHT_KEYS]
        if self._loses(tagged, "</think>") or any(self._loses(said) for said in fields):
            _warn(
                "the chat template drops earlier thoughts: a server that renders each conversation "
                "anew will drop them, while training keeps them; set chat_template_kwargs: "
                "{enable_thinking: false}, or serve with token-level history"
            )

    def _loses(self, said: dict[str, str], closing: str = "") -> bool:
        """Whether a thought in `said` vanishes after a later request, and thinking is not off.

        It is off where the generation prompt holds what closes a thought.
        """
        messages = [ASKED, {"role": "assistant", **said}]
        shown, later = self._template(messages), self._template([*messages, ASKED])
        if _THOUGHT in shown:
            closing = shown.partition(_THOUGHT)[2].partition(_ANSWERED)[0].strip()
        generation_prompt = self._opening.removeprefix(self._template([ASKED]))
        return _THOUGHT not in later and bool(closing) and closing not in generation_prompt

    def _find_end_of_turn(self) -> str:
        text = self._template(STUB_TURN)
        found = self._special.tokens.search(text, text.rindex(STUB) if STUB in text else len(text))
        if not found:
            raise UserError(
                "model: its chat template does not close an assistant message with a special token"
            )
        return found.group()

    def _check_deltas(self) -> None:
        offered = self._template([ASKED], tools=[TOOL])
        answered = self._template([ASKED, ANSWER, RESULT])
        if "probe_tool" not in offered or "probe_result" not in answered:
            raise UserError(
                "model: its chat template ignores tools or their results; use a model whose "
                "template renders them"
            )
        for replies in REPLIES:
            delta = self._after_stub(
                self._template([*STUB_TURN, *replies], add_generation_prompt=True)
            )
            if STUB in delta or not all(reply["content"] in delta for reply in replies):
                raise _refusal("another answer")
            for what, options, messages in conversations(replies):
                text = self._template(messages, add_generation_prompt=True, **options)
                if not text.endswith(delta):
                    raise _refusal(what)


def _refusal(what: str) -> UserError:
    return UserError(
        f"model: its chat template renders a reply differently after other conversations ({what}), "
        "so sampled tokens could not be kept; use another template"
    )


def _warn(text: str) -> None:
    """Warn once a run: on its first rank."""
    if os.environ.get("RANK", "0") == "0":
        warnings.warn(text, stacklevel=4)
