"""One typed tree of settings, filled by a recipe (YAML) and by flags.

Sections group the settings for reading. Every setting has one flat flag (`--learning-rate`); the
flags of the warm start have its prefix (`--warm-start-steps`). TRL's names are used where TRL has
one. No setting is read from an environment variable. `rules.py` checks settings against each other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

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
)
from pydantic_core import PydanticCustomError

DEFAULT_DOMAINS = ("airline", "retail", "telecom")
EMBEDDED_DOMAINS = {  # environment classes, in the form of the setting `environments`
    "airline": "pipeline.embedded.airline:AirlineEnvironment",
    "retail": "pipeline.embedded.retail:RetailEnvironment",
    "telecom": "pipeline.embedded.telecom:TelecomEnvironment",
    "telecom_chat": "pipeline.embedded.telecom_chat:TelecomChatEnvironment",
}
MAX_SEED = 2**32 - 1  # the largest seed that NumPy accepts

Share = Annotated[float, Field(ge=0, le=1)]
ShareBelowOne = Annotated[float, Field(ge=0, lt=1)]
Difficulty = Literal["easy", "medium", "hard"]


class Section(BaseModel):
    """A group of settings: closed, immutable, validated."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_conversions(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `seed: true`, which pydantic would read as 1, and empty text."""
        is_switch = cls.model_fields[str(info.field_name)].annotation is bool
        if value == "" or (isinstance(value, bool) and not is_switch):
            raise PydanticCustomError("not_converted", "Input should not be empty, true or false")
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
    use_peft: bool = Field(False, description="train LoRA adapters (PEFT) on the frozen model")
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
    difficulty: Difficulty = Field("medium", description="difficulty of generated tasks")
    task_seed: int = Field(0, description="seed of the generated tasks, which `seed` leaves alone")
    tasks: dict[str, str] = Field(
        {},
        description="training tasks of a domain in place of generated ones: {bank: SOURCE}, a JSON "
        "or JSONL file, or a dataset (a folder or a hub id)",
    )
    dataset_train_split: str = Field("train", description="the split of such a dataset")

    @property
    def import_strings(self) -> dict[str, str]:
        """The environment class, as `module:Class`, of each domain that `domains` may name."""
        return {**EMBEDDED_DOMAINS, **self.environments}


class WarmStartSettings(Section):
    """warm start (supervised)"""

    steps: NonNegativeInt = Field(440, description="optimizer steps; 0 skips the warm start")
    batch_size: PositiveInt = Field(32, description="demonstrations per step, over all ranks")
    learning_rate: PositiveFloat = Field(2e-3, description="peak learning rate")
    warmup_steps: NonNegativeInt = Field(30, description="steps of linear warm-up")
    rule_share: Share = Field(0.3, description="share of demonstrations that begin with the rule")
    data: Path | None = Field(
        None, description="JSONL file of demonstrations ({messages, tools}), not the expert's"
    )


class CurriculumSettings(Section):
    """curriculum"""

    curriculum: Literal["sequential", "mixed", "interleaved"] = Field(
        "sequential",
        description="one stage a domain; one stage whose steps hold all domains; one stage whose "
        "steps take the domains in turns",
    )
    order: list[str] = Field([], description="domain of each stage, with repeats; none: `domains`")
    domain_weights: dict[str, PositiveFloat] = Field(
        {}, description="share of each domain in mixed and interleaved stages; missing: 1"
    )
    difficulties: list[Difficulty] = Field(
        [], description="divides each stage into parts, e.g. easy,medium,hard; none: `difficulty`"
    )
    stage_weights: dict[str, PositiveFloat] = Field(
        {}, description="share of max_steps per stage, relative; missing: 1"
    )
    stage_steps: dict[str, PositiveInt] = Field(
        {}, description="steps of a stage; other stages share the rest of max_steps"
    )
    stage_tasks: dict[str, PositiveInt] = Field(
        {}, description="the same as a number of tasks, in whole steps of tasks_per_step"
    )
    plateau_patience: NonNegativeInt = Field(
        0,
        description="a stage ends early after so many validations in a row (see eval_steps) whose "
        "success on its own domains is no better than before; 0: never",
    )
    plateau_delta: NonNegativeFloat = Field(0.01, description="by how much success must be better")
    replay: ShareBelowOne = Field(0.3, description="share of a step's groups from earlier domains")


class RolloutSettings(Section):
    """rollout"""

    num_generations: int = Field(8, ge=2, description="episodes of one task, a group")
    tasks_per_step: PositiveInt = Field(24, description="groups per optimizer step over all ranks")
    temperature: PositiveFloat = Field(1.0, description="sampling temperature")
    top_k: NonNegativeInt = Field(
        0,
        description="sample among so many most likely tokens; 0: all. Log-probabilities stay those "
        "of all tokens, so with a limit sampling is slightly off-policy",
    )
    top_p: float = Field(1.0, gt=0, le=1, description="likewise, up to this cumulative probability")
    max_turns: PositiveInt = Field(8, description="assistant messages per episode")
    max_tokens_per_turn: PositiveInt = Field(40, description="sampled tokens per assistant message")
    max_tokens: PositiveInt = Field(256, description="tokens of a whole episode, prompt included")
    max_malformed_calls: NonNegativeInt = Field(1, description="malformed calls that get an error")
    max_tool_result_tokens: PositiveInt = Field(64, description="longer tool results become errors")
    max_concurrent_episodes: PositiveInt = Field(
        512, description="episodes a rank plays side by side"
    )
    call_timeout: PositiveFloat = Field(120.0, description="seconds per call of an environment")
    max_error_rate: Share = Field(
        0.5,
        description="the run stops where a larger share of a domain's episodes ends as "
        "environment_error; 1: never",
    )


class GRPOSettings(Section):
    """GRPO"""

    use_grpo: bool = Field(True, description="--no-grpo: evaluate only")
    max_steps: NonNegativeInt = Field(120, description="steps in total, over all stages")
    learning_rate: PositiveFloat = Field(3e-4, description="peak learning rate")
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = Field(
        "linear", description="decay over each stage's steps, to min_lr_rate"
    )
    min_lr_rate: Share = Field(0.1, description="share of the peak rate at a stage's end")
    warmup_steps: NonNegativeInt = Field(5, description="steps of linear warm-up of each stage")
    scale_lr: Literal["none", "linear", "sqrt"] = Field(
        "none", description="how learning_rate grows with tasks_per_step / reference_tasks_per_step"
    )
    reference_tasks_per_step: PositiveInt | None = Field(
        None, description="the tasks_per_step that learning_rate was chosen for"
    )
    adam_beta1: ShareBelowOne = Field(0.9, description="AdamW")
    adam_beta2: ShareBelowOne = Field(0.98, description="AdamW")
    weight_decay: NonNegativeFloat = Field(0.0, description="AdamW")
    max_grad_norm: PositiveFloat = Field(1.0, description="gradient clipping, global norm")
    max_skipped_steps: NonNegativeInt = Field(3, description="non-finite steps skipped in a row")
    beta: NonNegativeFloat = Field(
        0.0, description="weight of the KL divergence (k3) to the reference policy; 0 needs none"
    )
    use_bias_correction_kl: bool = Field(False, description="KL times the ratio (DeepSeek-V3.2)")
    sync_ref_model: bool = Field(False, description="each stage's initial policy is its reference")
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
    max_tokens_per_microbatch: PositiveInt = Field(2048, description="tokens per pass with padding")
    padding_free: bool = Field(False, description="join sequences in one row instead of padding")
    share_prefixes: bool = Field(
        True,
        description="compute common prefixes of episodes, such as the prompt, once; with "
        "attn_implementation sdpa, without padding_free",
    )
    balance_ranks: bool = Field(True, description="even out the ranks' numbers of trained tokens")
    shard_optimizer: bool = Field(False, description="spread AdamW's moments over the ranks")
    gradient_checkpointing: bool = Field(False, description="recompute activations; saves memory")
    drop_zero_std_groups: bool = Field(True, description="train on no group of equal rewards")
    dynamic_sampling: bool = Field(False, description="replace groups of equal rewards (DAPO)")
    max_resample_times: PositiveInt = Field(3, description="most rounds of that in a step")
    permute_rewards: bool = Field(False, description="control: permute the rewards of each step")
    max_sampling_logp_difference: PositiveFloat | None = Field(
        None,
        description="warn if train/sampling_logp_difference_max exceeds it; null: 1e-3 in fp32, "
        "0.5 in bf16",
    )

    @property
    def upper_clip(self) -> float:
        """`epsilon_high`, or `epsilon` if that is null."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


class EvaluationSettings(Section):
    """evaluation"""

    eval_trials: PositiveInt = Field(2, description="sampled trials per held-out task")
    success_threshold: float = Field(1.0, description="the least reward of a success")
    eval_steps: NonNegativeInt = Field(25, description="steps between validations; 0: never")
    kl_probe_tasks: NonNegativeInt = Field(
        16,
        description="validation tasks of each learned domain on which those evaluations estimate "
        "how far the policy has moved since (KL); 0: none",
    )
    eval_steps_tasks: PositiveInt = Field(20, description="tasks of each domain in a validation")


class RunSettings(Section):
    """run"""

    num_gpus: PositiveInt | None = Field(None, description="number of ranks; missing: as launched")
    seed: int = Field(1, ge=0, le=MAX_SEED, description="seed of the model and of every draw")
    output_dir: Path | None = Field(None, description="run folder; missing: runs/<recipe>-<time>")
    save_steps: NonNegativeInt = Field(50, description="steps between checkpoints; 0: stage ends")
    save_minutes: PositiveFloat | None = Field(
        None, description="checkpoint also when the last one is so many minutes old; null: never"
    )
    save_total_limit: PositiveInt = Field(2, description="step checkpoints kept; stage ends always")
    resume_from_checkpoint: str | None = Field(
        None,
        description="`latest` of this output folder, one of its checkpoints by name or path, or "
        "`auto`: the latest if there is one, else a fresh start",
    )
    override: bool = Field(False, description="resume with other settings than the checkpoint's")
    timeout: PositiveFloat = Field(
        600.0, description="seconds for a collective, and for a rank without a sign of progress"
    )
    deterministic: bool = Field(False, description="same bits on any number of CPU ranks; slow")
    profile: list[PositiveInt] = Field(
        [], description="steps of which each rank writes a trace (torch.profiler); `none` for none"
    )
    doctor: bool = Field(False, description="check ranks, links and machine, then exit")
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
