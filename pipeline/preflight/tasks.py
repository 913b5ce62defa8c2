"""The training, validation and held-out tasks of a domain, generated or from files."""

import heapq
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.config.settings import Config
from pipeline.data.datasets import has_split, open_tasks
from pipeline.data.rows import KEYS, TaskRow
from pipeline.data.tasks import Message, Task, columns_text
from pipeline.environments.domains import Domain, generated
from pipeline.environments.tools import raw_call, tool_methods
from pipeline.environments.trials import try_task
from pipeline.errors import UserError
from pipeline.files.untrusted import shown

NUM_TRIED = 1000  # maximum number of a source's tasks that are tried in the environment
NUM_LONGEST = 64  # number of a domain's prompts that are tokenized to find the longest prompt
NUM_TRIED_GENERATED = 8  # maximum number of tasks of a split that are tried without an expert
HELD_BACK_SHARE = 5  # at most a fifth of the rows are held out or validate


@dataclass(kw_only=True)
class TaskSets:
    """The tasks of a domain. `longest` has tasks with the most text, some with that of `reset`."""

    train: Sequence[Task]
    validation: list[Task]
    held_out: list[Task]
    longest: list[Task]
    notes: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)  # what `reset` returned for some tasks


def task_sets(config: Config, domain: Domain) -> TaskSets:
    """Return the tasks of a domain. Raises UserError for a faulty task.

    If neither `generate_tasks` nor a test split gives held-out and validation tasks, these tasks
    are the last rows of the domain's source.
    """
    data, name = config.data, domain.name
    source, eval_source = data.tasks.get(name), data.eval_tasks.get(name)
    num_held_out, num_validation = data.eval_tasks_per_domain, config.evaluation.validation_tasks
    held_out: Sequence[Task] | None = None
    validation: list[Task] | None = None
    if source is None or domain.generate_tasks is not None:
        validation = generated(data, domain, num_validation, "validation")
    split = data.dataset_test_split
    if eval_source is not None:
        held_out = _open(config, domain, eval_source, split, setting="eval_tasks")[:num_held_out]
    elif validation is not None:
        held_out = generated(data, domain, num_held_out, data.eval_split)
    elif source is not None and (split != "test" or has_split(source, split)):
        held_out = _open(config, domain, source, split, setting="eval_tasks")[:num_held_out]
    if held_out is not None and validation is not None:
        train, longest = train_tasks(config, domain, held_out)
        sets = TaskSets(train=train, validation=validation, held_out=[*held_out], longest=longest)
    else:
        sets = _last_rows_held_back(config, domain, held_out)
    where, remedy = name, ""
    if source is None and domain.generate_tasks is None:
        where = f"{name} has no generate_tasks(...) or tasks"
        remedy = "add generate_tasks, or give tasks"
    made = [*([] if source else [sets.train]), sets.validation, sets.held_out]
    for tasks in made:
        for task in tasks[:: -(-len(tasks) // NUM_TRIED_GENERATED)]:
            text = try_task(domain, task, where, config.rollout.call_timeout, remedy=remedy)
            if text:
                sets.texts.append(text)
                sets.longest.append(_with_request(task, text))
    if source is not None and name in data.own_domains and len(sets.train) == data.tasks_per_domain:
        sets.notes.append(f"{name}: trains on the first {len(sets.train)} tasks (tasks_per_domain)")
    asked = {"tasks_per_domain": sets.train, "eval_tasks_per_domain": sets.held_out}
    for setting, found in asked.items() if source is None and eval_source is None else ():
        if len(found) < (number := getattr(data, setting)):
            sets.notes.append(f"{name}: {len(found)} tasks are all there are ({setting} {number})")
    has_content = source is not None or domain.generate_tasks is not None  # beside ids
    trained = {_content(task) for task in sets.train} if has_content else set()
    if seen := sum(_content(task) in trained for task in sets.held_out):
        of = f"{seen} of {len(sets.held_out)} held-out tasks are training tasks too"
        remedy = "take out equal rows" if source else "make the splits from other values"
        sets.notes.append(f"{name}: {of}; {remedy}")
    for tool in undocumented(domain.environment):
        why = "has no docstring, so a model sees only its name"
        sets.notes.append(f"{name}: the tool {tool} {why}")
    return sets


def undocumented(environment_class: type[Any]) -> list[str]:
    """Return the names of the tools without a docstring, or without a description."""
    if raw_call(environment_class):
        functions = [schema["function"] for schema in environment_class.schemas]
        return [function["name"] for function in functions if not function.get("description")]
    return [name for name, tool in tool_methods(environment_class).items() if not tool.__doc__]


def _content(task: Task) -> tuple[str, ...]:
    return repr(task.prompt), task.payload, task.columns


def _with_request(task: Task, text: str) -> Task:
    """Return a task whose request ends with the text that `reset` returned."""
    *rest, request = task.prompt
    return replace(task, prompt=(*rest, {**request, "content": request["content"] + text}))


def _last_rows_held_back(
    config: Config, domain: Domain, held_out: Sequence[Task] | None
) -> TaskSets:
    name, source = domain.name, config.data.tasks[domain.name]
    rows, lengths = _rows(config, domain, held_out or ())
    notes, total, end = list[str](), len(rows), len(rows)
    most = max(1, total // HELD_BACK_SHARE)
    if held_out is None:
        end -= min(config.data.eval_tasks_per_domain, most)
        held_out = rows[max(end, 0) :]
        notes.append(f"{name}: the last {len(held_out)} of {total} tasks are held out")
    count = end - min(config.evaluation.validation_tasks, most)
    if count < 1:
        raise UserError(f"{source}: holds {total} tasks; give 3 or more, or give eval_tasks")
    validation = [*rows[count:end]]
    notes.append(f"{name}: tasks {count + 1} to {end} of {total} are for validations")
    train, longest = _used(config, domain, rows[:count], lengths)
    return TaskSets(
        train=train, validation=validation, held_out=[*held_out], longest=longest, notes=notes
    )


def train_tasks(
    config: Config, domain: Domain, held_out: Sequence[Task]
) -> tuple[Sequence[Task], list[Task]]:
    """Return the training tasks of a domain, and a list of the training tasks with the most text.

    Each row of a task source is validated and compared with the held-out tasks. Up to NUM_TRIED
    tasks, evenly spaced in the source, are tried in the environment.
    """
    if domain.name not in config.data.tasks:
        tasks: Sequence[Task] = generated(
            config.data, domain, config.data.tasks_per_domain, "train"
        )
        return tasks, longest_of(tasks)
    return _used(config, domain, *_rows(config, domain, held_out))


def _rows(
    config: Config, domain: Domain, held_out: Sequence[Task]
) -> tuple[Sequence[Task], list[int]]:
    """Return all tasks of a domain's source, and the number of characters of each prompt."""
    source, lengths = config.data.tasks[domain.name], list[int]()
    visit = _visitor(source, held_out, config.data.tasks_per_domain, lengths)
    return _open(config, domain, source, config.data.dataset_train_split, visit), lengths


def _used(
    config: Config, domain: Domain, rows: Sequence[Task], lengths: Sequence[int]
) -> tuple[Sequence[Task], list[Task]]:
    tasks, source = rows[: config.data.tasks_per_domain], config.data.tasks[domain.name]
    limit, success = config.rollout.call_timeout, config.evaluation.success_threshold
    for task in tasks[:: -(-len(tasks) // NUM_TRIED)]:
        try_task(domain, task, source, limit, success)
    return tasks, longest_of(tasks, lengths)


def _open(
    config: Config,
    domain: Domain,
    source: str,
    split: str,
    visit: Callable[[TaskRow], None] | None = None,
    setting: str = "tasks",
) -> Sequence[Task]:
    has_columns = domain.name in config.data.own_domains or bool(config.data.reward_funcs)
    return open_tasks(domain.name, source, split, visit, has_columns, setting)


def _visitor(
    source: str, held_out: Sequence[Task], count: int, lengths: list[int]
) -> Callable[[TaskRow], None]:
    """Return a function that refuses held-out tasks among the first `count` rows.

    The function appends the number of characters of each row's prompt to `lengths`.
    """
    by_request = defaultdict(list)  # held-out tasks by request, for a quick first comparison
    for task in held_out:
        content = list(task.prompt), json.loads(task.payload), _values(task.columns)
        by_request[task.prompt[-1]["content"]].append(content)

    def visit(row: TaskRow) -> None:
        prompt, payload = row["prompt"], row.get("payload", {})
        alike = by_request.get(prompt[-1]["content"])
        if alike and len(lengths) < count:
            payload = json.loads(payload) if isinstance(payload, str) else payload
            columns = {key: row[key] for key in row.keys() - KEYS}
            if (prompt, payload, _values(columns_text(columns))) in alike:
                raise UserError(
                    f"{source}: task {shown(row['id'])} is also a held-out task; take it out"
                )
        lengths.append(_num_characters(prompt))

    return visit


def _values(columns: str) -> dict[str, Any]:
    return {key: value for key, value in json.loads(columns).items() if value is not None}


def _num_characters(prompt: Sequence[Message]) -> int:
    return sum(len(message["content"]) for message in prompt)


def longest_of(tasks: Sequence[Task], lengths: Sequence[int] | None = None) -> list[Task]:
    """Return the tasks with the most text; `lengths` are numbers of characters, if known."""
    lengths = lengths or [_num_characters(task.prompt) for task in tasks]
    order = heapq.nlargest(NUM_LONGEST, range(len(tasks)), key=lengths.__getitem__)
    return [tasks[index] for index in order]
