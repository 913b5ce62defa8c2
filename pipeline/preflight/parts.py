"""The parts of a run without its weights; each wing makes its own part, and checks it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from pipeline.checkpoints.run_folder import problem, resumable
from pipeline.common.hub import check_upload
from pipeline.common.layout import is_toy
from pipeline.config.domain_names import EMBEDDED_DOMAINS
from pipeline.config.settings import Config, ModelSettings
from pipeline.data.curriculum import Stage
from pipeline.data.tasks import Task
from pipeline.environments.demonstrations import (
    Demonstrations,
    warm_start_demonstrations,
    with_words,
)
from pipeline.environments.domains import Domain, load_domains
from pipeline.environments.language_models.customers import check_scenarios
from pipeline.environments.task_sets import TaskSets, stages_of, tasks_of_run, training_tasks
from pipeline.evaluation.baselines import check_baselines
from pipeline.models.chat.template import Chat, load_chat
from pipeline.models.loading import load_tokenizer, tokenizer_settings
from pipeline.rollout.limits import (
    Prompts,
    check_limits,
    long_prompts,
    long_results,
    measure_prompts,
)
from pipeline.rollout.reward_checks import check_reward_functions
from pipeline.rollout.rewards import RewardFunctions, callables_of, load_reward_functions
from pipeline.training.demonstration_checks import check_demonstrations

# For newcomers who play the default domains with a real model under limits of another one.
FOR_PRETRAINED = "--config smollm2_three on a laptop, smollm2_three_domains_1gpu on a GPU"


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a run consists of beside its weights: made once, checked, and the same on all ranks."""

    domains: dict[str, Domain]
    demonstrations: dict[str, Demonstrations]  # for the warm start
    tasks: dict[str, TaskSets]
    stages: list[Stage]
    tokenizer: Any
    chat: Chat
    prompts: Prompts
    rewards: RewardFunctions | None
    served: list[str]  # domains whose customers a language model plays
    about: dict[str, Mapping[str, Any]]  # facts of domains about themselves
    notes: list[str]  # facts about the tasks and rewards that a user should know
    warnings: list[str]  # warnings about demonstrations, prompts and limits
    episodes_at_once: int  # that a rank plays

    @property
    def train(self) -> dict[str, Sequence[Task]]:
        return {name: sets.train for name, sets in self.tasks.items()}

    @property
    def validation(self) -> dict[str, list[Task]]:
        return {name: sets.validation for name, sets in self.tasks.items()}

    @property
    def held_out(self) -> dict[str, list[Task]]:
        return {name: sets.held_out for name, sets in self.tasks.items()}

    def sources(self, stage: Stage) -> dict[str, Sequence[Task]]:
        return training_tasks(self.tasks, stage)

    def prompt_ids(self, domain: str, task: Task) -> list[int]:
        return self.chat.prompt_ids(task.prompt, self.domains[domain].tools)

    @property
    def longest_prompt(self) -> list[int]:
        """The tokens of the longest prompt of the first domain."""
        name = next(iter(self.domains))
        return self.prompt_ids(name, self.tasks[name].longest[0])


def prepare(config: Config, with_tiny_tokenizer: bool = False, clock: str | None = None) -> Parts:
    """Make and check the parts of a run, without its weights. Raises UserError.

    With `with_tiny_tokenizer`, the tiny model's tokenizer replaces the recipe's tokenizer. `clock`
    is for the chat template of a new run (default: the present time).
    """
    resumed = resumable(config)
    checkpoint = next((path for path in resumed if not problem(path)), None)
    if config.run.push_to_hub and config.grpo.use_grpo:
        check_upload(str(config.run.hub_model_id))
    domains = load_domains(config)
    demonstrations = warm_start_demonstrations(config, domains)
    words = domains.values()
    settings = ModelSettings()
    if not with_tiny_tokenizer:
        words = with_words(domains, demonstrations)
        settings = tokenizer_settings(config, checkpoint)
    tokenizer = load_tokenizer(settings, words)
    chat = load_chat(config.model, tokenizer, domains, checkpoint, clock)
    rewards = load_reward_functions(config)
    tasks = tasks_of_run(config, domains, callables_of(rewards), long_prompts(config, chat))
    stages = stages_of(config, tasks)
    held_out = {name: sets.held_out for name, sets in tasks.items()}
    served, notes = check_scenarios(config, domains, held_out)
    check_baselines(domains, held_out)
    warnings, low = [], []
    if not resumed:
        warnings, low = check_demonstrations(config, domains, demonstrations, chat, held_out)
    notes += [note for sets in tasks.values() for note in sets.notes]
    notes += check_reward_functions(rewards, config, domains, tasks)
    about = {name: facts for name, d in domains.items() if d.about and (facts := d.about())}
    for name, facts in about.items():
        first = islice(facts.items(), 5)
        notes.append(f"{name}: {', '.join(f'{fact} {value}' for fact, value in first)}")
    notes += chat.notes
    notes += long_results(config.rollout, chat, tasks)
    prompts = measure_prompts(config.rollout, chat, domains, tasks)
    warnings += prompts.warnings
    is_embedded = EMBEDDED_DOMAINS.keys() >= domains.keys() and not is_toy(config.model.model)
    warnings += check_limits(
        config.rollout,
        [*low, *prompts.too_long],
        prompts.longest_of_all,
        FOR_PRETRAINED if is_embedded else "",
    )
    return Parts(
        domains=domains,
        demonstrations=demonstrations,
        tasks=tasks,
        stages=stages,
        tokenizer=tokenizer,
        chat=chat,
        prompts=prompts,
        rewards=rewards,
        served=served,
        about=about,
        notes=notes,
        warnings=warnings,
        episodes_at_once=config.rollout.max_concurrent_episodes,
    )
