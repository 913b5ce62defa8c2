"""The training, validation and held-out tasks of a domain, generated or from files."""

import heapq
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from pipeline.common.errors import UserError
from pipeline.common.untrusted import shown
from pipeline.config.domain_names import domains_of_user, generated_domains
from pipeline.config.settings import Config
from pipeline.data.curriculum import mixtures
from pipeline.data.datasets import has_split, open_tasks
from pipeline.data.rows import TaskRow
from pipeline.data.splits import (
    LEAST,
    Census,
    content_of_row,
    content_of_task,
    num_characters,
    same_by,
    same_task,
    seen_of,
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

IsLong = Callable[[Sequence[Message]], bool]  # gets a prompt
NUM_TRIED = 1000  # maximum number of a source's tasks that are tried in the environment
NUM_LONGEST = 64  # number of a domain's prompts that are tokenized to find the longest prompt
FEW = 100  # of fewer generated tasks, some families may have none
Graded = dict[tuple[str, str], Sequence[Task]]  # training tasks by domain and difficulty
NUM_TRIED_GENERATED = 8  # maximum number of tasks of a split that are tried without an expert


@dataclass(kw_only=True)
class TaskSets:
    """The tasks of a domain. `longest` has tasks with the most text, some with that of `reset`."""

    train: Sequence[Task]
    validation: list[Task]
    held_out: list[Task]
    longest: list[Task]
    notes: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)  # what `reset` returned for some tasks
    sources: list[Tasks] = field(default_factory=list)  # all tasks of each source

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

    If neither `generate_tasks` nor a test split gives held-out and validation tasks, these tasks
    are drawn from the domain's source. `rewards` are the reward functions, whose arguments say
    which columns make a task.
    """
    read = keys_read(domain, rewards)
    data = config.data
    name = domain.name
    source = data.tasks.get(name)
    eval_source = data.eval_tasks.get(name)
    num_held_out = data.eval_tasks_per_domain
    split = data.dataset_test_split
    held_out: Sequence[Task] | None = None
    validation: list[Task] | None = None
    notes = list[str]()
    sources = list[Tasks]()
    if source is None or domain.generate_tasks is not None:
        validation = generated(config, domain, config.evaluation.validation_tasks, "validation")
    if eval_source is None and source is not None and validation is None:
        eval_source = source if split != "test" or has_split(source, split) else None
    if eval_source is not None:
        held_out, notes = _held_out_of(config, domain, eval_source, read, is_long)
        sources.append(held_out)
    elif validation is not None:
        held_out = generated(config, domain, num_held_out, data.eval_split)
    if source is None:
        assert held_out is not None and validation is not None
        train = generated(config, domain, data.num_train_tasks, "train")
        sets = TaskSets(
            train=train,
            validation=validation,
            held_out=[*held_out],
            longest=longest_of(train),
        )
    else:
        sets = split_source(config, domain, held_out, validation, read, is_long)
    sets.notes = notes + sets.notes
    sets.sources = sources + sets.sources
    where = name
    remedy = ""
    if source is None and domain.generate_tasks is None:
        where = f"{name} has no generate_tasks(...) or tasks"
        remedy = "add generate_tasks, or give tasks"
    made = [*([] if source else [sets.train]), sets.validation, sets.held_out]
    for tasks in made:
        for task in tasks[:: -(-len(tasks) // NUM_TRIED_GENERATED) or 1]:
            if text := try_task(domain, task, where, config.rollout.call_timeout, remedy=remedy):
                sets.texts.append(text)
                sets.longest.append(_with_request(task, text))
    asked = {
        "tasks_per_domain": (sets.train, data.num_train_tasks),
        "eval_tasks_per_domain": (sets.held_out, num_held_out),
    }
    for setting, (found, number) in asked.items() if source is None and eval_source is None else ():
        if len(found) < number:
            sets.notes.append(f"{name}: {len(found)} tasks are all there are ({setting} {number})")
    if source is not None or domain.generate_tasks is not None:  # tasks are more than ids
        sets.notes += [f"{name}: {note}" for note in _seen_twice(sets, read, source is not None)]
    for tool in undocumented(domain.environment):
        sets.notes.append(
            f"{name}: the tool {tool} has no docstring, so a model sees only its name"
        )
    sets.notes += [f"{name}: {note}" for note in no_tools(domain.environment)]
    return sets


def keys_read(domain: Domain, rewards: Iterable[Callable[..., Any]]) -> set[str] | None:
    """Return the keys of a row that `reset` and reward functions may read; None: any key.

    In a task of one turn, the prompt is all that the model sees. A `reset` that reads the id may
    make other tasks of equal rows.
    """
    if is_single_turn(domain):
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
        asked.setdefault(same_task(words, task), task)
    trained = set[int]()
    requests = set[int]()
    differing = set[str]()
    twins = set[int]()
    for task in sets.train:
        trained.add(same_task(same, task))
        request = same_task(words, task)
        requests.add(request)
        if request in asked and request not in twins:
            twins.add(request)
            differing |= _differing(task, asked[request])
    remedy = "take out equal prompts" if has_source else "make the splits from other values"
    for kind, tasks in (("held-out", sets.held_out), ("validation", sets.validation)):
        if seen := sum(same_task(same, task) in trained for task in tasks):
            yield f"{seen} of {len(tasks)} {kind} tasks are training tasks too; {remedy}"
    differing &= differing if read is None else {"payload"}
    of_twins = [t for t in sets.held_out if same_task(words, t) in twins]
    new = sum(same_task(same, task) not in trained for task in of_twins)
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


def is_single_turn(domain: Domain) -> bool:
    return domain.is_single_turn


def _what_is_seen(task: Task) -> int:
    return seen_of(task.prompt, json.loads(task.columns))


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
    by_prompt = is_single_turn(domain)
    content = _what_is_seen if by_prompt else content_of_task
    known = {content(task) for task in held_out or ()}
    same = same_by(read)
    census = Census(same, by_prompt, taken={same_task(same, task) for task in held_out or ()})

    def visit(row: TaskRow) -> None:
        if known and (seen_of(row["prompt"], row) if by_prompt else content_of_row(row)) in known:
            raise UserError(
                f"{source}: task {shown(row['id'])} is also a held-out task; take it out"
            )
        census.add(row)

    rows, notes = _open(config, domain, source, data.dataset_train_split, visit, is_long=is_long)
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
    given = "" if held_out is None else "a held-out task or "
    numbers = {
        "held out": len(split.held_out),
        "for validations": len(split.validation),
        "for training": len(split.train),
        f"equal to {given}one of these and unused": split.num_copies,
        "unused (tasks_per_domain)": split.num_left,
    }
    told = [f"{number} {use}" for use, number in numbers.items() if number]
    how = "drawn by a hash of the task" + ", evenly over `family`" * census.has_families
    if census.is_by_id:
        how += "; the rows are alike, so tasks are told apart by the ids that `reset` gets"
    note = f"{domain.name}: {len(rows)} tasks: {', '.join(told)}; {how}"
    return TaskSets(
        train=train,
        validation=[*rows.at(split.validation)] if validation is None else validation,
        held_out=[*(rows.at(split.held_out) if held_out is None else held_out)],
        longest=longest_of(train, [census.lengths[number] for number in split.train]),
        notes=notes + [note] * (len(told) > 1),
        sources=[rows],
    )


def _held_out_of(
    config: Config, domain: Domain, source: str, read: set[str] | None, is_long: IsLong | None
) -> tuple[Tasks, list[str]]:
    """Return up to `eval_tasks_per_domain` different tasks of a source, and notes."""
    census = Census(same_by(read), by_prompt=is_single_turn(domain))
    split = config.data.dataset_test_split
    rows, notes = _open(
        config, domain, source, split, census.add, setting="eval_tasks", is_long=is_long
    )
    drawn = rows.at(census.drawn(config.data.eval_tasks_per_domain))
    if len(drawn) < len(rows):
        how = "drawn by a hash of the task" + ", evenly over `family`" * census.has_families
        notes.append(
            f"{domain.name}: {len(drawn)} of the {len(rows)} held-out tasks of {shown(source)} are "
            f"used (different ones, {how})"
        )
    return drawn, notes


def _open(
    config: Config,
    domain: Domain,
    source: str,
    split: str,
    visit: Callable[[TaskRow], None],
    *,
    setting: str = "tasks",
    is_long: IsLong | None = None,
) -> tuple[Tasks, list[str]]:
    """Return the tasks of a source whose prompt is not long, after a `visit` of each, and notes.

    Raises UserError for a faulty row, or if all prompts are long.
    """
    has_columns = domain.name in domains_of_user(config.data) or bool(config.data.reward_funcs)
    kept = array("Q")
    left_out = array("Q")

    def look(row: TaskRow) -> None:
        is_left_out = is_long is not None and is_long(row["prompt"])
        (left_out if is_left_out else kept).append(len(kept) + len(left_out))
        if not is_left_out:
            visit(row)

    rows = open_tasks(domain.name, source, split, look, has_columns, setting)
    if not left_out:
        return rows, []
    first = rows[left_out[0]].id
    found = (
        f"{len(left_out)} of the {len(rows)} tasks of {shown(source)} have prompts that leave no "
        f"room for a turn, the first is {shown(first)}, {rows.where(first)}"
    )
    if not kept:
        raise UserError(f"skip_long_tasks: {domain.name}: {found}; give more max_tokens")
    return rows.at(kept), [f"{domain.name}: {found}; they are left out (skip_long_tasks)"]


def longest_of(tasks: Sequence[Task], lengths: Sequence[int] | None = None) -> list[Task]:
    """Return the tasks with the most text; `lengths` are numbers of characters, if known."""
    lengths = lengths or [num_characters(task.prompt) for task in tasks]
    order = heapq.nlargest(NUM_LONGEST, range(len(tasks)), key=lengths.__getitem__)
    return [tasks[index] for index in order]


def graded_tasks(config: Config, domains: Mapping[str, Domain]) -> Graded:
    data = config.data
    difficulties = config.curriculum.difficulties
    graded = Graded()
    for name, difficulty in product(domains, difficulties):
        if name in data.tasks:
            raise UserError(
                f"difficulties: got {','.join(difficulties)}, but the tasks of {name} come from "
                f"{shown(data.tasks[name])}, which has none; take one of the two out"
            )
        graded[name, str(difficulty)] = generated(
            config, domains[name], data.num_train_tasks, "train", difficulty
        )
    return graded


def mix_families(
    config: Config, domains: Mapping[str, Domain], train: dict[str, Sequence[Task]], graded: Graded
) -> list[str]:
    """Replace tasks of domains by mixtures where shares or branches count, and return notes."""
    notes = list[str]()
    for name, domain in domains.items():
        given = config.curriculum.family_shares
        shares = given.get(name, domain.family_shares)
        is_even = config.curriculum.even_branches
        if is_even and not any(task.branch for task in train[name]):
            notes.append(f"even_branches: {name}: no task names a branch, so it has no effect")
            is_even = False
        if shares or is_even:
            found = {n: tasks for (d, n), tasks in graded.items() if d == name}
            # A recipe's shares are of many generated tasks. Others may take their place.
            are_many = config.data.num_train_tasks >= FEW and name in generated_domains(config)
            is_strict = name in given and (name in domains_of_user(config.data) or are_many)
            made, said = mixtures(name, found or {"train": train[name]}, shares, is_strict, is_even)
            notes += said
            if made:
                graded |= {(name, difficulty): made[difficulty] for difficulty in found}
                train[name] = made.get("train", train[name])
    return notes
