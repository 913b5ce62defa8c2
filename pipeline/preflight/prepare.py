"""Preparation of a run without its model: tasks, environments, tokenizer, chat format, stages."""

import heapq
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from pipeline.chat.template import Chat
from pipeline.config.settings import Config, ModelSettings
from pipeline.data.curriculum import Stage, make_stages
from pipeline.data.datasets import open_tasks
from pipeline.data.rows import TaskRow
from pipeline.data.tasks import Message, Task
from pipeline.environments.domains import Domain, generated, load_domains, try_task
from pipeline.environments.tools import tool_schemas
from pipeline.errors import UserError
from pipeline.files.untrusted import shown
from pipeline.models.loading import load_tokenizer
from pipeline.sft import check_demonstrations

NUM_TRIED = 1000  # maximum number of a source's tasks that are tried in the environment
NUM_TRIED_GENERATED = 8  # maximum number of generated tasks of a domain and split that are tried
NUM_LONGEST = 64  # number of a domain's prompts that are tokenized to find the longest prompt


@dataclass(frozen=True)
class Prepared:
    domains: dict[str, Domain]
    train: dict[str, Sequence[Task]]
    validation: dict[str, list[Task]]  # tasks for validations within a stage
    held_out: dict[str, list[Task]]  # tasks for the evaluations in results.json
    graded: dict[tuple[str, str], list[Task]]  # training tasks by domain and difficulty
    longest: dict[str, list[Task]]  # each domain's training tasks with the most text
    stages: list[Stage]
    tokenizer: Any
    chat: Chat

    @property
    def environments(self) -> dict[str, type[Any]]:
        return {name: domain.environment for name, domain in self.domains.items()}

    def sources(self, stage: Stage) -> dict[str, Sequence[Task]]:
        return {d: self.graded.get((d, stage.difficulty), self.train[d]) for d in stage.groups}

    def prompt_ids(self, domain: str, task: Task) -> list[int]:
        return self.chat.prompt_ids(task.prompt, tool_schemas(self.domains[domain].environment))

    def longest_prompts(self) -> dict[str, int]:
        return {d: max(len(self.prompt_ids(d, t)) for t in ts) for d, ts in self.longest.items()}


def prepare(config: Config, with_tiny_tokenizer: bool = False) -> Prepared:
    """Load and check the parts of a run, without the model. Raises UserError.

    With `with_tiny_tokenizer`, the tiny model's tokenizer replaces the recipe's tokenizer.
    """
    data, limits, domains = config.data, config.rollout, load_domains(config.data)

    def held_back(count: int, split: str) -> dict[str, list[Task]]:
        return {name: generated(data, domain, count, split) for name, domain in domains.items()}

    validation = held_back(max(config.evaluation.eval_steps_tasks, 1), "validation")
    held_out = held_back(data.eval_tasks_per_domain, data.eval_split)
    train, longest = dict[str, Sequence[Task]](), dict[str, list[Task]]()
    for name, domain in domains.items():
        train[name], longest[name] = train_tasks(config, domain, held_out[name])
        made = [] if name in data.tasks else [train[name]]
        for source in (*made, validation[name], held_out[name]):
            _try_some(config, domain, source, NUM_TRIED_GENERATED)
    graded, sizes = _graded(config, domains), {name: len(tasks) for name, tasks in train.items()}
    for (name, _), tasks in graded.items():
        longest[name] = longest[name] + _longest(tasks)
        sizes[name] = min(sizes[name], len(tasks))
    settings = ModelSettings() if with_tiny_tokenizer else config.model
    tokenizer = load_tokenizer(settings, domains.values())
    chat = Chat(tokenizer, config.model.chat_template_kwargs, config.model.tool_call_format)
    check_demonstrations(config, domains, chat)
    task_sets, stages = (train, validation, held_out, graded, longest), make_stages(config, sizes)
    prepared = Prepared(domains, *task_sets, stages, tokenizer, chat)
    for name, tokens in prepared.longest_prompts().items():
        if tokens + limits.max_tokens_per_turn > limits.max_tokens:
            raise UserError(
                f"max_tokens: got {limits.max_tokens}, but a prompt of {name} has {tokens} "
                f"tokens and a turn may take {limits.max_tokens_per_turn}; raise max_tokens"
            )
    return prepared


def train_tasks(
    config: Config, domain: Domain, held_out: Sequence[Task]
) -> tuple[Sequence[Task], list[Task]]:
    """Return the training tasks of a domain, and a list of the training tasks with the most text.

    Each row of a task source is validated and compared with the held-out tasks. Up to NUM_TRIED
    tasks, evenly spaced in the source, are tried in the environment.
    """
    data, count = config.data, config.data.tasks_per_domain
    source = data.tasks.get(domain.name)
    if source is None:
        tasks: Sequence[Task] = generated(data, domain, count, "train")
        return tasks, _longest(tasks)
    by_request = defaultdict(list)  # held-out tasks by request, for a quick first comparison
    for task in held_out:
        by_request[task.prompt[-1]["content"]].append((list(task.prompt), json.loads(task.payload)))
    lengths: list[int] = []

    def visit(row: TaskRow) -> None:
        prompt, payload = row["prompt"], row.get("payload", {})
        alike = by_request.get(prompt[-1]["content"])
        if alike and len(lengths) < count:
            content = (prompt, json.loads(payload) if isinstance(payload, str) else payload)
            if content in alike:
                raise UserError(
                    f"{source}: task {shown(row['id'])} is also a held-out task; take it out"
                )
        lengths.append(_num_characters(prompt))

    tasks = open_tasks(domain.name, source, data.dataset_train_split, visit)[:count]
    _try_some(config, domain, tasks, NUM_TRIED, source)
    return tasks, _longest(tasks, lengths)


def _try_some(
    config: Config, domain: Domain, tasks: Sequence[Task], most: int, source: str = ""
) -> None:
    """Try up to `most` evenly spaced tasks in the environment; `source` is the file of the tasks.

    Raises UserError for the first task that fails.
    """
    success = config.evaluation.success_threshold if source else None
    for task in tasks[:: -(-len(tasks) // most)]:
        try_task(domain, task, source or domain.name, config.rollout.call_timeout, success)


def _graded(config: Config, domains: Mapping[str, Domain]) -> dict[tuple[str, str], list[Task]]:
    data, difficulties, graded = config.data, config.curriculum.difficulties, {}
    for name, difficulty in product(domains, difficulties):
        if name in data.tasks:
            raise UserError(
                f"difficulties: got {','.join(difficulties)}, but the tasks of {name} come from "
                f"{shown(data.tasks[name])}, which has none; take one of the two out"
            )
        settings = data.model_copy(update={"difficulty": difficulty})
        tasks = generated(settings, domains[name], data.tasks_per_domain, "train")
        graded[name, str(difficulty)] = tasks
    return graded


def _num_characters(prompt: Sequence[Message]) -> int:
    return sum(len(message["content"]) for message in prompt)


def _longest(tasks: Sequence[Task], lengths: Sequence[int] | None = None) -> list[Task]:
    lengths = lengths or [_num_characters(task.prompt) for task in tasks]
    order = heapq.nlargest(NUM_LONGEST, range(len(tasks)), key=lengths.__getitem__)
    return [tasks[index] for index in order]
