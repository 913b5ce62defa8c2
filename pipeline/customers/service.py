"""The customers of a run: one endpoint, its cache and its budget, for the domains that need it."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.config.settings import Config, DataSettings
from pipeline.customers.cache import FOLDER, AnswerCache, key_of
from pipeline.customers.endpoint import Endpoint, Refused
from pipeline.customers.llm_customer import LlmCustomer, scenario_of
from pipeline.data.tasks import Message, Task
from pipeline.distributed.ranks import Ranks
from pipeline.environments.domains import Domain
from pipeline.environments.faults import Outage
from pipeline.errors import UserError
from pipeline.files.console import say

PATIENCE = 0.9  # share of call_timeout after which a customer gives up before the rollout does
SCENARIO = "scenario"  # a task's column with instructions; an environment's attribute of that name


def served_domains(
    data: DataSettings, domains: Mapping[str, Domain], tasks: Mapping[str, Sequence[Task]]
) -> list[str]:
    """Return the domains whose customers a language model plays."""
    return [
        name
        for name, domain in domains.items()
        if data.customer == "llm"
        and (hasattr(domain.environment, SCENARIO) or any(map(_scenario_text, tasks[name])))
    ]


def check_scenarios(
    data: DataSettings, domains: Mapping[str, Domain], tasks: Mapping[str, Sequence[Task]]
) -> list[str]:
    """Return a note for each domain whose scenarios have no effect.

    Raises UserError if the customers are to be a language model, and no task has a scenario.
    """
    if data.customer == "llm" and not served_domains(data, domains, tasks):
        hint = "give τ²-bench's domains (tau2), or tasks with the column scenario"
        names = ",".join(domains)
        raise UserError(f"customer: got llm, but no task of {names} has a scenario; {hint}")
    idle = [n for n in domains if data.customer != "llm" and _scenario_text(tasks[n][0])]
    return [f"{name}: scenario has no effect without customer llm" for name in idle]


def _scenario_text(task: Task) -> str:
    text = task.row().get(SCENARIO)
    return text if isinstance(text, str) else ""


def customers_of(
    config: Config,
    folder: Path,
    domains: Mapping[str, Domain],
    tasks: Mapping[str, Sequence[Task]],
    ranks: Ranks,
) -> "Customers | None":
    """Return the customers of a run on this rank, or None if no language model plays any."""
    names = served_domains(config.data, domains, tasks)
    tell = say if ranks.is_main else lambda line: None
    arguments = config, folder, names, tell, ranks.rank, ranks.num_ranks
    return Customers(*arguments) if names else None


class Customers:
    """The language model's customers on one rank. `welcomes` has the domains' `welcome` by name.

    Each rank may spend an equal share of what is left of the budget. After the budget is spent, or
    after the endpoint has refused all calls, `ended` says why, and each new call raises Outage.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        domains: Iterable[str],
        say: Callable[[str], None] = say,
        rank: int = 0,
        num_ranks: int = 1,
        name: str = "",
    ) -> None:
        data = config.data
        self.welcomes = dict.fromkeys(domains, self.welcome)
        self._data, key = data, os.environ.get(data.customer_key, "")
        self._endpoint = Endpoint(
            str(data.customer_url),
            str(data.customer_model),
            data.customer_temperature,
            key,
            PATIENCE * config.rollout.call_timeout,
            say,
        )
        self.cache = AnswerCache(folder / FOLDER, name or f"rank-{rank}")
        self.ended, self._num_open = "", 0
        limits = {
            "max_customer_calls": (data.max_customer_calls, self.cache.num_calls),
            "max_customer_tokens": (data.max_customer_tokens, self.cache.num_tokens),
        }
        self._most = {
            name: used + (limit - used + num_ranks - 1 - rank) // num_ranks
            for name, (limit, used) in limits.items()
            if limit is not None
        }

    async def welcome(self, environment: Any, task: Task, key: int, addition: str) -> str:
        """Give an episode its customer; return the customer's first words, or `addition`.

        `key` is the episode's key, from which the seed of the calls comes. `addition` is the text
        of the environment's `reset`. A task without a scenario keeps the environment's own user.
        """
        scenario = getattr(environment, SCENARIO, None)
        if scenario is None:
            if not (text := _scenario_text(task)):
                return addition
            scenario = scenario_of(text, task.prompt[-1]["content"] + addition)
        customer = LlmCustomer(scenario, partial(self._ask, key % 2**31))
        environment.user = customer
        words = await customer.first_words()
        return addition if scenario.first_words else words

    async def _ask(
        self, seed: int, messages: list[Message], tools: Sequence[dict[str, Any]]
    ) -> Message:
        model, temperature = self._endpoint.model, self._endpoint.temperature
        key = key_of(model, temperature, seed, messages, list(tools))
        if (known := self.cache.get(key)) is not None:
            return known
        self._check_budget()
        self._num_open += 1
        try:
            return await self._endpoint.answer(messages, tools, seed, partial(self.cache.put, key))
        except Refused as refused:
            why = f"customer_url: {self._endpoint.url} refuses a call ({refused})"
            if refused.for_all:
                key_name = self._data.customer_key
                self.ended = f"{why}; mend customer_url, customer_model or the key in {key_name}"
            raise Outage(why) from None
        finally:
            self._num_open -= 1

    def end_of_run(self, ranks: Ranks) -> str:
        """Return why the run must end, or an empty text; all ranks must call this function."""
        return next(filter(None, ranks.all_gather_objects(self.ended, "customers")), "")

    def _check_budget(self) -> None:
        spent = {
            "max_customer_calls": self.cache.num_calls + self._num_open,
            "max_customer_tokens": self.cache.num_tokens,
        }
        for name, most in self._most.items():
            if spent[name] >= most and not self.ended:
                limit = getattr(self._data, name)
                hint = "go on with --resume-from-checkpoint auto and more, nothing is paid twice"
                self.ended = f"{name}: got {limit}, which is spent; {hint}"
        if self.ended:
            raise Outage(f"customer: {self.ended}")
