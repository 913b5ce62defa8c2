"""Arbitrary input: the documented error or none, in time and memory that follow its size."""

import json
import os
import re
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir
from transformers.utils.chat_parsing import parse_response
from trl import chat_template_utils

from pipeline.common.errors import UserError
from pipeline.common.untrusted import MAX_MESSAGE, parse_json
from pipeline.config.recipe import SETTINGS, dump, load_recipe
from pipeline.config.settings import Config
from pipeline.data.tasks import load_tasks
from pipeline.environments.demonstrations import read_demonstrations
from pipeline.environments.embedded.airline import generate_tasks
from pipeline.environments.task_sets import split_source
from pipeline.models.chat.template import Chat
from pipeline.models.chat.text import Parsed, parse_hermes, steady
from pipeline.models.tiny import RESPONSE_TEMPLATE
from tests.support.helpers import chat, embedded, tokenizer
from tests.support.messages import refusal, says

pytestmark = pytest.mark.whole_run

_home = TemporaryDirectory(prefix="hypothesis-")  # what it writes goes with it
set_hypothesis_home_dir(_home.name)
settings.register_profile(
    "ci",
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.register_profile("nightly", settings.get_profile("ci"), max_examples=2_000)
fuzz = settings.get_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
ANY_TEXT = st.text(st.characters(exclude_categories=()))  # halves of characters, too
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(ANY_TEXT, inner), max_leaves=20
)


def made_of(*pieces: str) -> st.SearchStrategy[str]:
    """Texts of these pieces in any order, and of any others."""
    return st.lists(st.sampled_from(pieces) | ANY_TEXT, max_size=30).map("".join)


def changed(text: str) -> st.SearchStrategy[str]:
    """A text with pieces of it cut out, doubled or replaced."""
    place = st.integers(0, len(text))
    edits = st.tuples(place, place, st.sampled_from(["", '"', "{", "[", "0", "\\", "null"]))

    def edit(changes: list[tuple[int, int, str]]) -> str:
        now = text
        for start, end, piece in changes:
            now = now[:start] + piece + now[end:]
        return now

    return st.lists(edits, min_size=1, max_size=3).map(edit)


def refusal_of(call: Callable[[], Any]) -> str:
    """What a UserError says; empty where there is none."""
    try:
        call()
    except UserError as error:
        message = str(error)
        assert message.isprintable()
        assert 0 < len(message) < 2 * MAX_MESSAGE
        return message
    return ""


# Recipes


def comes_back_or_is_refused(path: Path, content: str | bytes) -> None:
    path.write_bytes(
        content if isinstance(content, bytes) else content.encode(errors="surrogatepass")
    )
    found: list[Config] = []
    if refusal_of(lambda: found.append(load_recipe(path))):
        return
    path.write_text(dump(found[0]), encoding="utf-8")
    assert load_recipe(path) == found[0]


@fuzz
@given(
    st.binary()
    | made_of(
        *(
            "run:",
            "model:",
            " chat_template_kwargs: ",
            " seed: ",
            "\n",
            "  ",
            ": ",
            ", ",
            "- ",
            "? ",
        ),
        *(
            "[",
            "]",
            "{",
            "}",
            "&a ",
            "*a",
            "!!int ",
            "!!float ",
            "!!bool ",
            "!!str ",
            "!!set ",
            "!",
        ),
        *(
            "'",
            '"',
            "|",
            ">",
            "#",
            "<<",
            "---",
            "%",
            "1",
            "1e999",
            ".nan",
            "0x1",
            "null",
            "\\ud800",
        ),
    )
)
def test_any_bytes_and_any_yaml_are_a_recipe_or_a_mistake(tmp_path, content):
    comes_back_or_is_refused(tmp_path / "own.yaml", content)


@fuzz
@given(
    st.lists(st.tuples(st.sampled_from(sorted(SETTINGS)), JSON), min_size=1, max_size=3),
    st.dictionaries(ANY_TEXT, JSON, max_size=1),
)
@example([(("data", "environments"), {"\x1f": None})], {})
@example([(("grpo", "max_resample_times"), 4294967296.0)], {})
@example([(("run", "seed"), 1)], {"\ud7fc": None})
def test_any_values_of_settings_are_a_recipe_or_a_mistake(tmp_path, values, others):
    tree: dict[str, Any] = dict(others)
    for (section, name), value in values:
        tree[section] = {name: value}
    comes_back_or_is_refused(tmp_path / "own.yaml", yaml.safe_dump(tree))


# Task files and demonstrations

TASK = generate_tasks(9, 1, "train", "medium")[0]
ROW = json.dumps({**TASK.row(), "payload": json.loads(TASK.payload)})
TALK = json.dumps(
    {
        "messages": [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "a"}}]},
        ]
    }
)


def is_read_or_refused(path: Path, content: str | bytes) -> None:
    path.write_bytes(content if isinstance(content, bytes) else content.encode(errors="replace"))

    def read() -> None:
        for task in load_tasks(path, "airline"):
            json.dumps(task.row(), ensure_ascii=False, allow_nan=False).encode()

    refusal_of(read)


@fuzz
@given(st.binary())
def test_any_bytes_are_tasks_or_a_mistake(tmp_path, content):
    for name in ("own.json", "own.jsonl"):
        is_read_or_refused(tmp_path / name, content)


@fuzz
@given(st.lists(JSON, max_size=3), st.booleans())
def test_any_json_is_tasks_or_a_mistake(tmp_path, rows, is_array):
    lines = [json.dumps(row) for row in rows]
    text = f"[{','.join(lines)}]" if is_array else "\n".join(lines)
    is_read_or_refused(tmp_path / "own.jsonl", text)


@fuzz
@given(changed(ROW))
def test_any_change_of_a_task_leaves_one_that_can_be_played_or_a_mistake(tmp_path, text):
    path = tmp_path / "own.jsonl"
    path.write_text(text)
    config = Config.model_validate({"data": {"tasks": {"airline": str(path)}}})
    refusal_of(lambda: split_source(config, embedded("airline")["airline"], [], [], None))


@fuzz
@given(JSON | st.dictionaries(st.sampled_from(["messages", "tools"]), JSON), changed(TALK))
def test_any_demonstrations_are_read_or_a_mistake(tmp_path, row, text):
    path = tmp_path / "own.jsonl"
    for content in (json.dumps(row), text):
        path.write_text(content)
        refusal_of(lambda: read_demonstrations(path))


@fuzz
@given(JSON)
def test_json_is_read_as_python_reads_it_or_refused(value):
    text = json.dumps(value)
    is_plain = not re.search(r"NaN|Infinity|\\ud", text)
    try:
        found = parse_json(text)
    except ValueError:
        found = None
        assert not is_plain
    assert json.dumps(found) == text or not is_plain


# What a model says

SAID = (
    *(
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "\n",
        " ",
        "<|im_end|>",
        "<|im_start|>",
    ),
    *('{"name": "look", "arguments": {"item": "a"}}', '{"name": ', '"look"', '"arguments": ', "{"),
    *("}", "[", "]", '"', "\\", "\\ud800", "null", "NaN", "1e999", "-", "9" * 5000, "[" * 2000),
)
TEMPLATES = {
    name.removesuffix("_template"): value
    for name, value in vars(chat_template_utils).items()
    if name.endswith("_template") and isinstance(value, dict) and "fields" in value
}


def is_a_message(parsed: Parsed) -> None:
    """It can be shown to a template and written to a file, and its calls can be made."""
    json.dumps(parsed.message(), allow_nan=False)
    for name, arguments in parsed.calls:
        json.dumps([name, arguments], ensure_ascii=False).encode()
        assert isinstance(arguments, dict)
    assert not (parsed.calls and parsed.malformed)


@fuzz
@given(made_of(*SAID))
def test_any_text_is_a_message_or_malformed(text):
    is_a_message(parse_hermes(text))


@fuzz
@given(st.lists(st.integers(0, 1000) | st.integers(0, 2**31 - 1)))
def test_any_tokens_are_a_message_or_malformed(ids):
    is_a_message(chat().parse(ids))


@pytest.mark.parametrize(
    "value", ["NaN", "1e999", '"\\ud800"', "9" * 5000, '{"a": ' * 70 + "1" + "}" * 70, "[" * 2000]
)
def test_a_call_that_no_file_could_hold_is_malformed(value):
    text = f'<tool_call>{{"name": "look", "arguments": {{"item": {value}}}}}</tool_call>'
    assert parse_hermes(text).malformed
    assert chat().parse(tokenizer()(text)["input_ids"]).malformed
    fine = text.replace(value, "[" * 60 + "]" * 60)
    assert parse_hermes(fine).calls == chat().parse(tokenizer()(fine)["input_ids"]).calls != []


def test_a_response_template_that_breaks_on_a_call_makes_it_malformed():
    own, template = deepcopy(tokenizer()), deepcopy(RESPONSE_TEMPLATE)
    calls = template["fields"]["tool_calls"]
    calls["transform"] = {"name": "{content.name}", "arguments": "{content.arguments}"}
    own.response_template = template
    text = '<tool_call>{"name": "a"}</tool_call>'
    problem = "transform placeholder '{content.arguments}' is missing key 'arguments'. Available: "
    assert Chat(own).parse(own(text)["input_ids"]).malformed == f"{problem}['name']"
    calls |= {"content": "xml-inline", "content_args": {"tag_pattern": "("}}
    says(refusal(Chat, own), "(one with arguments: missing ) at position 1); set ")


def test_an_expression_that_takes_exponential_time_makes_a_message_malformed(monkeypatch):
    monkeypatch.setattr("pipeline.models.chat.text.MAX_SEARCH_S", 0.1)
    own, template = deepcopy(tokenizer()), deepcopy(RESPONSE_TEMPLATE)
    template["fields"]["content"]["close_pattern"] += "|z(?:a|aa)+$"
    own.response_template = template
    made = Chat(own)  # no conversation of the checks has such a text
    assert made.parse(own("zaa")["input_ids"]).malformed == ""
    assert made.parse(own("z" + "a" * 99 + "!")["input_ids"]).malformed == "regex timed out"


# Time and memory

SIZE = 100_000
REPEATED = (
    *("<tool_call>", "</tool_call>", "<tool_call>{}</tool_call>", "<think>", "<think></think>"),
    *("</think>", "a", " ", "\n", "[", "{", '{"a":', '"', "\\", "9", "<|im_end|>", "\u29d8"),
    *("<tool_call>\n<function=a>", "<parameter=a>", ", a", ", a(", "a=[[", "<|tool_call>call:a{"),
)


IN_CI = ("<tool_call>", "<think>", "a", "{", "<|im_end|>", ", a(")


def proofs(*values: Any) -> list[Any]:
    return [pytest.param(value, marks=pytest.mark.proof) for value in values]


EACH_PIECE = pytest.mark.parametrize("piece", [*IN_CI, *proofs(*sorted({*REPEATED} - {*IN_CI}))])


def cpu_s(call: Callable[[str], Any], text: str) -> float:
    begun = time.process_time()
    call(text)
    return time.process_time() - begun


def assert_linear(call: Callable[[str], Any], before: str, piece: str, size: int = SIZE) -> None:
    """Time that grows with the square of a text's length is seconds here, and grows sixteenfold."""
    large = before + piece * (size // len(piece))
    small = before + piece * (size // 4 // len(piece))
    cpu_s(call, before + piece)
    took = cpu_s(call, large)
    if took > 0.2 and took >= 9 * (of_small := max(0.02, cpu_s(call, small))):
        took, of_small = min(took, cpu_s(call, large)), max(of_small, cpu_s(call, small))
        assert took < 9 * of_small, (before, piece)


def assert_small(call: Callable[[str], Any], before: str, piece: str, size: int = SIZE) -> None:
    """Memory that is within 60 MB at `size`, though it grew with the square of it."""
    tracemalloc.start()
    call(before + piece * (size // 4 // len(piece)))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 60_000_000 / 16


def quietly(call: Callable[[str], Any]) -> Callable[[str], None]:
    def run(text: str) -> None:
        try:
            call(text)
        except (UserError, ValueError, KeyError, TypeError, RecursionError):
            return

    return run


@pytest.mark.parametrize("before", ["", "<tool_call>", "<think>", "<tool_call>\n<function=a>"])
@EACH_PIECE
def test_reading_a_message_takes_time_that_follows_its_length(before, piece):
    assert_linear(parse_hermes, before, piece)
    template = steady(RESPONSE_TEMPLATE)
    assert_linear(quietly(lambda text: parse_response(text, template, prefix="")), before, piece)


@pytest.mark.parametrize("pieces", [IN_CI, *proofs(REPEATED)], ids=["some", "all"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_known_template_takes_time_that_follows_the_length(name, pieces):
    template = steady(TEMPLATES[name])
    read = quietly(lambda text: parse_response(text, template, prefix=""))
    for before in ("", "<tool_call><function=a>", "<tool_call>a\n", "<|tool_call_start|>[a("):
        tag = before.partition(">")[0].strip("<|")
        for piece in pieces if tag in str(TEMPLATES[name]) else ():  # else it is any text
            assert_linear(read, before, piece, size=40_000)


@EACH_PIECE
def test_guarding_a_text_takes_time_that_follows_its_length(piece):
    def guard(text: str) -> None:
        chat().cached.cache_clear()
        chat().num_content_tokens(text)

    assert_linear(guard, "", piece, size=40_000)


@pytest.fixture
def shallow() -> Iterator[None]:
    """A low limit of recursion; PyYAML takes time by the square of the depth that it reaches."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(400)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.parametrize(  # recipes are trusted: what no person writes is tried by the proof
    "piece",
    [
        "a: 1, ",
        "\n",
        "a",
        *proofs("[", "{a: ", "- ", "? ", "&a ", "*a ", "'", "| ", "!", "#", "--- a\n"),
    ],
)
@pytest.mark.parametrize("before", ["", *proofs("{", "a: &a ")])
def test_reading_a_recipe_takes_time_and_memory_that_follow_its_length(
    before, piece, tmp_path, shallow
):
    path = tmp_path / "own.yaml"

    def read(text: str) -> None:
        path.write_text(text)
        quietly(load_recipe)(path)

    assert_linear(read, before, piece, size=60_000)
    assert_small(read, before, piece, size=60_000)


@pytest.mark.parametrize("piece", ["[", '{"a":', "[],", '"', "\\", "9", " ", "\n", '{"id": "a"}\n'])
@pytest.mark.parametrize("before", ["", "[", '{"id": "a", "payload": '])
def test_reading_tasks_takes_time_and_memory_that_follow_the_length(before, piece, tmp_path):
    path = tmp_path / "own.jsonl"

    def read(text: str) -> None:
        path.write_text(text)
        quietly(lambda place: load_tasks(place, "airline"))(path)

    assert_linear(read, before, piece)
    assert_small(read, before, piece)
