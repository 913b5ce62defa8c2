"""Preparation of a run without its model: tasks, environments, tokenizer, chat format, stages."""

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from functools import partial
from hashlib import sha256
from importlib.util import find_spec
from itertools import islice, product
from pathlib import Path
from typing import Any

from pipeline.chat.fitting import Needs, clock_of, without_clock
from pipeline.chat.template import Chat
from pipeline.checkpoints.run_folder import TEMPLATE, hash_of, problem, resumable
from pipeline.config.settings import Config, ModelSettings, RolloutSettings
from pipeline.customers import check_scenarios
from pipeline.data.curriculum import Stage, TaskMixture, make_stages, mixtures, num_drawn
from pipeline.data.tasks import HELD_OUT, MODULE, Task
from pipeline.environments.demonstrations import has_demonstrations, words_of_demonstrations
from pipeline.environments.domains import Domain, generated, load_domains
from pipeline.environments.single_turn import SingleTurnEnvironment
from pipeline.environments.tools import tool_schemas
from pipeline.errors import UserError
from pipeline.evaluation.baselines import baseline_calls
from pipeline.files.hub import check_upload
from pipeline.files.untrusted import shown
from pipeline.models.loading import load_tokenizer
from pipeline.models.tiny import CHAT_TEMPLATE as TINY_TEMPLATE
from pipeline.preflight.task_sets import IsLong, TaskSets, longest_of, task_sets
from pipeline.preflight.trials import (
    TooLow,
    check_demonstrations,
    check_limits,
    check_reward_functions,
)
from pipeline.sft import sources_of

# Attributes of a tokenizer that are not in its tokenizer.json.
RULES = ("clean_up_tokenization_spaces", "split_special_tokens", "response_template")
# The file that a process was started by, which differs with the number of ranks.
STARTED = ("__main__", "__mp_main__")
FEW = 100  # of fewer generated tasks, some families may have none
Graded = dict[tuple[str, str], Sequence[Task]]  # training tasks by domain and difficulty


@dataclass(frozen=True)
class Prepared:
    domains: dict[str, Domain]
    train: dict[str, Sequence[Task]]
    validation: dict[str, list[Task]]  # tasks for validations within a stage
    held_out: dict[str, list[Task]]  # tasks for the evaluations in results.json
    graded: Graded
    longest: dict[str, list[Task]]  # each domain's training tasks with the most text
    stages: list[Stage]
    tokenizer: Any
    chat: Chat
    about: dict[str, Mapping[str, Any]]  # facts of domains about themselves
    made_of: dict[str, str]  # SHA-256 of tasks, demonstrations and modules, by name
    unseen: dict[str, str]  # "all" or "a part", by the role whose messages prompts leave out
    notes: list[str]  # facts about the tasks and rewards that a user should know
    warnings: list[str]  # warnings about the demonstrations
    episodes_at_once: int  # `max_concurrent_episodes`, or fewer if no more fit into memory

    @property
    def environments(self) -> dict[str, type[Any]]:
        return {name: domain.environment for name, domain in self.domains.items()}

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
        tokenizer = _tokenizer(config, domains, resumed)
    chat = Chat(
        tokenizer,
        config.model.chat_template_kwargs,
        config.model.tool_call_format,
        needs=needs_of(domains.values()),
        chat_template=config.model.chat_template,
        system_prompt=config.model.system_prompt,
        clock=_clock_of_run(resumed) or clock,
    )
    sets = {
        name: task_sets(config, domain, long_prompts(config, domain, chat))
        for name, domain in domains.items()
    }
    held_out = {name: of.held_out for name, of in sets.items()}
    notes = check_scenarios(config, domains, held_out)
    train = {name: of.train for name, of in sets.items()}
    longest = {name: of.longest for name, of in sets.items()}
    notes += [note for of in sets.values() for note in of.notes]
    notes += check_reward_functions(config, domains, train, held_out)
    graded = _graded(config, domains)
    origin = made_of(config, sets, graded)
    origin |= hashes_of_tokenizer(tokenizer)
    notes += _mix_families(config, domains, train, graded)
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


def is_too_long(limits: RolloutSettings, num_tokens: int) -> bool:
    """Return whether a prompt of so many tokens leaves no room for a turn."""
    return num_tokens + limits.max_tokens_per_turn > limits.max_tokens


def long_prompts(config: Config, domain: Domain, chat: Chat) -> IsLong | None:
    """Return a function that finds the prompts that `skip_long_tasks` leaves out, or None."""
    schemas = tool_schemas(domain.environment)
    if not config.data.skip_long_tasks:
        return None
    return lambda prompt: is_too_long(config.rollout, len(chat.prompt_ids([*prompt], schemas)))


def needs_of(domains: Iterable[Domain]) -> Needs:
    """Return what conversations in these domains need of a chat template."""
    environments = [domain.environment for domain in domains]
    return Needs(
        tools=any(map(tool_schemas, environments)),
        # An environment of a user's may make a `user` who answers in any method.
        replies=any(kind is not SingleTurnEnvironment for kind in environments),
    )


def _tokenizer(config: Config, domains: Mapping[str, Domain], resumed: Sequence[Path]) -> Any:
    """Return the model's tokenizer. The tiny model gets words for domains without `WORDS`.

    The tiny model's tokenizer of a resumed run comes from the run's checkpoint.
    """
    settings = config.model
    has_warm_start = config.grpo.use_grpo and config.warm_start.steps > 0
    if settings.model != "tiny":
        return load_tokenizer(settings)
    if whole := [path for path in resumed if not problem(path)]:
        return load_tokenizer(settings.model_copy(update={"model": str(whole[0])}))
    _, count = sources_of(config, domains)
    known = dict(domains)
    for name, domain in domains.items():
        if has_warm_start and not domain.words() and has_demonstrations(config, domain):
            words = words_of_demonstrations(config, domain, count)
            known[name] = replace(domain, words=partial(list, words))
    return load_tokenizer(settings, known.values())


def _clock_of_run(resumed: Sequence[Path]) -> str | None:
    """Return the clock that the chat template of a resumed run reads, from its checkpoint."""
    whole = next((path for path in resumed if not problem(path)), None)
    template = whole and whole / "chat_template.jinja"
    return clock_of(template.read_text()) if template and template.is_file() else None


def _graded(config: Config, domains: Mapping[str, Domain]) -> Graded:
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


def _mix_families(
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
            are_many = config.data.num_train_tasks >= FEW and name in config.generated_domains
            is_strict = name in given and (name in config.data.own_domains or are_many)
            made, said = mixtures(name, found or {"train": train[name]}, shares, is_strict, is_even)
            notes += said
            if made:
                graded |= {(name, difficulty): made[difficulty] for difficulty in found}
                train[name] = made.get("train", train[name])
    return notes


def made_of(
    config: Config, sets: Mapping[str, TaskSets], graded: Mapping[tuple[str, str], Iterable[Task]]
) -> dict[str, str]:
    """Return the SHA-256 of each thing that a run is made of, by its name.

    `graded` has the training tasks of curricula with difficulties, by domain and difficulty. Of
    code, the files of modules that settings name count, and of the modules beside them that they
    import: not this package, and not installed ones.
    """
    found = {}
    for name, of in sets.items():
        found[f"training tasks of {name}"] = _hash_of_tasks(of.train)
        found[f"validation tasks of {name}"] = _hash_of_tasks(of.validation)
        found[HELD_OUT + name] = _hash_of_tasks(of.held_out)
    for (name, difficulty), tasks in graded.items():
        found[f"training tasks of {name} ({difficulty})"] = _hash_of_tasks(tasks)
    for name, path in config.data.demonstrations.items():
        found[f"demonstrations of {name}"] = _hash_of_files(Path(path))
    return found | hashes_of_modules(config)


def hashes_of_modules(config: Config, known: Iterable[str] = ()) -> dict[str, str]:
    """Return the hash of each module of the user's that has been imported, by a name for it.

    Modules under the names `known`, which a run has imported late, count before they are imported.
    """
    found = dict[str, str]()
    factories = (of.factory for of in config.factories.values())
    for target in (*factories, *config.data.reward_funcs):
        found |= _hashes_of_modules(target.partition(":")[0])
    for name in set(known) - {MODULE + started for started in STARTED}:
        with suppress(Exception):  # whatever a package of the user's raises, as its import will
            spec = find_spec(name.removeprefix(MODULE)) if name not in found else None
            if spec is not None and spec.origin is not None and os.path.isfile(spec.origin):
                found[name] = hash_of(Path(spec.origin))
    return found


def _hashes_of_modules(named: str) -> dict[str, str]:
    """Return the hash of a module's file, and of the imported files beside its package, and below.

    Of an installed package, only its own files count.
    """
    files = {
        name: file
        for name, module in [*sys.modules.items()]
        if (file := getattr(module, "__file__", None))
        and name.partition(".")[0] not in (__name__.partition(".")[0], *STARTED)
    }
    if named not in files:
        return {}
    own = Path(files[named])
    folder = own.parents[named.count(".") + (own.name == "__init__.py")]  # it was imported from
    if folder.name == "site-packages":
        folder /= named.partition(".")[0]
    inside = os.path.join(folder, "")
    # Of thousands of modules few lie there, so paths are compared as text.
    beside = {
        name: Path(file)
        for name, file in files.items()
        if name == named
        or (
            file.startswith(inside)
            and "site-packages" not in file.removeprefix(inside).split(os.sep)
        )
    }
    return {f"{MODULE}{name}": hash_of(file) for name, file in beside.items() if file.is_file()}


def hashes_of_tokenizer(tokenizer: Any) -> dict[str, str]:
    """Return the SHA-256 of all that decides what ids a text has, and what text ids have."""
    words = sorted(tokenizer.get_vocab().items())
    template = without_clock(tokenizer.chat_template)  # earlier versions held no clock
    parts = [words, tokenizer.special_tokens_map, template]
    rules = [tokenizer.all_special_ids, *(getattr(tokenizer, name, None) for name in RULES)]
    if backend := getattr(tokenizer, "backend_tokenizer", None):
        # Calls of the tokenizer change its padding and truncation.
        rules.append(json.loads(backend.to_str()) | dict.fromkeys(("padding", "truncation")))
    return {
        TEMPLATE: _hash_of([json.dumps(parts, sort_keys=True, default=str)]),
        "rules of the tokenizer": _hash_of([json.dumps(rules, sort_keys=True, default=str)]),
    }


def _hash_of_tasks(tasks: Iterable[Task]) -> str:
    return _hash_of(json.dumps(astuple(task), sort_keys=True) for task in tasks)


def _hash_of_files(top: Path) -> str:
    files = [top] if top.is_file() else filter(Path.is_file, sorted(top.rglob("*")))
    return _hash_of(f"{file.relative_to(top).as_posix()} {hash_of(file)} " for file in files)


def _hash_of(texts: Iterable[str]) -> str:
    digest = sha256()
    for text in texts:
        digest.update(text.encode())
    return digest.hexdigest()
