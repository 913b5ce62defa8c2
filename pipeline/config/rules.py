"""Finds contradictions between settings. Each error names a setting, its value and a remedy."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.config.section import Section
from pipeline.config.settings import EMBEDDED_DOMAINS, Config
from pipeline.config.urls import mistake_of
from pipeline.errors import UserError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
JOINT_STAGES = ("mixed", "interleaved")
IMPORT_STRING = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
# No domain may have a name that evaluations or metrics use.
RESERVED_NAMES = (*JOINT_STAGES, "start", "warm_start", "rft", "mean", "agent")


def reward_names(functions: Sequence[str]) -> list[str]:
    """Return the names of reward functions in metrics: `function`, or else `module:function`."""
    names = [target.rpartition(":")[2] for target in functions]
    return [n if names.count(n) == 1 else t for n, t in zip(names, functions, strict=True)]


def check(config: Config) -> None:
    """Raise UserError for the first contradiction between settings."""
    rules = _model, _environments, _endpoints, _customer, _rewards, _names, _curriculum, _loss, _run
    for rule in rules:
        for mistake in rule(config):
            raise UserError(mistake)


def refuse_placeholders(config: Config) -> None:
    """Raise UserError for a recipe's placeholder where a run, but no check, needs a server."""
    data = config.data
    evaluation = config.evaluation
    urls = {"customer": data.customer_url, "judge": data.judge_url, "agent": evaluation.agent_url}
    for role, url in urls.items():
        name = f"{role}_url"
        if "://HOST" in (url or ""):
            raise UserError(f"{name}: got {url}; give the server's name in place of HOST")


def left_out(config: Config) -> Iterator[str]:
    """Yield a line for each setting without effect, such as an environment of no domain."""
    run = config.run
    is_trained = config.grpo.use_grpo
    if run.push_to_hub and not is_trained:
        yield "push_to_hub: nothing is trained, so nothing is uploaded"
    if run.keep_best and not is_trained:
        yield "keep_best: nothing is trained, so there is no checkpoint to keep"
    if config.rft.rft_rounds and not is_trained:
        yield "rft_rounds: nothing is trained, so there is no rejection fine-tuning"
    if run.hub_model_id and not run.push_to_hub and is_trained:
        yield "hub_model_id: has no effect without push_to_hub"
    domains = config.data.domains
    data = config.data
    for name in ("tau2_reward", "tau2_refuel_consent") if data.tau2 is None else ():
        if getattr(data, name) != type(data).model_fields[name].default:
            yield f"{name}: has no effect without tau2"
    if data.skip_long_tasks and not (data.tasks or data.eval_tasks):
        yield "skip_long_tasks: has no effect without tasks or eval_tasks"
    for name in config.data.environments:
        if name not in domains:
            yield f"environments: {name} is not used; add {name} to domains {','.join(domains)}"


def _model(config: Config) -> Iterator[str]:
    attention = config.model.attn_implementation
    if config.model.model == "tiny" and attention not in ("sdpa", "eager"):
        yield f"attn_implementation: got {attention!r}; give sdpa or eager to the tiny model"


def _environments(config: Config) -> Iterator[str]:
    taken = {*EMBEDDED_DOMAINS, *RESERVED_NAMES}  # in lower case: some file systems ignore the case
    for name, setting in config.data.own_domains.items():
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", name):
            hint = "use letters, digits, _ and - only, at most 64"
            yield f"environments: got the name {name[:100]!r}; {hint}"
        if name.lower() in taken or name.lower().startswith(("evaluation-", "rft-")):
            yield f"environments: got {name}, which is taken; choose another name"
        taken.add(name.lower())
        if not IMPORT_STRING.fullmatch(setting.factory):
            hint = "write module:Class, such as my_pkg.bank:BankEnvironment"
            yield f"environments: got {name}: {setting.factory!r}; {hint}"


def _endpoints(config: Config) -> Iterator[str]:
    data = config.data
    evaluation = config.evaluation
    given = f"with customer {data.customer}"
    remedy = "give customer llm"
    yield from _endpoint(data, "customer", data.customer == "llm", given, remedy)
    is_judged = data.judge_url is not None
    given = "without judge_url"
    yield from _endpoint(data, "judge", is_judged, given, "give judge_url")
    is_official = data.tau2 is not None and data.tau2_reward == "official"
    if is_judged and not (is_official or data.reward_funcs):
        hint = "give tau2 and tau2_reward official, or a reward function that asks it"
        yield f"judge_url: got {data.judge_url}; {hint}, or take it out"
    is_agent = evaluation.agent_url is not None
    given = "without agent_url"
    yield from _endpoint(evaluation, "agent", is_agent, given, "give agent_url")


def _endpoint(part: Section, role: str, is_used: bool, given: str, remedy: str) -> Iterator[str]:
    """Yield contradictions between the settings of a language model behind an endpoint."""
    default = type(part)()
    url = getattr(part, f"{role}_url")
    key = getattr(part, f"{role}_key")
    if not is_used:
        for name in (n for n in type(part).model_fields if f"{role}_" in n):
            if (value := getattr(part, name)) != getattr(default, name):
                why = f"{value}, {given}, which calls no endpoint"
                yield f"{name}: got {why}; {remedy}, or take it out"
        return
    for name in (n for n in (f"{role}_url", f"{role}_model") if not getattr(part, n)):
        who = "customer llm" if role == "customer" else f"the {role}"
        yield f"{name}: {who} needs it; give the endpoint's URL and its model's name"
    if mistake := mistake_of(str(url)):
        hint = "give the base URL of an OpenAI-compatible server, such as http://HOST:8000/v1"
        yield f"{role}_url: got {url!r}; {mistake}; {hint}"
    if key != getattr(default, f"{role}_key") and key not in os.environ:
        yield f"{role}_key: got {key}, which is not set; set the variable"


def _customer(config: Config) -> Iterator[str]:
    data = config.data
    scripted = [n for n in data.domains if n in ("airline", "retail") and data.tau2 is not None]
    if data.customer == "scripted" and scripted != data.domains:
        hint = "it is for airline and retail with tau2; name these domains, or give ticket or llm"
        yield f"customer: got scripted for {','.join(data.domains)}; {hint}"
    if data.eval_split == "base" and data.tau2 is None:
        yield "eval_split: got base, which the domains of tau2 have alone; give test or validation"
    if data.eval_split == "base" and (config.grpo.use_grpo or config.is_supervised):
        yield "eval_split: got base, which has training tasks; give it to evaluate, or give test"


def _rewards(config: Config) -> Iterator[str]:
    functions = config.data.reward_funcs
    weights = config.data.reward_weights
    for target in functions:
        if not IMPORT_STRING.fullmatch(target):
            hint = "write module:function, such as my_pkg.rewards:correct"
            yield f"reward_funcs: got {target!r}; {hint}"
        if functions.count(target) > 1:
            yield f"reward_funcs: got {target} twice; take one out"
    if weights and len(weights) != len(functions):
        given = f"{len(weights)} weights for {len(functions)} reward_funcs"
        yield f"reward_weights: got {given}; give one for each"


def _names(config: Config) -> Iterator[str]:
    data = config.data
    curriculum = config.curriculum
    known = list(data.factories)
    used = data.domains
    stages = list(dict.fromkeys([*known, *JOINT_STAGES, *config.stage_names]))
    scales = config.grpo.domain_advantage_scale
    own = "known domains, or give its class in `environments`, or its `tasks` with `reward_funcs`"
    of_run = "domains of the run, as `domains` lists them"
    for setting, given, choices, kind in (
        ("domains", used, known, own),
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
        for name in [*given]:
            if name not in choices:
                hint = f"name {kind} ({', '.join(choices)})"
                yield f"{setting}: got {name!r}; {_example(name) if choices is known else ''}{hint}"
    for setting, names in (("domains", used), ("difficulties", curriculum.difficulties)):
        if len(set(names)) < len(names):
            yield f"{setting}: got {','.join(names)}; name each once"


def _example(name: str) -> str:
    """Return how to use the example of a domain that is not embedded, or an empty text."""
    file = EXAMPLES / f"{name}.py"
    if not (name.isidentifier() and file.is_file()):
        return ""
    found = re.search(r"^class (\w*Environment)\b", file.read_text(encoding="utf-8"), re.MULTILINE)
    environment = found[1] if found else "CLASS"
    target = f"{{{name}: 'examples.{name}:{environment}'}}"
    return f'examples/{name}.py is such a domain: --environments "{target}"; or '


def _curriculum(config: Config) -> Iterator[str]:
    curriculum = config.curriculum
    stages = config.stage_names
    if curriculum.order and curriculum.curriculum != "sequential":
        given = f"{','.join(curriculum.order)} with curriculum {curriculum.curriculum}"
        yield f"order: got {given}, whose stage holds all domains; take one of the two out"
    if curriculum.replay + curriculum.preview >= 1:
        given = f"{curriculum.preview:g}, with replay {curriculum.replay:g}"
        yield f"preview: got {given}; leave groups to each stage's own domain: a sum below 1"
    for domain, shares in curriculum.family_shares.items():
        if (total := sum(shares.values())) > 1 + 1e-9:
            yield f"family_shares: {domain}: got the sum {total:g}; give at most 1"
    if both := curriculum.stage_steps.keys() & curriculum.stage_tasks:
        yield f"stage_tasks: got {min(both)}, as stage_steps has; give one"
    if curriculum.plateau_patience and not config.evaluation.validation_steps:
        yield "plateau_patience: give validation_steps more than 0, or take it out"
    if doubles := [name for name in stages if stages.count(name) > 1]:
        yield f"order: two stages are called {doubles[0]}; rename that domain"


def _loss(config: Config) -> Iterator[str]:
    grpo = config.grpo
    high = config.grpo.upper_clip
    is_cispo = config.grpo.loss_type == "cispo"
    if high < grpo.epsilon:
        yield f"epsilon_high: got {high}, below epsilon {grpo.epsilon}; give epsilon, more, or null"
    if is_cispo and high < 1:
        yield f"epsilon_high: got {high}, the largest ratio of cispo; give 1 or more, such as 5"
    if grpo.delta is not None and is_cispo:
        yield "delta: not used by loss_type cispo; take it out"
    if grpo.delta is not None and grpo.delta <= 1 + high:
        yield f"delta: got {grpo.delta}; give more than 1 + epsilon_high, {1 + high}"
    if grpo.dynamic_sampling and not grpo.drop_zero_std_groups:
        yield "drop_zero_std_groups: false contradicts dynamic_sampling; take one of the two out"
    if grpo.scale_lr != "none" and grpo.reference_tasks_per_step is None:
        hint = "give the tasks_per_step that learning_rate was chosen for"
        yield f"scale_lr: got {grpo.scale_lr} without reference_tasks_per_step; {hint}"


def _run(config: Config) -> Iterator[str]:
    rollout = config.rollout
    run = config.run
    if rollout.max_tokens <= rollout.max_tokens_per_turn:
        given = f"{rollout.max_tokens}, with max_tokens_per_turn {rollout.max_tokens_per_turn}"
        yield f"max_tokens: got {given}; give an episode (prompt included) more than one turn"
    if rollout.max_repeated_calls == 1:
        yield "max_repeated_calls: got 1, which ends all episodes at a call; give 2 or more, or 0"
    num_steps = config.grpo.max_steps if config.grpo.use_grpo else 0
    if late := [step for step in run.profile if step > num_steps]:
        yield f"profile: got step {late[0]}, but {num_steps} are trained; name steps from 1 on"
    if run.keep_best and not config.evaluation.validation_steps:
        yield "keep_best: needs validations; give validation_steps more than 0, or take it out"
    if run.push_to_hub and run.hub_model_id is None:
        yield "push_to_hub: needs the repository; give hub_model_id, NAME or ORGANISATION/NAME"
    if not run.doctor and run.timeout <= rollout.call_timeout:
        given = f"{run.timeout:g}, with call_timeout {rollout.call_timeout:g}"
        yield f"timeout: got {given}; give more than the longest call of an environment"
