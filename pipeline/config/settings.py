"""One typed tree of settings: a recipe (YAML) and flags fill it, and nothing else does.

Sections group the settings for reading; every setting has one flat flag (`--learning-rate`), and
the settings of the warm start carry its prefix (`--warm-start-steps`). TRL's names are used where
TRL has one. Nothing is read from environment variables. This module imports no torch.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from pipeline.errors import UserError

DEFAULT_DOMAINS = ("airline", "retail", "telecom")
EMBEDDED_DOMAINS = {  # and their environment classes, as `environments` names one's own
    "airline": "pipeline.embedded.airline:AirlineEnvironment",
    "retail": "pipeline.embedded.retail:RetailEnvironment",
    "telecom": "pipeline.embedded.telecom:TelecomEnvironment",
    "telecom_chat": "pipeline.embedded.telecom_chat:TelecomChatEnvironment",
}
RESERVED_STAGES = ("mixed", "interleaved")
# Of evaluations, and of the metric `reward/mean` of all domains.
RESERVED_NAMES = (*RESERVED_STAGES, "start", "warm_start", "mean")
MAX_NAME = 64  # characters of a domain's name, which is part of file names


class Section(BaseModel):
    """A group of settings: closed, immutable, validated."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_what_pydantic_would_convert(cls, value: Any, info: ValidationInfo) -> Any:
        """`seed: true` is not 1, and an empty text is no model, path or name."""
        assert info.field_name is not None
        wants_bool = cls.model_fields[info.field_name].annotation is bool
        if value == "" or (isinstance(value, bool) and not wants_bool):
            raise PydanticCustomError("wrong_type", "wrong type")
        return value


class ModelSettings(Section):
    """model"""

    model: str = Field("tiny", description="`tiny` (made by the pipeline), a folder, or a hub id")
    trust_remote_code: bool = Field(False, description="run code that comes with the model")
    attn_implementation: str = Field("sdpa", description="attention implementation of transformers")
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="passed to the chat template, e.g. {enable_thinking: false}"
    )
    tool_call_format: Literal["auto", "hermes"] = Field(
        "auto", description="how tool calls are read from the model's text"
    )
    mixed_precision: Literal["auto", "bf16", "no"] = Field(
        "auto", description="auto: bf16 on CUDA, fp32 on CPU"
    )
    use_peft: bool = Field(
        False, description="GRPO trains LoRA adapters on the frozen model, through PEFT"
    )
    lora_r: PositiveInt = Field(16, description="rank of the LoRA matrices")
    lora_alpha: PositiveInt = Field(32, description="LoRA's scale is lora_alpha / lora_r")
    lora_target_modules: list[str] = Field(
        ["all-linear"], description="names of the layers that get LoRA", min_length=1
    )


class DataSettings(Section):
    """tasks"""

    domains: list[str] = Field(
        list(DEFAULT_DOMAINS), description="domains, in the order of the stages", min_length=1
    )
    environments: dict[str, str] = Field(
        {}, description="a domain of your own: {bank: my_pkg.bank:BankEnvironment}"
    )
    tasks_per_domain: PositiveInt = Field(800, description="training tasks of each domain")
    eval_tasks_per_domain: PositiveInt = Field(120, description="held-out tasks of each domain")
    eval_split: Literal["validation", "test"] = Field(
        "test", description="split of the evaluations before and after each stage"
    )
    difficulty: Literal["easy", "medium", "hard"] = Field(
        "medium", description="difficulty of generated tasks"
    )
    task_seed: int = Field(
        0, description="seed of the generated tasks; `seed` does not change them"
    )
    tasks: dict[str, str] = Field(
        {},
        description="training tasks of a domain in place of generated ones: {bank: SOURCE}, a JSON "
        "or JSONL file, or a dataset (a folder or a hub id)",
    )
    dataset_train_split: str = Field("train", description="the split of such a dataset")

    @model_validator(mode="after")
    def _domains_are_known_and_unique(self) -> Self:
        taken = {
            *EMBEDDED_DOMAINS,
            *RESERVED_NAMES,
        }  # in small letters, as some file systems have it
        for name, target in self.environments.items():
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
                raise UserError(
                    f"environments: got the name {name!r}; use letters, digits, _ and - only"
                )
            if len(name) > MAX_NAME:
                raise UserError(
                    f"environments: got a name of {len(name)} characters ({name[:MAX_NAME]}...); "
                    f"use at most {MAX_NAME}"
                )
            if name.lower() in taken or name.lower().startswith("evaluation-"):
                raise UserError(f"environments: got {name}, which is taken; choose another name")
            taken.add(name.lower())
            if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", target):
                raise UserError(
                    f"environments: got {name}: {target!r}; write module:Class, "
                    "such as my_pkg.bank:BankEnvironment"
                )
        known = self.known_domains
        for position, name in enumerate(self.domains):
            if name not in known:
                raise UserError(
                    f"domains: got {name!r}, known are {', '.join(known)}; choose among them "
                    "or name its class in `environments`"
                )
            if name in self.domains[:position]:
                raise UserError(f"domains: got {name} twice; name each domain once")
        for name, source in self.tasks.items():
            if name not in self.domains:
                raise UserError(
                    f"tasks: got {name!r}, which is not among the domains "
                    f"({', '.join(self.domains)}); add it there, or drop its tasks"
                )
            if not source:
                raise UserError(f"tasks: {name}: got ''; give a file, a folder or a hub id")
        return self

    @property
    def import_strings(self) -> dict[str, str]:
        """The environment class, as `module:Class`, of each domain that `domains` may name."""
        return {**EMBEDDED_DOMAINS, **self.environments}

    @property
    def known_domains(self) -> tuple[str, ...]:
        """What `domains` may name: the embedded ones and the user's own."""
        return tuple(self.import_strings)


class WarmStartSettings(Section):
    """warm start (supervised)"""

    steps: NonNegativeInt = Field(440, description="optimizer steps; 0 skips the warm start")
    batch_size: PositiveInt = Field(32, description="demonstrations per step, over all ranks")
    learning_rate: PositiveFloat = Field(2e-3, description="peak learning rate")
    warmup_steps: NonNegativeInt = Field(30, description="steps of linear warm-up")
    rule_share: float = Field(
        0.3, ge=0, le=1, description="how often a demonstration's first decision follows the rule"
    )
    data: Path | None = Field(
        None,
        description="JSONL file of demonstrations ({messages, tools}) in place of the expert's",
    )


class CurriculumSettings(Section):
    """curriculum"""

    curriculum: Literal["sequential", "mixed", "interleaved"] = Field(
        "sequential",
        description="one stage a domain; one stage whose steps hold all domains; one stage whose "
        "steps take the domains in turns",
    )
    order: list[str] = Field(
        [], description="domains of a sequence of stages, repeats allowed; none: `domains`"
    )
    domain_weights: dict[str, PositiveFloat] = Field(
        {}, description="share of each domain in mixed and interleaved stages; missing: 1"
    )
    difficulties: list[Literal["easy", "medium", "hard"]] = Field(
        [],
        description="each stage in parts, one for each of these, such as easy,medium,hard; none: "
        "`difficulty`",
    )
    stage_weights: dict[str, PositiveFloat] = Field(
        {}, description="share of max_steps per stage, relative; missing: 1"
    )
    stage_steps: dict[str, PositiveInt] = Field(
        {}, description="steps of a stage; the other stages share what is left of max_steps"
    )
    stage_tasks: dict[str, PositiveInt] = Field(
        {}, description="the same as a number of tasks, in whole steps of tasks_per_step"
    )
    plateau_patience: NonNegativeInt = Field(
        0,
        description="a stage ends early after so many validations in a row (see eval_steps) whose "
        "success on its own domains is no better than before; 0: never",
    )
    plateau_delta: NonNegativeFloat = Field(
        0.01, description="by how much success must be better for that"
    )
    replay: float = Field(
        0.3, ge=0, lt=1, description="share of each step's groups drawn from earlier domains"
    )


class RolloutSettings(Section):
    """rollout"""

    num_generations: int = Field(8, ge=2, description="episodes of one task, a group")
    tasks_per_step: PositiveInt = Field(24, description="groups per optimizer step over all ranks")
    temperature: PositiveFloat = Field(1.0, description="sampling temperature")
    top_k: NonNegativeInt = Field(
        0,
        description="draw among so many most likely tokens; 0: all. Log-probabilities stay those "
        "of all tokens, so with a limit sampling is slightly off-policy",
    )
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="the same for the fewest most likely tokens that reach this probability",
    )
    max_turns: PositiveInt = Field(8, description="assistant messages per episode")
    max_tokens_per_turn: PositiveInt = Field(40, description="sampled tokens per assistant message")
    max_tokens: PositiveInt = Field(
        256, description="tokens of an episode in all: prompt, replies and sampled"
    )
    max_malformed_calls: NonNegativeInt = Field(
        1, description="malformed calls answered with an error before the episode ends"
    )
    max_tool_result_tokens: PositiveInt = Field(
        64, description="a longer tool result is replaced by an error"
    )
    max_live_episodes: PositiveInt = Field(512, description="episodes a rank plays side by side")
    call_timeout: PositiveFloat = Field(
        120.0,
        description="deadline of each call of an environment, in seconds; past it the episode ends "
        "as environment_error",
    )
    max_error_share: float = Field(
        0.5,
        ge=0,
        le=1,
        description="the run stops where a larger share of a domain's episodes ends as "
        "environment_error; 1: never",
    )

    @model_validator(mode="after")
    def _an_episode_holds_a_turn(self) -> Self:
        if self.max_tokens <= self.max_tokens_per_turn:
            raise UserError(
                f"max_tokens: got {self.max_tokens}, with max_tokens_per_turn "
                f"{self.max_tokens_per_turn}; give an episode (prompt included) more than one turn"
            )
        return self


class GRPOSettings(Section):
    """GRPO"""

    use_grpo: bool = Field(True, description="--no-grpo: evaluate only")
    max_steps: NonNegativeInt = Field(120, description="steps in total, over all stages")
    learning_rate: PositiveFloat = Field(3e-4, description="peak learning rate")
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = Field(
        "linear", description="decay over each stage's steps, to lr_end_share"
    )
    lr_end_share: float = Field(
        0.1, ge=0, le=1, description="share of the peak learning rate at a stage's end"
    )
    warmup_steps: NonNegativeInt = Field(5, description="steps of linear warm-up of each stage")
    scale_lr: Literal["none", "linear", "sqrt"] = Field(
        "none", description="how learning_rate grows with tasks_per_step / reference_tasks_per_step"
    )
    reference_tasks_per_step: PositiveInt | None = Field(
        None, description="the tasks_per_step that learning_rate was chosen for"
    )
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="AdamW")
    adam_beta2: float = Field(0.98, ge=0, lt=1, description="AdamW")
    weight_decay: NonNegativeFloat = Field(0.0, description="AdamW")
    max_grad_norm: PositiveFloat = Field(1.0, description="gradient clipping, global norm")
    max_skipped_steps: NonNegativeInt = Field(
        3,
        description="steps in a row that may be skipped because the loss or gradient is not finite",
    )
    beta: NonNegativeFloat = Field(
        0.0, description="weight of the KL divergence (k3) to the reference policy; 0 needs none"
    )
    use_bias_correction_kl: bool = Field(
        False, description="multiply that divergence by the ratio (DeepSeek-V3.2)"
    )
    sync_ref_model: bool = Field(
        False, description="the policy at each stage's start becomes the reference policy"
    )
    epsilon: PositiveFloat = Field(0.2, description="lower clip of the ratio")
    epsilon_high: PositiveFloat | None = Field(
        0.28, description="upper clip of the ratio; null: epsilon. cispo: the largest ratio itself"
    )
    delta: PositiveFloat | None = Field(
        None, description="bound of the ratio also where the advantage is negative; null: none"
    )
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo"] = Field(
        "dapo", description="the loss and its normalisation, as in TRL"
    )
    importance_sampling_level: Literal["token", "sequence"] = Field(
        "token", description="a ratio per token, or one per episode (GSPO)"
    )
    scale_rewards: Literal["group", "batch", "none"] = Field(
        "group", description="what advantages are divided by"
    )
    domain_advantage_scale: dict[str, PositiveFloat] = Field(
        {}, description="multiplies the advantages of a domain's episodes; missing: 1"
    )
    num_iterations: PositiveInt = Field(1, description="updates per batch of trajectories")
    entropy_coef: NonNegativeFloat = Field(0.005, description="weight of the entropy bonus")
    max_tokens_per_microbatch: PositiveInt = Field(
        2048, description="tokens of one forward pass, padding included"
    )
    padding_free: bool = Field(
        False, description="join the sequences of a forward pass in one row instead of padding them"
    )
    share_prefixes: bool = Field(
        True,
        description="compute once what episodes have in common from their start, such as the "
        "prompt; with attn_implementation sdpa, without padding_free",
    )
    balance_ranks: bool = Field(
        True, description="groups move from ranks with more tokens to train on to ranks with fewer"
    )
    shard_optimizer: bool = Field(
        False, description="each rank keeps a share of AdamW's moments (ZeroRedundancyOptimizer)"
    )
    gradient_checkpointing: bool = Field(
        False, description="recompute activations in the backward pass: less memory, more time"
    )
    drop_dead_groups: bool = Field(
        True, description="groups whose rewards are all equal take no part in the update"
    )
    dynamic_sampling: bool = Field(
        False, description="play other tasks in place of groups whose rewards are all equal (DAPO)"
    )
    max_resample_times: PositiveInt = Field(
        3, description="rounds of such replacements in a step, at most"
    )
    permute_rewards: bool = Field(
        False, description="control: permute the rewards among the episodes of each step"
    )
    logprob_gap_limit: PositiveFloat | None = Field(
        None,
        description="warn where sampler and training differ by more (train/logprob_gap); "
        "null: 1e-3 in fp32, 0.5 in bf16",
    )

    @property
    def upper_clip(self) -> float:
        """`epsilon_high`, which is `epsilon` where it is null."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @model_validator(mode="after")
    def _the_clips_fit_the_loss(self) -> Self:
        if self.upper_clip < self.epsilon:
            raise UserError(
                f"epsilon_high: got {self.epsilon_high}, below epsilon {self.epsilon}; "
                "give epsilon or more, or null"
            )
        if self.loss_type == "cispo" and self.upper_clip < 1:
            raise UserError(
                f"epsilon_high: got {self.upper_clip}, which with loss_type cispo is the largest "
                "ratio; give 1 or more, such as 5"
            )
        if self.delta is not None and self.loss_type == "cispo":
            raise UserError("delta: not used by loss_type cispo; take it out")
        if self.delta is not None and self.delta <= 1 + self.upper_clip:
            raise UserError(
                f"delta: got {self.delta}; give more than 1 + epsilon_high, {1 + self.upper_clip}"
            )
        return self

    @model_validator(mode="after")
    def _replaced_groups_are_dropped(self) -> Self:
        if self.dynamic_sampling and not self.drop_dead_groups:
            raise UserError(
                "drop_dead_groups: got false with dynamic_sampling, which trains on others in "
                "their place; take one of the two out"
            )
        return self

    @model_validator(mode="after")
    def _the_learning_rate_can_be_scaled(self) -> Self:
        if self.scale_lr != "none" and self.reference_tasks_per_step is None:
            raise UserError(
                f"scale_lr: got {self.scale_lr} without reference_tasks_per_step; "
                "give the tasks_per_step that learning_rate was chosen for"
            )
        return self


class EvaluationSettings(Section):
    """evaluation"""

    eval_trials: PositiveInt = Field(2, description="sampled trials per held-out task")
    success_threshold: float = Field(
        1.0,
        allow_inf_nan=False,
        description="the reward from which an episode counts as a success",
    )
    eval_steps: NonNegativeInt = Field(
        25, description="evaluate on validation tasks every so many steps; 0: never"
    )
    anchor_tasks: NonNegativeInt = Field(
        16,
        description="validation tasks of each learned domain on which those evaluations estimate "
        "how far the policy has moved since (KL); 0: none",
    )
    eval_steps_tasks: PositiveInt = Field(
        20, description="validation tasks of each domain in those evaluations"
    )


class RunSettings(Section):
    """run"""

    num_gpus: PositiveInt | None = Field(
        None, description="number of ranks; missing: what was launched, or 1"
    )
    seed: NonNegativeInt = Field(1, description="seed of the model, the warm start and every draw")
    output_dir: Path | None = Field(None, description="run folder; missing: runs/<recipe>-<time>")
    save_steps: NonNegativeInt = Field(
        50, description="checkpoint every so many steps; 0: at stage ends only"
    )
    save_minutes: PositiveFloat | None = Field(
        None, description="checkpoint also when the last one is so many minutes old; null: never"
    )
    save_total_limit: PositiveInt = Field(
        2, description="checkpoints inside stages kept; those of stages' ends always are"
    )
    resume_from_checkpoint: str | None = Field(
        None,
        description="`latest` of this output folder, one of its checkpoints by name or path, or "
        "`auto`: the latest if there is one, else a fresh start",
    )
    override: bool = Field(
        False, description="resume with settings that are not those of the checkpoint"
    )
    timeout: PositiveFloat = Field(
        600.0,
        description="deadline of every collective, and of any rank without a sign of progress, in "
        "seconds",
    )
    deterministic: bool = Field(
        False,
        description="the same tokens on any number of CPU ranks, bit by bit; several times slower",
    )
    profile: list[PositiveInt] = Field(
        [], description="steps of which each rank writes a trace of torch.profiler; `none` for none"
    )
    doctor: bool = Field(
        False, description="check the ranks, their links and this machine in a minute, then exit"
    )
    check: bool = Field(False, description="check recipe, tasks, template and memory, then exit")


class TrackingSettings(Section):
    """tracking"""

    report_to: list[Literal["wandb", "tensorboard"]] = Field(
        ["wandb"], description="trackers besides the files; `none` for none"
    )
    project: str = Field("three-domain-grpo", description="W&B project")
    run_name: str | None = Field(None, description="W&B run name; missing: the run folder's name")
    tags: list[str] = Field([], description="W&B tags")


class Config(Section):
    """The resolved settings of one run."""

    recipe: str = Field("three_domain_tiny", description="name of the recipe, for the run folder")
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    warm_start: WarmStartSettings = WarmStartSettings()
    curriculum: CurriculumSettings = CurriculumSettings()
    rollout: RolloutSettings = RolloutSettings()
    grpo: GRPOSettings = GRPOSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    run: RunSettings = RunSettings()
    tracking: TrackingSettings = TrackingSettings()

    @model_validator(mode="after")
    def _the_curriculum_names_domains_and_stages(self) -> Self:
        curriculum, data = self.curriculum, self.data
        stages = (*data.known_domains, *RESERVED_STAGES)
        stages += tuple(name for name in self.stage_names if name not in stages)
        for setting in ("stage_weights", "stage_steps", "stage_tasks"):
            for name in getattr(curriculum, setting):
                if name not in stages:
                    raise UserError(f"{setting}: got {name!r}; name stages ({', '.join(stages)})")
        for setting in ("order", "domain_weights"):
            for name in getattr(curriculum, setting):
                known = data.domains if setting == "order" else data.known_domains
                if name not in known:
                    raise UserError(
                        f"{setting}: got {name!r}; name domains of the run ({', '.join(known)})"
                    )
        if curriculum.order and curriculum.curriculum != "sequential":
            raise UserError(
                f"order: got {','.join(curriculum.order)} with curriculum {curriculum.curriculum}, "
                "whose stage holds all domains; take one of the two out"
            )
        if both := set(curriculum.stage_steps) & set(curriculum.stage_tasks):
            raise UserError(f"stage_tasks: got {min(both)}, as stage_steps has; give one")
        if curriculum.plateau_patience and not self.evaluation.eval_steps:
            raise UserError(
                "plateau_patience: needs validations; give eval_steps more than 0, or take it out"
            )
        if len(set(curriculum.difficulties)) < len(curriculum.difficulties):
            raise UserError("difficulties: got one twice; name each once")
        self._refuse_unclear_stages()
        return self

    def _refuse_unclear_stages(self) -> None:
        names = self.stage_names
        if double := [name for name in names if names.count(name) > 1]:
            raise UserError(
                f"order: two stages would be called {double[0]}; give that domain another name"
            )
        for setting in ("stage_steps", "stage_tasks"):
            for name in getattr(self.curriculum, setting):
                if name in self.data.domains and name not in names:
                    raise UserError(
                        f"{setting}: got {name!r}, which is no stage of this curriculum; name "
                        f"stages ({', '.join(names)})"
                    )

    @model_validator(mode="after")
    def _advantages_are_scaled_for_known_domains(self) -> Self:
        for name in self.grpo.domain_advantage_scale:
            if name not in self.data.known_domains:
                known = ", ".join(self.data.known_domains)
                raise UserError(f"domain_advantage_scale: got {name!r}; name domains ({known})")
        return self

    @property
    def stage_names(self) -> list[str]:
        """The stages in order: `airline`, a second time `airline-2`; `airline-easy`; `mixed`."""
        curriculum = self.curriculum
        names: list[str] = [curriculum.curriculum]
        if curriculum.curriculum == "sequential":
            order = curriculum.order or self.data.domains
            times = [order[: index + 1].count(name) for index, name in enumerate(order)]
            names = [n if t == 1 else f"{n}-{t}" for n, t in zip(order, times, strict=True)]
        parts = [f"-{difficulty}" for difficulty in curriculum.difficulties] or [""]
        return [f"{name}{part}" for name in names for part in parts]

    @model_validator(mode="after")
    def _profiled_steps_are_trained(self) -> Self:
        num_steps = self.grpo.max_steps if self.grpo.use_grpo else 0
        beyond = [step for step in self.run.profile if step > num_steps]
        if beyond:
            raise UserError(
                f"profile: got step {beyond[0]}, but {num_steps} are trained; name steps from 1 on"
            )
        return self

    @model_validator(mode="after")
    def _a_call_ends_before_its_rank_is_given_up(self) -> Self:
        if not self.run.doctor and self.run.timeout <= self.rollout.call_timeout:
            raise UserError(
                f"timeout: got {self.run.timeout:g}, with call_timeout "
                f"{self.rollout.call_timeout:g}, so that one slow call of an environment would end "
                "the run; give timeout more than call_timeout"
            )
        return self

    @property
    def peak_learning_rate(self) -> float:
        """`grpo.learning_rate`, scaled to the step's number of tasks; ranks play no part.

        `linear` after Goyal et al. 2017 (arXiv 1706.02677, section 2.1), `sqrt` after Krizhevsky
        2014 (arXiv 1404.5997, section 5) and, for Adam, Malladi et al. 2022 (arXiv 2205.10287).
        """
        if self.grpo.scale_lr == "none":
            return self.grpo.learning_rate
        assert self.grpo.reference_tasks_per_step is not None
        factor = self.rollout.tasks_per_step / self.grpo.reference_tasks_per_step
        return self.grpo.learning_rate * (factor if self.grpo.scale_lr == "linear" else factor**0.5)
