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
}
MAX_SEED = 2**32 - 1  # the largest seed that NumPy accepts

Share = Annotated[float, Field(ge=0, le=1)]
ShareBelowOne = Annotated[float, Field(ge=0, lt=1)]
Weights = dict[str, PositiveFloat]
Difficulty = Literal["easy", "medium", "hard"]


def field(default: Any, description: str, **limits: Any) -> Any:
    return Field(default, description=description, **limits)


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

    model: str = field("tiny", "`tiny` (made by the pipeline), a folder, or a hub id")
    trust_remote_code: bool = field(False, "run code that comes with the model")
    attn_implementation: str = field("sdpa", "attention implementation of transformers")
    chat_template_kwargs: dict[str, Any] = field({}, "for the template: {enable_thinking: false}")
    tool_call_format: Literal["auto", "hermes"] = field("auto", "the syntax of tool calls")
    mixed_precision: Literal["auto", "bf16", "no"] = field("auto", "auto: bf16 on CUDA, else fp32")
    use_peft: bool = field(False, "train LoRA adapters (PEFT) on the frozen model")
    lora_r: PositiveInt = field(16, "rank of the LoRA matrices")
    lora_alpha: PositiveInt = field(32, "LoRA's scale is lora_alpha / lora_r")
    lora_target_modules: list[str] = field(["all-linear"], "layers that get LoRA", min_length=1)


class DataSettings(Section):
    """tasks"""

    domains: list[str] = field(DEFAULT_DOMAINS, "domains, in the order of the stages", min_length=1)
    environments: dict[str, str] = field({}, "domains of your own: {bank: my_pkg.bank:BankEnv}")
    tasks_per_domain: PositiveInt = field(800, "training tasks of each domain")
    eval_tasks_per_domain: PositiveInt = field(120, "held-out tasks of each domain")
    eval_split: Literal["validation", "test"] = field("test", "split of the evaluations")
    difficulty: Difficulty = field("medium", "difficulty of generated tasks")
    task_seed: int = field(0, "seed of the generated tasks, which `seed` leaves alone")
    tasks: dict[str, str] = field({}, "training tasks, files or datasets: {bank: SOURCE}")
    dataset_train_split: str = field("train", "the split of such a dataset")

    @property
    def import_strings(self) -> dict[str, str]:
        """The environment class, as `module:Class`, of each domain that `domains` may name."""
        return {**EMBEDDED_DOMAINS, **self.environments}


class WarmStartSettings(Section):
    """warm start (supervised)"""

    steps: NonNegativeInt = field(440, "optimizer steps; 0 skips the warm start")
    batch_size: PositiveInt = field(32, "demonstrations per step, over all ranks")
    learning_rate: PositiveFloat = field(2e-3, "peak learning rate")
    warmup_steps: NonNegativeInt = field(30, "steps of linear warm-up")
    rule_share: Share = field(0.3, "share of demonstrations that begin with the rule")
    data: Path | None = field(None, "demonstrations, not the expert's (JSONL: {messages, tools})")


class CurriculumSettings(Section):
    """curriculum"""

    curriculum: Literal["sequential", "mixed", "interleaved"] = field(
        "sequential", "a stage per domain; one stage with mixed steps; or with domains in turns"
    )
    order: list[str] = field([], "domain of each stage, with repeats; none: `domains`")
    domain_weights: Weights = field({}, "shares in mixed and interleaved stages; missing: 1")
    difficulties: list[Difficulty] = field([], "parts of each stage, e.g. easy,medium,hard")
    stage_weights: Weights = field({}, "relative shares of max_steps; missing: 1")
    stage_steps: dict[str, PositiveInt] = field({}, "steps; other stages share the rest")
    stage_tasks: dict[str, PositiveInt] = field({}, "the same, as a number of tasks")
    plateau_patience: NonNegativeInt = field(
        0, "end a stage after so many validations in a row without more success; 0: never"
    )
    plateau_delta: NonNegativeFloat = field(0.01, "by how much success must be better")
    replay: ShareBelowOne = field(0.3, "share of a step's groups from earlier domains")


class RolloutSettings(Section):
    """rollout"""

    num_generations: int = field(8, "episodes of one task, a group", ge=2)
    tasks_per_step: PositiveInt = field(24, "groups per optimizer step over all ranks")
    temperature: PositiveFloat = field(1.0, "sampling temperature")
    top_k: NonNegativeInt = field(
        0, "sample among so many likeliest tokens; 0: all. A limit is slightly off-policy"
    )
    top_p: float = field(1.0, "likewise, up to this cumulative probability", gt=0, le=1)
    max_turns: PositiveInt = field(8, "assistant messages per episode")
    max_tokens_per_turn: PositiveInt = field(40, "sampled tokens per assistant message")
    max_tokens: PositiveInt = field(256, "tokens of a whole episode, prompt included")
    max_malformed_calls: NonNegativeInt = field(1, "malformed calls that get an error")
    max_tool_result_tokens: PositiveInt = field(64, "longer tool results become errors")
    max_concurrent_episodes: PositiveInt = field(512, "episodes a rank plays side by side")
    call_timeout: PositiveFloat = field(120.0, "seconds per call of an environment")
    max_error_rate: Share = field(
        0.5, "stop if a larger share of a domain's episodes ends as environment_error; 1: never"
    )


class GRPOSettings(Section):
    """GRPO"""

    use_grpo: bool = field(True, "--no-grpo: evaluate only")
    max_steps: NonNegativeInt = field(120, "steps in total, over all stages")
    learning_rate: PositiveFloat = field(3e-4, "peak learning rate")
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = field("linear", "decay per stage")
    min_lr_rate: Share = field(0.1, "share of the peak rate at a stage's end")
    warmup_steps: NonNegativeInt = field(5, "steps of linear warm-up of each stage")
    scale_lr: Literal["none", "linear", "sqrt"] = field(
        "none", "how learning_rate grows with tasks_per_step / reference_tasks_per_step"
    )
    reference_tasks_per_step: PositiveInt | None = field(None, "tasks_per_step of the rate")
    adam_beta1: ShareBelowOne = field(0.9, "AdamW")
    adam_beta2: ShareBelowOne = field(0.98, "AdamW")
    weight_decay: NonNegativeFloat = field(0.0, "AdamW")
    max_grad_norm: PositiveFloat = field(1.0, "gradient clipping, global norm")
    max_skipped_steps: NonNegativeInt = field(3, "non-finite steps skipped in a row")
    beta: NonNegativeFloat = field(0.0, "weight of the KL divergence (k3) to the reference")
    use_bias_correction_kl: bool = field(False, "KL times the ratio (DeepSeek-V3.2)")
    sync_ref_model: bool = field(False, "each stage's initial policy is its reference")
    epsilon: PositiveFloat = field(0.2, "lower clip of the ratio")
    epsilon_high: PositiveFloat | None = field(0.28, "upper clip; null: epsilon; cispo: the ratio")
    delta: PositiveFloat | None = field(None, "bound of the ratio for negative advantages")
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo"] = field(
        "dapo", "the loss and its normalisation, as in TRL"
    )
    importance_sampling_level: Literal["token", "sequence"] = field(
        "token", "a ratio per token, or one per episode (GSPO)"
    )
    scale_rewards: Literal["group", "batch", "none"] = field("group", "divisor of the advantages")
    domain_advantage_scale: Weights = field({}, "factors of advantages; missing: 1")
    num_iterations: PositiveInt = field(1, "updates per batch of trajectories")
    entropy_coef: NonNegativeFloat = field(0.005, "weight of the entropy bonus")
    max_tokens_per_microbatch: PositiveInt = field(2048, "tokens per pass with padding")
    padding_free: bool = field(False, "join sequences in one row instead of padding")
    share_prefixes: bool = field(True, "compute common prefixes once (sdpa, without padding_free)")
    balance_ranks: bool = field(True, "even out the ranks' numbers of trained tokens")
    shard_optimizer: bool = field(False, "spread AdamW's moments over the ranks")
    gradient_checkpointing: bool = field(False, "recompute activations; saves memory")
    drop_zero_std_groups: bool = field(True, "train on no group of equal rewards")
    dynamic_sampling: bool = field(False, "replace groups of equal rewards (DAPO)")
    max_resample_times: PositiveInt = field(3, "most rounds of that in a step")
    permute_rewards: bool = field(False, "control: permute the rewards of each step")
    max_sampling_logp_difference: PositiveFloat | None = field(
        None, "limit of the warning; null: 1e-3 in fp32, 0.5 in bf16"
    )

    @property
    def upper_clip(self) -> float:
        """`epsilon_high`, or `epsilon` if that is null."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


class EvaluationSettings(Section):
    """evaluation"""

    eval_trials: PositiveInt = field(2, "sampled trials per held-out task")
    success_threshold: float = field(1.0, "the least reward of a success")
    eval_steps: NonNegativeInt = field(25, "steps between validations; 0: never")
    kl_probe_tasks: NonNegativeInt = field(
        16, "validation tasks per learned domain that measure the later KL divergence; 0: none"
    )
    eval_steps_tasks: PositiveInt = field(20, "tasks of each domain in a validation")


class RunSettings(Section):
    """run"""

    num_gpus: PositiveInt | None = field(None, "number of ranks; missing: as launched")
    seed: int = field(1, "seed of the model and of every draw", ge=0, le=MAX_SEED)
    output_dir: Path | None = field(None, "run folder; missing: runs/<recipe>-<time>")
    save_steps: NonNegativeInt = field(50, "steps between checkpoints; 0: stage ends")
    save_minutes: PositiveFloat | None = field(None, "checkpoint also after so many minutes")
    save_total_limit: PositiveInt = field(2, "step checkpoints kept; stage ends always")
    resume_from_checkpoint: str | None = field(
        None, "`latest`, a checkpoint's name or path, or `auto`: the latest or a fresh start"
    )
    override: bool = field(False, "resume with other settings than the checkpoint's")
    timeout: PositiveFloat = field(600.0, "seconds for a collective, and without progress")
    deterministic: bool = field(False, "same bits on any number of CPU ranks; slow")
    profile: list[PositiveInt] = field([], "steps with a torch.profiler trace; `none` for none")
    doctor: bool = field(False, "check ranks, links and machine, then exit")
    check: bool = field(False, "check recipe, tasks, template and memory, then exit")


class TrackingSettings(Section):
    """tracking"""

    report_to: list[Literal["wandb", "tensorboard"]] = field(["wandb"], "trackers, or `none`")
    project: str = field("three-domain-grpo", "W&B project")
    run_name: str | None = field(None, "W&B run name; missing: the run folder's name")
    tags: list[str] = field([], "W&B tags")


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
