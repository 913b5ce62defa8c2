"""A domain: an environment class, and optional functions and constants in the class's module.

The setting `environments` names the class by an import string, such as
`my_pkg.bank:BankEnvironment`. The class's module has `generate_tasks(seed, n, split, difficulty)`,
and may have `MAX_TASKS`, the largest `n` that `generate_tasks` accepts. The module may have a
function `expert`, which solves tasks (see `experts.py`). The module may have `WORDS`, a list of
texts or a function that returns a list; each text becomes a token of the tiny model's tokenizer.
Without `WORDS`, the words come from the domain's demonstrations (see `demonstrations.py`).

The module may also have the functions `baselines(task)`, which returns {name of a fixed policy:
list of calls (tool, arguments) and of texts of messages}, and `about()`, which returns facts for
results, as JSON values by name. `FAMILY_SHARES`, a dict or a function that returns a dict, has
shares of the training draws by task family; the other families share the rest in proportion to
their numbers of tasks.

Instead of a class, the setting may name a function that returns environments or a whole
`Domain`, or a loop, which plays the episodes itself (`Play`). A function that is not async is a
loop if its first parameters are called policy and task.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

from pydantic import ValidationError, validate_call

from pipeline.common.console import user_module
from pipeline.common.errors import UserError, nearest
from pipeline.common.untrusted import is_plain, one_line, shown
from pipeline.config.domain_names import (
    LIBRARIES,
    domains_of_user,
    known_domains,
    library_of,
    package_of,
)
from pipeline.config.rules import IMPORT_STRING
from pipeline.config.settings import Config, EnvironmentFactory
from pipeline.data.curriculum import TINY
from pipeline.data.rows import row_problem
from pipeline.data.tasks import Message, Task
from pipeline.environments.agent_process import AgentProcess, agent_process
from pipeline.environments.calls import guarded, is_async
from pipeline.environments.discovery import (
    MAX_ITEMS,
    raw_call,
    taken,
    taken_pairs,
    tool_problem,
    tool_schemas,
)
from pipeline.environments.experts import Expert, run_expert
from pipeline.environments.faults import describe, only_faults
from pipeline.environments.single_turn import SingleTurnEnvironment
from pipeline.environments.tools import RandomState, writable

GenerateTasks = Callable[[int, int, str, str], list[Task]]  # arguments: seed, n, split, difficulty
# Plays an episode, async or not; arguments: the policy (`rollout/own_loop.py`) and the task.
# Returns the reward, also as {part: number}, or what others score: a text or None.
Play = Callable[[Any, Task], Any]
Call: TypeAlias = tuple[str, dict[str, Any]]  # a tool and its arguments
# Returns calls and texts of messages, by the name of a policy.
Baselines = Callable[[Task], Mapping[str, Sequence[Call | str]]]

LOOP = "a loop of your own is `async def play(policy, task)` or `def play(policy, task)`"
LOOP += ", with these names"


@dataclass(frozen=True, kw_only=True)
class Domain:
    """One domain of a run. A field that the domain's module does not define is None or empty.

    A `loop` plays the episodes itself. If there is an environment, too, the loop gets its tools and
    its user, and its `get_reward` scores.
    """

    name: str
    environment: type[Any] = SingleTurnEnvironment
    factory: Callable[[], Any] | None = None  # makes the environments; None: the class does
    loop: Play | None = None
    generate_tasks: GenerateTasks | None = None
    expert: Expert | None = None
    words: Callable[[], Iterable[str]] = tuple  # returns tokens for the tiny model's tokenizer
    max_tasks: int | None = None  # largest number `n` that generate_tasks accepts
    baselines: Baselines | None = None
    about: Callable[[], Mapping[str, Any]] | None = None  # returns facts as JSON values
    family_shares: Mapping[str, float] = field(default_factory=dict, hash=False)
    is_process: bool = False  # whether each episode has a process of its own (`max_agents`)
    module: str = ""  # that the settings name
    quotes_rules: bool = False  # whether the expert quotes rules (`warm_start.quote_rules`)
    is_own: bool = False  # of the user, not of this package

    @property
    def own_reward(self) -> str:
        """The name of the reward of `get_reward` or a loop; empty if only functions score."""
        if self.has_get_reward:
            return self.environment.__name__
        if isinstance(self.loop, AgentProcess):
            return "agent" if self.loop.prints_reward else ""
        return "" if self.loop is None else getattr(self.loop, "__name__", "OwnLoop")

    @property
    def has_get_reward(self) -> bool:
        return callable(getattr(self.environment, "get_reward", None))

    @property
    def is_loop_alone(self) -> bool:
        """Whether a loop plays the episodes without an environment."""
        return self.loop is not None and self.environment is SingleTurnEnvironment

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The JSON schemas of the environment's tools."""
        return tool_schemas(self.environment)

    @property
    def is_single_turn(self) -> bool:
        """Whether the model's first message ends an episode, and reward functions alone score."""
        return self.loop is None and self.environment is SingleTurnEnvironment

    @property
    def reward_parts(self) -> dict[str, str]:
        """The meaning of each part of the reward, for reports; empty if the class gives none."""
        parts = getattr(self.environment, "reward_parts", None)
        pairs = islice(parts.items(), MAX_ITEMS) if isinstance(parts, dict) else ()
        return {writable(str(name)): writable(str(meaning)) for name, meaning in pairs}

    @property
    def asks_judge(self) -> bool:
        """Whether the environment asks the judge, with `await self.judge(messages, seed=...)`."""
        return bool(getattr(self.environment, "has_judge", False))

    def make(self) -> Any:
        """Make an environment."""
        return (self.factory or self.environment)()

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
        expert = self.expert
        with RandomState(task):
            solved: tuple[list[Message], float] = guarded(
                "expert",
                seconds,
                lambda: run_expert(
                    self.make(),
                    expert,
                    task,
                    rule_share,
                    seed,
                    raised,
                    quotes_rules=self.quotes_rules,
                ),
            )
        return solved


def load_domains(config: Config) -> dict[str, Domain]:
    """Return {name: domain} in the order of `data.domains`; raises UserError if a domain is bad."""
    known = known_domains(config)
    own = domains_of_user(config.data)
    return {
        name: _with_agent(
            replace(
                _load(name, known[name], config),
                module=known[name].factory.partition(":")[0],
                is_own=name in own,
                quotes_rules=config.warm_start.quote_rules,
            ),
            config,
        )
        for name in config.data.domains
    }


def _with_agent(domain: Domain, config: Config) -> Domain:
    """Return a domain whose episodes are played by what `agents` names. Raises UserError."""
    if (target := config.data.agents.get(domain.name)) is None:
        return domain
    where = f"agents: {domain.name}: got {target!r}"
    if domain.loop is not None:
        raise UserError(f"{where}, but its environment is a loop itself; take one of the two out")
    if not IMPORT_STRING.fullmatch(target):
        prints_reward = not config.data.reward_funcs and not domain.has_get_reward
        return replace(domain, loop=agent_process(where, target, prints_reward))
    _, loop = imported(where, target)
    if not is_loop(loop):
        raise UserError(f"{where}, which is {shown(loop)}; {LOOP}")
    with refused(f"{where}, which cannot be called with (policy, task)", LOOP):
        inspect.signature(loop).bind(None, None)
    return replace(domain, loop=loop)


def imported(where: str, target: str) -> tuple[Any, Any]:
    """Import `module:name`, return the module and the object. Raises UserError."""
    module_name, _, attribute = target.partition(":")
    with refused(f"{where}, which fails on import"):
        try:
            module = user_module(module_name)
        except ImportError as error:
            why = describe(error).partition(": ")[2]
            near = nearest(module_name, LIBRARIES)
            hint = f"; did you mean {near}:{attribute}?" if near else ""
            raise UserError(f"{where} ({why}); give an importable module:name{hint}") from None
        if not hasattr(module, attribute):
            why = f"{module.__file__} has no attribute {attribute!r}"
            raise UserError(f"{where} ({why}); give an importable module:name")
        return module, getattr(module, attribute)


def _load(name: str, setting: EnvironmentFactory, config: Config) -> Domain:
    needs_reward = not config.data.reward_funcs and name not in config.data.agents
    source = "tools" if name in config.data.tools else "environments"
    where = f"{source}: {name}: got {setting.factory!r}"
    if library := library_of(setting.factory):
        domain = _of_library(where, *library, setting.arguments)
        _check_environment(where, domain, needs_reward)
        return _checked(where, _renamed(domain, name))
    package = package_of(name, setting.factory)
    origin = f" of the installed package {package}" if package else ""
    where = f"environments: {name}{origin}: got {setting.factory!r}"
    module, factory = imported(where, setting.factory)
    call = partial(factory, **setting.arguments) if setting.arguments else factory
    if is_loop(factory):
        with refused(f"{where}, which cannot be called with (policy, task)", LOOP):
            inspect.signature(factory).bind(None, None, **setting.arguments)
        domain = Domain(name=name, loop=call)
    elif isinstance(factory, type):
        domain = Domain(name=name, environment=factory, factory=call)
    elif callable(factory):
        with refused(f"{where}, which fails", f"mend it; {LOOP}"):
            first = call()
        if isinstance(first, Domain):
            _check_environment(where, first, needs_reward)
            domain = replace(_renamed(first, name), words=partial(_words, where, first.words))
            return _checked(where, domain)
        domain = Domain(name=name, environment=type(first), factory=call)
    else:
        raise UserError(f"{where}, which is {shown(factory)}; name a class or a function")
    _check_environment(where, domain, needs_reward)
    return _checked(where, _with_module(where, domain, module))


def _of_library(where: str, target: str, named: str, arguments: Mapping[str, Any]) -> Domain:
    """Return the domain that a library makes of a name and arguments. Raises UserError."""
    _, make = imported(where, target)
    if not named:
        raise UserError(f"{where}; name an environment after the colon")
    try:
        with refused("it fails", "mend its name or its arguments"):
            try:
                domain: Domain = validate_call(make)(named, **arguments)
            except ValidationError as error:
                wrong = error.errors()[0]
                takes = ", ".join([*inspect.signature(make).parameters][1:]) or "none"
                why = f"{wrong['msg']}, got {shown(wrong['input'])}; it takes {takes}"
                raise UserError(f"argument {wrong['loc'][0]}: {why}") from None
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return domain


def is_loop(factory: Any) -> bool:
    """Return whether a callable is a loop, and not what makes environments."""
    call = factory if inspect.isfunction(factory) else getattr(factory, "__call__", None)  # noqa: B004
    makes_more = inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call)
    if isinstance(factory, type) or makes_more or not callable(factory):
        return False
    with suppress(TypeError, ValueError):  # of code in C
        names = [*inspect.signature(factory).parameters]
        return names[:2] == ["policy", "task"] or is_async(factory)
    return False


def _with_module(where: str, domain: Domain, module: Any) -> Domain:
    """Return a domain with what its module defines."""
    max_tasks = getattr(module, "MAX_TASKS", None)
    if max_tasks is not None and (type(max_tasks) is not int or max_tasks < 1):
        raise UserError(f"{where}, whose MAX_TASKS is {shown(max_tasks)}; give a whole number")
    shares = getattr(module, "FAMILY_SHARES", {})
    with refused(f"{where}, whose FAMILY_SHARES fail", "give {family: share}"):
        shares = shares() if callable(shares) else shares
    return replace(
        domain,
        generate_tasks=getattr(module, "generate_tasks", None),
        expert=getattr(module, "expert", None),
        words=partial(_words, where, getattr(module, "WORDS", ())),
        max_tasks=max_tasks,
        baselines=getattr(module, "baselines", None),
        about=getattr(module, "about", None),
        family_shares=shares,
    )


def _checked(where: str, domain: Domain) -> Domain:
    """Return a domain whose `about` raises UserError for bad facts. Raises UserError."""
    for name in ("baselines", "about"):
        if not callable(function := getattr(domain, name)) and function is not None:
            raise UserError(f"{where}, whose {name} is {shown(function)}; give a function")
    shares = domain.family_shares
    with refused(f"{where}, whose FAMILY_SHARES fail", "give {family: share}"):
        shares = taken_pairs(shares) if isinstance(shares, Mapping) else shares
    is_valid = isinstance(shares, Mapping) and all(
        isinstance(family, str) and type(share) in (int, float) and 0 <= share <= 1
        for family, share in shares.items()
    )
    if not is_valid or sum(shares.values()) > 1 + TINY:
        hint = "give {family: share} with shares from 0 to 1 and a sum of at most 1"
        raise UserError(f"{where}, whose FAMILY_SHARES are {shown(shares)}; {hint}")
    about = domain.about and partial(_facts, where, domain.about)
    return replace(domain, about=about, family_shares=dict(shares))


def _facts(where: str, about: Callable[[], Any]) -> dict[str, Any]:
    with refused(f"{where}, whose about() fails", "return JSON values by name"):
        facts = taken_pairs(about())
        if not is_plain(facts):
            raise ValueError(f"gave {shown(facts)}")
    return facts


def _renamed(domain: Domain, name: str) -> Domain:
    """Return a copy of a domain, whose tasks have the name, too."""

    def generate_tasks(*arguments: Any) -> list[Task]:
        assert domain.generate_tasks is not None
        tasks = domain.generate_tasks(*arguments)
        is_list = isinstance(tasks, list)
        return [replace(task, domain=name) for task in list.copy(tasks)] if is_list else tasks

    return replace(domain, name=name, generate_tasks=domain.generate_tasks and generate_tasks)


def _check_environment(where: str, domain: Domain, needs_reward: bool) -> None:
    environment = domain.environment
    if not callable(getattr(environment, "reset", None)):
        raise UserError(f"{where}, which has no reset(); add it")
    if needs_reward and not domain.own_reward:
        raise UserError(f"{where}, which has no get_reward(); add it, or give reward_funcs")
    remedy = "give each public method type hints and a Google docstring, or a name with _"
    remedy = "mend the schemas" if raw_call(environment) else remedy
    with refused(f"{where}, whose tools cannot be told to a model", remedy):
        if problem := tool_problem(environment) or _why_nothing_is_set(environment):
            raise UserError(f"{where}, {problem}")
        if not is_plain(tool_schemas(environment)):
            raise ValueError("a schema holds what JSON cannot, such as NaN or half a character")


def _why_nothing_is_set(environment: type[Any]) -> str:
    """Return why an episode cannot set its attributes in an environment, and the remedy; or ""."""
    attributes = ["final_message", "stop_reason", *(["messages"] if raw_call(environment) else [])]
    if getattr(getattr(environment, "__dataclass_params__", None), "frozen", False):
        return "which is a frozen dataclass, but an episode changes it; take out frozen=True"
    if environment.__dictoffset__ == 0 and issubclass(environment, tuple):
        return "which is a NamedTuple, but an episode changes it; write a class"
    missing = [name for name in attributes if not hasattr(environment, name)]
    if missing and environment.__dictoffset__ == 0:
        hint = "add them, or take the slots out"
        return f"whose __slots__ lack {', '.join(missing)}, which an episode sets; {hint}"
    for name in attributes:
        member = inspect.getattr_static(environment, name, None)
        if isinstance(member, property) and member.fset is None:
            hint = "give it a setter, or another name"
            return f"whose {name} is a property, but an episode sets it; {hint}"
    return ""


def _words(where: str, words: Any) -> list[str]:
    with refused(f"{where}, whose WORDS fail", "give a list of texts"):
        texts = taken(words() if callable(words) else words)
    if isinstance(words, str) or not all(isinstance(text, str) and text for text in texts):
        raise UserError(f"{where}, whose WORDS are {shown(words)}; give a list of texts")
    if bad := next((text for text in texts if not is_plain(text)), None):
        raise UserError(
            f"{where}, whose WORDS have {shown(bad)}, half of a surrogate pair; mend it"
        )
    return texts


@contextmanager
def refused(what: str, remedy: str = "mend it") -> Iterator[None]:
    """If a domain's code raises an exception, raise UserError("{what} (reason); {remedy}")."""
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        raise UserError(f"{what} ({describe(only_faults(error))}); {remedy}") from None


def generated(
    config: Config, domain: Domain, count: int, split: str, difficulty: str | None = None
) -> list[Task]:
    """Return the tasks of `generate_tasks`; raises UserError if the result is no list of tasks.

    `difficulty` takes the place of the setting's.
    """
    data = config.data
    if domain.generate_tasks is None and domain.is_loop_alone:
        hint = f"give --tasks '{{{domain.name}: FILE}}', or generate_tasks beside the loop"
        raise UserError(f"tasks of {domain.name}: none for its loop in {domain.module}; {hint}")
    if domain.generate_tasks is None:
        return _self_sampled(domain.name, data.task_seed, count, split)
    level = difficulty or data.difficulty
    arguments = (data.task_seed, count, split, level)
    make = partial(domain.generate_tasks, data.task_seed, count, split, level)
    where = f"tasks of {domain.name}"
    call = f"{where}: {domain.module}.generate_tasks{arguments}"
    with refused(f"{call} fails"):
        try:
            tasks = make()
        except ValueError as error:  # for example because fewer than `count` tasks exist
            why = describe(error) if domain.is_own else str(error)
            raise UserError(f"{where}: {one_line(why.removeprefix('ValueError: '))}") from None
    copies = list.copy(tasks) if isinstance(tasks, list) else []  # a subclass may never end
    if not (copies and all(isinstance(task, Task) for task in copies)):
        raise UserError(f"{call} gave {shown(tasks)}; return a list of Task")
    if other := next((task.domain for task in copies if task.domain != domain.name), None):
        raise UserError(f"{call} gave one of the domain {shown(other)}; return {where}")
    if split == "validation" and domain.is_own:
        with refused(f"{call} fails"):
            again = make()
        if not isinstance(again, list) or list.copy(again) != copies:
            why = "gives other tasks when it is called again, so no run could be resumed"
            raise UserError(f"{call} {why}; draw from its arguments alone")
    for task in copies if domain.is_own else ():
        with refused(f"{call} gave the task {shown(task.id)}"):
            row = {**vars(task), "prompt": list(task.prompt)}
            if problem := row_problem(row, domain.name, has_columns=True):
                raise ValueError(problem)
            if not is_plain(row):
                raise ValueError("it holds half of a surrogate pair")
    return copies


def _self_sampled(name: str, task_seed: int, count: int, split: str) -> list[Task]:
    """Return tasks whose requests come from the environment's `reset`."""
    prompt = ({"role": "user", "content": ""},)
    ids = (f"{split}-{task_seed}-{index}" for index in range(count))
    return [Task(domain=name, id=task_id, prompt=prompt, payload="{}") for task_id in ids]
