"""The training, validation and held-out tasks of a domain, generated or from files."""

import heapq
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.common.errors import UserError
from pipeline.common.untrusted import shown
from pipeline.config.domain_names import generated_domains
from pipeline.config.settings import Config
from pipeline.data.curriculum import Stage, TaskMixture, make_stages, mixtures, num_drawn
from pipeline.data.datasets import has_split, open_tasks
from pipeline.data.splits import (
    LEAST,
    Census,
    Split,
    num_characters,
    same_by,
)
from pipeline.data.tasks import Message, Task, Tasks
from pipeline.environments.discovery import (
    keywords_read,
    no_tools,
    raw_call,
    tool_methods,
    tool_schemas,
)
from pipeline.environments.domains import Domain, generated
from pipeline.environments.task_checks import try_task

IsLong = Callable[[Domain, Sequence[Message]], bool]  # gets a prompt
NUM_TRIED = 1000  # maximum number of a source's tasks that are tried in the environment
NUM_LONGEST = 64  # number of a domain's prompts that are tokenized to find the longest prompt
FEW = 100  # of fewer generated tasks, some families may have none
NUM_TRIED_GENERATED = 8  # maximum number of tasks of a split that are tried without an expert


@dataclass(frozen=True, kw_only=True)
class TaskSets:
    """The tasks of a domain. `longest` has tasks with the most text, some with that of `reset`."""

    train: Sequence[Task]
    validation: list[Task]  # for validations within a stage
    held_out: list[Task]  # for the evaluations in results.json
    longest: list[Task]
    graded: Mapping[str, Sequence[Task]] = field(default_factory=dict)  # to train, by difficulty
    notes: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)  # what `reset` returned for some tasks
    sources: list[Tasks] = field(default_factory=list)  # all tasks of each source

    @property
    def num_drawn(self) -> int:
        """The number of training tasks that may be drawn, of the difficulty with the fewest."""
        return min(map(num_drawn, [self.train, *self.graded.values()]))

    def where(self, task_id: str) -> str:
        """Return the file and line of a task, or "" for a generated one."""
        return next(filter(None, (tasks.where(task_id) for tasks in self.sources)), "")


def task_sets(
    config: Config,
    domain: Domain,
    rewards: Iterable[Callable[..., Any]] = (),
    is_long: IsLong | None = None,
) -> TaskSets:
    """Return the tasks of a domain, without rows whose prompt `is_long`. Raises UserError.

    `rewards` are the reward functions, whose arguments say which columns make a task. Some tasks
    are tried in the environment.
    """
    read = keys_read(domain, rewards)
    sets = _open_sets(config, domain, read, is_long)
    longest = [*sets.longest]
    texts = list[str]()
    for task, text in _tried(config, domain, sets):
        texts.append(text)
        longest.append(_with_request(task, text))
    notes = [*sets.notes, *_notes(config, domain, sets, read)]
    return replace(sets, longest=longest, texts=texts, notes=notes)


def _open_sets(
    config: Config, domain: Domain, read: set[str] | None, is_long: IsLong | None
) -> TaskSets:
    """Return the tasks of a domain from where its settings say, not yet tried.

    If neither `generate_tasks` nor a test split gives held-out and validation tasks, these tasks
    are drawn from the domain's source.
    """
    data = config.data
    source = data.tasks.get(domain.name)
    eval_source = data.eval_tasks.get(domain.name)
    split = data.dataset_test_split
    held_out: Sequence[Task] | None = None
    validation: list[Task] | None = None
    notes = list[str]()
    sources = list[Tasks]()
    if source is None or domain.generate_tasks is not None:
        validation = generated(config, domain, config.evaluation.validation_tasks, "validation")
    elif eval_source is None and (split != "test" or has_split(source, split)):
        eval_source = source
    if eval_source is not None:
        held_out, notes = _held_out_of(config, domain, eval_source, read, is_long)
        sources.append(held_out)
    elif validation is not None:
        held_out = generated(config, domain, data.eval_tasks_per_domain, data.eval_split)
    if source is not None:
        sets = split_source(config, domain, held_out, validation, read, is_long)
        return replace(sets, notes=notes + sets.notes, sources=sources + sets.sources)
    assert held_out is not None and validation is not None
    train = generated(config, domain, data.num_train_tasks, "train")
    return TaskSets(
        train=train,
        validation=validation,
        held_out=[*held_out],
        longest=longest_of(train),
        notes=notes,
        sources=sources,
    )


def _tried(config: Config, domain: Domain, sets: TaskSets) -> Iterator[tuple[Task, str]]:
    """Try some tasks; yield those to whose request `reset` adds a text, and the text."""
    source = config.data.tasks.get(domain.name)
    where = domain.name
    remedy = ""
    if source is None and domain.generate_tasks is None:
        where = f"{where} has no generate_tasks(...) or tasks"
        remedy = "add generate_tasks, or give tasks"
    for tasks in (sets.train if source is None else (), sets.validation, sets.held_out):
        for task in tasks[:: -(-len(tasks) // NUM_TRIED_GENERATED) or 1]:
            if text := try_task(domain, task, where, config.rollout.call_timeout, remedy=remedy):
                yield task, text


def _notes(config: Config, domain: Domain, sets: TaskSets, read: set[str] | None) -> Iterator[str]:
    """Yield what a user should know of a domain's tasks and tools."""
    data = config.data
    name = domain.name
    has_source = name in data.tasks
    if not has_source and name not in data.eval_tasks:
        for setting, tasks, number in (
            ("tasks_per_domain", sets.train, data.num_train_tasks),
            ("eval_tasks_per_domain", sets.held_out, data.eval_tasks_per_domain),
        ):
            if len(tasks) < number:
                yield f"{name}: {len(tasks)} tasks are all there are ({setting} {number})"
    if has_source or domain.generate_tasks is not None:  # tasks are more than ids
        yield from (f"{name}: {note}" for note in _seen_twice(sets, read, has_source))
    for tool in undocumented(domain.environment):
        yield f"{name}: the tool {tool} has no docstring, so a model sees only its name"
    yield from (f"{name}: {note}" for note in no_tools(domain.environment))


def keys_read(domain: Domain, rewards: Iterable[Callable[..., Any]]) -> set[str] | None:
    """Return the keys of a row that `reset` and reward functions may read; None: any key.

    In a task of one turn, the prompt is all that the model sees. A `reset` that reads the id may
    make other tasks of equal rows.
    """
    if domain.is_single_turn:
        return set()
    read = set[str]()
    for function in [domain.environment.reset, *rewards]:
        names = keywords_read(function)
        if names is None or "id" in names or domain.loop is not None:
            return None
        read |= names
    return read


def _seen_twice(sets: TaskSets, read: set[str] | None, has_source: bool) -> Iterator[str]:
    """Yield notes on held-out and validation tasks that are trained on, or may be."""
    same = same_by(read)
    words = same_by(() if has_source else {"payload"})  # a generator's payload makes the task
    asked = dict[int, Task]()
    for task in sets.held_out:
        asked.setdefault(words(task), task)
    trained = set[int]()
    requests = set[int]()
    differing = set[str]()
    twins = set[int]()
    for task in sets.train:
        trained.add(same(task))
        request = words(task)
        requests.add(request)
        if request in asked and request not in twins:
            twins.add(request)
            differing |= _differing(task, asked[request])
    remedy = "take out equal prompts" if has_source else "make the splits from other values"
    for kind, tasks in (("held-out", sets.held_out), ("validation", sets.validation)):
        if seen := sum(same(task) in trained for task in tasks):
            yield f"{seen} of {len(tasks)} {kind} tasks are training tasks too; {remedy}"
    differing &= differing if read is None else {"payload"}
    of_twins = [t for t in sets.held_out if words(t) in twins]
    new = sum(same(task) not in trained for task in of_twins)
    if new and differing and len(requests) >= LEAST:
        names = ", ".join(sorted(differing))
        yield (
            f"{new} of {len(sets.held_out)} held-out tasks have a request that is trained on too, "
            f"in rows that differ in {shown(names)}; take out what makes no other task, or let "
            "reset name the columns that it reads"
        )


def _differing(one: Task, other: Task) -> set[str]:
    """Return the names of the columns in which two tasks differ, and `payload` if it differs."""
    rows = [{"payload": json.loads(t.payload), **json.loads(t.columns)} for t in (one, other)]
    return {name for name in rows[0].keys() | rows[1] if rows[0].get(name) != rows[1].get(name)}


def undocumented(environment_class: type[Any]) -> list[str]:
    """Return the names of the tools without a docstring, or without a description."""
    if raw_call(environment_class):
        functions = [schema["function"] for schema in tool_schemas(environment_class)]
        return [function["name"] for function in functions if not function.get("description")]
    return [name for name, tool in tool_methods(environment_class).items() if not tool.__doc__]


def _with_request(task: Task, text: str) -> Task:
    """Return a task whose request ends with the text that `reset` returned."""
    *rest, request = task.prompt
    return replace(task, prompt=(*rest, {**request, "content": request["content"] + text}))


def split_source(
    config: Config,
    domain: Domain,
    held_out: Sequence[Task] | None,
    validation: list[Task] | None,
    read: set[str] | None,
    is_long: IsLong | None = None,
) -> TaskSets:
    """Return the task sets of a domain with a source, of which the training tasks are drawn.

    So are held-out and validation tasks that are None. Each row is validated and compared with the
    given held-out tasks by the keys `read`. Up to NUM_TRIED tasks, evenly spaced in the source, are
    tried in the environment. Raises UserError for a faulty row.
    """
    data = config.data
    source = data.tasks[domain.name]
    rows, notes = _open(config, domain, source, data.dataset_train_split, is_long=is_long)
    census = Census(rows, same_by(read), domain.is_single_turn, held_out or ())
    if (number := census.first_copy_of_held_out) is not None:
        raise UserError(
            f"{source}: task {shown(rows[number].id)} is also a held-out task; take it out"
        )
    num_held_out = data.eval_tasks_per_domain if held_out is None else 0
    # Without validations, no row is kept back for them.
    is_validated = validation is None and config.evaluation.validation_steps > 0
    num_validation = config.evaluation.validation_tasks if is_validated else 0
    split = census.split(data.tasks_per_domain, num_validation, num_held_out)
    success = config.evaluation.success_threshold
    train = rows.at(split.train or [0])
    for task in train[:: -(-len(train) // NUM_TRIED)]:
        try_task(domain, task, source, config.rollout.call_timeout, success)
    if not split.train:
        holds = f"{source}: holds {census.num_different} different tasks"
        if held_out is not None and split.num_copies:
            raise UserError(f"{holds}, and each is held out or validates; give others")
        raise UserError(f"{holds}; give 3 or more, or give eval_tasks")
    uses = _uses(split, "" if held_out is None else "a held-out task or ")
    note = f"{domain.name}: {len(rows)} tasks: {', '.join(uses)}; {census.how_drawn}"
    if census.is_by_id:
        note += "; the rows are alike, so tasks are told apart by the ids that `reset` gets"
    return TaskSets(
        train=train,
        validation=[*rows.at(split.validation)] if validation is None else validation,
        held_out=[*(rows.at(split.held_out) if held_out is None else held_out)],
        longest=longest_of(train, [census.lengths[number] for number in split.train]),
        notes=notes + [note] * (len(uses) > 1),
        sources=[rows],
    )


def _uses(split: Split, others: str) -> list[str]:
    """Return how many rows each part of a run uses, in words."""
    numbers = {
        "held out": len(split.held_out),
        "for validations": len(split.validation),
        "for training": len(split.train),
        f"equal to {others}one of these and unused": split.num_copies,
        "unused (tasks_per_domain)": split.num_left,
    }
    return [f"{number} {use}" for use, number in numbers.items() if number]


def _held_out_of(
    config: Config, domain: Domain, source: str, read: set[str] | None, is_long: IsLong | None
) -> tuple[Tasks, list[str]]:
    """Return up to `eval_tasks_per_domain` different tasks of a source, and notes."""
    split = config.data.dataset_test_split
    rows, notes = _open(config, domain, source, split, setting="eval_tasks", is_long=is_long)
    census = Census(rows, same_by(read), domain.is_single_turn)
    drawn = rows.at(census.drawn(config.data.eval_tasks_per_domain))
    if len(drawn) < len(rows):
        notes.append(
            f"{domain.name}: {len(drawn)} of the {len(rows)} held-out tasks of {shown(source)} are "
            f"used (different ones, {census.how_drawn})"
        )
    return drawn, notes


def _open(
    config: Config,
    domain: Domain,
    source: str,
    split: str,
    *,
    setting: str = "tasks",
    is_long: IsLong | None = None,
) -> tuple[Tasks, list[str]]:
    """Return the tasks of a source whose prompt is not long, and notes.

    Raises UserError for a faulty row, or if all prompts are long.
    """
    has_columns = domain.is_own or bool(config.data.reward_funcs)
    rows = open_tasks(domain.name, source, split, has_columns, setting)
    if is_long is None:
        return rows, []
    lengths = [is_long(domain, task.prompt) for task in rows]
    if True not in lengths:
        return rows, []
    number = lengths.index(True)
    first = rows[number].id
    left_out = (
        f"{sum(lengths)} of the {len(rows)} tasks of {shown(source)} have prompts that leave no "
        f"room for a turn, the first is {shown(first)}, {rows.where(first)}"
    )
    kept = rows.at([number for number, is_left_out in enumerate(lengths) if not is_left_out])
    if not kept:
        raise UserError(f"skip_long_tasks: {domain.name}: {left_out}; give more max_tokens")
    return kept, [f"{domain.name}: {left_out}; they are left out (skip_long_tasks)"]


def longest_of(tasks: Sequence[Task], lengths: Sequence[int] | None = None) -> list[Task]:
    """Return the tasks with the most text; `lengths` are numbers of characters, if known."""
    lengths = lengths or [num_characters(task.prompt) for task in tasks]
    order = heapq.nlargest(NUM_LONGEST, range(len(tasks)), key=lengths.__getitem__)
    return [tasks[index] for index in order]


def graded_and_mixed(config: Config, domain: Domain, sets: TaskSets) -> TaskSets:
    """Return `sets` with training tasks for each difficulty, and as mixtures where shares count.

    So do branches, with `even_branches`. Raises UserError for settings that do not fit the tasks.
    """
    name = domain.name
    graded = _graded_tasks(config, domain)
    longest = sets.longest + [task for tasks in graded.values() for task in longest_of(tasks)]
    sets = replace(sets, graded=graded, longest=longest)
    asked = config.curriculum.family_shares
    shares = asked.get(name, domain.family_shares)
    is_even = config.curriculum.even_branches
    notes = [*sets.notes]
    if is_even and not any(task.branch for task in sets.train):
        notes.append(f"even_branches: {name}: no task names a branch, so it has no effect")
        is_even = False
    if not shares and not is_even:
        return replace(sets, notes=notes)
    # A recipe's shares are of many generated tasks. Others may take their place.
    are_many = config.data.num_train_tasks >= FEW and name in generated_domains(config)
    is_strict = name in asked and (domain.is_own or are_many)
    by_difficulty = graded or {"train": sets.train}
    mixed, mixing_notes = mixtures(name, by_difficulty, shares, is_strict, is_even)
    return replace(
        sets,
        train=mixed.get("train", sets.train),
        graded={difficulty: mixed.get(difficulty, graded[difficulty]) for difficulty in graded},
        notes=notes + mixing_notes,
    )


def _graded_tasks(config: Config, domain: Domain) -> dict[str, Sequence[Task]]:
    """Return a domain's training tasks for each of `difficulties`."""
    data = config.data
    difficulties = config.curriculum.difficulties
    if difficulties and domain.name in data.tasks:
        raise UserError(
            f"difficulties: got {','.join(difficulties)}, but the tasks of {domain.name} come from "
            f"{shown(data.tasks[domain.name])}, which has none; take one of the two out"
        )
    return {
        str(d): generated(config, domain, data.num_train_tasks, "train", d) for d in difficulties
    }


def tasks_of_run(
    config: Config,
    domains: Mapping[str, Domain],
    rewards: Sequence[Callable[..., Any]],
    is_long: IsLong | None,
) -> dict[str, TaskSets]:
    """Return the tasks of each domain of a run, as its curriculum draws them."""
    tasks = {name: task_sets(config, domain, rewards, is_long) for name, domain in domains.items()}
    return {name: graded_and_mixed(config, domains[name], sets) for name, sets in tasks.items()}


def training_tasks(tasks: Mapping[str, TaskSets], stage: Stage) -> dict[str, Sequence[Task]]:
    """Return the training tasks of each domain of a stage."""
    sets = {name: tasks[name] for name in stage.groups}
    return {name: of.graded.get(stage.difficulty, of.train) for name, of in sets.items()}


def stages_of(config: Config, tasks: Mapping[str, TaskSets]) -> list[Stage]:
    """Return the stages of a run, with the shares of families that they draw."""
    stages = make_stages(config, {name: sets.num_drawn for name, sets in tasks.items()})
    return [replace(stage, family_shares=_family_shares(tasks, stage)) for stage in stages]


def _family_shares(tasks: Mapping[str, TaskSets], stage: Stage) -> dict[str, dict[str, float]]:
    sources = training_tasks(tasks, stage).items()
    return {name: source.shares for name, source in sources if isinstance(source, TaskMixture)}
