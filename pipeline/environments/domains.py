"""A domain: an environment class, and optional functions and constants in the class's module.

The setting `environments` names the class by an import string, such as
`my_pkg.bank:BankEnvironment`. The class's module has `generate_tasks(seed, n, split, difficulty)`,
and may have `MAX_TASKS`, the largest `n` that `generate_tasks` accepts. The module may have a
function `expert`, which solves tasks (see `experts.py`). The module may have `WORDS`, a list of
texts or a function that returns a list; each text becomes a token of the tiny model's tokenizer.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from pipeline.config.settings import EMBEDDED_DOMAINS, DataSettings
from pipeline.data.tasks import Message, Task
from pipeline.environments.experts import Expert, goal_of, run_expert
from pipeline.environments.faults import EnvironmentFault, describe, only_faults
from pipeline.environments.timeouts import guarded
from pipeline.environments.tools import reward_of, started, tool_schemas
from pipeline.errors import UserError
from pipeline.files.imports import user_module
from pipeline.files.untrusted import one_line, shown

GenerateTasks = Callable[[int, int, str, str], list[Task]]  # arguments: seed, n, split, difficulty


@dataclass(frozen=True, kw_only=True)
class Domain:
    """One domain of a run. A field that the domain's module does not define is None or empty."""

    name: str
    environment: type[Any]
    generate_tasks: GenerateTasks | None = None
    expert: Expert | None = None
    words: Callable[[], Iterable[str]] = tuple  # returns tokens for the tiny model's tokenizer
    max_tasks: int | None = None  # largest number `n` that generate_tasks accepts

    def demonstrate(
        self,
        task: Task,
        seconds: float,
        rule_share: float = 1.0,
        seed: int = 0,
        raised: list[str] | None = None,
    ) -> tuple[list[Message], float]:
        """Let the expert solve a task; return the conversation and the reward.

        The exceptions of tools, except ToolErrors, are appended to `raised`. Raises
        EnvironmentFault if the environment or expert fails or the episode exceeds `seconds`.
        """
        assert self.expert is not None, f"{self.name} has no expert"
        arguments = self.expert, task, rule_share, seed, raised
        found: tuple[list[Message], float] = guarded(
            "expert", seconds, lambda: run_expert(self.environment(), *arguments)
        )
        return found


def load_domains(data: DataSettings) -> dict[str, Domain]:
    """Return {name: domain} in the order of `data.domains`; raises UserError if a domain is bad."""
    return {name: _load(name, data.import_strings[name]) for name in data.domains}


def _load(name: str, target: str) -> Domain:
    where = f"environments: {name}: got {target!r}"
    module_name, _, attribute = target.partition(":")
    with _refused(f"{where}, which fails on import"):
        try:
            module = user_module(module_name)
        except ImportError as error:
            why = describe(error).partition(": ")[2]
            raise UserError(f"{where} ({why}); give an importable module:Class") from None
        if not hasattr(module, attribute):
            why = f"{module.__file__} has no attribute {attribute!r}"
            raise UserError(f"{where} ({why}); give an importable module:Class")
        environment = getattr(module, attribute)
    _check_environment(where, environment)
    max_tasks = getattr(module, "MAX_TASKS", None)
    if max_tasks is not None and (type(max_tasks) is not int or max_tasks < 1):
        raise UserError(f"{where}, whose MAX_TASKS is {shown(max_tasks)}; give a whole number")
    return Domain(
        name=name,
        environment=environment,
        generate_tasks=getattr(module, "generate_tasks", None),
        expert=getattr(module, "expert", None),
        words=partial(_words, where, getattr(module, "WORDS", ())),
        max_tasks=max_tasks,
    )


def _check_environment(where: str, environment: Any) -> None:
    if not isinstance(environment, type):
        raise UserError(f"{where}, which is {shown(environment)}; name a class")
    for name in ("reset", "get_reward"):
        if not callable(getattr(environment, name, None)):
            raise UserError(f"{where}, which has no {name}(); add it")
    remedy = "give each public method type hints and a Google docstring, or a name with _"
    with _refused(f"{where}, whose tools cannot be told to a model", remedy):
        tool_schemas(environment)


def _words(where: str, words: Any) -> list[str]:
    with _refused(f"{where}, whose WORDS fail", "give a list of texts"):
        texts = list(words() if callable(words) else words)
    if isinstance(words, str) or not all(isinstance(text, str) and text for text in texts):
        raise UserError(f"{where}, whose WORDS are {shown(words)}; give a list of texts")
    return texts


@contextmanager
def _refused(what: str, remedy: str = "mend it") -> Iterator[None]:
    """If a domain's code raises an exception, raise UserError("{what} (reason); {remedy}")."""
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        raise UserError(f"{what} ({describe(only_faults(error))}); {remedy}") from None


def generated(data: DataSettings, domain: Domain, count: int, split: str) -> list[Task]:
    """Return the tasks of `generate_tasks`; raises UserError if the result is no list of tasks."""
    module = data.import_strings[domain.name].partition(":")[0]
    if domain.generate_tasks is None:
        raise UserError(f"environments: {module} has no generate_tasks(...); add it")
    arguments = (data.task_seed, count, split, data.difficulty)
    where = f"tasks of {domain.name}"
    call = f"{where}: {module}.generate_tasks{arguments}"
    with _refused(f"{call} fails"):
        try:
            tasks = domain.generate_tasks(*arguments)
        except ValueError as error:  # for example because fewer than `count` tasks exist
            why = str(error) if domain.name in EMBEDDED_DOMAINS else describe(error)
            raise UserError(f"{where}: {one_line(why.removeprefix('ValueError: '))}") from None
    if not (isinstance(tasks, list) and tasks and all(isinstance(t, Task) for t in tasks)):
        raise UserError(f"{call} gave {shown(tasks)}; return a list of Task")
    if other := next((task.domain for task in tasks if task.domain != domain.name), None):
        raise UserError(f"{call} gave one of the domain {shown(other)}; return {where}")
    return tasks


def try_task(
    domain: Domain, task: Task, source: str, seconds: float, success: float | None = None
) -> None:
    """Raise UserError if `reset` fails on a task, or if `get_reward` fails right after `reset`.

    With a `success`, the domain's expert must also reach this reward if the task has a goal.
    """
    is_tried = success is not None and domain.expert is not None and goal_of(task) is not None
    try:
        start = partial(started, domain.environment, task.row())
        environment = guarded("reset", seconds, start).environment
        if why := _unsolved(domain, task, seconds, success or 0.0) if is_tried else "":
            raise UserError(
                f"{source}: task {shown(task.id)}: the actions that serve its goal do not lead to "
                f"what it expects ({why}); mend goal, database or expected"
            )
        guarded("get_reward", seconds, partial(reward_of, environment))
    except EnvironmentFault as fault:
        failed = f"{fault.call} failed on task {shown(task.id)}: {one_line(str(fault))}"
        raise UserError(f"{source}: {failed}; mend the environment or the task") from None


def try_expert(domain: Domain, task: Task, seconds: float, success: float) -> None:
    """Raise UserError if the domain's expert does not solve a task from `generate_tasks`."""
    if why := _unsolved(domain, task, seconds, success):
        raise UserError(
            f"tasks of {domain.name}: the expert does not solve task {shown(task.id)} ({why}); "
            "mend the expert or the task"
        )


def _unsolved(domain: Domain, task: Task, seconds: float, success: float) -> str:
    raised: list[str] = []
    try:
        _, reward = domain.demonstrate(task, seconds, raised=raised)
    except EnvironmentFault as fault:
        return one_line("; ".join([*raised[:1], str(fault)]))
    return "" if reward >= success else one_line("; ".join([f"reward {reward:g}", *raised[:1]]))


def environments_of(domains: Mapping[str, Domain]) -> dict[str, type[Any]]:
    return {name: domain.environment for name, domain in domains.items()}
