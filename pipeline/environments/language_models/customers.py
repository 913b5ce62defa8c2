"""Customers who talk with the trained model: a script, and a language model with a scenario.

An environment with a property `scenario`, or a task with a column `scenario`, lets a language model
play its customer. The run also has its judge from here.
"""

import json
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.common.errors import UserError
from pipeline.config.settings import Config
from pipeline.data.tasks import SCENARIO, Message, Task
from pipeline.environments.domains import Domain
from pipeline.environments.faults import Outage
from pipeline.environments.language_models.endpoint import spoken
from pipeline.environments.language_models.language_model import LanguageModel

if TYPE_CHECKING:
    from pipeline.distributed.ranks import Ranks  # imports torch

STOPS = ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###")  # those of τ²-bench
MAX_ERRORS = 10  # failed calls of the customer's tools
MAX_ROUNDS = 30  # messages with calls of the customer's tools, one after the other
SILENCE = "I got an empty message. Could you say that again?"
GREETING = "Hello! How can I help you?"
SYSTEM = """\
You play a customer who writes to the service agent of a company. Answer with the customer's next
message and nothing else: short and in your own words. Your instructions say who you are and what
you want. Tell what the agent asks for, one thing after the other, and invent nothing. Do not read
the instructions out. When your request is settled, or when nothing more can be done, write
###STOP### instead of a message. When the agent transfers you to a person, write ###TRANSFER###.

Your instructions:
"""
Ask = Callable[[list[Message], Sequence[dict[str, Any]]], Awaitable[Message]]
# Gives an environment its customer: (environment, task, key, request) -> new request.
OpeningMessage = Callable[[Any, Task, int, str], Coroutine[Any, Any, str] | str]

# Of the scripted customer.
MOST_REPLIES = 20
PARTS = ("known_info", "unknown_info", "task_instructions")  # after `reason_for_call`
FIRST_PERSON = {
    **{"you are": "I am", "you're": "I'm", "you were": "I was", "yourself": "myself"},
    **{"yours": "mine", "your": "my", "you": "I"},
    **{f"{word} you": f"{word} me" for word in ("to", "for", "asks", "tells", "told", "offers")},
}
SECOND = re.compile(rf"\b({'|'.join(sorted(FIRST_PERSON, key=len)[::-1])})\b", re.IGNORECASE)
IDENTITY = re.compile(
    r"\b(id|e-?mail|name|zip|who (are|am)|identity|verify|(order|reservation) (id|number))\b"
)
ELSE = re.compile(r"\b(anything|something) (else|more)\b|\bfurther\b")
TRANSFER = re.compile(r"\btransferr(ed|ing)\b")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What a language model needs in order to play the customer of one episode."""

    system: str  # the system prompt
    greeting: str  # the agent's first message
    first_words: str = ""  # the customer's first message, or empty: the language model writes it
    schemas: Sequence[dict[str, Any]] = ()  # JSON schemas of the customer's own tools
    # Calls a tool of the customer; returns the text of the result, and whether the call failed.
    call: Callable[[str, dict[str, Any]], tuple[str, bool]] | None = None


class LlmCustomer:
    """The customer of one episode; `ask` returns the language model's next message.

    `model_messages` is the conversation as the language model sees it, with calls of its own tools.
    The agent's thoughts and tool calls are not in it. `tool_counts` has [calls, failed calls] by
    tool. Every method raises Outage if the language model fails as a customer.
    """

    def __init__(self, scenario: Scenario, ask: Ask) -> None:
        self._scenario = scenario
        self._ask = ask
        self.model_messages: list[Message] = [{"role": "system", "content": scenario.system}]
        self.tool_counts: dict[str, list[int]] = {}
        self._is_gone = False

    async def first_words(self) -> str:
        """Return the customer's first message, which answers the agent's greeting."""
        if known := self._scenario.first_words:
            greeting = {"role": "user", "content": self._scenario.greeting}
            self.model_messages += [greeting, {"role": "assistant", "content": known}]
            return known
        said = await self._answer(self._scenario.greeting)
        self._is_gone = any(stop in said for stop in STOPS)
        return said

    async def reply(self, message: str) -> str | None:
        """Return the answer to a message, or None if the customer ends the conversation."""
        if self._is_gone:
            return None
        if not (heard := spoken(message)):
            return SILENCE
        said = await self._answer(heard)
        return None if any(stop in said for stop in STOPS) else said

    async def _answer(self, message: str) -> str:
        self.model_messages.append({"role": "user", "content": message})
        for _ in range(MAX_ROUNDS):
            answer = await self._ask(self.model_messages, self._scenario.schemas)
            words = spoken(answer["content"])
            self.model_messages.append({**answer, "content": words})
            if calls := answer.get("tool_calls"):
                self.model_messages += [self._result(call) for call in calls]
            elif words:
                return words
            else:
                raise Outage("customer: the language model wrote thoughts and no message")
        raise Outage(f"customer: {MAX_ROUNDS} messages with calls of tools and no other one")

    def _result(self, call: Message) -> Message:
        """Call one of the customer's own tools; return the message with the result."""
        name = call["function"]["name"]
        text = f"Error: there is no tool {name}"
        failed = True
        if self._scenario.call is not None:
            text, failed = self._scenario.call(name, json.loads(call["function"]["arguments"]))
        counts = self.tool_counts.setdefault(name, [0, 0])
        counts[0] += 1
        counts[1] += failed
        if sum(num_failed for _, num_failed in self.tool_counts.values()) >= MAX_ERRORS:
            raise Outage(f"customer: {MAX_ERRORS} calls of the customer's tools failed")
        return {"role": "tool", "tool_call_id": call["id"], "content": text}


def record_customer(environment: Any, trajectory: Any) -> None:
    """Add a language model's conversation as the customer to a trajectory.

    The customer's tools are counted apart from the model's, under `customer/` and their name.
    """
    user: Any = getattr(environment, "user", None)
    if isinstance(user, LlmCustomer):
        trajectory.customer = list(user.model_messages)
        trajectory.tools |= {
            f"customer/{name}": counts for name, counts in user.tool_counts.items()
        }


class ScriptedCustomer:
    """A customer without a language model: a state machine over the scenario of an episode.

    The customer says why he writes, then one part of the scenario after the other. Asked for his
    identity, he repeats what he knows; asked for anything else, he agrees. He ends the conversation
    after a transfer, or when nothing is left to say and the agent asks nothing, or asks whether
    there is anything else. `instructions` are the parts of a scenario by name, as τ²-bench's
    airline and retail have them. Their English is turned from the second person into the first one
    by words, not by grammar.
    """

    def __init__(self, instructions: Mapping[str, Any]) -> None:
        told = {name: in_first_person(str(text)) for name, text in instructions.items() if text}
        self._known = told.get("known_info", "I do not know more than that.")
        self._left = [told[name] for name in PARTS if name in told]
        self.first_words = told.get("reason_for_call") or self._left.pop(0)
        self._num_replies = 0

    def reply(self, message: str) -> str | None:
        """Return the answer to a message, or None if the customer ends the conversation."""
        text = spoken(message).lower()
        self._num_replies += 1
        if TRANSFER.search(text) or self._num_replies > MOST_REPLIES:
            return None
        if self._left:
            return self._left.pop(0)
        if "?" not in text or ELSE.search(text):
            return None
        return self._known if IDENTITY.search(text) else "Yes, please."


def in_first_person(text: str) -> str:
    """Return a text about "you" as a text about "I"."""

    def replaced(match: re.Match[str]) -> str:
        word = FIRST_PERSON[match[0].lower()]
        return word[0].upper() + word[1:] if match[0][0].isupper() else word

    return SECOND.sub(replaced, text).strip()


def served_domains(
    config: Config, domains: Mapping[str, Domain], tasks: Mapping[str, Sequence[Task]]
) -> list[str]:
    """Return the domains whose customers a language model plays."""
    return [
        name
        for name, domain in domains.items()
        if config.customer.url is not None
        and (hasattr(domain.environment, SCENARIO) or any(map(_scenario_text, tasks[name])))
    ]


def check_scenarios(
    config: Config, domains: Mapping[str, Domain], tasks: Mapping[str, Sequence[Task]]
) -> tuple[list[str], list[str]]:
    """Return the domains whose customers a language model plays, and notes on idle scenarios.

    Raises UserError if the customers are to be a language model, and no task has a scenario.
    """
    url = config.customer.url
    if url is None:
        idle = [name for name in domains if _scenario_text(tasks[name][0])]
        return [], [f"{name}: scenario has no effect without customer_url" for name in idle]
    if not (served := served_domains(config, domains, tasks)):
        hint = "give τ²-bench's domains (tau2), or tasks with the column scenario"
        names = ",".join(domains)
        raise UserError(f"customer_url: got {url}, but no task of {names} has a scenario; {hint}")
    return served, []


def _scenario_text(task: Task) -> str:
    text = task.row().get(SCENARIO)
    return text if isinstance(text, str) else ""


class Customers:
    """The language model's customers on one rank.

    `opening_messages` has, by domain, the function that gives a customer's first message.
    """

    def __init__(self, model: LanguageModel, domains: Iterable[str]) -> None:
        self.model = model
        self.opening_messages = dict.fromkeys(domains, self.opening_message)

    async def opening_message(self, environment: Any, task: Task, key: int, request: str) -> str:
        """Give an episode its customer; return the request, with the customer's first words.

        `key` is the episode's key, from which the seed of the calls comes. `request` is the task's
        text and that of the environment's `reset`. A task without a scenario keeps the
        environment's own user.
        """
        scenario = getattr(environment, SCENARIO, None)
        text = _scenario_text(task)
        if scenario is None and not text:
            return request
        if scenario is None:
            scenario = Scenario(system=SYSTEM + text, greeting=GREETING, first_words=request)
        customer = LlmCustomer(scenario, partial(self.model.ask, seed=key % 2**31))
        environment.user = customer
        words = await customer.first_words()
        if scenario.first_words:
            return request
        return str(task.prompt[-1]["content"]) + words


def customers_of(
    config: Config,
    folder: Path,
    served: Sequence[str],
    ranks: "Ranks",
) -> Customers | None:
    """Return the customers of the domains `served` on this rank, or None if there are none."""
    if not served:
        return None
    timeout = config.rollout.call_timeout
    model = LanguageModel("customer", config.customer, timeout, folder, ranks)
    return Customers(model, served)


def judge_of(config: Config, folder: Path, ranks: "Ranks") -> LanguageModel | None:
    """Return the judge of a run, or None.

    With a `judge_url`, `check_reward_functions` has found who asks it: environments with
    `has_judge`, by `await self.judge(messages, seed=...)`, or reward functions, by their argument
    `judge`.
    """
    if config.judge.url is None:
        return None
    return LanguageModel("judge", config.judge, config.rollout.call_timeout, folder, ranks)


def end_of_run(models: Sequence[LanguageModel], ranks: "Ranks") -> str:
    """Return why the run must end, or an empty text; all ranks must call this function."""
    mine = next(filter(None, (model.ended for model in models)), "")
    return next(filter(None, ranks.all_gather_objects(mine, "language models")), "")
