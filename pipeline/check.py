"""`--check`, and what every run checks before it starts ranks.

These are the settings, tasks, tokenizer, template and memory.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from pipeline import lora
from pipeline.config import EMBEDDED_DOMAINS, Config, UserError
from pipeline.environments.base import tool_schemas
from pipeline.environments.experts import play_expert
from pipeline.policy import hub_reachable, on_gpu, uses_bf16
from pipeline.prepare import Prepared, prepare
from pipeline.run_folder import check_folder
from pipeline.tasks import count_by
from pipeline.tiny import tiny_model, tiny_tokenizer

GIB = 1 << 30
# Shapes of hub models in shipped recipes, so that their memory can be added up where the hub
# cannot be reached. Source: the config.json of each model on the Hugging Face hub.
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-4B": {
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    }
}


def validate(config: Config) -> Prepared:
    """Check everything but the run's folder that can be refused before a rank computes.

    Raises UserError.
    """
    parts = prepare(config)
    need, have = sum(memory_per_rank(config).values()), memory_of_a_rank(config)
    if need > have:
        parts_of = " + ".join(
            f"{name} {size / GIB:.1f}" for name, size in memory_per_rank(config).items()
        )
        raise UserError(
            f"memory: each rank needs {need / GIB:.1f} GiB ({parts_of}) and has "
            f"{have / GIB:.1f}; lower max_live_episodes or max_tokens_per_microbatch, set "
            "use_peft or shard_optimizer, or take a smaller model or larger GPUs"
        )
    return parts


def main(config: Config) -> int:
    """Check a recipe and print what it would do; nothing is written and no weights are loaded."""
    check_folder(config)
    unreachable = ""
    try:
        parts = prepare(config)
    except UserError as error:
        if config.model.model not in SHAPES:
            raise
        unreachable = str(error)
        parts = prepare(config, tokenizer=tiny_tokenizer())
    print(f"recipe {config.recipe}: model {config.model.model}")
    if unreachable:
        print(
            f"  not checked: tokenizer and template ({unreachable}); the embedded tokenizer "
            "counts below"
        )
    _print_tasks(config, parts)
    _print_stages(config, parts)
    _print_prompts(config, parts)
    _print_memory(config)
    return 0


def _print_tasks(config: Config, parts: Prepared) -> None:
    print("tasks")
    for domain in config.data.domains:
        families = ", ".join(
            f"{name} {count}" for name, count in count_by(parts.train[domain], "family").items()
        )
        held_out = len(parts.held_out[domain])
        print(
            f"  {domain}: {len(parts.train[domain])} to train ({families}), {held_out} "
            f"{config.data.eval_split}"
        )


def _print_stages(config: Config, parts: Prepared) -> None:
    size = config.rollout.num_generations
    print(f"stages ({config.curriculum.curriculum}; groups of {size} episodes)")
    if not config.grpo.use_grpo:
        print("  none: evaluation only")
        return
    for stage in parts.stages:
        groups = " + ".join(f"{count} {domain}" for domain, count in stage.groups.items())
        print(f"  {stage.name}: {stage.num_steps} steps of {groups} groups")


def _print_prompts(config: Config, parts: Prepared) -> None:
    limits = config.rollout
    print(
        f"prompts (limits: {limits.max_tokens} tokens an episode, {limits.max_tokens_per_turn} "
        "a turn)"
    )
    for domain, longest in parts.longest_prompts().items():
        print(f"  {domain}: longest prompt {longest} tokens")
    for domain in config.data.domains:
        task, environment = parts.train[domain][0], parts.environments[domain]
        ids = parts.chat.prompt_ids(task.prompt, tool_schemas(environment))
        print(f"\n--- a prompt of {domain} ({task.id}) ---\n{parts.tokenizer.decode(ids)}")
        if domain not in EMBEDDED_DOMAINS:
            continue
        expert = import_module(f"pipeline.environments.{domain}").expert
        messages, reward = play_expert(environment(), expert, task)
        print(f"--- its expert, reward {reward:g} ---")
        for message in messages[len(task.prompt) :]:
            calls = [call["function"] for call in message.get("tool_calls", [])]
            said = message["content"] or "; ".join(f"{c['name']}({c['arguments']})" for c in calls)
            print(f"  {message['role']}: {said}")


def _print_memory(config: Config) -> None:
    need = memory_per_rank(config)
    total, have = sum(need.values()), memory_of_a_rank(config)
    print("\nmemory per rank, estimated")
    for name, size in need.items():
        print(f"  {name:<34}{size / GIB:8.2f} GiB")
    verdict = "fits" if total <= have else "does not fit: a run would be refused here"
    print(
        f"  {'sum':<34}{total / GIB:8.2f} GiB, of {have / GIB:.1f} GiB that a rank has here: "
        f"{verdict}"
    )


def memory_per_rank(config: Config) -> dict[str, float]:
    """Bytes that a rank needs, by purpose, estimated from the model's shape and the limits."""
    model = empty_model(config)
    shape, num_parameters = model.config, model.num_parameters()
    size = 2 if uses_bf16(config.model) else 4
    head_dim = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    layers = shape.num_hidden_layers
    limits, grpo = config.rollout, config.grpo
    data, num_ranks = config.data, config.run.num_gpus or 1
    groups = -(-limits.tasks_per_step // num_ranks)
    trials = len(data.domains) * data.eval_tasks_per_domain * config.evaluation.eval_trials
    side_by_side = max(groups * limits.num_generations, -(-trials // num_ranks))
    episodes = min(limits.max_live_episodes, side_by_side)
    cache = 2 * layers * shape.num_key_value_heads * head_dim * size * limits.max_tokens * episodes
    memory = {
        "weights (fp32)": 4.0 * num_parameters,
        "weights of the sampler": size * num_parameters,
    }
    memory["key-value cache"] = cache
    if grpo.use_grpo:
        tokens = max(grpo.max_tokens_per_microbatch, limits.max_tokens)
        # Per token and layer: about 16 hidden-size and 3 intermediate-size tensors kept for the
        # backward pass, and three float32 copies of the logits of one chunk.
        kept = tokens * layers * (16 * shape.hidden_size + 3 * shape.intermediate_size) * size
        if grpo.gradient_checkpointing:  # one layer's, and every layer's input
            kept = kept // layers + tokens * layers * shape.hidden_size * size
        logits = 3 * 4 * min(1 << 24, tokens * shape.vocab_size)
        memory |= _memory_of_training(config, model, num_parameters)
        memory["activations of a micro-batch"] = float(kept + logits)
    return memory


def _memory_of_training(config: Config, model: Any, num_parameters: int) -> dict[str, float]:
    """Bytes that come with trained weights, in GRPO or the warm start, whichever needs more."""
    grpo, num_trained = config.grpo, num_parameters
    num_ranks = config.run.num_gpus or 1
    memory = {}
    if config.model.use_peft:
        with torch.device("meta"):
            attached = lora.attach(model, config.model, config.model.model, config.run.seed)
        num_trained = sum(p.numel() for p in attached.parameters() if p.requires_grad)
        memory["LoRA adapters (fp32)"] = 4.0 * num_trained
    memory["gradients (fp32)"] = 4.0 * num_trained
    memory["AdamW (fp32, two moments)"] = 8.0 * num_trained
    if grpo.shard_optimizer:
        memory["AdamW (fp32, two moments)"] /= num_ranks
    if grpo.beta > 0:
        memory["reference policy (fp32)"] = 4.0 * num_trained
    warm_start = {  # trains every weight, and shards nothing
        "gradients of the warm start": 4.0 * num_parameters,
        "AdamW of the warm start": 8.0 * num_parameters,
    }
    needs_more = sum(warm_start.values()) > sum(memory.values())
    return warm_start if config.warm_start.steps and needs_more else memory


def empty_model(config: Config) -> Any:
    """The recipe's model without its weights."""
    name = config.model.model
    if name == "tiny":
        with torch.device("meta"):
            return tiny_model(tiny_tokenizer(), 0)
    try:
        shape = AutoConfig.from_pretrained(
            lora.base_of(name) if lora.is_adapter(name) else name,
            trust_remote_code=config.model.trust_remote_code,
            local_files_only=not hub_reachable(),
        )
    except (OSError, ValueError) as error:
        if name not in SHAPES:
            raise UserError(
                f"model: got {name!r}, which cannot be loaded ({str(error).splitlines()[0]})"
            ) from None
        shape = Qwen3Config(**SHAPES[name])
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            shape, trust_remote_code=config.model.trust_remote_code
        )


def memory_of_a_rank(config: Config) -> float:
    """Bytes that one rank can use here.

    They are its GPU's, or its share of the machine's (or container's) memory.
    """
    if on_gpu():
        return float(
            min(
                torch.cuda.get_device_properties(i).total_memory
                for i in range(torch.cuda.device_count())
            )
        )
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and limit.read_text().strip().isdigit():
        total = min(total, int(limit.read_text()))
    return total / int(os.environ.get("LOCAL_WORLD_SIZE", config.run.num_gpus or 1))
