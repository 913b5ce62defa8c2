"""An episode in the terminal: the rollout of one task, whose customer may be a person."""

import json
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from pydantic import BaseModel

from pipeline.chat.template import Chat
from pipeline.config.settings import Config, ModelSettings, RolloutSettings
from pipeline.data.rng import generator, stream_key
from pipeline.data.tasks import Message, Task
from pipeline.environments.customers import reply_of
from pipeline.environments.discovery import OF_THE_EPISODE, raw_call, tool_schemas
from pipeline.environments.domains import Domain
from pipeline.errors import UserError
from pipeline.export.checkpoint import RunCheckpoint
from pipeline.files.console import styled
from pipeline.files.untrusted import printable, shown
from pipeline.models.layers import fix_rotary
from pipeline.models.loading import load_folder, load_tokenizer, on_gpu, uses_bf16
from pipeline.preflight.prepare import long_prompts, needs_of
from pipeline.preflight.tasks import task_sets
from pipeline.rollout.rewards import load_reward_functions
from pipeline.rollout.rollout import Rollout, RolloutRequest, SamplerPolicy
from pipeline.rollout.sampler import make_sampler
from pipeline.rollout.trajectory import StopReason, Trajectory

NO_DEADLINE_S = 1e6  # a person may think for long
MOST_LINES = 25  # largest number of shown lines of rules, or of the database
INDENT = 10  # characters of the first column
STYLES = {"customer": "bold", "agent": "cyan"}  # other lines are dim
# Attributes of an environment that describe the episode, and not what the tools can see.


def find_task(config: Config, domain: Domain, task_id: str | None, seed: int, chat: Chat) -> Task:
    """Return the task with this id, or a held-out task that the seed chooses.

    `chat` finds the tasks that the run left out as too long.

    Raises UserError for an unknown id.
    """
    for count in (1, config.data.tasks_per_domain):  # training tasks are made only if needed
        data = config.data.model_copy(update={"tasks_per_domain": count})
        is_long = long_prompts(config, domain, chat)
        sets = task_sets(config.model_copy(update={"data": data}), domain, is_long)
        if task_id is None:
            return generator(seed, "chat", domain.name).choice(sets.held_out)
        for tasks in (sets.held_out, sets.validation, sets.train):
            if (found := next((task for task in tasks if task.id == task_id), None)) is not None:
                return found
    some = ", ".join(task.id for task in sets.held_out[:3])
    raise UserError(f"--task: got {shown(task_id)}; tasks of {domain.name} are {some} and others")


def chat_of(checkpoint: RunCheckpoint, domain: Domain) -> Chat:
    """Return the chat format of a checkpoint, whose template was fitted."""
    settings = _settings(checkpoint)
    kwargs = settings.chat_template_kwargs
    calls = settings.tool_call_format
    return Chat(load_tokenizer(settings), kwargs, calls, needs=needs_of([domain]))


def _settings(checkpoint: RunCheckpoint) -> ModelSettings:
    return checkpoint.config.model.model_copy(update={"model": str(checkpoint.path)})


def load_rollout(
    checkpoint: RunCheckpoint, domain: Domain, chat: Chat, limits: RolloutSettings, **hooks: Any
) -> Rollout:
    """Return the run's rollout with a checkpoint's weights, on the GPU if there is one.

    `hooks` are further arguments of Rollout. Raises UserError for files that cannot be loaded.
    """
    config = checkpoint.config
    settings = _settings(checkpoint)
    model = load_folder(checkpoint.path, settings)
    fix_rotary(model, limits.max_tokens)
    dtype = torch.bfloat16 if uses_bf16(settings) else torch.float32
    sampler = make_sampler(model.to("cuda" if on_gpu() else "cpu"), chat, limits, dtype, True)
    rewards = load_reward_functions(config)
    policy = SamplerPolicy(sampler, chat, limits)
    environments = {domain.name: domain.environment}
    return Rollout(policy, chat, environments, limits, rewards=rewards, **hooks)


def play(rollout: Rollout, customer: "Terminal", task: Task, seed: int, greedy: bool) -> Trajectory:
    """Play an episode of a task, print the conversation and the outcome, return the episode.

    The random numbers are those of the task's first trial in an evaluation with this seed.
    """
    key = stream_key(seed, "evaluation", *task.key, 0)
    (trajectory,) = rollout([RolloutRequest(task=task, trial=0, key=key)], greedy)
    print()
    limits = rollout.limits
    reason = trajectory.stop_reason
    why = {
        StopReason.MAX_TURNS: f" (max_turns {limits.max_turns})",
        StopReason.MAX_TOKENS: f" (max_tokens_per_turn {limits.max_tokens_per_turn}, "
        f"max_tokens {limits.max_tokens})",
        StopReason.MALFORMED_CALL: f" (max_malformed_calls {limits.max_malformed_calls})",
        StopReason.REPEATED_CALL: f" (max_repeated_calls {limits.max_repeated_calls})",
    }.get(reason, "")
    counts = f"{trajectory.num_turns} message(s) of the agent, {trajectory.num_tokens} tokens"
    tell("ended", f"{reason}{why}, {counts}")
    if trajectory.error:
        tell("error", trajectory.error)
    if customer.before:
        was = _flat(customer.before)
        now = _flat(state_of(customer.environment))
        names = [name for name in {**was, **now} if was.get(name) != now.get(name)]
        changes = [f"{name}: {was.get(name, '-')} -> {now.get(name, '-')}" for name in names]
        tell("changed", changes or "nothing")
    parts = trajectory.rewards or trajectory.reward_breakdown
    told = ", ".join(f"{name} {value:g}" for name, value in parts.items() if value is not None)
    goal = " for the task's own goal" if customer.is_human else ""
    tell("reward", f"{trajectory.reward:g}{goal}{f' ({told})' if told else ''}")
    wrong = trajectory.difference.items()
    tell("expected", [f"{name}: {right}, found {found}" for name, (found, right) in wrong])
    return trajectory


class Terminal:
    """Prints a conversation. With `is_human`, a person types the customer's messages."""

    def __init__(self, is_human: bool, chat: Chat) -> None:
        self.is_human = is_human
        self.chat = chat
        self.environment: Any = None
        self.before: dict[str, Any] = {}  # the database before the first message of the model

    def _begin(self, environment: Any, messages: Sequence[Message]) -> None:
        """Print rules, tools, database and request; a person may type another request.

        Raises EOFError if the input has ended.
        """
        self.environment = environment
        self.before = state_of(environment)
        *rules, request = messages
        schemas = tool_schemas(type(environment))
        prompt = self.chat.tokenizer.decode(self.chat.prompt_ids(messages, schemas))
        if messages[0]["role"] != "system":
            tell("template", self.chat.preface)
        for message in rules:
            lines = message["content"].splitlines()
            tell("rules", lines)
            tell("", _unseen(lines, prompt))
        tell("tools", [_signature(schema["function"]) for schema in schemas])
        tell("database", list(_rows(self.before)))
        print()
        if self.is_human:
            print(styled(f"The task's request, which Enter sends: {request['content']}", "dim"))
            request["content"] = _typed() or request["content"]
        else:
            self.watch(environment, [request])

    def watch(self, environment: Any, messages: Sequence[Message]) -> None:
        """Print new messages; the first ones are the prompt, whose request a person may change."""
        if self.environment is not environment:
            return self._begin(environment, messages)
        for message in messages:
            role = message["role"]
            if role == "user":
                if not self.is_human:
                    tell("customer", message["content"])
            else:
                calls = [_call(call["function"]) for call in message.get("tool_calls") or ()]
                name = {"assistant": "agent", "system": "rules"}.get(role, "tool")
                tell(name, [*filter(None, [message["content"]]), *calls] or [""])

    def reply(self, environment: Any, message: str) -> Any:
        if not self.is_human:
            return reply_of(environment, message)
        try:
            return _typed() or None
        except EOFError:
            return None


def state_of(environment: Any) -> dict[str, Any]:
    """Return what the tools of an environment can see, as nested dicts.

    Read are an attribute `_db` and the public attributes with plain data.
    """
    attributes = getattr(environment, "__dict__", {})
    hidden = OF_THE_EPISODE | ({"messages"} if raw_call(type(environment)) else set())
    public = {k: v for k, v in attributes.items() if k[0] != "_" and k not in hidden}
    found = {**public, **_plain(attributes.get("_db", {}))}
    return {name: plain for name, value in found.items() if (plain := _plain(value)) is not None}


def _plain(value: Any) -> Any:
    """Return plain data, in which texts stand for what is no dict; None for other objects."""
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    is_data = isinstance(value, str | bool | int | float | list | tuple | set)
    return "-" if value is None else str(value) if is_data else None


def _rows(state: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """Yield a line for each nested dict with values: its path, and the values by name."""
    values = {name: value for name, value in state.items() if not isinstance(value, Mapping)}
    if values:
        yield f"{where}: " * bool(where) + ", ".join(f"{name} {v}" for name, v in values.items())
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from _rows(value, f"{where}.{name}".lstrip("."))


def _unseen(lines: Sequence[str], prompt: str) -> list[str]:
    """Return a line that says how much of a message the model's template leaves out, if it does."""
    texts = [text for line in lines if (text := line.strip())]
    seen = sum(text in prompt for text in texts)
    if 2 * seen >= len(texts):  # a tokenizer may change single characters
        return []
    return [f"(the model sees {seen} of these {len(texts)} lines: its template drops the others)"]


def _signature(function: Mapping[str, Any]) -> str:
    return f"{function['name']}({', '.join(function['parameters'].get('properties', {}))})"


def _call(function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments", {}).items()
    texts = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments)
    return f"{function['name']}({', '.join(texts)})"


def _typed() -> str:
    """Return a line that a person types; raises EOFError at the end of the input."""
    text = input(styled("customer".ljust(INDENT), "bold"))
    if not sys.stdin.isatty():
        print(printable(text))  # the terminal has not shown the line
    return text.strip()


def tell(name: str, content: str | Sequence[str]) -> None:
    """Print a text or lines beside a name in the first column; print nothing for no lines."""
    lines = content.splitlines() if isinstance(content, str) else list(content)
    if len(lines) > MOST_LINES:
        lines[MOST_LINES:] = [f"... and {len(lines) - MOST_LINES} lines more"]
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    width = max(40, columns - INDENT)
    options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    wrapped = [part for line in lines for part in textwrap.wrap(printable(line), width, **options)]
    for number, line in enumerate(wrapped or lines):
        heading = (name if number == 0 else "").ljust(INDENT)
        print(styled(f"{heading}{line}", STYLES.get(name, "dim")), flush=True)


def _flat(state: Mapping[str, Any], where: str = "") -> dict[str, str]:
    """Return {path: value} for all values in nested dicts."""
    found: dict[str, str] = {}
    for name, value in state.items():
        path = f"{where}.{name}".lstrip(".")
        found |= _flat(value, path) if isinstance(value, Mapping) else {path: value}
    return found
