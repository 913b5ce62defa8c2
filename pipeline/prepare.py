"""What a run needs before any rank computes, checked as it is made.

These are the tasks, environments, tokenizer, chat format and stages.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from pipeline.chat import Chat
from pipeline.config import EMBEDDED_DOMAINS, Config, UserError
from pipeline.curriculum import Stage, make_stages
from pipeline.environments import environment_classes
from pipeline.environments.base import settled, tool_schemas
from pipeline.policy import load_tokenizer
from pipeline.tasks import Task, load_tasks
from pipeline.warm_start import check_demonstrations


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The parts of a run that hold no weights."""

    environments: dict[str, type[Any]]
    train: dict[str, list[Task]]
    validation: dict[str, list[Task]]  # for evaluations inside a stage
    held_out: dict[str, list[Task]]  # for the evaluations that results.json reports
    stages: list[Stage]
    tokenizer: Any
    chat: Chat

    def longest_prompts(self) -> dict[str, int]:
        """Tokens of the longest prompt of each domain."""
        return {
            domain: max(
                len(self.chat.prompt_ids(task.prompt, tool_schemas(self.environments[domain])))
                for task in _sample(tasks)
            )
            for domain, tasks in self.train.items()
        }


def _sample(tasks: Sequence[Task]) -> Sequence[Task]:
    """The tasks with the longest texts.

    Tokens follow characters closely enough to look at these only.
    """
    return sorted(tasks, key=lambda task: -sum(len(m["content"]) for m in task.prompt))[:64]


def prepare(config: Config, tokenizer: Any = None) -> Prepared:
    """Load and check everything but the weights.

    Raises UserError for whatever is the user's to mend.
    """
    data = config.data
    environments = environment_classes(data.domains, data.environments)
    for domain in EMBEDDED_DOMAINS:
        if getattr(data, f"{domain}_tasks") is not None and domain not in data.domains:
            raise UserError(
                f"{domain}_tasks: given, but {domain} is not among the domains; add it or drop "
                "the file"
            )
    check_demonstrations(config)
    train = {domain: _train_tasks(config, domain, environments[domain]) for domain in data.domains}
    validation_count = max(config.evaluation.eval_steps_tasks, 1)
    validation = {d: generated(config, d, validation_count, "validation") for d in data.domains}
    held_out = {
        d: generated(config, d, data.eval_tasks_per_domain, data.eval_split) for d in data.domains
    }
    tokenizer = tokenizer or load_tokenizer(config.model)
    chat = Chat(tokenizer, config.model.chat_template_kwargs, config.model.tool_call_format)
    prepared = Prepared(
        environments=environments,
        train=train,
        validation=validation,
        held_out=held_out,
        stages=make_stages(config, {domain: len(tasks) for domain, tasks in train.items()}),
        tokenizer=tokenizer,
        chat=chat,
    )
    for domain, tokens in prepared.longest_prompts().items():
        if tokens + config.rollout.max_tokens_per_turn > config.rollout.max_tokens:
            raise UserError(
                f"max_tokens: got {config.rollout.max_tokens}, but a prompt of {domain} has "
                f"{tokens} tokens and a turn may take {config.rollout.max_tokens_per_turn}; "
                "raise max_tokens"
            )
    return prepared


def _train_tasks(config: Config, domain: str, environment: type[Any]) -> list[Task]:
    path = getattr(config.data, f"{domain}_tasks", None)
    if path is None:
        return generated(config, domain, config.data.tasks_per_domain, "train")
    tasks = load_tasks(path, domain)[: config.data.tasks_per_domain]
    held_out = generated(config, domain, config.data.eval_tasks_per_domain, config.data.eval_split)
    seen = {_content(task) for task in held_out}
    for task in tasks:
        try:
            settled(environment().reset(**task.row()))
        except Exception as error:  # whatever the environment says of a payload it cannot use
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"{path}: task {task.id!r}: its payload cannot be used ({type(error).__name__}: "
                f"{reason}); mend it"
            ) from None
        if _content(task) in seen:
            raise UserError(
                f"{path}: task {task.id!r} is also a held-out task; take it out of the file"
            )
    return tasks


def _content(task: Task) -> str:
    return json.dumps([task.prompt, json.loads(task.payload)], sort_keys=True)


def generated(config: Config, domain: str, count: int, split: str) -> list[Task]:
    """Tasks of a domain's own `generate_tasks(seed, n, split, difficulty)`."""
    own = config.data.environments.get(domain, "").partition(":")[0]
    module = import_module(own or f"pipeline.environments.{domain}")
    if not hasattr(module, "generate_tasks"):
        raise UserError(
            f"environments: {module.__name__} has no generate_tasks(seed, n, split, "
            "difficulty); add it"
        )
    try:
        tasks: list[Task] = module.generate_tasks(
            config.data.task_seed, count, split, config.data.difficulty
        )
    except ValueError as error:
        raise UserError(f"tasks of {domain}: {error}") from None
    return tasks
