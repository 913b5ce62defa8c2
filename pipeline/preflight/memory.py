"""The memory that a rank needs, estimated, and what it has."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from pipeline.config.settings import Config
from pipeline.grpo.micro_batches import KEYS_PER_TOKEN
from pipeline.models import lora
from pipeline.models.layers import widest
from pipeline.models.loading import on_gpu, uses_bf16
from pipeline.models.shapes import empty_model

GIB = 1 << 30


def memory_per_rank(config: Config, tokenizer: Any = None) -> dict[str, float]:
    """Bytes that a rank needs, by purpose, estimated from the model's shape and the limits."""
    model = empty_model(config, tokenizer)
    shape, num_parameters = model.config.get_text_config(), model.num_parameters()
    size = 2 if uses_bf16(config.model) else 4
    layers, intermediate_size = shape.num_hidden_layers, _intermediate_size(shape)
    limits, grpo = config.rollout, config.grpo
    data, num_ranks = config.data, config.run.num_gpus or 1
    groups = -(-limits.tasks_per_step // num_ranks)
    trials = len(data.domains) * data.eval_tasks_per_domain * config.evaluation.eval_trials
    side_by_side = max(groups * limits.num_generations, -(-trials // num_ranks))
    episodes = min(limits.max_live_episodes, side_by_side)
    cache = layers * _size_of_cache(shape) * size * limits.max_tokens * episodes
    memory = {
        "weights (fp32)": 4.0 * num_parameters,
        # In fp32 it shares those that are trained; LoRA's are merged into others.
        "weights of the sampler": size * num_parameters * (size == 2 or config.model.use_peft),
        "key-value cache": cache,
    }
    if grpo.use_grpo:
        trained = _tokens_of_a_step(config, num_ranks)
        tokens = max(limits.max_tokens, min(grpo.max_tokens_per_microbatch, trained))
        # Per token and layer: about 16 hidden-size and 3 intermediate-size tensors kept for the
        # backward pass, and three float32 copies of the logits of one chunk.
        kept = tokens * layers * (16 * shape.hidden_size + 3 * intermediate_size) * size
        if grpo.share_prefixes and not grpo.padding_free:  # keys and values that attention gathers
            gathered = min(tokens * KEYS_PER_TOKEN, trained)
            kept += gathered * layers * 2 * _size_of_keys(shape) * size
        if grpo.gradient_checkpointing:  # one layer's, and every layer's input
            kept = kept // layers + tokens * layers * shape.hidden_size * size
        logits = 3 * 4 * min(1 << 24, tokens * shape.vocab_size)
        memory |= _memory_of_training(config, model, num_parameters)
        memory["activations of a micro-batch"] = float(kept + logits)
    return memory


def _size_of_cache(shape: Any) -> int:
    """Numbers that a token takes in a layer's cache; latent attention keeps what both come from."""
    if latent := getattr(shape, "kv_lora_rank", None):
        return int(latent + shape.qk_rope_head_dim)
    return 2 * _size_of_keys(shape)


def _tokens_of_a_step(config: Config, num_ranks: int) -> int:
    """Tokens of the episodes that a rank trains on in a step, all of full length.

    With dynamic sampling the groups that live may all lie on one rank; balancing evens them out
    to within a group. The warm start's demonstrations count where they are more.
    """
    limits, grpo = config.rollout, config.grpo
    groups = -(-limits.tasks_per_step // num_ranks)
    if grpo.dynamic_sampling:
        balances = grpo.balance_ranks and not config.run.deterministic
        groups = min(groups + 1, limits.tasks_per_step) if balances else limits.tasks_per_step
    episodes = groups * limits.num_generations
    if config.warm_start.steps:
        episodes = max(episodes, -(-config.warm_start.batch_size // num_ranks))
    return episodes * limits.max_tokens


def _size_of_keys(shape: Any) -> int:
    """Numbers that the keys of a token take in a layer; linear attention keeps none."""
    heads = widest(shape, "num_attention_heads")
    head_dim = widest(shape, "head_dim") or shape.hidden_size // max(1, heads)
    return (widest(shape, "num_key_value_heads") or heads) * head_dim


def _intermediate_size(shape: Any) -> int:
    """Of the feed-forward layers; where it is not told, the customary one."""
    return widest(shape, "intermediate_size") or 4 * int(shape.hidden_size)


def _memory_of_training(config: Config, model: Any, num_parameters: int) -> dict[str, float]:
    """Bytes that come with trained weights, in GRPO or the warm start, whichever needs more."""
    grpo, num_trained = config.grpo, _num_trained(config, model)
    num_ranks = config.run.num_gpus or 1
    memory = {}
    if config.model.use_peft:
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


def _num_trained(config: Config, model: Any) -> int:
    """Weights that GRPO trains; with LoRA, the model without weights gets its adapters here."""
    if not config.model.use_peft:
        return int(model.num_parameters())
    with torch.device("meta"):
        attached = lora.attach(model, config.model, config.model.model, config.run.seed)
    return sum(p.numel() for p in attached.parameters() if p.requires_grad)


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
