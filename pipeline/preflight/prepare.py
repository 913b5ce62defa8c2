"""What a run needs before any rank computes, checked as it is made.

These are the tasks, environments, tokenizer, chat format and stages.
"""

from __future__ import annotations

import heapq
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from pipeline.chat.template import Chat
from pipeline.config.settings import EMBEDDED_DOMAINS, Config
from pipeline.data.curriculum import Stage, make_stages
from pipeline.data.datasets import refuse_files_elsewhere, refuse_sources_elsewhere
from pipeline.data.rows import DatasetRows, Row
from pipeline.data.tasks import Message, Task, Tasks, Visit, load_tasks, tasks_of
from pipeline.embedded.scripted import play_expert
from pipeline.environments import environment_classes
from pipeline.environments.deadline import alarms, describe, only_faults
from pipeline.environments.tools import EnvironmentFault, guarded, started, tool_schemas
from pipeline.errors import UserError
from pipeline.files.hub import hub_reachable
from pipeline.files.untrusted import one_line, shown
from pipeline.models.loading import load_tokenizer
from pipeline.sft import check_demonstrations, try_demonstrations

NUM_TRIED = 1000  # tasks of a source that are tried in their environment before a run
NUM_LONGEST = 64  # prompts that are tokenized to find the longest


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The parts of a run that hold no weights."""

    environments: dict[str, type[Any]]
    train: dict[str, Sequence[Task]]
    validation: dict[str, list[Task]]  # for evaluations inside a stage
    held_out: dict[str, list[Task]]  # for the evaluations that results.json reports
    graded: dict[tuple[str, str], list[Task]]  # by domain and difficulty, where stages have one
    longest: dict[str, list[Task]]  # those to train on with the most text
    stages: list[Stage]
    tokenizer: Any
    chat: Chat

    def sources(self, stage: Stage) -> dict[str, Sequence[Task]]:
        """The training tasks of a stage's domains."""
        return {d: self.graded.get((d, stage.difficulty), self.train[d]) for d in stage.groups}

    def longest_prompts(self) -> dict[str, int]:
        """Tokens of the longest prompt of each domain."""
        return {
            domain: max(self.prompt_tokens(domain, task) for task in tasks)
            for domain, tasks in self.longest.items()
        }

    def prompt_tokens(self, domain: str, task: Task) -> int:
        return len(self.chat.prompt_ids(task.prompt, tool_schemas(self.environments[domain])))


def prepare(config: Config, tokenizer: Any = None) -> Prepared:
    """Load and check everything but the weights.

    Raises UserError for whatever is the user's to mend.
    """
    data = config.data
    environments = {d: environment_of(d, data.environments) for d in data.domains}
    for domain in EMBEDDED_DOMAINS:
        if getattr(data, f"{domain}_tasks") is not None and domain not in data.domains:
            raise UserError(
                f"{domain}_tasks: given, but {domain} is not among the domains; add it or drop "
                "the file"
            )
    check_demonstrations(config)
    validation_count = max(config.evaluation.eval_steps_tasks, 1)
    validation = {d: generated(config, d, validation_count, "validation") for d in data.domains}
    held_out = {
        d: generated(config, d, data.eval_tasks_per_domain, data.eval_split) for d in data.domains
    }
    loaded = {d: train_tasks(config, d, environments[d], held_out[d]) for d in data.domains}
    train = {domain: tasks for domain, (tasks, _) in loaded.items()}
    graded = _graded(config)
    longest = {domain: longest for domain, (_, longest) in loaded.items()}
    for (domain, _), tasks in graded.items():
        longest[domain] = longest[domain] + _longest_of(tasks)
    sizes = {
        d: min([len(t), *(len(g) for (k, _), g in graded.items() if k == d)])
        for d, t in train.items()
    }
    tokenizer = tokenizer or load_tokenizer(config.model, data.domains)
    chat = Chat(tokenizer, config.model.chat_template_kwargs, config.model.tool_call_format)
    try_demonstrations(config, chat)
    prepared = Prepared(
        environments=environments,
        train=train,
        validation=validation,
        held_out=held_out,
        graded=graded,
        longest=longest,
        stages=make_stages(config, sizes),
        tokenizer=tokenizer,
        chat=chat,
    )
    limits = config.rollout
    for domain, tasks in prepared.longest.items():
        for task in tasks:  # the first that is too long ends it: others may be as long
            tokens = prepared.prompt_tokens(domain, task)
            if tokens + limits.max_tokens_per_turn > limits.max_tokens:
                raise UserError(
                    f"max_tokens: got {limits.max_tokens}, but a prompt of {domain} has {tokens} "
                    f"tokens and a turn may take {limits.max_tokens_per_turn}; raise max_tokens"
                )
    return prepared


def environment_of(domain: str, own: dict[str, str]) -> type[Any]:
    """The environment class of a domain; UserError where it cannot be imported, or is none."""
    where = f"environments: {domain}: got {own.get(domain, '')!r}"
    try:
        found = environment_classes([domain], own)[domain]
    except UserError:
        raise
    except BaseException as error:  # whatever a module does when it is imported
        why = describe(only_faults(error))
        raise UserError(f"{where}, which fails on import ({why}); mend it") from None
    if not isinstance(found, type):
        raise UserError(f"{where}, which is {shown(found)}; name a class")
    for name in ("reset", "get_reward"):
        if not callable(getattr(found, name, None)):
            raise UserError(f"{where}, which has no {name}(); add it")
    try:
        tool_schemas(found)
    except BaseException as error:
        why = describe(only_faults(error))
        raise UserError(
            f"{where}, whose tools cannot be told to a model ({why}); give each public "
            "method type hints and a Google docstring, or a name with _"
        ) from None
    return found


def train_tasks(
    config: Config, domain: str, environment: type[Any], held_out: Sequence[Task]
) -> tuple[Sequence[Task], list[Task]]:
    """The training tasks of a domain, and those among them with the most text.

    Each row of a source is looked at once: it is validated, compared with the held-out tasks, and
    its prompt is measured. Up to NUM_TRIED tasks, evenly spread, are tried in the environment, and
    where their payload has the goal of an embedded domain's expert, they are played by it.
    """
    source, count = getattr(config.data, f"{domain}_tasks", None), config.data.tasks_per_domain
    if source is None:
        made = generated(config, domain, count, "train")
        return made, _longest_of(made)
    known = _by_request(held_out)
    lengths: list[int] = []

    def visit(row: Row) -> None:
        prompt, payload = row["prompt"], row.get("payload", {})
        alike = known.get(prompt[-1]["content"])
        if alike and len(lengths) < count:
            content = (prompt, json.loads(payload) if isinstance(payload, str) else payload)
            if content in alike:
                raise UserError(
                    f"{source}: task {shown(row['id'])} is also a held-out task; take it out"
                )
        lengths.append(_num_characters(prompt))

    tasks = _open(config, domain, visit)[:count]
    with alarms():
        for task in tasks[:: -(-len(tasks) // NUM_TRIED)]:
            _try(config, environment, task, source)
    return tasks, _longest(tasks, lengths)


def _try(config: Config, environment: type[Any], task: Task, source: str) -> None:
    """UserError where a task cannot be started, or its own expert cannot solve it."""
    where, seconds = f"{source}: task {shown(task.id)}", config.rollout.call_timeout
    try:
        guarded("reset", seconds, partial(started, environment, task.row()))
    except EnvironmentFault as fault:
        reason = one_line(str(fault))
        raise UserError(f"{where}: its payload cannot be used ({reason}); mend it") from None
    if task.domain not in EMBEDDED_DOMAINS or not json.loads(task.payload).get("goal"):
        return
    expert = import_module(f"pipeline.embedded.{task.domain}").expert
    try:
        _, reward = guarded("expert", seconds, lambda: play_expert(environment(), expert, task))
        result = f"reward {reward:g}"
    except EnvironmentFault as fault:
        reward, result = 0.0, one_line(str(fault))
    if reward != 1:
        raise UserError(
            f"{where}: the actions that serve its goal do not lead to what it expects ({result}); "
            "mend goal, database or expected"
        )


def _by_request(tasks: Sequence[Task]) -> Mapping[str, list[tuple[list[Message], Any]]]:
    """Prompts and payloads of tasks, by the customer's request."""
    found: dict[str, list[tuple[list[Message], Any]]] = {}
    for task in tasks:
        content = (list(task.prompt), json.loads(task.payload))
        found.setdefault(task.prompt[-1]["content"], []).append(content)
    return found


def _num_characters(prompt: Sequence[Message]) -> int:
    return sum(len(message["content"]) for message in prompt)


def _graded(config: Config) -> dict[tuple[str, str], list[Task]]:
    """Training tasks of each difficulty that the curriculum names."""
    data, found = config.data, {}
    for domain in data.domains if config.curriculum.difficulties else ():
        if getattr(data, f"{domain}_tasks", None) is not None:
            raise UserError(
                f"difficulties: got {','.join(config.curriculum.difficulties)}, but the tasks of "
                f"{domain} come from {domain}_tasks, which has none; take one of the two out"
            )
        for difficulty in config.curriculum.difficulties:
            known = config.model_copy(
                update={"data": data.model_copy(update={"difficulty": difficulty})}
            )
            found[domain, str(difficulty)] = generated(
                known, domain, data.tasks_per_domain, "train"
            )
    return found


def _longest_of(tasks: Sequence[Task]) -> list[Task]:
    return _longest(tasks, [_num_characters(task.prompt) for task in tasks])


def _longest(tasks: Sequence[Task], lengths: Sequence[int]) -> list[Task]:
    """Tokens follow characters closely enough to look at the longest texts only."""
    order = heapq.nlargest(NUM_LONGEST, range(len(tasks)), key=lengths.__getitem__)
    return [tasks[index] for index in order]


def _open(config: Config, domain: str, visit: Visit) -> Tasks:
    """The tasks of the file or dataset that the settings name for a domain, validated."""
    source = getattr(config.data, f"{domain}_tasks")
    path, split = Path(source), config.data.dataset_train_split
    if os.path.isfile(source):
        return load_tasks(path, domain, visit)
    is_named_file = path.suffix in (".json", ".jsonl") or os.path.lexists(source)
    if is_named_file and not os.path.isdir(source):
        raise UserError(
            f"{domain}_tasks: got {shown(source)}, which is no file; give an existing file"
        )
    return tasks_of(_dataset(f"{domain}_tasks", source, split), domain, visit)


def _dataset(setting: str, source: str, split: str) -> DatasetRows:
    """The rows of a folder made by `save_to_disk`, or of what `load_dataset` takes.

    A folder of one `Dataset` is taken whole; of a dataset with splits, `split`.
    """
    from datasets import config, disable_progress_bars, load_from_disk

    path = Path(source)
    disable_progress_bars()
    if not path.is_dir() and not hub_reachable():
        config.HF_HUB_OFFLINE = True  # or it would be asked for half a minute
    try:
        refuse_files_elsewhere(path)
        if (path / "state.json").is_file():
            return DatasetRows(load_from_disk(source), source)
        if (path / "dataset_dict.json").is_file():
            splits = load_from_disk(source)
            if split not in splits:
                raise ValueError(f"it has no split {split!r} but {', '.join(splits)}")
            return DatasetRows(splits[split], f"{source}, {split}")
        return DatasetRows(_load_dataset(source, split), f"{source}, {split}")
    except UserError:
        raise
    except Exception as error:  # whatever `datasets` says of what it cannot load
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(
            f"{setting}: got {shown(source)}, which is no file, nor a dataset that can be loaded "
            f"with dataset_train_split {split} ({one_line(reason).rstrip('.')}); give a file, a "
            "folder or a hub id"
        ) from None


def _load_dataset(source: str, split: str) -> Any:
    from datasets import Features, Json, config, load_dataset, load_dataset_builder

    refuse_sources_elsewhere(source, load_dataset_builder(source))
    found = load_dataset(source, split=split)
    has_structs = isinstance(found.features.get("payload"), dict)
    at_hand = Path(source).is_dir() or not config.HF_HUB_OFFLINE
    if has_structs and at_hand and found.info.builder_name == "json":
        # Payloads as they were written: a struct would have the keys of all of them.
        features = Features({**found.features, "payload": Json()})
        found = load_dataset(source, split=split, features=features)
    return found


def generated(config: Config, domain: str, count: int, split: str) -> list[Task]:
    """Tasks of a domain's own `generate_tasks(seed, n, split, difficulty)`."""
    own = config.data.environments.get(domain, "").partition(":")[0]
    module = import_module(own or f"pipeline.embedded.{domain}")
    if not hasattr(module, "generate_tasks"):
        raise UserError(
            f"environments: {module.__name__} has no generate_tasks(seed, n, split, "
            "difficulty); add it"
        )
    arguments = (config.data.task_seed, count, split, config.data.difficulty)
    try:
        tasks = module.generate_tasks(*arguments)
    except ValueError as error:
        raise UserError(f"tasks of {domain}: {one_line(str(error))}") from None
    except BaseException as error:
        only_faults(error)
        if not own:
            raise
        raise UserError(
            f"tasks of {domain}: {module.__name__}.generate_tasks{arguments} fails "
            f"({describe(error)}); mend it"
        ) from None
    if own and not (isinstance(tasks, list) and tasks and all(isinstance(t, Task) for t in tasks)):
        raise UserError(
            f"tasks of {domain}: {module.__name__}.generate_tasks{arguments} gave {shown(tasks)}; "
            "return a list of Task"
        )
    found: list[Task] = tasks
    return found
