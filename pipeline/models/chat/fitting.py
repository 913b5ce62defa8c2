"""Fits a tokenizer's chat template to the conversations of a run.

What a model's template lacks is written in front of it, as Jinja that rewrites the messages: a
system prompt, a block of tools, or the system message of a model that has none. For a template that
reads the clock, the clock stands still. The tokenizer keeps the whole template, so that
checkpoints, exported folders and servers render what training rendered.
"""

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipeline.common.errors import UserError, nearest
from pipeline.common.untrusted import read_file, shown
from pipeline.data.tasks import Message
from pipeline.environments.domains import Domain
from pipeline.models.chat.template_checks import CALL, PROBE_TOOLS, RESULT

MAX_TEMPLATE_BYTES = 1 << 20
MARK = "{#- The chat template follows. -#}"  # stands between the part in front and a template

SYSTEM_PROMPT = """
{%- if messages[0].role != 'system' %}
{%- set messages = [{'role': 'system', 'content': SYSTEM_PROMPT}] + messages %}
{%- endif %}"""
# The function with which templates read the clock, as the texts of one time.
CLOCK = """
{%- macro strftime_now(format) %}
{%- set held = CLOCK %}
{%- for part in format.split('%') %}
{%- set code = part[: 2 if part.startswith('-') else 1] %}
{{- part if loop.first else held.get(code, '%' ~ code) ~ part[code | length :] }}
{%- endfor %}
{%- endmacro %}"""
_CLOCK = re.compile("[^\n]*".join(map(re.escape, CLOCK.split("CLOCK"))))
_CODES = [*"aAbBcCdDeFfgGhHIjklmMpPrRsSTuUVwWxXyYzZ", *(f"-{code}" for code in "dHIjmMSy")]
# Tools are signatures in the system message, calls are Hermes calls, results are user messages.
TOOLS_BEGIN = "{%- set made.text = 'You can call these tools:' %}"  # of earlier versions, too
TOOLS = """
{%- set made = namespace(messages=[], text='') %}
{%- if tools %}
{%- set made.text = 'You can call these tools:' %}
{%- for tool in tools %}
{%- set made.text = made.text ~ '\\n' ~ tool.function.name ~ '(' %}
{%- for name, kind in (tool.function.parameters.properties or {}).items() %}
{%- set options = kind.enum | join(' or ') if kind.enum else kind.type | default('') | string %}
{%- set made.text = made.text ~ (', ' if not loop.first else '') ~ name %}
{%- set made.text = made.text ~ (': ' ~ options if options and options != 'string' else '') %}
{%- endfor %}
{%- set made.text = made.text ~ ')' %}
{%- if tool.function.description %}
{%- set about = tool.function.description.strip().replace('.\\n', '.\\n\\n') %}
{%- set about = about.split('\\n\\n')[0].split() | join(' ') %}
{%- set made.text = made.text ~ ': ' ~ about %}
{%- endif %}
{%- endfor %}
{%- set made.text = made.text ~ '\\nTo call a tool, write:\\n<tool_call>\\n{"name": "TOOL", ' %}
{%- set made.text = made.text ~ '"arguments": {"NAME": "VALUE"}}\\n</tool_call>' %}
{%- if messages[0].role == 'system' %}
{%- set made.text = messages[0].content ~ '\\n\\n' ~ made.text %}
{%- set messages = messages[1:] %}
{%- endif %}
{%- set messages = [{'role': 'system', 'content': made.text}] + messages %}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- set is_first = loop.first or loop.previtem.role != 'tool' %}
{%- set made.text = '' if is_first else made.text ~ '\\n' %}
{%- set made.text = made.text ~ '<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' %}
{%- if loop.last or loop.nextitem.role != 'tool' %}
{%- set made.messages = made.messages + [{'role': 'user', 'content': made.text}] %}
{%- endif %}
{%- elif message.tool_calls %}
{%- set made.text = message.content or '' %}
{%- for call in message.tool_calls %}
{%- set made.text = made.text ~ ('\\n' if made.text else '') ~ '<tool_call>\\n{"name": ' %}
{%- set made.text = made.text ~ call.function.name | tojson ~ ', "arguments": ' %}
{%- set made.text = made.text ~ (call.function.arguments or {}) | tojson ~ '}\\n</tool_call>' %}
{%- endfor %}
{%- set made.messages = made.messages + [{'role': 'assistant', 'content': made.text}] %}
{%- else %}
{%- set made.messages = made.messages + [message] %}
{%- endif %}
{%- endfor %}
{%- set messages = made.messages %}
{%- set tools = none %}"""
NO_SYSTEM = """
{%- if messages[0].role == 'system' and messages | length > 1 %}
{%- set text = messages[0].content ~ '\\n\\n' ~ messages[1].content %}
{%- set messages = [{'role': 'user', 'content': text}] + messages[2:] %}
{%- endif %}"""
# Templates of models that also see pictures read a list of parts.
PARTS = """
{%- set made = namespace(messages=[]) %}
{%- for message in messages %}
{%- set part = {'type': 'text', 'text': message.content} %}
{%- set made.messages = made.messages + [{'role': message.role, 'content': [part]}] %}
{%- endfor %}
{%- set messages = made.messages %}"""

# Templates for models without one. Both end a message with the tokenizer's end of sequence.
OWN = {
    # The conversation's texts and nothing else: a prompt is continued, as in TRL's standard format.
    "text": """
{%- for message in messages %}
{{- message.content ~ ('\\n\\n' if message.role == 'system' else '') }}
{{- eos_token if message.role == 'assistant' else '' }}
{%- endfor %}""",
    "plain": """
{%- for message in messages %}
{%- if message.role == 'system' %}{{ message.content ~ '\\n\\n' }}
{%- elif message.role == 'assistant' %}{{ 'Assistant: ' ~ message.content ~ eos_token ~ '\\n' }}
{%- else %}{{ 'User: ' ~ message.content ~ '\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}""",
}

Rendering = tuple[Sequence[Message], dict[str, Any], str]  # messages, options, a text in it
_ASKED: Message = {"role": "user", "content": "probe_user"}
_SYSTEM: Message = {"role": "system", "content": "probe_system"}
# What a template must be able to render.
_REQUEST: Rendering = ([_ASKED], {}, "probe_user")
_POLICY: Rendering = ([_SYSTEM, _ASKED], {}, "probe_system")
_OFFERED: Rendering = ([_ASKED], {"tools": PROBE_TOOLS}, "probe_tool")
_ANSWERED: Rendering = ([_ASKED, CALL, RESULT], {}, "probe_result")


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What the conversations of a run's domains have: tools, and replies to the model."""

    tools: bool = True
    replies: bool = True


EVERYTHING = Needs()


def fit_template(
    tokenizer: Any,
    render: Callable[..., str],
    *,
    needs: Needs,
    chat_template: str | None,
    system_prompt: str | None,
    tools_as_text: bool,
    clock: str,
) -> list[str]:
    """Set `tokenizer.chat_template` to a template for a run; return notes for the user.

    `render` has the arguments of `apply_chat_template`, renders with the tokenizer's present
    template, and raises UserError if the template raises. `chat_template` replaces the tokenizer's
    own. `tools_as_text` writes tools as text even if the template renders tools. `clock`, from
    `held_clock`, is what the template reads instead of the clock, unless an earlier fit has written
    one. Raises UserError for an unknown name of a template.
    """
    before, template, notes = _template_of(tokenizer, chat_template, needs)
    held = clock_of(before) or clock
    if system_prompt is not None:
        before = SYSTEM_PROMPT.replace(
            "SYSTEM_PROMPT", json.dumps(system_prompt, ensure_ascii=False)
        )
        notes.append("the system prompt stands before prompts that have none of their own")

    if "strftime_now" in template:
        before = held + before.replace(held, "")
        notes.append(
            "the chat template reads the clock, which stands still from the start of the run on, "
            "in resumed runs, checkpoints and exported models, too"
        )

    def fits(*probes: Rendering) -> bool:
        tokenizer.chat_template = before + MARK + template if before else template
        try:
            return all(text in render(list(talk), **options) for talk, options, text in probes)
        except UserError:
            return False

    is_text = TOOLS_BEGIN in before
    if needs.tools and not is_text and (tools_as_text or not fits(_OFFERED, _ANSWERED)):
        before += TOOLS
        notes.append(
            "the chat template gets a block of tools: their signatures stand in the system "
            "message, calls are <tool_call> blocks and results user messages"
        )
    if not fits(_POLICY):
        before += NO_SYSTEM
        if fits(_POLICY) and (system_prompt is not None or needs.tools):
            notes.append("the chat template has no system message; it begins the user's first one")
    if not fits(_REQUEST):
        before += PARTS
        fits(_POLICY)
    return notes


def held_clock(time: datetime | None = None) -> str:
    """Return the part of a template that holds the clock at a time, by default the present time."""
    time = time or datetime.now()
    return CLOCK.replace("CLOCK", json.dumps({code: time.strftime(f"%{code}") for code in _CODES}))


def clock_of(template: str) -> str | None:
    """Return the part of a fitted template that holds the clock, or None."""
    held = _CLOCK.search(template)
    return held and held.group()


def without_clock(template: str) -> str:
    """Return a fitted template without the part that holds the clock."""
    clock = clock_of(template)
    return template.replace(clock, "").removeprefix(MARK) if clock else template


def body_of(template: str) -> str:
    """Return a chat template without what `fit_template` wrote in front of it."""
    return template.rpartition(MARK)[2]


def _template_of(tokenizer: Any, name: str | None, needs: Needs) -> tuple[str, str, list[str]]:
    """Return the part in front of a tokenizer's template, the template to use, and notes."""
    if name is not None:
        return "", named_template(name, tokenizer), []
    own = tokenizer.chat_template
    if isinstance(own, dict):
        own = own.get("tool_use" if needs.tools else "default") or own.get("default")
    if own:
        before, _, template = own.rpartition(MARK)
        return before, template, []
    name = "plain" if needs.tools or needs.replies else "text"
    what = {"plain": "messages with the words User and Assistant", "text": "prompts as they are"}
    note = f"the tokenizer has no chat template: --chat-template {name}, {what[name]}"
    return "", named_template(name, tokenizer), [note]


def named_template(name: str, tokenizer: Any) -> str:
    """Return the text of a chat template; `name` is a file, or a name of this package's or TRL's.

    Raises UserError for another name, and for a file that cannot be read.
    """
    if Path(name).is_file():
        try:
            return read_file(Path(name), MAX_TEMPLATE_BYTES).decode()
        except (OSError, ValueError) as error:
            raise UserError(f"chat_template: {shown(name)} cannot be read ({error})") from None
    if name in OWN:
        begins = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
        return f"{'{{- bos_token }}' if begins else ''}{OWN[name]}"
    spec = find_spec("trl")
    folder = Path(str(spec and spec.origin)).parent / "chat_templates"
    known = {path.stem: path for path in sorted(folder.glob("*.jinja"))}
    if name in known:
        return known[name].read_text(encoding="utf-8")
    near = nearest(name, [*OWN, *known])
    hint = f"did you mean {near}?" if near else f"names are {', '.join([*OWN, *known])}"
    raise UserError(f"chat_template: got {shown(name)}, which is no file and no name; {hint}")


def needs_of(domains: Collection[Domain]) -> Needs:
    """Return what conversations in these domains need of a chat template."""
    return Needs(
        tools=any(domain.tools or domain.loop for domain in domains),  # a loop's are its own
        # A user's environment may make a `user` who answers in any method.
        replies=any(not domain.is_single_turn for domain in domains),
    )
