"""An estimate of the memory that a rank needs, and the memory that a rank has."""

import math
import os
from pathlib import Path
from typing import Any

import psutil
import torch

from pipeline.config.settings import Config
from pipeline.grpo.budget import token_budget
from pipeline.grpo.micro_batches import KEYS_PER_TOKEN
from pipeline.models import lora
from pipeline.models.capabilities import widest
from pipeline.models.loading import dtype_of, empty_model, on_gpu, uses_bf16

GIB = 1 << 30


def memory_per_rank(config: Config, tokenizer: Any = None) -> dict[str, float]:
    """Estimate the bytes that a rank needs, by purpose, from the model's shape and the settings."""
    model = empty_model(config, tokenizer)
    shape, num_parameters = model.config.get_text_config(), model.num_parameters()
    size = 2 if uses_bf16(config.model) else 4
    limits, data, num_ranks = config.rollout, config.data, config.run.num_gpus or 1
    groups = -(-limits.tasks_per_step // num_ranks)
    trials = len(data.domains) * data.eval_tasks_per_domain * config.evaluation.eval_trials
    episodes = max(groups * limits.num_generations, -(-trials // num_ranks))
    cached = limits.max_tokens * min(limits.max_concurrent_episodes, episodes)
    is_frozen = config.model.use_peft and not config.is_supervised
    held = size if is_frozen else 4
    memory = {
        f"weights ({'fp32' if held == 4 else 'bf16'})": float(held * num_parameters),
        # The sampler uses the memory of weights that have its type.
        "weights of the sampler": float(size * num_parameters * (size < held)),
        "key-value cache": shape.num_hidden_layers * _cached_per_token(shape) * size * cached,
    }
    if config.grpo.use_grpo:
        memory |= _memory_of_training(config, model, num_parameters)
        is_here = num_ranks <= max(1, torch.cuda.device_count())
        budget = token_budget(config, model, memory_of_a_rank(config) if is_here else math.inf)
        memory["activations of a micro-batch"] = _activations(config, shape, size, groups, budget)
    return memory


def _activations(config: Config, shape: Any, size: int, groups: int, budget: int) -> float:
    grpo, limits, layers = config.grpo, config.rollout, shape.num_hidden_layers
    if grpo.dynamic_sampling:  # Without balancing, one rank may get all groups of a step.
        balances = grpo.balance_ranks and not config.run.deterministic
        groups = min(groups + 1, limits.tasks_per_step) if balances else limits.tasks_per_step
    episodes = groups * limits.num_generations
    if config.is_supervised:
        episodes = max(episodes, -(-config.warm_start.batch_size // (config.run.num_gpus or 1)))
    trained = episodes * limits.max_tokens  # largest number of tokens per rank and step
    tokens = max(limits.max_tokens, min(budget, trained))
    intermediate_size = widest(shape, "intermediate_size") or 4 * int(shape.hidden_size)
    # For the backward pass, a layer keeps about 16 hidden and 3 MLP vectors per token.
    kept = tokens * layers * (16 * shape.hidden_size + 3 * intermediate_size) * size
    if grpo.share_prefixes and not grpo.padding_free:  # attention copies keys and values
        gathered = min(tokens * KEYS_PER_TOKEN, trained)
        kept += gathered * layers * 2 * _keys_per_token(shape) * size
    if grpo.gradient_checkpointing:  # memory holds one layer's activations and every layer's input
        kept = kept // layers + tokens * layers * shape.hidden_size * size
    # The sum includes three float32 copies of the logits of one chunk of tokens.
    return float(kept + 3 * 4 * min(1 << 24, tokens * shape.vocab_size))


def _cached_per_token(shape: Any) -> int:
    if latent := getattr(shape, "kv_lora_rank", None):
        return int(latent + shape.qk_rope_head_dim)
    return 2 * _keys_per_token(shape)


def _keys_per_token(shape: Any) -> int:
    heads = widest(shape, "num_attention_heads")
    head_dim = widest(shape, "head_dim") or shape.hidden_size // max(1, heads)
    return (widest(shape, "num_key_value_heads") or heads) * head_dim


def _memory_of_training(config: Config, model: Any, num_parameters: int) -> dict[str, float]:
    grpo, trained = config.grpo, 4.0 * num_trained(config, model)
    moments = 2 * trained / (config.run.num_gpus or 1 if grpo.shard_optimizer else 1)
    memory = {"LoRA adapters (fp32)": trained} if config.model.use_peft else {}
    memory |= {"gradients (fp32)": trained, "AdamW (fp32, two moments)": moments}
    if grpo.beta > 0:
        memory["reference policy (fp32)"] = trained
    if not config.is_supervised:
        return memory
    # Supervised training trains all weights, and each rank keeps the whole optimizer state.
    gradients, adamw = "gradients of the warm start", "AdamW of the warm start"
    warm_start = {gradients: 4.0 * num_parameters, adamw: 8.0 * num_parameters}
    return max(memory, warm_start, key=lambda needs: sum(needs.values()))


def num_trained(config: Config, model: Any) -> int:
    """Return the number of weights that GRPO trains. With LoRA, adapters are added to `model`."""
    if not config.model.use_peft:
        return int(model.num_parameters())
    with torch.device("meta"):
        arguments = config.model, config.model.model, config.run.seed, dtype_of(config.model)
        attached = lora.attach(model, *arguments)
    return sum(p.numel() for p in attached.parameters() if p.requires_grad)


def memory_of_a_rank(config: Config) -> float:
    """Return the bytes of the smallest GPU or, without a GPU, a rank's share of main memory."""
    if on_gpu():
        devices = range(torch.cuda.device_count())
        return float(min(torch.cuda.get_device_properties(i).total_memory for i in devices))
    total = psutil.virtual_memory().total
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and limit.read_text().strip().isdigit():
        total = min(total, int(limit.read_text()))
    return float(total) / int(os.environ.get("LOCAL_WORLD_SIZE", config.run.num_gpus or 1))
