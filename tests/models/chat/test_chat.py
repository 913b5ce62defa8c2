"""Chat: pieces rendered one by one are the conversation; no text becomes a control token."""

import resource
import warnings
from datetime import datetime
from functools import cache, partial
from pathlib import Path

import pytest
import trl
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from pipeline.common import children
from pipeline.config.settings import ModelSettings
from pipeline.environments import Domain
from pipeline.environments.discovery import tool_schemas
from pipeline.environments.experts import run_expert
from pipeline.models.chat.fitting import Needs, clock_of, held_clock, without_clock
from pipeline.models.chat.template import Chat, load_chat
from pipeline.models.chat.text import Parsed, parse_hermes
from pipeline.models.tiny import CHAT_TEMPLATE, tiny_tokenizer
from tests.support.helpers import (
    DOMAINS,
    call,
    chat,
    embedded,
    environments_of,
    module_of,
    say,
    tokenizer,
)
from tests.support.messages import refusal, says

CLASSES = environments_of(embedded())
TOOLS = tool_schemas(CLASSES["airline"])
ASKED = [{"role": "system", "content": "airline"}, {"role": "user", "content": "cancel K07"}]

# In the style of Qwen3: results come in the user's turn, and thinking before the last request is
# dropped from history.
TAGS = ("<think>", "</think>", "<tool_response>", "</tool_response>")


def other_tokenizer(template, tags=TAGS):
    """The tiny tokenizer with another template, and no response template."""
    made = tiny_tokenizer()
    made.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    made.chat_template = template
    made.response_template = None
    return made


def qwen3(**options):
    """Qwen3's own template, which TRL knows with its response template."""
    path = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
    return Chat(other_tokenizer(path.read_text(encoding="utf-8")), options)


@cache
def expert_episodes(count=12):
    return list(_expert_episodes(count))


def _expert_episodes(count):
    for domain in DOMAINS:
        module = module_of(domain)
        for task in module.generate_tasks(0, count, "train", "hard"):
            messages, _ = run_expert(CLASSES[domain](), module.expert, task)
            while messages[-1]["role"] == "tool":  # a transfer ends the episode
                messages.pop()
            yield messages, tool_schemas(CLASSES[domain])


def encode(made, text):
    return made(text, add_special_tokens=False)["input_ids"]


def piece_by_piece(made, messages, tools):
    """The ids of a conversation as a rollout puts them together."""
    ids, replies = made.prompt_ids(messages[:2], tools), []
    for message in messages[2:]:
        if message["role"] != "assistant":
            replies.append(message)
            continue
        ids += made.reply_ids(replies) if replies else []
        ids += made.message_ids(message)
        replies = []
    return ids


LOOPS = "{% for i in range(10**5) %}{% for j in range(10**5) %}{% endfor %}{% endfor %}"
GREEDY = [
    (
        "loops after many turns",
        "{% if messages | length > 30 %}" + LOOPS + "{% endif %}",
        "CPU time",
    ),
    ("a long power", "{{ 10**(10**9) }}", "CPU time"),
    ("a long text", "{{ 'a' * 10**10 }}", "MiB of memory"),
    ("more than is used", "{{ 'a' * 10**7 }}", "writes 10000"),
    ("a macro of itself", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
]


@pytest.mark.whole_run
@pytest.mark.parametrize(("start", "said"), [row[1:] for row in GREEDY], ids=[r[0] for r in GREEDY])
def test_a_template_that_takes_too_much_is_refused_before_it_is_rendered_here(
    start, said, monkeypatch
):
    if said == "CPU time":  # the others take most of a second of it
        monkeypatch.setattr(children, "MAX_CPU_S", 1.0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    line = refusal(Chat, other_tokenizer(start + CHAT_TEMPLATE))
    says(line, "model: its chat template ", said, "; give another --chat-template")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (64 << 10)  # KiB


# Messages to tokens


def test_prompt_message_and_reply_follow_one_another():
    prompt = chat().prompt_ids(ASKED, TOOLS[:2])
    assert tokenizer().decode(prompt) == (
        "<|im_start|>system\nairline\ntools: add_bag cancel<|im_end|>"
        "<|im_start|>user\ncancel K07<|im_end|><|im_start|>assistant\n"
    )
    message = chat().message_ids(call("cancel", reservation="K07"))
    assert tokenizer().decode(message) == (
        '<tool_call>\n{"name": "cancel", "arguments": {"reservation": "K07"}}\n'
        "</tool_call><|im_end|>"
    )
    reply = chat().reply_ids([{"role": "tool", "name": "cancel", "content": '{"ok": "yes"}'}])
    assert tokenizer().decode(reply) == (
        '<|im_start|>tool\n{"ok": "yes"}<|im_end|><|im_start|>assistant\n'
    )
    assert chat().end_of_turn == "<|im_end|>"
    assert message[-1] == chat().end_of_turn_id == tokenizer().eos_token_id


def test_the_pieces_of_an_episode_are_the_conversation_rendered_at_once():
    turns = []
    for messages, tools in expert_episodes():
        whole = tokenizer().apply_chat_template(messages, tools=tools, return_dict=False)
        assert piece_by_piece(chat(), messages, tools) == whole
        turns.append(sum(message["role"] == "assistant" for message in messages))
    assert max(turns) >= 4


# No text becomes a control token


def test_tags_that_a_policy_says_itself_stay_tags_in_its_messages():
    made = qwen3()
    think, end = made.tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    ids = made.message_ids(say("<think>\nhm\n</think>\n\nDone."))
    assert (ids.count(think), ids.count(end)) == (1, 1)
    reply = made.reply_ids([{"role": "user", "content": "<think>\nhm\n</think>"}])
    assert (reply.count(think), reply.count(end)) == (0, 0)


def test_white_space_that_a_tokenizer_added_stays_one_token():
    made = Chat(other_tokenizer(CHAT_TEMPLATE, tags=("\n\n",)), tool_call_format="hermes")
    (blank_line,) = encode(made.tokenizer, "\n\n")
    assert made.reply_ids([{"role": "user", "content": "a\n\nb"}]).count(blank_line) == 1


# Tokens to messages

CALL = '<tool_call>\n{"name": "find_line", "arguments": {"customer": "K07"}}\n</tool_call>'
FOUND = ("find_line", {"customer": "K07"})


@cache
def readers():
    """By the tokenizer's response template, and by Hermes tags."""
    return [chat(), Chat(tokenizer(), tool_call_format="hermes")]


def parse(text):
    """What both readers make of a sampled text."""
    return [made.parse(encode(tokenizer(), text)) for made in readers()]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Done.<|im_end|>", "Done.", []),
        ("Done.", "Done.", []),
        ("  Done.\n", "Done.", []),
        ("", "", []),
        ("<|im_end|>", "", []),
        (CALL + "<|im_end|>", "", [FOUND]),
        (CALL, "", [FOUND]),
        ("One moment. " + CALL, "One moment.", [FOUND]),
        (CALL + CALL, "", [FOUND, FOUND]),
        ('<tool_call>{"name": "a"}</tool_call>', "", [("a", {})]),
        ('<tool_call>{"name": "a", "arguments": null}</tool_call>', "", [("a", {})]),
        (
            '<tool_call>{"name": "a", "arguments": {"x": [1, {"y": "é"}]}}</tool_call>',
            "",
            [("a", {"x": [1, {"y": "é"}]})],
        ),
    ],
)
def test_text_and_calls_are_read(text, content, calls):
    for parsed in parse(text):
        assert parsed == Parsed(content=content, calls=calls)


@pytest.mark.parametrize(
    "text",
    [
        CALL[:-3],
        CALL[:40],
        "<tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>find_line</tool_call>",
        "<tool_call>{'name': 'find_line'}</tool_call>",
        "<tool_call>[1]</tool_call>",
        '<tool_call>"find_line"</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "a", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "a", "arguments": "x"}</tool_call>',
        '<tool_call>{"name": "a", "arguments": {"x": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "\\udfff"}</tool_call>',
        CALL + "<tool_call>{</tool_call>",
        "<tool_call>" + "[" * 5000,
        '<tool_call>{"name": "a", "arguments": {"x": ' + "[" * 600 + "]" * 600 + "}}</tool_call>",
    ],
)
def test_a_malformed_call_is_a_finding_and_never_an_exception(text):
    for parsed in parse(text + "<|im_end|>"):
        assert parsed.malformed
        assert "\n" not in parsed.malformed
        assert parsed.calls == []
        assert parsed.content == text
        assert parsed.message() == say(text)


def test_thinking_is_no_content():
    assert parse_hermes("<think>\n<tool_call>?\n</think>\n\n" + CALL) == Parsed(
        content="", thoughts="<tool_call>?", calls=[FOUND]
    )
    assert parse_hermes("<think>hm</think>Done.") == Parsed(content="Done.", thoughts="hm")


def test_what_an_expert_says_is_read_back():
    for messages, _ in expert_episodes():
        for message in messages:
            if message["role"] == "assistant":
                for made in readers():
                    assert made.parse(made.message_ids(message)).message() == message


# Other templates


def test_qwen3s_own_template_works_with_and_without_thinking():
    result = {"role": "tool", "name": "find_line", "content": '{"line": "K09"}'}
    reply = (
        '\n<|im_start|>user\n<tool_response>\n{"line": "K09"}\n</tool_response><|im_end|>\n'
        "<|im_start|>assistant\n"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = qwen3()
        plain = qwen3(enable_thinking=False)
    silent = "<think>\n\n</think>\n\n"
    assert made.tokenizer.decode(made.reply_ids([result])) == reply
    assert plain.tokenizer.decode(plain.reply_ids([result])) == reply + silent
    message = call("find_line", customer="K07")
    assert made.tokenizer.decode(made.message_ids(message)) == silent + CALL + "<|im_end|>"
    assert plain.tokenizer.decode(plain.message_ids(message)) == CALL + "<|im_end|>"
    for each, thoughts in ((made, ""), (plain, None)):
        parsed = Parsed(content="", thoughts=thoughts, calls=[FOUND])
        assert each.parse(each.message_ids(message)) == parsed
        sampled = encode(each.tokenizer, "<think>\nhm\n</think>\n\nDone.<|im_end|>")
        assert each.parse(sampled) == Parsed(content="Done.", thoughts="hm")


IGNORANT = {
    "tools": CHAT_TEMPLATE.replace("{{ tool.function.name }}", ""),
    "results": CHAT_TEMPLATE.replace(
        "{{ message.content }}",
        "{% if message.role != 'tool' %}{{ message.content }}{% endif %}",
    ),
    "raises": CHAT_TEMPLATE
    + "{% if messages[-1].role == 'tool' %}{{ raise_exception('no') }}{% endif %}",
}
BLOCK = """<|im_start|>system
airline

You can call these tools:
find_line(customer: K07 or K08, seats: integer): Find it.
pay()
To call a tool, write:
<tool_call>
{"name": "TOOL", "arguments": {"NAME": "VALUE"}}
</tool_call><|im_end|><|im_start|>user
cancel K07<|im_end|><|im_start|>assistant
"""
WHOLE_SYSTEM = "{{ message.content.split('\n')[0] }}", "{{ message.content }}"


def tool(name, description, **properties):
    parameters = {"type": "object", "properties": properties}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


@pytest.mark.parametrize("name", IGNORANT)
def test_a_template_without_tools_gets_a_block_of_them(name):
    made = Chat(other_tokenizer(IGNORANT[name].replace(*WHOLE_SYSTEM)))
    assert ["block of tools" in note for note in made.notes] == [True]
    customer, seats = {"type": "string", "enum": ["K07", "K08"]}, {"type": "integer"}
    tools = [
        tool("find_line", "Find it.\nMore.", customer=customer, seats=seats),
        tool("pay", ""),
    ]
    assert made.tokenizer.decode(made.prompt_ids(ASKED, tools)) == BLOCK
    results = [{"role": "tool", "name": "pay", "content": text} for text in ("a", "b")]
    assert made.tokenizer.decode(made.reply_ids(results)) == (
        "<|im_start|>user\n<tool_response>\na\n</tool_response>\n<tool_response>\nb\n"
        "</tool_response><|im_end|><|im_start|>assistant\n"
    )
    said = made.message_ids({**call("find_line", customer="K07"), "content": "One moment."})
    assert made.tokenizer.decode(said) == "One moment.\n" + CALL + "<|im_end|>"
    assert made.parse(said) == Parsed(content="One moment.", calls=[FOUND])


def test_a_model_without_a_template_continues_texts_or_gets_roles_as_words():
    alone = Needs(tools=False, replies=False)
    asked = [{"role": "user", "content": "3 + 4 ="}]
    made = Chat(other_tokenizer(None), needs=alone)
    assert "--chat-template text" in made.notes[0]
    assert made.tokenizer.decode(made.prompt_ids(asked, [])) == "3 + 4 ="
    assert made.tokenizer.decode(made.message_ids(say(" 7"))) == " 7<|im_end|>"
    made = Chat(other_tokenizer(None))
    assert "--chat-template plain" in made.notes[0]
    assert made.tokenizer.decode(made.prompt_ids(asked, [])) == "User: 3 + 4 =\nAssistant:"
    said = made.message_ids(call("find_line", customer="K07"))
    assert made.parse(said) == Parsed(content="", calls=[FOUND])
    reply = made.reply_ids([{"role": "user", "content": "Sure?"}])
    assert made.tokenizer.decode(reply) == "\nUser: Sure?\nAssistant:"


def test_a_text_begins_as_the_tokenizer_begins_it():
    beginning = other_tokenizer(None)
    beginning.add_special_tokens({"bos_token": "<bos>"})
    post = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", beginning.bos_token_id)])
    beginning.backend_tokenizer.post_processor = post
    made = Chat(beginning, needs=Needs(tools=False, replies=False))
    assert made.tokenizer.decode(made.prompt_ids([ASKED[1]], [])) == "<bos>cancel K07"


def test_a_system_prompt_stands_before_prompts_without_one_and_stays_with_the_tokenizer(tmp_path):
    whole = CHAT_TEMPLATE.replace(*WHOLE_SYSTEM)
    prompt = 'Say "{{ x }}"\nin \U0001f600 and \\n.'
    made = Chat(other_tokenizer(whole), system_prompt=prompt)
    head = f"<|im_start|>system\n{prompt}<|im_end|>"
    ids = made.prompt_ids(ASKED[1:], [])
    assert made.tokenizer.decode(ids).startswith(head)
    assert made.tokenizer.decode(made.prompt_ids(ASKED, [])).startswith("<|im_start|>system\nairl")
    made.tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert Chat(loaded).prompt_ids(ASKED[1:], []) == ids
    other = Chat(loaded, system_prompt="Other.")
    assert other.tokenizer.decode(other.prompt_ids(ASKED[1:], [])).startswith(
        "<|im_start|>system\nOther.<|im_end|>"
    )


def test_a_template_without_a_system_message_puts_it_before_the_request():
    refusing = CHAT_TEMPLATE.replace(
        "{%- if message.role == 'system' -%}",
        "{%- if message.role == 'system' -%}{{ raise_exception('no') }}",
    )
    made = Chat(other_tokenizer(refusing), needs=Needs(tools=False))
    assert made.tokenizer.decode(made.prompt_ids(ASKED, [])) == (
        "<|im_start|>user\nairline\n\ncancel K07<|im_end|><|im_start|>assistant\n"
    )


def test_the_tools_that_an_agent_brings_reach_a_model_whose_template_has_none():
    template = (
        "{%- for message in messages -%}<|im_start|>{{ message.role }}\n{{ message.content }}"
        "<|im_end|>{%- endfor -%}"
        "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
    )
    domains = Domain(name="desk", loop=len), Domain(name="desk")
    with_agent, without = (
        load_chat(ModelSettings(), other_tokenizer(template), {"desk": domain})
        for domain in domains
    )
    name = TOOLS[0]["function"]["name"]
    for made, is_shown in ((with_agent, True), (without, False)):
        assert (name in made.tokenizer.decode(made.prompt_ids(ASKED, TOOLS))) == is_shown
    assert with_agent.prompt_ids(ASKED, []) == without.prompt_ids(ASKED, [])


def test_a_template_is_named_or_a_file(tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text(CHAT_TEMPLATE, encoding="utf-8")
    by_file = Chat(other_tokenizer(None), chat_template=str(file))
    assert by_file.tokenizer.chat_template == CHAT_TEMPLATE
    by_name = Chat(other_tokenizer(None), chat_template="qwen2_5")
    theirs = Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja"
    assert by_name.tokenizer.chat_template == theirs.read_text(encoding="utf-8")
    says(
        refusal(Chat, other_tokenizer(None), chat_template="qwen2_55"),
        "chat_template: got 'qwen2_55'",
        "did you mean qwen2_5?",
    )


REFUSES_TURNS = "{% if messages | length > 2 %}{{ raise_exception('one') }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "settings", "preface"),
    [
        ("qwen2_5", {}, "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."),
        ("qwen3", {}, ""),
        ("qwen3", {"system_prompt": "Be brief."}, "Be brief."),
        ("plain", {}, ""),
        ("text", {"system_prompt": "Be brief."}, "Be brief."),
        (CHAT_TEMPLATE, {}, ""),
        ("A talk.\n" + CHAT_TEMPLATE, {}, "A talk."),
        (REFUSES_TURNS + CHAT_TEMPLATE, {}, ""),
    ],
)
def test_what_a_template_writes_before_a_prompt_without_a_system_message_is_known(
    template, settings, preface, tmp_path
):
    if "{" in template:
        (tmp_path / "own.jinja").write_text(template, encoding="utf-8")
        template = str(tmp_path / "own.jinja")
    needs = Needs(tools=False, replies=False)
    made = Chat(other_tokenizer(None), needs=needs, chat_template=template, **settings)
    assert made.preface == preface


def test_a_template_that_writes_what_the_model_shall_continue_is_refused_for_demonstrations():
    template = CHAT_TEMPLATE.replace("<|im_start|>assistant{{ '\n' }}", "<|im_start|>assistant\nI ")
    made = Chat(other_tokenizer(template), tool_call_format="hermes")
    says(
        refusal(made.message_ids, say("Done.")),
        "renders an assistant message differently from what it",
    )


@pytest.mark.parametrize("tool_call_format", ["auto", "hermes"])
def test_without_a_response_template_calls_that_the_template_writes_so_are_read_by_hermes_tags(
    tool_call_format,
):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = Chat(other_tokenizer(CHAT_TEMPLATE), tool_call_format=tool_call_format)
    assert made.parse(encode(made.tokenizer, CALL)).calls == [FOUND]


WHOLE = CHAT_TEMPLATE.replace(*WHOLE_SYSTEM)
LOOP = "{%- for message in messages -%}"
HIDING = {  # the start of a template, what replaces its loop, and what its refusal says
    "the user": ("", "{%- for message in messages if message.role != 'user' -%}", "the user's"),
    "the first request": ("", "{%- for message in messages[1:] -%}", "the user's messages out"),
    "old messages": ("", "{%- for message in messages[-30:] -%}", "the user's messages out"),
    "order": ("", "{%- for message in messages[::-1] -%}", "in another order"),
    "order of words": (
        "",
        f"{LOOP}{{%- set words = message.content.split() | reverse | join(' ') -%}}"
        "{%- set message = dict(message, content=words) -%}",
        "in another order",
    ),
    "order of long ones": (
        "",
        "{%- for message in (messages | reverse if messages | length > 40 else messages) -%}",
        "in another order",
    ),
    "many turns": (
        "{{ raise_exception('long') if messages | length > 50 }}",
        LOOP,
        "44 more (long)",
    ),
    "a draw": ("{{ ['a', 'b'] | random }}", LOOP, "draws at random"),
    "a rare draw": ("{{ lipsum() if messages | length == 7 }}", LOOP, "draws at random"),
    "an object's address": ("{{ messages | map('upper') }}", LOOP, "in different ways"),
}


@pytest.mark.parametrize("name", HIDING)
def test_a_template_that_hides_or_shuffles_what_was_said_is_refused(name):
    start, loop, said = HIDING[name]
    needs = Needs(tools=False, replies=name not in ("the user", "the first request"))
    made = other_tokenizer(start + WHOLE.replace(LOOP, loop))
    line = refusal(lambda: Chat(made, needs=needs))
    says(line, "model: its chat template ", said)


CUTS = {
    "300 characters": "{{ message.content[:300] }}",
    "a line": "{{ message.content.split('\\n')[0] }}",
    "a paragraph": "{{ message.content.split('\\n\\n') | last }}",
    "a word": "{{ message.content | truncate(400) }}",
    "capitals": "{{ message.content | lower }}",
}


@pytest.mark.parametrize("name", CUTS)
def test_a_template_that_cuts_the_users_text_is_refused(name):
    template = WHOLE.replace("{{ message.content }}", CUTS[name])
    for needs in (Needs(), Needs(tools=False), Needs(tools=False, replies=False)):
        made = other_tokenizer(template)
        line = refusal(partial(Chat, made, tool_call_format="hermes", needs=needs))
        says(line, "model: its chat template leaves ", "of the user's messages out; give another")


def test_a_prompt_says_what_the_template_leaves_out_of_it():
    hides = "{%- for message in messages if not (tools and message.role == 'system') -%}"
    made = Chat(other_tokenizer(WHOLE.replace(LOOP, hides)), tool_call_format="hermes")
    assert (made.check_shown(ASKED, []), made.check_shown(ASKED, TOOLS)) == ({}, {"system": "all"})
    assert chat().check_shown(ASKED, TOOLS) == {"system": "a part"}
    alone = Needs(tools=False, replies=False)
    first = WHOLE.replace(LOOP, "{%- for message in messages[-1:] -%}")
    made = Chat(other_tokenizer(first), needs=alone)
    shown = [{"role": "user", "content": "1"}, say("2"), {"role": "user", "content": "3"}]
    line = refusal(made.check_shown, shown, [])
    says(line, "leaves a part of the user's messages out")


NOW = datetime(2026, 7, 4, 9, 5, 7, 89)


def test_the_clock_of_a_template_stands_still_also_in_a_loaded_checkpoint(tmp_path):
    formats = ["%d %b %Y", "%Y-%m-%d", "%H:%M:%S.%f", "%-d/%-m, %A", "100%", "%Q"]
    start = "{% macro day() %}{% for f in " + str(formats) + " %}{{ strftime_now(f) }};{% endfor %}"
    start += "{% endmacro %}{% if strftime_now is defined %}{{ day() }}{% endif %}"
    made = Chat(other_tokenizer(start + WHOLE), clock=held_clock(NOW), tool_call_format="hermes")
    shown = made.tokenizer.decode(made.prompt_ids(ASKED, [])).partition("<|im_start|>")[0]
    assert shown == "04 Jul 2026;2026-07-04;09:05:07.000089;4/7, Saturday;100%;%Q;"
    assert "reads the clock" in made.notes[0]
    assert without_clock(made.tokenizer.chat_template) == start + WHOLE
    made.tokenizer.save_pretrained(tmp_path)
    assert clock_of((tmp_path / "chat_template.jinja").read_text()) == held_clock(NOW)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    later = Chat(loaded, clock=held_clock(datetime(2027, 1, 1)), tool_call_format="hermes")
    assert later.tokenizer.chat_template == made.tokenizer.chat_template
    assert later.prompt_ids(ASKED, TOOLS) == made.prompt_ids(ASKED, TOOLS)
