"""Domains: environment classes with the further contents of their modules, loaded once for a run.

A domain has the import string of its environment class, `my_pkg.bank:BankEnvironment`. Its module
may have `generate_tasks(seed, n, split, difficulty)`, an `expert` for the warm start
(`experts.py`), `WORDS` for the tiny tokenizer (texts, or a function that returns them), and
`MAX_TASKS`, the largest number of tasks of one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, cast

from pipeline.config.settings import DataSettings
from pipeline.data.tasks import Message, Task
from pipeline.environments.experts import Expert, goal_of, run_expert
from pipeline.environments.faults import EnvironmentFault
from pipeline.environments.timeouts import describe, guarded, only_faults
from pipeline.environments.tools import started, tool_schemas
from pipeline.errors import UserError
from pipeline.files.untrusted import one_line, shown

GenerateTasks = Callable[[int, int, str, str], list[Task]]  # (seed, n, split, difficulty)


@dataclass(frozen=True, kw_only=True)
class Domain:
    """One domain of a run; missing parts of its module are None or empty."""

    name: str
    environment: type[Any]
    generate_tasks: GenerateTasks | None = None
    expert: Expert | None = None
    words: Callable[[], Iterable[str]] = tuple  # one token each in the tiny tokenizer
    max_tasks: int | None = None  # of one call of generate_tasks

    def demonstrate(
        self, task: Task, seconds: float, rule_share: float = 1.0, seed: int = 0
    ) -> tuple[list[Message], float]:
        """The expert's conversation on a task and its reward, all within one deadline.

        Raises EnvironmentFault.
        """
        expert = self.expert
        assert expert is not None, f"{self.name} has no expert"

        def play() -> tuple[list[Message], float]:
            return run_expert(self.environment(), expert, task, rule_share, seed)

        return cast(tuple[list[Message], float], guarded("expert", seconds, play))

    def can_demonstrate(self, task: Task) -> bool:
        """Whether there is an expert, and a goal in the task."""
        return self.expert is not None and goal_of(task) is not None


def load_domains(data: DataSettings) -> dict[str, Domain]:
    """The domains of a run, by name and in order; UserError if one cannot be used."""
    return {name: _load(name, data.import_strings[name]) for name in data.domains}


def _load(name: str, target: str) -> Domain:
    where = f"environments: {name}: got {target!r}"
    module_name, _, attribute = target.partition(":")
    try:
        module = import_module(module_name)
        environment = getattr(module, attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"{where} ({one_line(str(error))}); give an importable module:Class"
        ) from None
    except BaseException as error:
        why = describe(only_faults(error))
        raise UserError(f"{where}, which fails on import ({why}); mend it") from None
    _check_environment(where, environment)
    functions = {name: getattr(module, name, None) for name in ("generate_tasks", "expert")}
    for key, value in functions.items():
        if value is not None and not callable(value):
            raise UserError(f"{where}, whose module has {key} {shown(value)}; make it a function")
    max_tasks = getattr(module, "MAX_TASKS", None)
    if max_tasks is not None and (type(max_tasks) is not int or max_tasks < 1):
        raise UserError(f"{where}, whose MAX_TASKS is {shown(max_tasks)}; give a whole number")
    return Domain(
        name=name,
        environment=environment,
        words=partial(_words, where, getattr(module, "WORDS", ())),
        max_tasks=max_tasks,
        **functions,
    )


def _check_environment(where: str, environment: Any) -> None:
    if not isinstance(environment, type):
        raise UserError(f"{where}, which is {shown(environment)}; name a class")
    for name in ("reset", "get_reward"):
        if not callable(getattr(environment, name, None)):
            raise UserError(f"{where}, which has no {name}(); add it")
    try:
        tool_schemas(environment)
    except BaseException as error:
        why = describe(only_faults(error))
        raise UserError(
            f"{where}, whose tools cannot be told to a model ({why}); give each public "
            "method type hints and a Google docstring, or a name with _"
        ) from None


def _words(where: str, words: Any) -> list[str]:
    try:
        texts = list(words() if callable(words) else words)
    except BaseException as error:
        why = describe(only_faults(error))
        raise UserError(f"{where}, whose WORDS fail ({why}); give a list of texts") from None
    if isinstance(words, str) or not all(isinstance(text, str) and text for text in texts):
        raise UserError(f"{where}, whose WORDS are {shown(words)}; give a list of texts")
    return texts


def generated(data: DataSettings, domain: Domain, count: int, split: str) -> list[Task]:
    """Tasks of a domain's own `generate_tasks(seed, n, split, difficulty)`."""
    module = data.import_strings[domain.name].partition(":")[0]
    if domain.generate_tasks is None:
        raise UserError(
            f"environments: {module} has no generate_tasks(seed, n, split, difficulty); add it"
        )
    arguments = (data.task_seed, count, split, data.difficulty)
    call = f"{module}.generate_tasks{arguments}"
    try:
        tasks = domain.generate_tasks(*arguments)
    except ValueError as error:
        raise UserError(f"tasks of {domain.name}: {one_line(str(error))}") from None
    except BaseException as error:
        why = describe(only_faults(error))
        raise UserError(f"tasks of {domain.name}: {call} fails ({why}); mend it") from None
    if not (isinstance(tasks, list) and tasks and all(isinstance(t, Task) for t in tasks)):
        raise UserError(
            f"tasks of {domain.name}: {call} gave {shown(tasks)}; return a list of Task"
        )
    if other := next((task for task in tasks if task.domain != domain.name), None):
        raise UserError(
            f"tasks of {domain.name}: {call} gave one of the domain {shown(other.domain)}; return "
            f"tasks of {domain.name}"
        )
    return tasks


def try_task(domain: Domain, task: Task, source: str, seconds: float, success: float) -> None:
    """Raise UserError if a task cannot be started, or the expert does not solve it."""
    where = f"{source}: task {shown(task.id)}"
    try:
        guarded("reset", seconds, partial(started, domain.environment, task.row()))
    except EnvironmentFault as fault:
        why = one_line(str(fault))
        raise UserError(f"{where}: its payload cannot be used ({why}); mend it") from None
    if domain.can_demonstrate(task) and (why := _unsolved(domain, task, seconds, success)):
        raise UserError(
            f"{where}: the actions that serve its goal do not lead to what it expects ({why}); "
            "mend goal, database or expected"
        )


def try_expert(domain: Domain, task: Task, seconds: float, success: float) -> None:
    """Raise UserError if the expert does not solve a task that the domain generates."""
    if why := _unsolved(domain, task, seconds, success):
        raise UserError(
            f"tasks of {domain.name}: the expert does not solve task {shown(task.id)} ({why}); "
            "mend the expert or the task"
        )


def _unsolved(domain: Domain, task: Task, seconds: float, success: float) -> str:
    """The reason why the expert's episode is no success; empty if it is one."""
    try:
        _, reward = domain.demonstrate(task, seconds)
    except EnvironmentFault as fault:
        return one_line(str(fault))
    return "" if reward >= success else f"reward {reward:g}"


def environments_of(domains: Mapping[str, Domain]) -> dict[str, type[Any]]:
    """The environment class of each domain."""
    return {name: domain.environment for name, domain in domains.items()}
