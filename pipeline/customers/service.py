"""The language models of a run: one plays customers, and one judges episodes."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.config.settings import Config, DataSettings
from pipeline.customers.llm_customer import LlmCustomer, scenario_of
from pipeline.data.tasks import SCENARIO, Task
from pipeline.distributed.ranks import Ranks
from pipeline.endpoints.language_model import LanguageModel
from pipeline.environments.domains import Domain
from pipeline.errors import UserError


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
    if not (names := served_domains(config.data, domains, tasks)):
        return None
    return Customers(LanguageModel("customer", config, folder, ranks), names)


def judge_of(
    config: Config,
    folder: Path,
    domains: Mapping[str, Domain],
    ranks: Ranks,
    rewards: Any = None,
) -> LanguageModel | None:
    """Return the judge of a run if anybody asks one, or None.

    Those who ask are environments with `has_judge`, with `await self.judge(messages, seed=...)`,
    and the reward functions `rewards`, with their argument `judge`.
    """
    asks = any(getattr(domain.environment, "has_judge", False) for domain in domains.values())
    asks = asks or (rewards is not None and rewards.asks_judge)
    if not asks or config.data.judge_url is None:
        return None
    return LanguageModel("judge", config, folder, ranks)


class Customers:
    """The language model's customers on one rank. `welcomes` has the domains' `welcome` by name."""

    def __init__(self, model: LanguageModel, domains: Iterable[str]) -> None:
        self.model = model
        self.welcomes = dict.fromkeys(domains, self.welcome)

    async def welcome(self, environment: Any, task: Task, key: int, request: str) -> str:
        """Give an episode its customer; return the request, with the customer's first words.

        `key` is the episode's key, from which the seed of the calls comes. `request` is the task's
        text and that of the environment's `reset`. A task without a scenario keeps the
        environment's own user.
        """
        scenario = getattr(environment, SCENARIO, None)
        if scenario is None:
            if not (text := _scenario_text(task)):
                return request
            scenario = scenario_of(text, request)
        customer = LlmCustomer(scenario, partial(self.model.ask, seed=key % 2**31))
        environment.user = customer
        words = await customer.first_words()
        if scenario.first_words:
            return request
        return str(task.prompt[-1]["content"]) + words


def end_of_run(models: Sequence[LanguageModel], ranks: Ranks) -> str:
    """Return why the run must end, or an empty text; all ranks must call this function."""
    mine = next(filter(None, (model.ended for model in models)), "")
    return next(filter(None, ranks.all_gather_objects(mine, "language models")), "")
