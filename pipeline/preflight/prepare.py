"""What a run needs before any rank computes, checked as it is made.

These are the tasks, environments, tokenizer, chat format and stages.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.chat.template import Chat
from pipeline.config.settings import Config
from pipeline.data.curriculum import Stage, make_stages
from pipeline.data.datasets import open_tasks
from pipeline.data.rows import Row
from pipeline.data.tasks import Message, Task
from pipeline.environments.domains import (
    Domain,
    environments_of,
    generated,
    load_domains,
    try_task,
)
from pipeline.environments.tools import tool_schemas
from pipeline.errors import UserError
from pipeline.files.untrusted import shown
from pipeline.models.loading import load_tokenizer
from pipeline.models.tiny import tiny_tokenizer
from pipeline.sft import check_demonstrations

NUM_TRIED = 1000  # tasks of a source that are tried in their environment before a run
NUM_LONGEST = 64  # prompts that are tokenized to find the longest


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The parts of a run that hold no weights."""

    domains: dict[str, Domain]
    train: dict[str, Sequence[Task]]
    validation: dict[str, list[Task]]  # for evaluations inside a stage
    held_out: dict[str, list[Task]]  # for the evaluations that results.json reports
    graded: dict[tuple[str, str], list[Task]]  # by domain and difficulty, where stages have one
    longest: dict[str, list[Task]]  # those to train on with the most text
    stages: list[Stage]
    tokenizer: Any
    chat: Chat

    @property
    def environments(self) -> dict[str, type[Any]]:
        """The environment class of each domain."""
        return environments_of(self.domains)

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
        return len(
            self.chat.prompt_ids(task.prompt, tool_schemas(self.domains[domain].environment))
        )


def prepare(config: Config, with_tiny_tokenizer: bool = False) -> Prepared:
    """Load and check everything but the weights.

    `with_tiny_tokenizer`: for a model whose own cannot be reached. Raises UserError for whatever is
    the user's to mend.
    """
    data = config.data
    domains = load_domains(data)
    validation_count = max(config.evaluation.eval_steps_tasks, 1)
    validation = {
        name: generated(data, domain, validation_count, "validation")
        for name, domain in domains.items()
    }
    held_out = {
        name: generated(data, domain, data.eval_tasks_per_domain, data.eval_split)
        for name, domain in domains.items()
    }
    loaded = {name: train_tasks(config, domain, held_out[name]) for name, domain in domains.items()}
    train = {domain: tasks for domain, (tasks, _) in loaded.items()}
    graded = _graded(config, domains)
    longest = {domain: longest for domain, (_, longest) in loaded.items()}
    for (domain, _), tasks in graded.items():
        longest[domain] = longest[domain] + _longest_of(tasks)
    sizes = {
        d: min([len(t), *(len(g) for (k, _), g in graded.items() if k == d)])
        for d, t in train.items()
    }
    if with_tiny_tokenizer:
        tokenizer: Any = tiny_tokenizer(domains.values())
    else:
        tokenizer = load_tokenizer(config.model, domains.values())
    chat = Chat(tokenizer, config.model.chat_template_kwargs, config.model.tool_call_format)
    check_demonstrations(config, domains, chat)
    prepared = Prepared(
        domains=domains,
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


def train_tasks(
    config: Config, domain: Domain, held_out: Sequence[Task]
) -> tuple[Sequence[Task], list[Task]]:
    """The training tasks of a domain, and those among them with the most text.

    Each row of a source is looked at once: it is validated, compared with the held-out tasks, and
    its prompt is measured. Up to NUM_TRIED tasks, evenly spread, are tried in the environment, and
    played by the domain's expert if it has one and their payload a goal.
    """
    data, count = config.data, config.data.tasks_per_domain
    source = data.tasks.get(domain.name)
    if source is None:
        made = generated(data, domain, count, "train")
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

    tasks = open_tasks(domain.name, source, data.dataset_train_split, visit)[:count]
    limit, success = config.rollout.call_timeout, config.evaluation.success_threshold
    for task in tasks[:: -(-len(tasks) // NUM_TRIED)]:
        try_task(domain, task, source, limit, success)
    return tasks, _longest(tasks, lengths)


def _by_request(tasks: Sequence[Task]) -> Mapping[str, list[tuple[list[Message], Any]]]:
    """Prompts and payloads of tasks, by the customer's request."""
    found: dict[str, list[tuple[list[Message], Any]]] = {}
    for task in tasks:
        content = (list(task.prompt), json.loads(task.payload))
        found.setdefault(task.prompt[-1]["content"], []).append(content)
    return found


def _num_characters(prompt: Sequence[Message]) -> int:
    return sum(len(message["content"]) for message in prompt)


def _graded(config: Config, domains: Mapping[str, Domain]) -> dict[tuple[str, str], list[Task]]:
    """Training tasks of each difficulty that the curriculum names."""
    data, found = config.data, {}
    for name, domain in domains.items() if config.curriculum.difficulties else ():
        if name in data.tasks:
            raise UserError(
                f"difficulties: got {','.join(config.curriculum.difficulties)}, but the tasks of "
                f"{name} come from {shown(data.tasks[name])}, which has none; take one of the two "
                "out"
            )
        for difficulty in config.curriculum.difficulties:
            known = data.model_copy(update={"difficulty": difficulty})
            found[name, str(difficulty)] = generated(known, domain, data.tasks_per_domain, "train")
    return found


def _longest_of(tasks: Sequence[Task]) -> list[Task]:
    return _longest(tasks, [_num_characters(task.prompt) for task in tasks])


def _longest(tasks: Sequence[Task], lengths: Sequence[int]) -> list[Task]:
    """Tokens follow characters closely enough to look at the longest texts only."""
    order = heapq.nlargest(NUM_LONGEST, range(len(tasks)), key=lengths.__getitem__)
    return [tasks[index] for index in order]
