"""What names of settings in TRL, transformers and PEFT are called here, or what is here instead.

Each entry of the two tables has one or more names, separated by spaces. A name may end with `*`,
which stands for any text. Present settings are in backticks, as their flags without hyphens.
"""

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase

from pipeline.config.settings import Config, Section

CALLED = {  # names of settings that have another name here
    "activation_checkpointing": "gradient_checkpointing",
    "ddp_timeout": "timeout",
    "environment_factory": "environments",
    "epsilon_low": "epsilon",
    "full_determinism": "deterministic",
    "gpus num_devices num_processes nproc_per_node": "num_gpus",
    "kl_coef": "beta",
    "lora_rank": "lora_r",
    "lr": "learning_rate",
    "model_name model_name_or_path": "model",
    "num_generations_eval": "eval_trials",
    "out_dir": "output_dir",
    "use_lora": "use_peft",
    "wandb_project": "project",
    "wandb_run_name": "run_name",
}
_PASSES = "in passes of `max_tokens_per_microbatch`; set these"
_SAMPLER = "the pipeline has its own sampler; `max_concurrent_episodes` sets how much at once"
INSTEAD = {  # what to set instead of names that have no equal here
    "bf16 bf16_full_eval": "write `mixed_precision` bf16",
    "fp16 fp16_full_eval tf32": "not supported; set `mixed_precision` to bf16, or to no for fp32",
    "dtype torch_dtype": "weights are loaded in fp32; `mixed_precision` bf16 computes in bf16",
    "load_in_4bit load_in_8bit bnb_* use_bnb_*": "weights are not quantized; set `use_peft`",
    "per_device_* batch_size train_batch_size eval_batch_size generation_batch_size "
    "auto_find_batch_size gradient_accumulation_steps steps_per_generation": (
        f"a step is `tasks_per_step` groups of `num_generations` over all ranks, {_PASSES}"
    ),
    "epochs num_epochs num_train_epochs": (
        "runs are counted in steps of `tasks_per_step` tasks; set `max_steps`"
    ),
    "steps": "write `max_steps` for GRPO, or `warm_start_steps` for the warm start",
    "max_completion_length max_new_tokens max_prompt_length max_length max_seq_length": (
        "set `max_tokens` of an episode with its prompt, and `max_tokens_per_turn`"
    ),
    "max_tool_calling_iterations": "set `max_turns`, the assistant messages of an episode",
    "use_vllm vllm_* use_transformers_* transformers_* cache_implementation": _SAMPLER,
    "generation_kwargs min_p repetition_penalty": "set `temperature`, `top_k` and `top_p`",
    "dataset dataset_name dataset_config dataset_streaming": (
        "write `domains` DOMAIN and `tasks` '{DOMAIN: SOURCE}', a file, a folder or a hub id"
    ),
    "data_seed": "`task_seed` generates the tasks, and `seed` draws all else",
    "logging_* log_*": "each step is logged in the run folder; see `report_to`",
    "trackio_*": "see `report_to` for the trackers",
    "eval_strategy eval_on_start eval_delay eval_steps": (
        "stages begin and end with an evaluation; set `validation_steps` for those in between"
    ),
    "load_best_model_at_end metric_for_best_model greater_is_better": (
        "`keep_best` keeps the checkpoint with the best mean validation success"
    ),
    "save_strategy": "set `save_steps` or `save_minutes`; the ends of stages are saved too",
    "lr_scheduler_type": "set `stage_lr_decay`, which ends at `min_lr_rate`",
    "lr_scheduler_kwargs": "set `min_lr_rate`",
    "warmup_steps warmup_ratio": "set `stage_warmup_steps`, the warm-up of each stage",
    "sync_ref_model ref_model_*": (
        "no reference follows the policy during a stage; `reference_per_stage` sets one per stage"
    ),
    "optim optim_* adam_epsilon": (
        "the optimizer is AdamW; set `adam_beta1`, `adam_beta2` and `weight_decay`"
    ),
    "deepspeed fsdp fsdp_* ds3_*": (
        "not supported; `shard_optimizer` is ZeRO stage 1, and `use_peft` trains adapters"
    ),
    "lora_dropout use_dora use_rslora": "plain LoRA without dropout; set `lora_r`, `lora_alpha`",
    "use_cpu cpu": "set the environment variable ACCELERATE_USE_CPU=true",
    "hub_token": "for `push_to_hub` set the environment variable HF_TOKEN",
    "hub_*": "one upload follows training; see `push_to_hub` and `hub_model_id`",
    "use_adaptive_entropy entropy_coef_* entropy_target": "set `entropy_coef`, which is fixed",
}


def instead(name: str) -> str:
    """Return the error message for a setting or flag of TRL, or ""."""
    plain, is_flag = name.lstrip("-").replace("-", "_").removeprefix("no_"), name.startswith("-")

    def written(setting: str) -> str:
        if is_flag:
            return f"--{setting.replace('_', '-')}"
        key = setting.removeprefix("warm_start_")
        *_, owner = (s for s, part in Config() if isinstance(part, Section) and hasattr(part, key))
        return f"{owner}.{key}"

    if text := _entry(INSTEAD, plain):
        return f"{name}: " + re.sub("`(.*?)`", lambda match: written(match[1]), text)
    new = _entry(CALLED, plain)
    return f"{name} is called {written(new)} here" if new else ""


def _entry(table: Mapping[str, str], name: str) -> str:
    fitting = (v for keys, v in table.items() if any(fnmatchcase(name, k) for k in keys.split()))
    return next(fitting, "")
