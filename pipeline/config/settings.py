"""All settings of a run with types and defaults. A recipe (YAML) and flags set the values.

A name that TRL also has means here what it means in TRL. `rules.py` finds contradictions between
settings.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.types import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic_core import PydanticCustomError

MAX_SEED = 2**32 - 1  # the largest seed that NumPy accepts

Difficulty = Literal["easy", "medium", "hard"]
# Whether the stages of a curriculum are joint: have all domains. `data/curriculum.py` makes them.
# A step of `mixed` has groups of every domain; a step of `interleaved` has groups of one domain.
CURRICULA = {"sequential": False, "separate": False, "mixed": True, "interleaved": True}
MERGE = "merge"  # a stage without steps, in which the experts' weights are merged
DISTILL = "distill"  # a stage in which the experts teach a student
# The last stage of `separate`, by merge_method.
LAST_STAGES = {"task_arithmetic": MERGE, "ties": MERGE, "distillation": DISTILL}


class LossFacts(NamedTuple):
    """What is known of a loss beside its formula, which is in `training/grpo.py`."""

    unused: tuple[str, ...] = ()  # settings that it does not use
    least_upper_clip: float = 0.0  # of `epsilon_high`


LOSSES = {
    "grpo": LossFacts(),
    "bnpo": LossFacts(),
    "dr_grpo": LossFacts(),
    "dapo": LossFacts(),
    "cispo": LossFacts(unused=("delta",), least_upper_clip=1.0),
}


class SamplerFacts(NamedTuple):
    """What is known of a sampler before it is made. Settings that begin with its name are its own.

    The callable `target` (`module:name`) makes it from the model, RolloutSettings, the type of the
    weights, and the ids that end a message.
    """

    target: str
    in_words: str
    is_exact: bool = True  # else the loss corrects the difference to the trainer's probabilities
    package: str = ""  # must be installed
    memory: str = ""  # the setting that is its share of a rank's memory
    invariant_by: str = ""  # the variable that makes sums on GPUs independent of the batch


SAMPLERS = {
    "own": SamplerFacts(
        "pipeline.rollout.samplers.own:RowSampler.of_settings",
        "one key-value cache over all turns",
    ),
    "generate": SamplerFacts(
        "pipeline.rollout.samplers.generate:GenerateSampler.of_settings",
        "through generate, every message from the start again (slower)",
    ),
    "vllm": SamplerFacts(
        "pipeline.rollout.samplers.vllm:VLLMSampler",
        "vLLM's engine in each rank",
        is_exact=False,
        package="vllm",
        memory="vllm_memory",
        invariant_by="VLLM_BATCH_INVARIANT",
    ),
}
RatioLevel = Literal["token", "sequence"]
Correction = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
Share = Annotated[float, Field(ge=0, le=1)]
ShareBelowOne = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]
PositiveWeights = dict[str, PositiveFloat]


def field(default: Any, description: str, **limits: Any) -> Any:
    return Field(default, description=description, **limits)


class Section(BaseModel):
    """A group of immutable, validated settings. Unknown names of settings are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_conversions(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse empty text, and true or false for a number, because pydantic reads true as 1.

        In a recipe as in a flag, `none` is an empty list.
        """
        annotation = cls.model_fields[str(info.field_name)].annotation
        if value == "none" and get_origin(annotation) is list:
            return []
        if value == "" or (isinstance(value, bool) and annotation is not bool):
            raise PydanticCustomError("not_converted", "Input should not be empty, true or false")
        return value


class ModelSettings(Section):
    """model"""

    model: str = field("tiny", "`tiny` (made by the pipeline), a folder, a run, or a hub id")
    trust_remote_code: bool = field(False, "run code that comes with the model")
    attn_implementation: str = field("sdpa", "attention implementation of transformers")
    chat_template: Text | None = field(
        None, "instead of the model's: a file, text or plain (ours), or a name of TRL's"
    )
    chat_template_kwargs: dict[str, Any] = field({}, "for the template: {enable_thinking: false}")
    system_prompt: Text | None = field(None, "system message of prompts that have none")
    tool_call_format: Literal["auto", "hermes", "text"] = field(
        "auto", "the syntax of tool calls; text: written by a block of ours, read as hermes"
    )
    mixed_precision: Literal["auto", "bf16", "no"] = field(
        "auto", "auto: bf16 on CUDA, and for pretrained models on CPUs that multiply bf16"
    )
    use_peft: bool = field(False, "freeze the model and train LoRA adapters (PEFT)")
    lora_r: PositiveInt = field(16, "rank of the LoRA matrices")
    lora_alpha: PositiveInt = field(32, "LoRA's scale is lora_alpha / lora_r")
    lora_target_modules: list[str] = field(["all-linear"], "layers that get LoRA", min_length=1)

    @field_validator("chat_template")
    @classmethod
    def _whole_path(cls, value: str | None) -> str | None:
        return str(Path(value).resolve()) if value and Path(value).is_file() else value


class EnvironmentFactory(Section):
    """A callable that makes environments, with arguments for each call."""

    factory: Text = Field(description="a class or function, as `module:name`")
    arguments: dict[str, Any] = Field(default={})


class DataSettings(Section):
    """tasks and rewards"""

    domains: list[str] = field(
        ["airline", "retail", "telecom"], "domains, in the order of the stages", min_length=1
    )
    environments: dict[str, str | EnvironmentFactory] = field(
        {}, "domains of your own: {bank: my_pkg.bank:BankEnv}, or {factory: ..., arguments: {...}}"
    )
    tools: dict[str, Text] = field(
        {}, "servers of tools for domains of `tasks`: {desk: mcp:python server.py}, or a URL (MCP)"
    )
    agents: dict[str, Text] = field(
        {}, "what plays a domain: {bank: my_pkg.agent:play}, or a command: {bank: python agent.py}"
    )
    tau2: Path | None = field(None, "a checkout of tau2-bench, whose three domains replace ours")
    tau2_arguments: dict[str, Any] = field(
        {}, "of these domains: {reward: official, refuel_consent: false, customer: scripted}"
    )
    tasks_per_domain: PositiveInt | None = field(
        None, "training tasks of each domain; null: all rows of a source, or 800 generated tasks"
    )
    eval_tasks_per_domain: PositiveInt = field(120, "held-out tasks of each domain")
    eval_split: Literal["validation", "test", "base"] = field("test", "split of held-out tasks")
    difficulty: Difficulty = field("medium", "difficulty of generated tasks")
    task_seed: int = field(0, "seed of the generated tasks")
    tasks: dict[str, Text] = field({}, "files or datasets of training tasks: {bank: SOURCE}")
    eval_tasks: dict[str, Text] = field({}, "files or datasets of held-out tasks: {bank: SOURCE}")
    dataset_train_split: str = field("train", "split of the datasets in `tasks`")
    dataset_test_split: str = field("test", "split of held-out tasks of the datasets")
    reward_funcs: list[Text] = field([], "reward functions, called as TRL does: module:function")
    reward_weights: list[float] = field([], "weight of each reward function; none: 1")
    max_reward_calls: PositiveInt | None = field(
        None, "calls of async reward functions in a run; more end it; null: no limit"
    )
    skip_long_tasks: bool = field(
        False, "leave out rows of tasks and eval_tasks whose prompts leave no room for a turn"
    )
    demonstrations: dict[str, Text] = field({}, "files, instead of experts: {bank: FILE}")

    @field_validator("tau2")
    @classmethod
    def _whole_path(cls, value: Path | None) -> Path | None:
        return None if value is None else value.expanduser().resolve()

    @property
    def num_train_tasks(self) -> int:
        """The number of generated training tasks of each domain."""
        return self.tasks_per_domain or 800


class EndpointSettings(Section):
    """A language model behind an OpenAI-compatible endpoint. A run calls it if `url` is given."""

    url: Text | None = field(None, "chat endpoint, such as http://HOST:8000/v1")
    model: Text | None = field(None, "name of the model at the endpoint")
    temperature: NonNegativeFloat = field(0.0, "sampling temperature")
    key: Text = field("OPENAI_API_KEY", "environment variable that holds the API key")
    max_calls: PositiveInt | None = field(None, "paid calls of a run; null: no limit")
    max_tokens: PositiveInt | None = field(None, "paid tokens of a run; null: no limit")

    @property
    def in_words(self) -> str:
        """The model with its temperature, or an empty text if none is called."""
        return "" if self.url is None else f"{self.model} at temperature {self.temperature:g}"


class CustomerSettings(EndpointSettings):
    """customer (a language model)"""


class JudgeSettings(EndpointSettings):
    """judge (a language model, for rewards)"""


class AgentSettings(EndpointSettings):
    """agent (a language model to compare with)"""

    temperature: NonNegativeFloat | None = field(  # type: ignore[assignment]
        None, "temperature of its trials; null: the rollout's `temperature`"
    )


class WarmStartSettings(Section):
    """warm start (supervised)"""

    steps: NonNegativeInt = field(440, "optimizer steps; 0 skips the warm start")
    batch_size: PositiveInt = field(32, "demonstrations per step, over all ranks")
    learning_rate: PositiveFloat | None = field(None, "peak; null: what suits the model")
    warmup_steps: NonNegativeInt = field(30, "steps of linear warm-up")
    rule_share: Share = field(0.3, "share of decisions that follow the rule")
    quote_rules: bool = field(
        False, "experts quote the rule that decides: airline, retail, telecom, `agent.quote`"
    )


class RFTSettings(Section):
    """rejection fine-tuning (RFT)"""

    rft_rounds: NonNegativeInt = field(0, "rounds of training on own successes, before GRPO")
    rft_tasks: PositiveInt = field(100, "training tasks per domain and round")
    rft_learning_rate: PositiveFloat | None = field(None, "peak; null: what suits the model")


class CurriculumSettings(Section):
    """curriculum"""

    curriculum: Literal[*CURRICULA] = field(  # type: ignore[invalid-literal]
        "sequential", "a stage per domain, or one stage of all domains; separate: then merged"
    )
    merge_method: Literal[*LAST_STAGES] = field(  # type: ignore[invalid-literal]
        "task_arithmetic", "how the experts of separate stages become one model"
    )
    merge_weight: PositiveFloat | None = field(
        None, "factor of the merged task vectors; null: 1 / experts for task_arithmetic, 1 for ties"
    )
    merge_density: float = field(
        0.2, "ties: share of each task vector that is kept, its largest absolute values", gt=0, le=1
    )
    order: list[str] = field([], "domain of each stage; may repeat domains; none: `domains`")
    domain_weights: PositiveWeights = field(
        {}, "weights in mixed and interleaved stages; missing: 1"
    )
    family_shares: dict[str, dict[str, Share]] = field(
        {}, "shares of the draws, by domain and task family: {bank: {loan: 0.3}}"
    )
    even_branches: bool = field(
        False, "draw the branches of each task family equally often, as far as a step holds them"
    )
    task_sampling: Literal["uniform", "signal"] = field(
        "uniform", "signal: draw tasks less often whose groups had equal rewards"
    )
    difficulties: list[Difficulty] = field([], "parts of each stage, such as easy,medium,hard")
    stage_weights: PositiveWeights = field(
        {}, "weights of stages, which share max_steps; missing: 1"
    )
    stage_steps: dict[str, PositiveInt] = field({}, "numbers of steps; other stages share the rest")
    stage_tasks: dict[str, PositiveInt] = field({}, "numbers of tasks, instead of stage_steps")
    plateau_patience: NonNegativeInt = field(
        0, "validations without a gain of 0.01 that end a stage; 0: never"
    )
    replay: ShareBelowOne = field(0.3, "share of a step's groups from earlier domains")
    preview: ShareBelowOne = field(0.08, "share of a step's groups from later domains")

    @property
    def is_joint(self) -> bool:
        """Whether the stages have all domains."""
        return CURRICULA[self.curriculum]

    @property
    def last_stage(self) -> str:
        """The stage that makes one model of experts, or "" if there are none."""
        return LAST_STAGES[self.merge_method] if self.is_separate else ""

    @property
    def is_separate(self) -> bool:
        """Whether each domain has an expert, and a last stage makes one model of them."""
        return self.curriculum == "separate"


class RolloutSettings(Section):
    """rollout"""

    num_generations: int = field(8, "episodes of one task (a group)", ge=2)
    tasks_per_step: PositiveInt = field(24, "groups per optimizer step, over all ranks")
    temperature: PositiveFloat = field(1.0, "sampling temperature")
    top_k: NonNegativeInt = field(0, "sample the k likeliest tokens; 0: all; off-policy if set")
    top_p: float = field(1.0, "sample the likeliest tokens up to this probability", gt=0, le=1)
    max_turns: PositiveInt = field(8, "assistant messages per episode")
    max_tokens_per_turn: PositiveInt = field(40, "sampled tokens per assistant message")
    max_tokens: PositiveInt = field(256, "tokens per episode, with its prompt")
    max_malformed_calls: NonNegativeInt = field(1, "malformed calls per episode; one more ends it")
    max_repeated_calls: NonNegativeInt = field(
        0, "equal calls in a row that end an episode; 0: none"
    )
    max_tool_result_tokens: PositiveInt = field(64, "tokens of a tool result; more is an error")
    partial_rollout_tokens: NonNegativeInt = field(
        0, "tokens that an episode samples in a step, then it goes on in the next; 0: it ends there"
    )
    max_staleness: NonNegativeInt = field(
        4, "with that: most optimizer steps between the sampling of a token and its training"
    )
    max_concurrent_episodes: PositiveInt = field(512, "episodes that a rank samples at once")
    max_agents: PositiveInt | None = field(
        None,
        "processes of `agents` at once, on a rank, without those that wait for the next step; "
        "null: 4 for each core",
    )
    sampler: Literal["auto", *SAMPLERS] = field(  # type: ignore[invalid-literal]
        "auto", "what samples; auto: own, or generate where own cannot"
    )
    vllm_memory: float = field(0.3, "share of a rank's memory for vLLM", gt=0, lt=1)
    call_timeout: PositiveFloat = field(120.0, "seconds per call of an environment")
    rollout_timeout: PositiveFloat | None = field(None, "seconds until all waits end; null: none")
    max_error_rate: Share = field(0.5, "share of failed episodes that ends a run; 1: none")

    @property
    def is_partial(self) -> bool:
        """Whether episodes may go on in later steps."""
        return min(self.partial_rollout_tokens, self.max_staleness) > 0

    @property
    def sampler_facts(self) -> SamplerFacts:
        """What is known of the sampler; `auto` samples as `own` does."""
        return SAMPLERS["own" if self.sampler == "auto" else self.sampler]


class GRPOSettings(Section):
    """GRPO"""

    use_grpo: bool = field(True, "train with GRPO; --no-grpo: evaluate only")
    max_steps: NonNegativeInt = field(120, "steps of all stages; 0: none, the warm start alone")
    learning_rate: PositiveFloat | None = field(None, "peak; null: what suits the model")
    stage_lr_decay: Literal["linear", "cosine", "constant"] = field("linear", "after warm-up")
    min_lr_rate: Share = field(0.1, "share of the peak rate at a stage's end")
    stage_warmup_steps: NonNegativeInt = field(5, "steps of linear warm-up of each stage")
    scale_lr: Literal["none", "linear", "sqrt"] = field("none", "scale the rate to tasks_per_step")
    reference_tasks_per_step: PositiveInt | None = field(None, "tasks_per_step before scale_lr")
    adam_beta1: ShareBelowOne = field(0.9, "AdamW's decay of the first moment")
    adam_beta2: ShareBelowOne = field(0.98, "AdamW's decay of the second moment")
    weight_decay: NonNegativeFloat = field(0.0, "AdamW's weight decay, also of norms and biases")
    max_grad_norm: PositiveFloat = field(1.0, "largest norm of the gradient (clipping)")
    max_skipped_steps: NonNegativeInt = field(3, "non-finite steps to skip in a row")
    beta: NonNegativeFloat = field(0.0, "weight of the KL divergence (k3) to the reference")
    use_bias_correction_kl: bool = field(False, "multiply the KL term by the ratio (DeepSeek-V3.2)")
    reference_per_stage: bool = field(False, "each stage's initial policy is its reference")
    learned_beta: NonNegativeFloat = field(
        0.0, "weight of the KL divergence (k3) of learned domains from the end of their stage"
    )
    learned_beta_tasks: PositiveInt = field(16, "training tasks per learned domain for that")
    movement_coef: NonNegativeFloat = field(
        0.0, "weight of half the squared distance of the weights to those at the stage's start"
    )
    epsilon: PositiveFloat = field(0.2, "lower clip of the ratio")
    epsilon_high: PositiveFloat | None = field(0.28, "upper clip; null: epsilon; cispo: the limit")
    delta: PositiveFloat | None = field(None, "bound of the ratio for negative advantages")
    loss_type: Literal[*LOSSES] = field(  # type: ignore[invalid-literal]
        "dapo", "the loss and its normalisation, as in TRL"
    )
    importance_sampling_level: RatioLevel = field("token", "a ratio per token, or sequence (GSPO)")
    scale_rewards: Literal["group", "batch", "none"] = field("group", "divisor of the advantages")
    domain_advantage_scale: PositiveWeights = field(
        {}, "factors of advantages, by domain; missing: 1"
    )
    num_iterations: PositiveInt = field(1, "updates per step, on the same trajectories")
    entropy_coef: NonNegativeFloat = field(0.005, "weight of the entropy bonus")
    vllm_importance_sampling_correction: bool = field(
        True, "multiply the policy loss by the ratio of trainer to sampler, with sampler vllm"
    )
    partial_rollout_correction: bool = field(
        False, "with partial_rollout_tokens and another sampler, the same, by its mode and clips"
    )
    vllm_importance_sampling_mode: Correction = field(
        "sequence_mask", "that ratio: per token or sequence; truncated, or 0 beyond the clips"
    )
    vllm_importance_sampling_clip_max: PositiveFloat | None = field(
        3.0, "upper clip of that ratio; null: none"
    )
    vllm_importance_sampling_clip_min: NonNegativeFloat | None = field(
        None, "lower clip of that ratio; null: none"
    )
    max_tokens_per_microbatch: PositiveInt | None = field(
        None, "tokens per forward pass, with padding; null: a group, or more on a GPU, if they fit"
    )
    padding_free: bool = field(False, "join sequences in one row, without padding")
    share_prefixes: bool = field(True, "compute common prefixes once; needs attention sdpa")
    balance_ranks: bool = field(True, "give all ranks similar numbers of trained tokens")
    shard: Literal["none", "optimizer", "full"] = field(
        "none", "spread over the ranks: AdamW's moments, or also weights and gradients (FSDP2)"
    )
    reshard_after_forward: bool = field(
        True, "with shard full: gather a layer's weights for each pass, not all once an update"
    )
    gradient_checkpointing: bool = field(False, "recompute activations to save memory")
    drop_zero_std_groups: bool = field(True, "leave out groups with equal rewards")
    dynamic_sampling: bool = field(False, "replace groups with equal rewards (DAPO)")
    max_resample_times: PositiveInt = field(3, "rounds of dynamic sampling per step")
    max_sampling_logp_difference: PositiveFloat | None = field(
        None,
        "largest mean difference without a warning, nats; null: 1e-4 in fp32, 0.1 in bf16, "
        "0.3 with the correction",
    )

    @property
    def upper_clip(self) -> float:
        """`epsilon_high`, or `epsilon` if `epsilon_high` is null."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


class EvaluationSettings(Section):
    """evaluation"""

    eval_trials: PositiveInt = field(2, "sampled trials per held-out task")
    eval_on_start: bool = field(True, "evaluate the given model before anything is trained")
    eval_greedy: bool = field(True, "play each held-out task once more, with the likeliest tokens")
    success_threshold: float = field(1.0, "least reward of a success")
    validation_steps: NonNegativeInt = field(25, "steps between validations; 0: never")
    kl_probe_tasks: NonNegativeInt = field(16, "tasks per learned domain for the KL probe; 0: none")
    validation_tasks: PositiveInt = field(20, "tasks per domain in a validation")
    start_report_tasks: NonNegativeInt = field(0, "tasks per domain to play for the start report")


class RunSettings(Section):
    """run"""

    num_gpus: PositiveInt | None = field(None, "number of ranks; missing: as launched")
    seed: int = field(1, "seed of the model and of all sampling", ge=0, le=MAX_SEED)
    output_dir: Path | None = field(None, "run folder; missing: runs/<recipe>-<time>")
    save_steps: NonNegativeInt = field(50, "steps between checkpoints; 0: at stage ends only")
    save_minutes: PositiveFloat | None = field(15, "minutes between additional checkpoints")
    save_total_limit: PositiveInt = field(2, "number of step checkpoints to keep")
    keep_best: bool = field(False, "keep the checkpoint with the best mean validation success")
    push_to_hub: bool = field(False, "upload the model after training; needs a token (HF_TOKEN)")
    hub_model_id: str | None = field(None, "repository: NAME or ORGANISATION/NAME")
    hub_private_repo: bool = field(False, "make a new repository private")
    resume_from_checkpoint: str | None = field(
        None, "a name, a path, `latest`, or `auto` (the latest, or a new run if there is none)"
    )
    override: bool = field(False, "resume with other settings than the checkpoint's")
    timeout: PositiveFloat = field(600.0, "seconds of a collective, or without progress")
    deterministic: bool = field(
        False, "equal bits on any number of CPU ranks; on GPUs, only vLLM's draws; slow"
    )
    watch: bool = field(False, "serve a page on this machine that follows the run")
    profile: list[PositiveInt] = field([], "steps with a torch.profiler trace, or `none`")
    stop_on_dead_domain: bool = field(False, "end the run if a domain learns nothing for 10 steps")
    doctor: bool = field(False, "check ranks, links and machine, then exit")
    check: bool = field(False, "check recipe, tasks, template and memory, then exit")
    plan: list[PositiveInt] = field([], "with check: numbers of ranks to plan, such as 8,16,64")
    plan_tflops: PositiveFloat | None = field(
        None, "TFLOP/s of a rank in the plan; null: measured, else 200"
    )
    plan_bandwidth: PositiveFloat = field(
        50.0, "GB/s that a rank sends, in the plan; doctor measures them"
    )


class TrackingSettings(Section):
    """tracking"""

    report_to: list[Literal["wandb", "tensorboard", "trackio"]] = field(
        ["wandb"], "trackers, or `none`"
    )
    log_completions_steps: NonNegativeInt = field(
        0, "steps between tables of episodes in the trackers; 0: none during the run"
    )
    project: str = field("three-domain-grpo", "project in W&B and trackio")
    run_name: str | None = field(
        None, "run name in W&B and trackio; missing: the run folder's name"
    )
    tags: list[str] = field([], "W&B tags")


class Config(Section):
    """The settings of one run."""

    recipe: str = Field("three_domain_tiny", description="name of the recipe, for the run folder")
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    customer: CustomerSettings = CustomerSettings()
    judge: JudgeSettings = JudgeSettings()
    warm_start: WarmStartSettings = WarmStartSettings()
    rft: RFTSettings = RFTSettings()
    curriculum: CurriculumSettings = CurriculumSettings()
    rollout: RolloutSettings = RolloutSettings()
    grpo: GRPOSettings = GRPOSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    agent: AgentSettings = AgentSettings()
    run: RunSettings = RunSettings()
    tracking: TrackingSettings = TrackingSettings()

    def changed(self, section: str, **values: Any) -> "Config":
        """Return the settings with other values in a section."""
        part = getattr(self, section).model_copy(update=values)
        return self.model_copy(update={section: part})

    @property
    def stage_names(self) -> list[str]:
        """The names of the stages: `airline`, `airline-2`, `airline-easy`, `mixed`, `merge`."""
        curriculum = self.curriculum
        names: list[str] = [curriculum.curriculum]
        if not curriculum.is_joint:
            order = curriculum.order or self.data.domains
            times = [order[: index + 1].count(name) for index, name in enumerate(order)]
            names = [n if t == 1 else f"{n}-{t}" for n, t in zip(order, times, strict=True)]
        parts = [f"-{difficulty}" for difficulty in curriculum.difficulties] or [""]
        last = curriculum.last_stage
        return [*(f"{name}{part}" for name in names for part in parts), *([last] * bool(last))]

    @property
    def corrects_sampling(self) -> bool:
        """Whether the loss corrects the difference between sampler and trainer."""
        is_inexact = not self.rollout.sampler_facts.is_exact
        of_partial = self.grpo.partial_rollout_correction and self.rollout.is_partial
        return of_partial or (self.grpo.vllm_importance_sampling_correction and is_inexact)

    @property
    def is_supervised(self) -> bool:
        """Whether supervised training comes before GRPO."""
        return bool(self.warm_start.steps or self.rft.rft_rounds)

    @property
    def peak_learning_rate(self) -> float:
        """`grpo.learning_rate`, scaled by tasks_per_step / reference_tasks_per_step.

        The scaling `linear` is from Goyal et al. 2017 (arXiv 1706.02677, section 2.1). The scaling
        `sqrt` is from Krizhevsky 2014 (arXiv 1404.5997, section 5) and, for Adam, from Malladi et
        al. 2022 (arXiv 2205.10287).
        """
        assert self.grpo.learning_rate is not None, "the settings were not fitted to the model"
        if self.grpo.scale_lr == "none":
            return self.grpo.learning_rate
        assert self.grpo.reference_tasks_per_step is not None
        factor = self.rollout.tasks_per_step / self.grpo.reference_tasks_per_step
        return self.grpo.learning_rate * (factor if self.grpo.scale_lr == "linear" else factor**0.5)
