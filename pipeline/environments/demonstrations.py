"""Demonstrations of a domain, from a file or from the domain's expert, and their words.

The setting `demonstrations` names a domain's file. A domain without a file has the conversations of
its expert. The words of demonstrations become tokens of the tiny model if the domain's module has
no `WORDS`.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.common.errors import UserError
from pipeline.common.untrusted import one_line, shown
from pipeline.config.settings import Config
from pipeline.data.curriculum import TaskMixture, quota
from pipeline.data.rows import json_lines, messages_problem, with_usual_messages
from pipeline.data.tasks import Message, Task
from pipeline.environments.domains import Domain, generated
from pipeline.environments.faults import EnvironmentFault

MAX_READ = 400  # maximum number of a domain's demonstrations whose words are counted
MAX_WORDS = 400  # maximum number of words that a domain gets
MAX_FIELDS = 1500  # maximum number of fields that a domain gets
FIELD = re.compile(r".+?(?:, | \| |\n)|.+", re.DOTALL)
MAX_VALUE = 32  # maximum number of characters of a value, such as an id
STRIDE = 1_000_003  # from the seed of a task's demonstration to that of the task's next one
MAX_CHARACTERS = 100  # maximum number of characters of a word


class Demonstration(NamedTuple):
    """A conversation for the warm start; `where` names its line or its task in messages."""

    where: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None  # JSON schemas; None: those of the domain's environment


def read_demonstrations(path: Path) -> list[Demonstration]:
    """Return the demonstrations of a JSON Lines file. Raises UserError for an invalid line."""
    demonstrations: list[Demonstration] = []
    try:
        for where, _, _, row in json_lines(path):
            fields: Any = row if isinstance(row, dict) else {}
            messages = with_usual_messages(fields.get("messages"))
            tools = fields.get("tools")
            if problem := messages_problem(messages):
                raise UserError(f"{where}: messages: {problem}")
            roles = [message["role"] for message in messages]
            if "assistant" not in roles or roles[0] == "assistant":
                needed = "starts with a request and holds an assistant message"
                raise UserError(f"{where}: a demonstration {needed}")
            is_list = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
            if tools is not None and not is_list:
                raise UserError(f"{where}: tools: got {shown(tools)}; give a list of JSON schemas")
            demonstrations.append(Demonstration(where, messages, tools))
    except (OSError, UnicodeDecodeError) as error:
        why = f"{path} cannot be read ({one_line(str(error))})"
        raise UserError(f"demonstrations: {why}; check the path") from None
    if not demonstrations:
        raise UserError(f"{path}: holds no demonstrations; give one JSON object per line")
    return demonstrations


class Demonstrations:
    """What a domain shows a warm start: the conversations of its file, or `count` of its expert.

    They are made when they are first asked for, and kept until `forget`. Raises UserError then for
    an invalid line of the file, or if the expert fails on a task.
    """

    def __init__(self, config: Config, domain: Domain, count: int) -> None:
        self.domain = domain
        self.count = count
        self.file = config.data.demonstrations.get(domain.name)
        self._config = config
        self.forget()

    def forget(self) -> None:
        self._made = list[Demonstration]()
        self._rest = demonstrations_of(self._config, self.domain, self.count)

    def __iter__(self) -> Iterator[Demonstration]:
        yield from self._made
        for demonstration in self._rest:
            self._made.append(demonstration)
            yield demonstration

    def words(self) -> list[str]:
        """Return up to MAX_WORDS frequent texts of the demonstrations; see `words_of`."""
        few = min(MAX_READ, self.count, self.domain.max_tasks or self.count)
        is_all = self.file is not None or few == self.count
        demonstrations = self if is_all else demonstrations_of(self._config, self.domain, few)
        return words_of([*demonstrations], [self.domain.name, *names_of(self.domain.tools)])


def warm_start_demonstrations(
    config: Config, domains: Mapping[str, Domain]
) -> dict[str, Demonstrations]:
    """Return the demonstrations of each domain that has some; none without a warm start.

    Each domain gives the same number of examples.
    """
    if not config.grpo.use_grpo:
        return {}
    files = config.data.demonstrations
    sources = [d for d in domains.values() if d.name in files or d.expert is not None]
    num_examples = config.warm_start.steps * config.warm_start.batch_size
    count = -(-num_examples // max(1, len(sources)))
    return {d.name: Demonstrations(config, d, count) for d in sources if count}


def with_words(
    domains: Mapping[str, Domain], demonstrations: Mapping[str, Demonstrations]
) -> Iterator[Domain]:
    """Yield the domains; those without `WORDS` get the words of their demonstrations."""
    for name, domain in domains.items():
        is_wordless = name in demonstrations and not domain.words()
        yield replace(domain, words=demonstrations[name].words) if is_wordless else domain


def demonstrations_of(config: Config, domain: Domain, count: int) -> Iterator[Demonstration]:
    """Yield all demonstrations of the domain's file, or `count` conversations of its expert.

    Raises UserError for an invalid line of the file, or if the expert fails on a task.
    """
    tools = domain.tools
    if (path := config.data.demonstrations.get(domain.name)) is not None:
        for demonstration in read_demonstrations(Path(path)):
            has_tools = demonstration.tools is not None
            yield demonstration if has_tools else demonstration._replace(tools=tools)
        return
    timeout = config.rollout.call_timeout
    share = config.warm_start.rule_share
    for task, number in _drawn(config, domain, count):
        try:
            messages, _ = domain.demonstrate(
                task, timeout, share, config.run.seed + number * STRIDE
            )
        except EnvironmentFault as fault:
            raise UserError(
                f"tasks of {domain.name}: the expert fails on task {shown(task.id)} "
                f"({one_line(str(fault))}); mend the expert or the task"
            ) from None
        yield Demonstration(f"the expert's task {shown(task.id)}", messages, tools)


def _drawn(config: Config, domain: Domain, count: int) -> Iterator[tuple[Task, int]]:
    """Yield training tasks, and how often each was yielded before; families with shares repeat."""
    tasks = generated(config, domain, count, "train")
    shares = config.curriculum.family_shares.get(domain.name, domain.family_shares)
    if not shares:
        yield from ((task, 0) for task in tasks)
        return
    mixture = TaskMixture(tasks, shares)
    places = Counter[str]()
    for family in quota(mixture.shares, count):
        indices = mixture.indices[family]
        number, place = divmod(places[family], len(indices))
        places[family] += 1
        yield mixture[indices[place]], number


def names_of(tools: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of tools, and then the names as they stand in a list, after a space."""
    names = [str(schema["function"]["name"]) for schema in tools]
    return [*names, *(f" {name}" for name in names)]


def words_of(demonstrations: Sequence[Demonstration], fixed: Iterable[str]) -> list[str]:
    """Return `fixed` and frequent texts of demonstrations, the most frequent first.

    At most MAX_READ demonstrations are read and at most MAX_WORDS texts returned. Each conversation
    is split at its values, which are arguments of calls and values of tools' JSON results. A value
    or a text between two values is a word if enough conversations hold it. Other texts are split at
    spaces, digits and punctuation. So a value is the same token in a request and in a call, and the
    syntax between two values of a call is one token. A word has no digits: a token of each number
    or id would be too rare to be learned, and digits can be copied.
    """
    demonstrations = demonstrations[:: -(-len(demonstrations) // MAX_READ)]
    conversations = list(map(_split, demonstrations))
    least = max(2, len(demonstrations) // 100)
    texts = Counter(text for conversation in conversations for text in conversation)
    words = Counter(
        {
            text: number
            for text, number in texts.items()
            if number >= least and len(text) <= MAX_CHARACTERS and not any(map(str.isdigit, text))
        }
    )
    pieces = Counter[str]()
    for conversation in conversations:
        parts = (re.findall(r" ?[^\W\d]+|[^\w\s]+ ?", text) for text in conversation - words.keys())
        pieces.update({piece for part in parts for piece in part})
    words.update({piece: number for piece, number in pieces.items() if number >= least})
    fixed = dict.fromkeys(fixed)
    frequent = sorted(words, key=lambda word: (-words[word], word))
    return [*fixed, *(word for word in frequent if len(word) > 1 and word not in fixed)][:MAX_WORDS]


def fields_of(demonstrations: Iterable[Demonstration]) -> list[str]:
    """Return up to MAX_FIELDS frequent fields of demonstrations, the most frequent first.

    A field is a piece of a message up to `, `, ` | ` or a line break: one argument of a call, one
    value of a tool's result. Fields suit tools that answer with lines of text, and may have digits.
    """
    count = Counter[str]()
    for message in (m for one in demonstrations for m in one.messages if m["role"] != "system"):
        texts = [message["content"], *map(_written, message.get("tool_calls") or ())]
        count.update(field for text in texts for field in FIELD.findall(text))
    return [field for field, number in count.most_common(MAX_FIELDS) if number >= 3]


def _written(call: Mapping[str, Any]) -> str:
    """Return a call as the tiny model's chat template writes the call."""
    name = call["function"]["name"]
    arguments = call["function"].get("arguments", {})
    return f'\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n'


def _split(demonstration: Demonstration) -> set[str]:
    """Return the values of a conversation, and the texts between values."""
    texts = list[str]()
    values = set[str]()
    for message in demonstration.messages:
        content = message["content"]
        texts.append(content.partition("\n")[0] if message["role"] == "system" else content)
        if message["role"] == "tool":
            try:
                values.update(_leaves(json.loads(content)))
            except ValueError:
                continue
        for call in message.get("tool_calls") or ():
            name = call["function"]["name"]
            arguments = call["function"].get("arguments", {})
            values.update((name, *_leaves(arguments)))
            texts.append(_written(call))
    longest_first = sorted(values, key=lambda value: (-len(value), value))
    at_values = "|".join(map(re.escape, longest_first)) or r"(?!)"
    splits = (re.split(rf"(?<!\w)(?:{at_values})(?!\w)", text) for text in texts)
    return values.union(text for split in splits for text in split if text)


def _leaves(value: Any) -> Iterator[str]:
    """Yield the values in a JSON value that are short enough to be words."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _leaves(inner)
        return
    text = value if isinstance(value, str) else json.dumps(value)
    if text.strip() and len(text) <= MAX_VALUE:
        yield text
