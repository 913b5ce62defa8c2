"""Lets a checkpoint serve a customer, in the terminal or on a page, with the run's settings."""

import argparse
import json
import queue
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain, count
from pathlib import Path
from random import Random
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from pipeline.checkpoints.trained import RunCheckpoint, open_checkpoint
from pipeline.common.console import command, styled
from pipeline.common.errors import UserError
from pipeline.common.layout import is_toy
from pipeline.common.untrusted import printable, shown
from pipeline.config.cli import Parser, seed_of
from pipeline.config.settings import RolloutSettings
from pipeline.data.rng import generator, stream_key
from pipeline.data.tasks import Message, Task
from pipeline.distributed.devices import dtype_of, on_gpu
from pipeline.environments.discovery import OF_THE_EPISODE, raw_call, tool_schemas
from pipeline.environments.domains import Domain, load_domains
from pipeline.environments.language_models.customers import Customers, served_domains
from pipeline.environments.language_models.language_model import LanguageModel
from pipeline.environments.task_sets import TaskSets, task_sets
from pipeline.environments.tools import reply_of
from pipeline.models.chat.fitting import needs_of
from pipeline.models.chat.template import Chat
from pipeline.models.layers import fix_rotary
from pipeline.models.loading import load_folder, load_tokenizer
from pipeline.report.server import HERE, NO_PAGE, Answer, Page, address_in_words, server_of
from pipeline.report.write import filled, parts_of_page
from pipeline.rollout.limits import long_prompts
from pipeline.rollout.rewards import callables_of, load_reward_functions
from pipeline.rollout.rollout import Rollout, RolloutRequest, SamplerPolicy
from pipeline.rollout.samplers.choice import make_sampler
from pipeline.rollout.trajectory import Trajectory

NO_DEADLINE_S = 1e6  # a person may think for long
MOST_LINES = 25  # largest number of shown lines of rules, or of the database
NUM_EXAMPLES = 3  # of requests, for a person
APART = ("request", "ended")  # names of lines after an empty line
INDENT = 10  # characters of the first column
STYLES = {"customer": "bold", "agent": "cyan"}  # other lines are dim
PLAIN = (BaseModel, Mapping, str, bool, int, float, list, tuple, set)


def main(argv: list[str]) -> int:
    """Run `chat RUN`; raises UserError for a mistake of the user."""
    options = _parser().parse_args(argv)
    checkpoint = open_checkpoint(options.run, options.checkpoint)
    config = checkpoint.config
    names = config.data.domains
    name = options.domain or names[0]
    if name not in names:
        raise UserError(f"--domain: got {shown(name)}; domains of the run: {', '.join(names)}")
    seed = config.run.seed if options.seed is None else options.seed
    domain = load_domains(config)[name]
    chat = chat_of(checkpoint, domain)
    rewards = load_reward_functions(config)
    is_long = long_prompts(config, chat)
    sets = task_sets(config, domain, callables_of(rewards), is_long)
    task = find_task(sets, domain, options.task, seed)
    place: Terminal | ChatPage = Terminal()
    if options.web:
        place = ChatPage(f"{name} of {options.run.resolve().name}")
        address = address_in_words(place.address, checkpoint.run)
        print(f"chat in a browser: {address} (Ctrl-C ends it)", flush=True)
    how = "greedy" if options.greedy else f"sampled at temperature {config.rollout.temperature:g}"
    place.tell("model", f"{checkpoint}; {how}, seed {seed}")
    place.tell("domain", f"{name}, of {', '.join(names)}")
    place.tell("task", f"{task.id} {task.family}".rstrip())
    conversation = ConversationView(options.human, chat, place)
    limits = config.rollout
    hooks = models_asked(checkpoint, domain, task, options.human)
    if options.human:
        place.tell("examples", example_requests(sets, generator(seed, "examples", name)))
        if is_toy(str(checkpoint.path)):
            place.tell("note", "so small a model answers only such requests; else, noise")
        limits = limits.model_copy(update={"call_timeout": NO_DEADLINE_S, "rollout_timeout": None})
    elif "opening_messages" in hooks:
        place.tell("customer", config.customer.in_words)
    hooks |= {"reply": conversation.reply, "watch": conversation.watch, "rewards": rewards}
    rollout = load_rollout(checkpoint, domain, chat, limits, **hooks)
    try:
        for trial in count() if options.web else range(1):
            # The random numbers of the task's trial in an evaluation with this seed.
            key = stream_key(seed, "evaluation", *task.key, trial)
            request = RolloutRequest(task=task, trial=trial, key=key)
            conversation.tell_end(rollout([request], options.greedy)[0])
            if options.web:
                place.tell("over", "send begins another conversation; Ctrl-C in the terminal ends")
                place.typed()
    except (KeyboardInterrupt, EOFError):
        print("\nended before the conversation did")
    return 0


def _parser() -> argparse.ArgumentParser:
    flags = Parser(prog=command("chat"), description=__doc__, allow_abbrev=False)
    flags.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    flags.add_argument("--domain", help="a domain of the run [the first]")
    flags.add_argument("--task", metavar="ID", help="id of a task [a held-out task]")
    flags.add_argument(
        "--human",
        action="store_true",
        help="you type the customer's messages; an empty line ends the conversation",
    )
    flags.add_argument("--greedy", action="store_true", help="always take the likeliest token")
    flags.add_argument(
        "--seed",
        type=seed_of,
        metavar="N",
        help="chooses the task and the random numbers [the run's seed]",
    )
    flags.add_argument(
        "--checkpoint",
        default="latest",
        metavar="NAME",
        help="name of a checkpoint, latest, or best (of --keep-best) [latest]",
    )
    flags.add_argument("--web", action="store_true", help="serve the conversation as a page")
    return flags


def models_asked(
    checkpoint: RunCheckpoint, domain: Domain, task: Task, is_human: bool
) -> dict[str, Any]:
    """Return arguments of Rollout for the models that play the customer and the judge."""
    config = checkpoint.config
    timeout = config.rollout.call_timeout
    model_of = partial(LanguageModel, call_timeout=timeout, folder=checkpoint.run, name="chat")
    asked: dict[str, Any] = {}
    if not is_human and served_domains(config, {domain.name: domain}, {domain.name: [task]}):
        customers = Customers(model_of("customer", config.customer), [domain.name])
        asked["opening_messages"] = customers.opening_messages
    if config.judge.url is not None:
        asked["judge"] = model_of("judge", config.judge).ask
    return asked


def example_requests(sets: TaskSets, random: Random) -> list[str]:
    """Return requests of some held-out tasks."""
    tasks = random.sample(sets.held_out, min(NUM_EXAMPLES, len(sets.held_out)))
    requests = [task.prompt[-1]["content"] for task in tasks]
    return [str(request).strip() for request in requests if request]


def find_task(sets: TaskSets, domain: Domain, task_id: str | None, seed: int) -> Task:
    """Return the task with this id, or a held-out task that the seed chooses.

    Raises UserError for an unknown id.
    """
    if task_id is None:
        return generator(seed, "chat", domain.name).choice(sets.held_out)
    for task in chain(sets.held_out, sets.validation, sets.train):
        if task.id == task_id:
            return task
    some = ", ".join(task.id for task in sets.held_out[:3])
    raise UserError(f"--task: got {shown(task_id)}; tasks of {domain.name} are {some} and others")


def chat_of(checkpoint: RunCheckpoint, domain: Domain) -> Chat:
    """Return the chat format of a checkpoint, whose template was fitted."""
    settings = checkpoint.config.model.model_copy(update={"model": str(checkpoint.path)})
    return Chat(
        load_tokenizer(settings),
        settings.chat_template_kwargs,
        settings.tool_call_format,
        needs=needs_of([domain]),
    )


def load_rollout(
    checkpoint: RunCheckpoint, domain: Domain, chat: Chat, limits: RolloutSettings, **hooks: Any
) -> Rollout:
    """Return the run's rollout with a checkpoint's weights, on the GPU if there is one.

    `hooks` are further arguments of Rollout. Raises UserError for files that cannot be loaded.
    """
    settings = checkpoint.config.model.model_copy(update={"model": str(checkpoint.path)})
    model = load_folder(checkpoint.path, settings)
    fix_rotary(model, limits.max_tokens)
    model = model.to("cuda" if on_gpu() else "cpu")
    sampler = make_sampler(model, chat, limits, dtype_of(settings), is_main=True)
    return Rollout(
        SamplerPolicy(sampler, chat, limits),
        chat,
        {domain.name: domain},
        limits,
        **hooks,
    )


class Terminal:
    """Shows lines, and waits for what a person types."""

    def typed(self) -> str:
        """Return a line that a person types; raises EOFError at the end of the input."""
        text = input(styled("customer".ljust(INDENT), "bold"))
        if not sys.stdin.isatty():
            print(printable(text))  # the terminal has not shown the line
        return text.strip()

    def tell(self, name: str, content: str | Sequence[str]) -> None:
        """Print a text or lines beside a name in the first column; print nothing for no lines."""
        lines = content.splitlines() if isinstance(content, str) else list(content)
        if len(lines) > MOST_LINES:
            lines[MOST_LINES:] = [f"... and {len(lines) - MOST_LINES} lines more"]
        if name in APART:
            print()
        for number, line in enumerate(lines):
            heading = (name if number == 0 else "").ljust(INDENT)
            print(styled(f"{heading}{printable(line)}", STYLES.get(name, "dim")), flush=True)


class ChatPage(Page):
    """The place of a conversation with `--web`: as Terminal, on a page at `address`."""

    def __init__(self, title: str) -> None:
        self._html = filled("chat.html", title=title, **parts_of_page("chat.js"))
        self._lines = list[tuple[str, str]]()
        self._is_waiting = False  # for the person
        self._typed = queue.Queue[str]()
        server = server_of(self, HERE[0], None)
        self.address = server.address
        threading.Thread(target=server.serve_forever, daemon=True).start()

    def get(self, path: str, query: dict[str, list[str]]) -> Answer:
        """Answer `/` and `/lines?since=NUMBER` (JSON: names and texts, and whose turn it is)."""
        if path == "/":
            return 200, "text/html", self._html
        since = query.get("since", ["0"])[0]
        if path == "/lines" and since.isdecimal():
            found = {"is_waiting": self._is_waiting, "lines": self._lines[int(since) :]}
            return 200, "application/json", json.dumps(found)
        return NO_PAGE

    def take(self, words: str) -> None:
        if self._is_waiting:
            self._is_waiting = False
            self._typed.put(words)

    def tell(self, name: str, content: str | Sequence[str]) -> None:
        """Show a text or lines; show nothing for no lines."""
        text = content if isinstance(content, str) else "\n".join(content)
        if text:
            self._lines.append((name, printable(text)))

    def typed(self) -> str:
        """Wait for a message, and show it."""
        self._is_waiting = True
        words = self._typed.get()
        self.tell("customer", words)
        return words


class ConversationView:
    """Shows a conversation and its outcome. With `is_human`, a person types as the customer."""

    def __init__(self, is_human: bool, chat: Chat, place: Terminal | ChatPage) -> None:
        self.is_human = is_human
        self.chat = chat
        self.tell = place.tell
        self.typed = place.typed
        self.environment: Any = None
        self.prompt = list[Message]()  # with a person's request
        self.before: dict[str, str] = {}  # the database before the first message of the model

    def _begin(self, environment: Any, messages: Sequence[Message]) -> None:
        """Print rules, tools, database and request; a person may type another request.

        Raises EOFError if the input has ended.
        """
        self.environment = environment
        self.before = state_of(environment)
        *rules, request = messages
        schemas = tool_schemas(type(environment))
        if messages[0]["role"] != "system":
            self.tell("template", self.chat.preface)
        for message in rules:
            self.tell("rules", message["content"])
        self.tell("tools", [_signature(schema["function"]) for schema in schemas])
        self.tell("database", _rows(self.before))
        if self.is_human:
            self.tell("request", f"{request['content']} (the task's own: an empty line sends it)")
            request["content"] = self.typed() or request["content"]
        else:
            self.tell("customer", request["content"])

    def watch(self, environment: Any, messages: Sequence[Message]) -> None:
        """Print new messages; the first ones are the prompt, whose request a person may change.

        The first conversation of a user's loop often begins with the same prompt.
        """
        if self.environment is not environment:
            self._begin(environment, messages)
            self.prompt = list(messages)
            return
        if messages == self.prompt:
            return
        names = {"user": "customer", "assistant": "agent", "system": "rules"}
        for message in messages:
            role = message["role"]
            calls = [_call(call["function"]) for call in message.get("tool_calls") or ()]
            if role != "user" or not self.is_human:
                lines = [message["content"], *calls] if message["content"] else calls
                self.tell(names.get(role, "tool"), lines or [""])

    def reply(self, environment: Any, message: str) -> Any:
        if not self.is_human:
            return reply_of(environment, message)
        try:
            return self.typed() or None
        except EOFError:
            return None

    def tell_end(self, trajectory: Trajectory) -> None:
        """Print how the episode ended, what it changed in the database, and its reward."""
        num_tokens = trajectory.sequences[-1].num_tokens
        counts = f"{trajectory.num_turns} message(s) of the agent, {num_tokens} tokens"
        self.tell("ended", f"{trajectory.stop_reason}, {counts}")
        self.tell("error", trajectory.error)
        if before := self.before:
            now = state_of(self.environment)
            paths = [path for path in {**before, **now} if before.get(path) != now.get(path)]
            lines = [f"{path}: {before.get(path, '-')} -> {now.get(path, '-')}" for path in paths]
            self.tell("changed", lines or "nothing")
        parts = trajectory.rewards or trajectory.reward_breakdown
        values = [f"{name} {value:g}" for name, value in parts.items() if value is not None]
        named = f" ({', '.join(values)})" if values else ""
        goal = " for the task's own goal" if self.is_human else ""
        self.tell("reward", f"{trajectory.reward:g}{goal}{named}")
        wrong = trajectory.difference.items()
        self.tell("expected", [f"{name}: {right}, found {found}" for name, (found, right) in wrong])


def state_of(environment: Any) -> dict[str, str]:
    """Return {path: value} of what the tools of an environment can see.

    Read are an attribute `_db` and the public attributes with plain data.
    """
    attributes = getattr(environment, "__dict__", {})
    hidden = OF_THE_EPISODE | ({"messages"} if raw_call(type(environment)) else set())
    state = {name: value for name, value in attributes.items() if name[0] != "_"}
    database = attributes.get("_db", {})
    state |= dict(database) if isinstance(database, BaseModel | Mapping) else {}
    seen = {k: v for k, v in state.items() if k not in hidden and isinstance(v, PLAIN)}
    return _flat(to_jsonable_python(seen, fallback=str))


def _flat(state: Mapping[str, Any], where: str = "") -> dict[str, str]:
    """Return {path: value} for all values in nested dicts."""
    found: dict[str, str] = {}
    for name, value in state.items():
        path = f"{where}.{name}".lstrip(".")
        text = "-" if value is None else str(value)
        found |= _flat(value, path) if isinstance(value, Mapping) else {path: text}
    return found


def _rows(state: Mapping[str, str]) -> list[str]:
    """Return a line for each nested dict: its path, and the values by name."""
    values: dict[str, list[str]] = {}
    for path, value in state.items():
        parent, _, name = path.rpartition(".")
        values.setdefault(parent, []).append(f"{name} {value}")
    return [f"{parent}: {', '.join(of)}".removeprefix(": ") for parent, of in values.items()]


def _signature(function: Mapping[str, Any]) -> str:
    return f"{function['name']}({', '.join(function['parameters'].get('properties', {}))})"


def _call(function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments", {}).items()
    texts = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments)
    return f"{function['name']}({', '.join(texts)})"
