"""Preparation of a run without its model: tasks, environments, tokenizer, chat format, stages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from pipeline.checkpoints.run_folder import problem, resumable
from pipeline.common.hub import check_upload
from pipeline.common.untrusted import shown
from pipeline.config.settings import Config, ModelSettings
from pipeline.data.curriculum import Stage, TaskMixture, make_stages, num_drawn
from pipeline.data.tasks import Task
from pipeline.environments.discovery import tool_schemas
from pipeline.environments.domains import Domain, load_domains
from pipeline.environments.language_models.customers import check_scenarios
from pipeline.environments.task_sets import (
    Graded,
    graded_tasks,
    longest_of,
    mix_families,
    task_sets,
)
from pipeline.evaluation.baselines import baseline_calls
from pipeline.models.chat.fitting import clock_of, needs_of
from pipeline.models.chat.template import Chat
from pipeline.models.loading import load_tokenizer
from pipeline.models.tiny import CHAT_TEMPLATE as TINY_TEMPLATE
from pipeline.preflight.made_of import hashes_of_tokenizer, made_of
from pipeline.rollout.limits import TooLow, check_limits, is_too_long, long_prompts
from pipeline.rollout.reward_checks import check_reward_functions
from pipeline.rollout.rewards import RewardFunctions, callables_of, load_reward_functions
from pipeline.training.demonstration_checks import check_demonstrations, tokenizer_of


@dataclass(frozen=True)
class Prepared:
    domains: dict[str, Domain]
    train: dict[str, Sequence[Task]]
    validation: dict[str, list[Task]]  # tasks for validations within a stage
    held_out: dict[str, list[Task]]  # tasks for the evaluations in results.json
    graded: Graded
    longest: dict[str, list[Task]]  # each domain's training tasks with the most text
    stages: list[Stage]
    rewards: RewardFunctions | None
    served: list[str]  # domains whose customers a language model plays
    tokenizer: Any
    chat: Chat
    about: dict[str, Mapping[str, Any]]  # facts of domains about themselves
    made_of: dict[str, str]  # SHA-256 of tasks, demonstrations and modules, by name
    unseen: dict[str, str]  # "all" or "a part", by the role whose messages prompts leave out
    notes: list[str]  # facts about the tasks and rewards that a user should know
    warnings: list[str]  # warnings about the demonstrations
    episodes_at_once: int  # `max_concurrent_episodes`, or fewer if no more fit into memory

    def sources(self, stage: Stage) -> dict[str, Sequence[Task]]:
        return {d: self.graded.get((d, stage.difficulty), self.train[d]) for d in stage.groups}

    def family_shares(self, stage: Stage) -> dict[str, dict[str, float]]:
        found = self.sources(stage).items()
        return {name: of.shares for name, of in found if isinstance(of, TaskMixture)}

    def prompt_ids(self, domain: str, task: Task) -> list[int]:
        return self.chat.prompt_ids(task.prompt, tool_schemas(self.domains[domain].environment))

    def longest_prompts(self) -> dict[str, int]:
        return {d: max(len(self.prompt_ids(d, t)) for t in ts) for d, ts in self.longest.items()}


def prepare(
    config: Config, with_tiny_tokenizer: bool = False, clock: str | None = None
) -> Prepared:
    """Load and check the parts of a run, without the model. Raises UserError.

    With `with_tiny_tokenizer`, the tiny model's tokenizer replaces the recipe's tokenizer. `clock`
    is for the chat template of a new run (default: the present time).
    """
    if config.run.push_to_hub and config.grpo.use_grpo:
        check_upload(str(config.run.hub_model_id))
    limits = config.rollout
    domains = load_domains(config)
    resumed = resumable(config)
    if with_tiny_tokenizer:
        tokenizer = load_tokenizer(ModelSettings(), domains.values())
    else:
        tokenizer = tokenizer_of(config, domains, resumed)
    chat = Chat(
        tokenizer,
        config.model.chat_template_kwargs,
        config.model.tool_call_format,
        needs=needs_of(domains.values()),
        chat_template=config.model.chat_template,
        system_prompt=config.model.system_prompt,
        clock=_clock_of_run(resumed) or clock,
    )
    rewards = load_reward_functions(config)
    sets = {
        name: task_sets(config, domain, callables_of(rewards), long_prompts(config, domain, chat))
        for name, domain in domains.items()
    }
    held_out = {name: of.held_out for name, of in sets.items()}
    served, notes = check_scenarios(config, domains, held_out)
    train = {name: of.train for name, of in sets.items()}
    longest = {name: of.longest for name, of in sets.items()}
    notes += [note for of in sets.values() for note in of.notes]
    notes += check_reward_functions(rewards, config, domains, train, held_out)
    graded = graded_tasks(config, domains)
    origin = made_of(config, sets, graded)
    origin |= hashes_of_tokenizer(tokenizer)
    notes += mix_families(config, domains, train, graded)
    sizes = {name: num_drawn(tasks) for name, tasks in train.items()}
    for (name, _), tasks in graded.items():
        longest[name] = longest[name] + longest_of(tasks)
        sizes[name] = min(sizes[name], num_drawn(tasks))
    for name, domain in domains.items():
        if domain.baselines is not None:
            baseline_calls(domain, sets[name].held_out[0])
    about = {name: facts for name, of in domains.items() if of.about and (facts := of.about())}
    for name, facts in about.items():
        told = (f"{fact} {value}" for fact, value in islice(facts.items(), 5))
        notes.append(f"{name}: {', '.join(told)}")
    notes += chat.notes
    for name, of in sets.items():
        tokens = max(map(chat.num_content_tokens, of.texts), default=0)
        if tokens > (most := limits.max_tool_result_tokens):
            notes.append(
                f"{name}: reset returns {tokens} tokens; tool results of more than "
                f"max_tool_result_tokens ({most}) become errors"
            )
    warnings, beyond = (
        ([], []) if resumed else check_demonstrations(config, domains, chat, held_out)
    )
    prepared = Prepared(
        domains=domains,
        train=train,
        validation={name: of.validation for name, of in sets.items()},
        held_out=held_out,
        graded=graded,
        longest=longest,
        stages=make_stages(config, sizes),
        rewards=rewards,
        served=served,
        tokenizer=tokenizer,
        chat=chat,
        about=about,
        made_of=origin,
        unseen={},
        notes=notes,
        warnings=warnings,
        episodes_at_once=limits.max_concurrent_episodes,
    )
    stages = [replace(s, family_shares=prepared.family_shares(s)) for s in prepared.stages]
    prepared = replace(prepared, stages=stages)
    # Not only those that are trained on: what has no room for a turn would count as failed.
    prompts = dict[str, int]()
    for name, of in sets.items():
        asked = [*longest[name], *longest_of([*of.validation, *of.held_out])]
        schemas = tool_schemas(domains[name].environment)
        for prompt in {
            str([m["role"] for m in task.prompt]): task.prompt for task in asked
        }.values():
            prepared.unseen.update(chat.check_shown(prompt, schemas))
        lengths = [len(prepared.prompt_ids(name, task)) for task in asked]
        prompts[name] = max(lengths)
        if is_too_long(limits, prompts[name]):
            task = asked[lengths.index(prompts[name])]
            where = f"task {shown(task.id)}"
            if place := of.where(task.id):
                where += f", {place}; --skip-long-tasks leaves such rows out"
            turn = limits.max_tokens_per_turn
            what = f"a prompt of {name} has {prompts[name]} tokens and a turn may take {turn}"
            needs = {"max_tokens": prompts[name] + turn}
            beyond.append(TooLow(f"{what} ({where})", needs, is_refused=True))
    for role, part in prepared.unseen.items():
        if tokenizer.chat_template != TINY_TEMPLATE:  # which reads a first line alone, as said
            what = f"{part} of the {role} message"
            prepared.warnings.append(f"the chat template leaves {what} out of prompts")
    prepared.warnings.extend(check_limits(limits, beyond, prompts))
    return prepared


def _clock_of_run(resumed: Sequence[Path]) -> str | None:
    """Return the clock that the chat template of a resumed run reads, from its checkpoint."""
    whole = next((path for path in resumed if not problem(path)), None)
    template = whole and whole / "chat_template.jinja"
    return clock_of(template.read_text()) if template and template.is_file() else None
