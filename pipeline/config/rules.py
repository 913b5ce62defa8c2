"""Finds contradictions between settings. Each error names a setting, its value and a remedy."""

import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from pipeline.common.errors import UserError, nearest
from pipeline.config.domain_names import (
    DOMAIN_NAME,
    EMBEDDED_DOMAINS,
    LIBRARIES,
    domains_of_user,
    generated_domains,
    installed_domains,
    known_domains,
    library_of,
)
from pipeline.config.settings import (
    CURRICULA,
    DISTILL,
    LAST_STAGES,
    LOSSES,
    MERGE,
    SAMPLERS,
    Config,
    EndpointSettings,
    GRPOSettings,
    RolloutSettings,
    Section,
)

JOINT_STAGES = tuple(name for name, is_joint in CURRICULA.items() if is_joint)
IMPORT_STRING = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_LABEL = r"\w([\w-]*\w)?"
_NUMBERS = r"[0-9]{1,3}(\.[0-9]{1,3}){3}|\[[0-9a-f:.]+\]"  # addresses of IPv4 and IPv6
_HOST = rf"({_NUMBERS}|(?![0-9.]+([:/]|$)){_LABEL}(\.{_LABEL})*\.?)"
BASE_URL = re.compile(rf"https?://{_HOST}(:(?P<port>[0-9]{{1,5}}))?(/[^\s?#]*)?", re.IGNORECASE)
# No domain may have a name that evaluations or metrics use.
RESERVED_NAMES = (
    *JOINT_STAGES,
    *LAST_STAGES.values(),
    "start",
    "warm_start",
    "rft",
    "mean",
    "agent",
)

Verdicts = Iterable[tuple[bool, str]]  # whether a rule is broken, and its message


def reward_names(functions: Sequence[str]) -> list[str]:
    """Return the names of reward functions in metrics: `function`, or else `module:function`."""
    names = [target.rpartition(":")[2] for target in functions]
    return [n if names.count(n) == 1 else t for n, t in zip(names, functions, strict=True)]


def changed(section: Section) -> list[str]:
    """Return the settings of a section that have other values than by default."""
    return [n for n, value in section if value != type(section).model_fields[n].default]


def check(config: Config) -> None:
    """Raise UserError for the first contradiction between settings."""
    for rules in (_tools, _environments, _endpoints, _rewards, _names, _curriculum, _numbers):
        for is_broken, message in rules(config):
            if is_broken:
                raise UserError(message)
    for row in CONTRADICTIONS:
        if row.applies(config):
            raise UserError(row.message(config))


def refuse_placeholders(config: Config) -> None:
    """Raise UserError for a recipe's placeholder where a run, but no check, needs a server."""
    for role, endpoint in _endpoints_of(config).items():
        url = endpoint.url
        if url is not None and "://HOST" in url:
            raise UserError(f"{role}_url: got {url}; give the server's name in place of HOST")


def _endpoints_of(config: Config) -> dict[str, EndpointSettings]:
    """Return the settings of the language models that a run may call, by what they play."""
    return {"customer": config.customer, "judge": config.judge, "agent": config.agent}


def without_effect(config: Config) -> list[str]:
    """Return a line for each setting without effect, such as an environment of no domain."""
    lines = [row.message(config) for row in WITHOUT_EFFECT if row.applies(config)]
    used = ",".join(config.data.domains)
    lines += [
        f"environments: {name} is not used; add {name} to domains {used}"
        for name in config.data.environments
        if name not in config.data.domains
    ]
    needed = {name: "plan" for name in ("plan_tflops", "plan_bandwidth") if not config.run.plan}
    if not config.grpo.learned_beta:
        needed["learned_beta_tasks"] = "learned_beta"
    needed |= {
        name: f"sampler {sampler}"
        for sampler in SAMPLERS
        for name in RolloutSettings.model_fields
        if name.startswith(f"{sampler}_") and config.rollout.sampler != sampler
    }
    if config.rollout.sampler_facts.is_exact and not config.corrects_sampling:
        inexact = " or ".join(name for name, facts in SAMPLERS.items() if not facts.is_exact)
        names = (n for n in GRPOSettings.model_fields if n.startswith("vllm_importance_sampling_"))
        needed |= dict.fromkeys(names, f"sampler {inexact}, or partial_rollout_correction")
    if not config.rollout.partial_rollout_tokens:
        needed["max_staleness"] = needed["partial_rollout_correction"] = "partial_rollout_tokens"
    is_separate = config.curriculum.is_separate
    needed |= dict.fromkeys(
        ("replay", "preview") if is_separate else ("merge_method", "merge_weight"),
        "curriculum sequential" if is_separate else "curriculum separate",
    )
    if not is_separate or config.curriculum.merge_method != "ties":
        needed["merge_density"] = "curriculum separate and merge_method ties"
    if config.curriculum.last_stage == DISTILL:
        needed["merge_weight"] = "merge_method task_arithmetic or ties"
    sections = (config.run, config.rollout, config.grpo, config.curriculum)
    set_by_user = {name for section in sections for name in changed(section)}
    return [
        *lines,
        *(f"{n}: has no effect without {what}" for n, what in needed.items() if n in set_by_user),
    ]


def _tools(config: Config) -> Verdicts:
    data = config.data
    for name, server in data.tools.items():
        yield from (
            (
                not server.startswith("mcp:"),
                f"tools: got {name}: {server!r}; write mcp:COMMAND or mcp:URL, such as 'mcp:python "
                "server.py'",
            ),
            (
                name in data.environments or name in EMBEDDED_DOMAINS,
                f"tools: got {name}, whose environment has its own; take one of the two out",
            ),
            (
                name not in data.tasks,
                f"tools: got {name}, which has no tasks; give tasks {{{name}: FILE}}",
            ),
            (
                not data.reward_funcs and name not in data.agents,
                f"tools: got {name}, whose episodes nothing scores; give reward_funcs",
            ),
        )


def _environments(config: Config) -> Verdicts:
    taken = {*EMBEDDED_DOMAINS, *RESERVED_NAMES}
    for name, setting in domains_of_user(config.data).items():
        lower = name.lower()  # some file systems ignore the case
        yield from (
            (
                not DOMAIN_NAME.fullmatch(name),
                f"environments: got the name {name[:100]!r}; use letters, digits, _ and - only, at "
                "most 64",
            ),
            (
                lower in taken or lower.startswith(("evaluation-", "rft-")),
                f"environments: got {name}, which is taken; choose another name",
            ),
            (
                not (IMPORT_STRING.fullmatch(setting.factory) or library_of(setting.factory)),
                f"environments: got {name}: {setting.factory!r}; write module:Class, such as "
                "my_pkg.bank:BankEnvironment, or an environment of a library, such as "
                f"reasoning_gym:chain_sum ({', '.join(LIBRARIES)})",
            ),
        )
        taken.add(lower)


def _endpoints(config: Config) -> Verdicts:
    for role, endpoint in _endpoints_of(config).items():
        url = endpoint.url
        unused = changed(endpoint)
        yield from (
            (
                url is None,
                f"{role}_{name}: got {getattr(endpoint, name)}, without {role}_url, so no endpoint "
                f"is called; give {role}_url, or take it out",
            )
            for name in unused
        )
        yield from (
            (
                url is not None and endpoint.model is None,
                f"{role}_model: the {role} needs it; give the name of the model at {role}_url",
            ),
            (
                url is not None and not _is_base_url(url),
                f"{role}_url: got {url!r}; give the base URL of an OpenAI-compatible server, such "
                "as http://HOST:8000/v1",
            ),
            (
                "key" in unused and endpoint.key not in os.environ,
                f"{role}_key: got {endpoint.key}, which is not set; set the variable",
            ),
        )


def _is_base_url(url: str) -> bool:
    parts = BASE_URL.fullmatch(url)
    return parts is not None and 1 <= int(parts["port"] or 80) <= 65535


def _rewards(config: Config) -> Verdicts:
    functions = config.data.reward_funcs
    weights = config.data.reward_weights
    example = "write module:function, such as my_pkg.rewards:correct"
    return [
        *(
            (not IMPORT_STRING.fullmatch(target), f"reward_funcs: got {target!r}; {example}")
            for target in functions
        ),
        *(
            (functions.count(target) > 1, f"reward_funcs: got {target} twice; take one out")
            for target in functions
        ),
        (
            bool(weights) and len(weights) != len(functions),
            f"reward_weights: got {len(weights)} weights for {len(functions)} reward_funcs; give "
            "one for each",
        ),
    ]


def _names(config: Config) -> Verdicts:
    data = config.data
    curriculum = config.curriculum
    known = list(known_domains(config))
    used = data.domains
    trained = [name for name in config.stage_names if name != MERGE]
    stages = list(dict.fromkeys([*known, *JOINT_STAGES, *trained]))
    scales = config.grpo.domain_advantage_scale
    of_run = "domains of the run, as `domains` lists them"
    yield from ((True, _unknown_domain(name, known)) for name in used if name not in known)
    for setting, named, choices, kind in (
        ("agents", data.agents, used, of_run),
        ("tools", data.tools, used, of_run),
        ("tasks", data.tasks, used, of_run),
        ("eval_tasks", data.eval_tasks, used, of_run),
        ("demonstrations", data.demonstrations, used, of_run),
        ("order", curriculum.order, used, of_run),
        ("domain_weights", curriculum.domain_weights, known, "domains"),
        ("family_shares", curriculum.family_shares, known, "domains"),
        ("domain_advantage_scale", scales, known, "domains"),
        ("stage_weights", curriculum.stage_weights, stages, "stages"),
        ("stage_steps", curriculum.stage_steps, trained, "stages"),
        ("stage_tasks", curriculum.stage_tasks, trained, "stages"),
    ):
        hint = f"name {kind} ({', '.join(choices)})"
        yield from ((name not in choices, f"{setting}: got {name!r}; {hint}") for name in named)
    for setting, names in (("domains", used), ("difficulties", curriculum.difficulties)):
        yield len(set(names)) < len(names), f"{setting}: got {','.join(names)}; name each once"


def _unknown_domain(name: str, known: Sequence[str]) -> str:
    offered = [*known, *sorted(installed_domains().names - {*known})]
    near = nearest(name, offered)
    hint = "install its package, or give its class in `environments`, or its `tasks` with"
    hint += " `reward_funcs` or `agents`" + f"; did you mean {near}?" * bool(near)
    return f"domains: got {name!r}; name known domains ({', '.join(offered)}), {hint}"


def _curriculum(config: Config) -> Verdicts:
    curriculum = config.curriculum
    stages = config.stage_names
    order = ",".join(curriculum.order)
    yield (
        bool(order) and curriculum.is_joint,
        f"order: got {order} with curriculum {curriculum.curriculum}, whose stage holds all "
        "domains; take one of the two out",
    )
    names = curriculum.order or config.data.domains
    yield (
        curriculum.is_separate and config.grpo.use_grpo and len(names) < 2,
        f"curriculum: got separate for {','.join(names)} alone, so nothing can be merged; give "
        "more domains, or sequential",
    )
    yield (
        curriculum.is_separate and len(set(names)) < len(names),
        f"order: got {order} with curriculum separate, where a domain has one expert; name each "
        "domain once",
    )
    for domain, shares in curriculum.family_shares.items():
        total = sum(shares.values())
        yield total > 1 + 1e-9, f"family_shares: {domain}: got the sum {total:g}; give at most 1"
    for stage in curriculum.stage_tasks:
        yield (
            stage in curriculum.stage_steps,
            f"stage_tasks: got {stage}, as stage_steps has; give one",
        )
    for stage in stages:
        yield (
            stages.count(stage) > 1,
            f"order: two stages are called {stage}; rename that domain",
        )


def _numbers(config: Config) -> Verdicts:
    grpo = config.grpo
    for name in LOSSES[grpo.loss_type].unused:
        yield name in changed(grpo), f"{name}: not used by loss_type {grpo.loss_type}; take it out"
    highest = 1 + grpo.upper_clip
    yield (
        grpo.delta is not None and grpo.delta <= highest,
        f"delta: got {grpo.delta}; give more than 1 + epsilon_high, {highest}",
    )
    num_steps = grpo.max_steps if grpo.use_grpo else 0
    for step in config.run.profile:
        yield (
            step > num_steps,
            f"profile: got step {step}, but {num_steps} are trained; name steps from 1 on",
        )
    plan = ",".join(map(str, config.run.plan))
    yield (
        bool(plan) and not config.run.check,
        f"plan: got {plan} for a run; give check with it, or take it out",
    )


class Row(NamedTuple):
    """A fault of a setting: when there is one, and a text with the settings in braces."""

    setting: str
    applies: Callable[[Config], bool]
    text: str

    def message(self, config: Config) -> str:
        return f"{self.setting}: {self.text.format(**dict(config))}"


CONTRADICTIONS = (
    # curriculum
    Row(
        "preview",
        lambda c: c.curriculum.replay + c.curriculum.preview >= 1,
        "got {curriculum.preview:g}, with replay {curriculum.replay:g}; leave groups to each "
        "stage's own domain: a sum below 1",
    ),
    Row(
        "plateau_patience",
        lambda c: c.curriculum.plateau_patience > 0 and not c.evaluation.validation_steps,
        "give validation_steps more than 0, or take it out",
    ),
    Row(
        "merge_method",
        lambda c: c.curriculum.is_separate and c.model.use_peft and MERGE in c.stage_names,
        "got {curriculum.merge_method} with use_peft: the sum of experts' products B A has a "
        "higher rank than one adapter holds; train all weights, or give distillation",
    ),
    Row(
        "importance_sampling_level",
        lambda c: (
            c.curriculum.last_stage == DISTILL and c.grpo.importance_sampling_level != "token"
        ),
        "got {grpo.importance_sampling_level} with merge_method distillation, whose tokens have "
        "advantages of their own; give token",
    ),
    Row(
        "keep_best",
        lambda c: c.curriculum.is_separate and c.run.keep_best,
        "got true with curriculum separate, where the best policy may be an expert of one domain; "
        "take it out: the last checkpoint is what was made of all",
    ),
    # GRPO
    Row(
        "epsilon_high",
        lambda c: c.grpo.upper_clip < c.grpo.epsilon,
        "got {grpo.upper_clip}, below epsilon {grpo.epsilon}; give epsilon, more, or null",
    ),
    Row(
        "epsilon_high",
        lambda c: c.grpo.upper_clip < LOSSES[c.grpo.loss_type].least_upper_clip,
        "got {grpo.upper_clip}, the largest ratio of {grpo.loss_type}; give 1 or more, such as 5",
    ),
    Row(
        "vllm_importance_sampling_clip_min",
        lambda c: (
            (c.grpo.vllm_importance_sampling_clip_min or 0.0)
            >= (c.grpo.vllm_importance_sampling_clip_max or math.inf)
        ),
        "got {grpo.vllm_importance_sampling_clip_min}, with vllm_importance_sampling_clip_max "
        "{grpo.vllm_importance_sampling_clip_max}; give less, or null",
    ),
    Row(
        "drop_zero_std_groups",
        lambda c: c.grpo.dynamic_sampling and not c.grpo.drop_zero_std_groups,
        "false contradicts dynamic_sampling; take one of the two out",
    ),
    Row(
        "shard",
        lambda c: c.grpo.shard == "full" and c.run.deterministic,
        "got full with deterministic, whose sums are of whole gradients; give optimizer or none",
    ),
    Row(
        "scale_lr",
        lambda c: c.grpo.scale_lr != "none" and c.grpo.reference_tasks_per_step is None,
        "got {grpo.scale_lr} without reference_tasks_per_step; give the tasks_per_step that "
        "learning_rate was chosen for",
    ),
    # model, data, rollout
    Row(
        "attn_implementation",
        lambda c: c.model.model == "tiny" and c.model.attn_implementation not in ("sdpa", "eager"),
        "got {model.attn_implementation!r}; give sdpa or eager to the tiny model",
    ),
    Row(
        "eval_split",
        lambda c: c.data.eval_split == "base" and bool(generated_domains(c)),
        "got base, which generated tasks do not have; give test or validation",
    ),
    Row(
        "eval_split",
        lambda c: c.data.eval_split == "base" and (c.grpo.use_grpo or c.is_supervised),
        "got base, which has training tasks; give it to evaluate, or give test",
    ),
    Row(
        "max_tokens",
        lambda c: c.rollout.max_tokens <= c.rollout.max_tokens_per_turn,
        "got {rollout.max_tokens}, with max_tokens_per_turn {rollout.max_tokens_per_turn}; give an "
        "episode (prompt included) more than one turn",
    ),
    Row(
        "max_repeated_calls",
        lambda c: c.rollout.max_repeated_calls == 1,
        "got 1, which ends all episodes at a call; give 2 or more, or 0",
    ),
    # evaluation, run
    Row(
        "eval_on_start",
        lambda c: not (c.evaluation.eval_on_start or c.grpo.use_grpo),
        "got false for a run that only evaluates; take it out",
    ),
    Row(
        "keep_best",
        lambda c: c.run.keep_best and not c.evaluation.validation_steps,
        "needs validations; give validation_steps more than 0, or take it out",
    ),
    Row(
        "plan",
        lambda c: bool(c.run.plan) and not (c.grpo.use_grpo and c.grpo.max_steps),
        "got ranks for a run without steps of GRPO; set use_grpo and max_steps, or take plan out",
    ),
    Row(
        "plan",
        lambda c: bool(c.run.plan) and c.run.deterministic,
        "got ranks with deterministic, whose exchanges it does not count; take one out",
    ),
    Row(
        "push_to_hub",
        lambda c: c.run.push_to_hub and c.run.hub_model_id is None,
        "needs the repository; give hub_model_id, NAME or ORGANISATION/NAME",
    ),
    Row(
        "timeout",
        lambda c: not c.run.doctor and c.run.timeout <= c.rollout.call_timeout,
        "got {run.timeout:g}, with call_timeout {rollout.call_timeout:g}; give more than the "
        "longest call of an environment",
    ),
)

WITHOUT_EFFECT = (
    Row(
        "partial_rollout_tokens",
        lambda c: (
            c.rollout.partial_rollout_tokens > 0
            and (
                not c.rollout.max_staleness
                or c.rollout.partial_rollout_tokens >= c.rollout.max_tokens
            )
        ),
        "got {rollout.partial_rollout_tokens}, which has no effect with max_tokens "
        "{rollout.max_tokens} and max_staleness {rollout.max_staleness}; give less than the first, "
        "and the second more than 0",
    ),
    Row(
        "push_to_hub",
        lambda c: c.run.push_to_hub and not c.grpo.use_grpo,
        "nothing is trained, so nothing is uploaded",
    ),
    Row(
        "keep_best",
        lambda c: c.run.keep_best and not c.grpo.use_grpo,
        "nothing is trained, so there is no checkpoint to keep",
    ),
    Row(
        "task_sampling",
        lambda c: c.curriculum.task_sampling == "signal" and not c.grpo.use_grpo,
        "nothing is trained, so no task is drawn",
    ),
    Row(
        "rft_rounds",
        lambda c: c.rft.rft_rounds > 0 and not c.grpo.use_grpo,
        "nothing is trained, so there is no rejection fine-tuning",
    ),
    Row(
        "learned_beta",
        lambda c: (
            c.grpo.learned_beta > 0
            and (
                c.curriculum.curriculum != "sequential"
                or len({*(c.curriculum.order or c.data.domains)}) == 1
            )
        ),
        "has no effect, because no stage goes on from one of another domain",
    ),
    Row(
        "hub_model_id",
        lambda c: c.run.hub_model_id is not None and not c.run.push_to_hub and c.grpo.use_grpo,
        "has no effect without push_to_hub",
    ),
    Row(
        "log_completions_steps",
        lambda c: c.tracking.log_completions_steps > 0 and not c.tracking.report_to,
        "has no effect with report_to none",
    ),
    Row(
        "tau2_arguments",
        lambda c: c.data.tau2 is None and bool(c.data.tau2_arguments),
        "has no effect without tau2",
    ),
    Row(
        "max_agents",
        lambda c: (
            c.rollout.max_agents is not None
            and not (c.data.agents or c.data.tools or c.data.environments)
        ),
        "has no effect without agents, tools or environments",
    ),
    Row(
        "reshard_after_forward",
        lambda c: c.grpo.shard != "full" and not c.grpo.reshard_after_forward,
        "has no effect without shard full",
    ),
    Row(
        "kl_probe_tasks",
        lambda c: (
            c.grpo.use_grpo
            and c.evaluation.kl_probe_tasks > 0
            and c.evaluation.validation_steps == 0
            and len(c.stage_names) > 1
        ),
        "got {evaluation.kl_probe_tasks}, but the KL of learned domains is measured in "
        "validations, and validation_steps is 0",
    ),
    Row(
        "skip_long_tasks",
        lambda c: c.data.skip_long_tasks and not (c.data.tasks or c.data.eval_tasks),
        "has no effect without tasks or eval_tasks",
    ),
)
