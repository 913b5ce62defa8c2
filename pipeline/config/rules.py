"""Checks of settings against each other. Each error names the setting, its value and a remedy."""

from __future__ import annotations

import re
from collections.abc import Iterable

from pipeline.config.settings import EMBEDDED_DOMAINS, Config
from pipeline.errors import UserError

JOINT_STAGES = ("mixed", "interleaved")
# Names of evaluations, and of the metric `reward/mean` over all domains.
RESERVED_NAMES = (*JOINT_STAGES, "start", "warm_start", "mean")


def check(config: Config) -> None:
    """Raise UserError for the first contradiction."""
    _check_environments(config.data.environments)
    _check_names(config)
    _check_curriculum(config)
    _check_loss(config)
    rollout, run = config.rollout, config.run
    if rollout.max_tokens <= rollout.max_tokens_per_turn:
        raise UserError(
            f"max_tokens: got {rollout.max_tokens}, with max_tokens_per_turn "
            f"{rollout.max_tokens_per_turn}; give an episode (prompt included) more than one turn"
        )
    num_steps = config.grpo.max_steps if config.grpo.use_grpo else 0
    if late := [step for step in run.profile if step > num_steps]:
        raise UserError(
            f"profile: got step {late[0]}, but {num_steps} are trained; name steps from 1 on"
        )
    if not run.doctor and run.timeout <= rollout.call_timeout:
        raise UserError(
            f"timeout: got {run.timeout:g}, with call_timeout {rollout.call_timeout:g}, so that "
            "one slow call of an environment would end the run; give timeout more than call_timeout"
        )


def _check_environments(environments: dict[str, str]) -> None:
    taken = {*EMBEDDED_DOMAINS, *RESERVED_NAMES}  # in lower case: some file systems ignore case
    for name, target in environments.items():
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", name):
            raise UserError(
                f"environments: got the name {name[:100]!r}; "
                "use letters, digits, _ and - only, at most 64"
            )
        if name.lower() in taken or name.lower().startswith("evaluation-"):
            raise UserError(f"environments: got {name}, which is taken; choose another name")
        taken.add(name.lower())
        if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", target):
            raise UserError(
                f"environments: got {name}: {target!r}; write module:Class, "
                "such as my_pkg.bank:BankEnvironment"
            )


def _check_names(config: Config) -> None:
    data, curriculum = config.data, config.curriculum
    known, used = list(data.import_strings), data.domains
    stages = list(dict.fromkeys([*known, *JOINT_STAGES, *config.stage_names]))
    names: list[tuple[str, Iterable[str], list[str], str]] = [
        ("domains", used, known, "known domains, or its class in `environments`"),
        ("tasks", data.tasks, used, "domains of the run"),
        ("order", curriculum.order, used, "domains of the run"),
        ("domain_weights", curriculum.domain_weights, known, "domains"),
        ("domain_advantage_scale", config.grpo.domain_advantage_scale, known, "domains"),
        ("stage_weights", curriculum.stage_weights, stages, "stages"),
        ("stage_steps", curriculum.stage_steps, stages, "stages"),
        ("stage_tasks", curriculum.stage_tasks, stages, "stages"),
    ]
    for setting, given, choices, kind in names:
        for name in given:
            if name not in choices:
                raise UserError(f"{setting}: got {name!r}; name {kind} ({', '.join(choices)})")
    for setting, given in (("domains", used), ("difficulties", curriculum.difficulties)):
        if len(set(given)) < len(given):
            raise UserError(f"{setting}: got {','.join(given)}; name each once")
    for name, source in data.tasks.items():
        if not source:
            raise UserError(f"tasks: {name}: got ''; give a file, a folder or a hub id")


def _check_curriculum(config: Config) -> None:
    curriculum, stages = config.curriculum, config.stage_names
    if curriculum.order and curriculum.curriculum != "sequential":
        raise UserError(
            f"order: got {','.join(curriculum.order)} with curriculum {curriculum.curriculum}, "
            "whose stage holds all domains; take one of the two out"
        )
    if both := set(curriculum.stage_steps) & set(curriculum.stage_tasks):
        raise UserError(f"stage_tasks: got {min(both)}, as stage_steps has; give one")
    if curriculum.plateau_patience and not config.evaluation.eval_steps:
        raise UserError("plateau_patience: give eval_steps more than 0, or take it out")
    if doubles := [name for name in stages if stages.count(name) > 1]:
        raise UserError(f"order: two stages are called {doubles[0]}; rename that domain")
    for name in (*curriculum.stage_steps, *curriculum.stage_tasks):
        if name in config.data.domains and name not in stages:
            setting = "stage_steps" if name in curriculum.stage_steps else "stage_tasks"
            raise UserError(
                f"{setting}: got {name!r}, which is no stage of this curriculum; name stages "
                f"({', '.join(stages)})"
            )


def _check_loss(config: Config) -> None:
    grpo = config.grpo
    if grpo.upper_clip < grpo.epsilon:
        raise UserError(
            f"epsilon_high: got {grpo.epsilon_high}, below epsilon {grpo.epsilon}; "
            "give epsilon or more, or null"
        )
    if grpo.loss_type == "cispo" and grpo.upper_clip < 1:
        raise UserError(
            f"epsilon_high: got {grpo.upper_clip}, which with loss_type cispo is the largest "
            "ratio; give 1 or more, such as 5"
        )
    if grpo.delta is not None and grpo.loss_type == "cispo":
        raise UserError("delta: not used by loss_type cispo; take it out")
    if grpo.delta is not None and grpo.delta <= 1 + grpo.upper_clip:
        raise UserError(
            f"delta: got {grpo.delta}; give more than 1 + epsilon_high, {1 + grpo.upper_clip}"
        )
    if grpo.dynamic_sampling and not grpo.drop_zero_std_groups:
        raise UserError(
            "drop_zero_std_groups: got false with dynamic_sampling, which replaces such groups; "
            "take one of the two out"
        )
    if grpo.scale_lr != "none" and grpo.reference_tasks_per_step is None:
        raise UserError(
            f"scale_lr: got {grpo.scale_lr} without reference_tasks_per_step; "
            "give the tasks_per_step that learning_rate was chosen for"
        )
