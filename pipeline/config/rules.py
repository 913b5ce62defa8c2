"""Finds contradictions between settings. Each error names a setting, its value and a remedy."""

import os
import re
from collections.abc import Iterable, Sequence

from pipeline.common.errors import UserError, nearest
from pipeline.config.domain_names import (
    EMBEDDED_DOMAINS,
    domains_of_user,
    generated_domains,
    installed_domains,
    known_domains,
)
from pipeline.config.settings import (
    CURRICULA,
    LOSSES,
    SAMPLERS,
    Config,
    EndpointSettings,
    Section,
)

JOINT_STAGES = tuple(name for name, is_joint in CURRICULA.items() if is_joint)
IMPORT_STRING = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
DOMAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_LABEL = r"\w([\w-]*\w)?"
_NUMBERS = r"[0-9]{1,3}(\.[0-9]{1,3}){3}|\[[0-9a-f:.]+\]"  # addresses of IPv4 and IPv6
_HOST = rf"({_NUMBERS}|(?![0-9.]+([:/]|$)){_LABEL}(\.{_LABEL})*\.?)"
BASE_URL = re.compile(rf"https?://{_HOST}(:(?P<port>[0-9]{{1,5}}))?(/[^\s?#]*)?", re.IGNORECASE)
# No domain may have a name that evaluations or metrics use.
RESERVED_NAMES = (*JOINT_STAGES, "start", "warm_start", "rft", "mean", "agent")

Rows = Iterable[tuple[bool, str]]  # whether a rule is broken, and its message


def reward_names(functions: Sequence[str]) -> list[str]:
    """Return the names of reward functions in metrics: `function`, or else `module:function`."""
    names = [target.rpartition(":")[2] for target in functions]
    return [n if names.count(n) == 1 else t for n, t in zip(names, functions, strict=True)]


def changed(section: Section) -> list[str]:
    """Return the settings of a section that have other values than by default."""
    return [n for n, value in section if value != type(section).model_fields[n].default]


def check(config: Config) -> None:
    """Raise UserError for the first contradiction between settings."""
    for rules in (_environments, _endpoints, _rewards, _names, _curriculum, _loss, _run):
        for is_broken, message in rules(config):
            if is_broken:
                raise UserError(message)


def refuse_placeholders(config: Config) -> None:
    """Raise UserError for a recipe's placeholder where a run, but no check, needs a server."""
    for role, endpoint in _endpoints_of(config).items():
        url = endpoint.url
        if url is not None and "://HOST" in url:
            raise UserError(f"{role}_url: got {url}; give the server's name in place of HOST")


def _endpoints_of(config: Config) -> dict[str, EndpointSettings]:
    """Return the settings of the language models that a run may call, by what they play."""
    return {"customer": config.customer, "judge": config.judge, "agent": config.agent}


def left_out(config: Config) -> list[str]:
    """Return a line for each setting without effect, such as an environment of no domain."""
    data = config.data
    run = config.run
    is_trained = config.grpo.use_grpo
    evaluation = config.evaluation
    untrained = "nothing is trained, so"
    rows = [
        (
            run.push_to_hub and not is_trained,
            f"push_to_hub: {untrained} nothing is uploaded",
        ),
        (
            run.keep_best and not is_trained,
            f"keep_best: {untrained} there is no checkpoint to keep",
        ),
        (
            config.rft.rft_rounds > 0 and not is_trained,
            f"rft_rounds: {untrained} there is no rejection fine-tuning",
        ),
        (
            run.hub_model_id is not None and not run.push_to_hub and is_trained,
            "hub_model_id: has no effect without push_to_hub",
        ),
        (
            config.tracking.log_completions_steps > 0 and not config.tracking.report_to,
            "log_completions_steps: has no effect with report_to none",
        ),
        (
            data.tau2 is None and bool(data.tau2_arguments),
            "tau2_arguments: has no effect without tau2",
        ),
        (
            config.grpo.shard != "full" and not config.grpo.reshard_after_forward,
            "reshard_after_forward: has no effect without shard full",
        ),
        *(
            (
                not run.plan and name in changed(run),
                f"{name}: has no effect without plan",
            )
            for name in ("plan_tflops", "plan_bandwidth")
        ),
        (
            is_trained
            and evaluation.kl_probe_tasks > 0
            and evaluation.validation_steps == 0
            and len(config.stage_names) > 1,
            f"kl_probe_tasks: got {evaluation.kl_probe_tasks}, but the KL of learned domains is "
            "measured in validations, and validation_steps is 0",
        ),
        (
            data.skip_long_tasks and not (data.tasks or data.eval_tasks),
            "skip_long_tasks: has no effect without tasks or eval_tasks",
        ),
    ]
    used = ",".join(data.domains)
    rows += [
        (
            name not in data.domains,
            f"environments: {name} is not used; add {name} to domains {used}",
        )
        for name in data.environments
    ]
    rows += [
        (config.rollout.sampler != sampler, f"{name}: has no effect without sampler {sampler}")
        for sampler in SAMPLERS
        for name in changed(config.rollout)
        if name.startswith(f"{sampler}_")
    ]
    inexact = " or ".join(name for name, facts in SAMPLERS.items() if not facts.is_exact)
    rows += [
        (
            config.rollout.sampler_facts.is_exact,
            f"{name}: has no effect without sampler {inexact}",
        )
        for name in changed(config.grpo)
        if name.startswith("vllm_importance_sampling_")
    ]
    return [line for has_no_effect, line in rows if has_no_effect]


def _environments(config: Config) -> Rows:
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
                not IMPORT_STRING.fullmatch(setting.factory),
                f"environments: got {name}: {setting.factory!r}; write module:Class, such as "
                "my_pkg.bank:BankEnvironment",
            ),
        )
        taken.add(lower)


def _endpoints(config: Config) -> Rows:
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
    found = BASE_URL.fullmatch(url)
    return found is not None and 1 <= int(found["port"] or 80) <= 65535


def _rewards(config: Config) -> Rows:
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


def _names(config: Config) -> Rows:
    data = config.data
    curriculum = config.curriculum
    known = list(known_domains(config))
    used = data.domains
    stages = list(dict.fromkeys([*known, *JOINT_STAGES, *config.stage_names]))
    scales = config.grpo.domain_advantage_scale
    of_run = "domains of the run, as `domains` lists them"
    yield from ((True, _unknown_domain(name, known)) for name in used if name not in known)
    for setting, given, choices, kind in (
        ("tasks", data.tasks, used, of_run),
        ("eval_tasks", data.eval_tasks, used, of_run),
        ("demonstrations", data.demonstrations, used, of_run),
        ("order", curriculum.order, used, of_run),
        ("domain_weights", curriculum.domain_weights, known, "domains"),
        ("family_shares", curriculum.family_shares, known, "domains"),
        ("domain_advantage_scale", scales, known, "domains"),
        ("stage_weights", curriculum.stage_weights, stages, "stages"),
        ("stage_steps", curriculum.stage_steps, config.stage_names, "stages"),
        ("stage_tasks", curriculum.stage_tasks, config.stage_names, "stages"),
    ):
        hint = f"name {kind} ({', '.join(choices)})"
        yield from ((name not in choices, f"{setting}: got {name!r}; {hint}") for name in given)
    for setting, names in (("domains", used), ("difficulties", curriculum.difficulties)):
        is_double = len(set(names)) < len(names)
        yield is_double, f"{setting}: got {','.join(names)}; name each once"


def _unknown_domain(name: str, known: Sequence[str]) -> str:
    offered = [*known, *sorted(installed_domains().names - {*known})]
    near = nearest(name, offered)
    hint = "install its package, or give its class in `environments`, or its `tasks` with"
    hint += f" `reward_funcs`; did you mean {near}?" if near else " `reward_funcs`"
    return f"domains: got {name!r}; name known domains ({', '.join(offered)}), {hint}"


def _curriculum(config: Config) -> Rows:
    curriculum = config.curriculum
    stages = config.stage_names
    return [
        (
            bool(curriculum.order) and curriculum.is_joint,
            f"order: got {','.join(curriculum.order)} with curriculum {curriculum.curriculum}, "
            "whose stage holds all domains; take one of the two out",
        ),
        (
            curriculum.replay + curriculum.preview >= 1,
            f"preview: got {curriculum.preview:g}, with replay {curriculum.replay:g}; leave groups "
            "to each stage's own domain: a sum below 1",
        ),
        *(
            (
                sum(shares.values()) > 1 + 1e-9,
                f"family_shares: {domain}: got the sum {sum(shares.values()):g}; give at most 1",
            )
            for domain, shares in curriculum.family_shares.items()
        ),
        *(
            (
                stage in curriculum.stage_steps,
                f"stage_tasks: got {stage}, as stage_steps has; give one",
            )
            for stage in curriculum.stage_tasks
        ),
        (
            curriculum.plateau_patience > 0 and not config.evaluation.validation_steps,
            "plateau_patience: give validation_steps more than 0, or take it out",
        ),
        *(
            (
                stages.count(stage) > 1,
                f"order: two stages are called {stage}; rename that domain",
            )
            for stage in stages
        ),
    ]


def _loss(config: Config) -> Rows:
    grpo = config.grpo
    high = grpo.upper_clip
    least = grpo.vllm_importance_sampling_clip_min
    most = grpo.vllm_importance_sampling_clip_max
    return [
        (
            high < grpo.epsilon,
            f"epsilon_high: got {high}, below epsilon {grpo.epsilon}; give epsilon, more, or null",
        ),
        (
            grpo.loss_type == "cispo" and high < 1,
            f"epsilon_high: got {high}, the largest ratio of cispo; give 1 or more, such as 5",
        ),
        *(
            (name in changed(grpo), f"{name}: not used by loss_type {grpo.loss_type}; take it out")
            for name in LOSSES[grpo.loss_type]
        ),
        (
            grpo.delta is not None and grpo.delta <= 1 + high,
            f"delta: got {grpo.delta}; give more than 1 + epsilon_high, {1 + high}",
        ),
        (
            least is not None and most is not None and least >= most,
            f"vllm_importance_sampling_clip_min: got {least}, with "
            f"vllm_importance_sampling_clip_max {most}; give less, or null",
        ),
        (
            grpo.dynamic_sampling and not grpo.drop_zero_std_groups,
            "drop_zero_std_groups: false contradicts dynamic_sampling; take one of the two out",
        ),
        (
            grpo.shard == "full" and config.run.deterministic,
            "shard: got full with deterministic, whose sums are of whole gradients; give optimizer "
            "or none",
        ),
        (
            grpo.scale_lr != "none" and grpo.reference_tasks_per_step is None,
            f"scale_lr: got {grpo.scale_lr} without reference_tasks_per_step; give the "
            "tasks_per_step that learning_rate was chosen for",
        ),
    ]


def _run(config: Config) -> Rows:
    data = config.data
    rollout = config.rollout
    run = config.run
    attention = config.model.attn_implementation
    num_steps = config.grpo.max_steps if config.grpo.use_grpo else 0
    return [
        (
            config.model.model == "tiny" and attention not in ("sdpa", "eager"),
            f"attn_implementation: got {attention!r}; give sdpa or eager to the tiny model",
        ),
        (
            data.eval_split == "base" and bool(generated_domains(config)),
            "eval_split: got base, which generated tasks do not have; give test or validation",
        ),
        (
            data.eval_split == "base" and (config.grpo.use_grpo or config.is_supervised),
            "eval_split: got base, which has training tasks; give it to evaluate, or give test",
        ),
        (
            rollout.max_tokens <= rollout.max_tokens_per_turn,
            f"max_tokens: got {rollout.max_tokens}, with max_tokens_per_turn "
            f"{rollout.max_tokens_per_turn}; give an episode (prompt included) more than one turn",
        ),
        (
            rollout.max_repeated_calls == 1,
            "max_repeated_calls: got 1, which ends all episodes at a call; give 2 or more, or 0",
        ),
        *(
            (
                step > num_steps,
                f"profile: got step {step}, but {num_steps} are trained; name steps from 1 on",
            )
            for step in run.profile
        ),
        (
            not (config.evaluation.eval_on_start or config.grpo.use_grpo),
            "eval_on_start: got false for a run that only evaluates; take it out",
        ),
        (
            run.keep_best and not config.evaluation.validation_steps,
            "keep_best: needs validations; give validation_steps more than 0, or take it out",
        ),
        (
            bool(run.plan) and not run.check,
            f"plan: got {','.join(map(str, run.plan))} for a run; give check with it, or take it "
            "out",
        ),
        (
            bool(run.plan) and num_steps == 0,
            "plan: got ranks for a run without steps of GRPO; set use_grpo and max_steps, or take "
            "plan out",
        ),
        (
            bool(run.plan) and run.deterministic,
            "plan: got ranks with deterministic, whose exchanges it does not count; take one out",
        ),
        (
            run.push_to_hub and run.hub_model_id is None,
            "push_to_hub: needs the repository; give hub_model_id, NAME or ORGANISATION/NAME",
        ),
        (
            not run.doctor and run.timeout <= rollout.call_timeout,
            f"timeout: got {run.timeout:g}, with call_timeout {rollout.call_timeout:g}; give more "
            "than the longest call of an environment",
        ),
    ]
