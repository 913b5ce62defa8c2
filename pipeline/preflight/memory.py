"""An estimate of the memory that a rank needs in each phase of a run, and what a rank has."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from pipeline.config.settings import Config
from pipeline.grpo.budget import token_budget
from pipeline.grpo.micro_batches import KEYS_PER_TOKEN
from pipeline.grpo.token_logprobs import LOGITS_PER_CHUNK, LOGITS_PER_CHUNK_ON_GPU
from pipeline.models import lora
from pipeline.models.capabilities import widest
from pipeline.models.loading import dtype_of, empty_model, on_gpu, uses_bf16
from pipeline.rollout.row_sampler import MASK

GIB = 1 << 30
CARDS = (24, 40, 80, 141)  # GB of GPUs that are sold; CONTEXT is not in them
CONTEXT = 1.5 * GIB  # of a GPU: CUDA, NCCL's buffers, what the allocator cannot use (assumed)
STEP_OF_CONTEXT, LONGEST = 256, 1 << 18  # tokens
CACHE, PASS = "key-value cache", "a pass of the sampler"
ACTIVATIONS = "activations of a micro-batch"
CASTS, ON_THEIR_WAY = "weights cast to bf16", "moments on their way to rank 0"
GRADIENTS, ADAMW = "gradients (fp32)", "AdamW (fp32, two moments)"
PHASES = ("rollout", "update", "checkpoint", "warm start")
OF_GRPO = ("rollout", "update", "checkpoint")
WHEN = {  # the phases of a term that is not there in all of them
    CACHE: ("rollout",),
    PASS: ("rollout",),
    ACTIVATIONS: ("update", "warm start"),
    CASTS: ("update",),
    ON_THEIR_WAY: ("checkpoint",),
    **dict.fromkeys(("LoRA adapters (fp32)", GRADIENTS, ADAMW, "reference policy (fp32)"), OF_GRPO),
    **dict.fromkeys(("gradients of the warm start", "AdamW of the warm start"), ("warm start",)),
}


class Memory(dict[str, float]):
    """Bytes by term. On a CPU, the key-value cache stays in all phases of GRPO."""

    keeps_cache = False
    episodes, per_episode = 0, 0.0  # the largest number at the same time; the bytes of one

    def of(self, phase: str) -> dict[str, float]:
        """Return the terms of a phase; {} if the run has no such phase."""
        if phase not in self.phases:
            return {}
        kept = (CACHE,) if self.keeps_cache and phase in OF_GRPO else ()
        return {n: size for n, size in self.items() if n in kept or phase in WHEN.get(n, PHASES)}

    @property
    def phases(self) -> list[str]:
        trained = (GRADIENTS in self, GRADIENTS in self, "AdamW of the warm start" in self)
        return [p for p, is_there in zip(PHASES, (True, *trained), strict=True) if is_there]

    @property
    def peak(self) -> tuple[float, str]:
        """The bytes of the largest phase, and its name."""
        return max((sum(self.of(phase).values()), phase) for phase in self.phases)


def memory_per_rank(config: Config, tokenizer: Any = None) -> Memory:
    """Estimate the bytes that a rank needs, by term, from the model's shape and the settings."""
    return _estimator(config, tokenizer)(config)


def _estimator(config: Config, tokenizer: Any) -> Callable[[Config], Memory]:
    """Return a function that estimates for settings with the same model as `config`."""
    model = empty_model(config, tokenizer)
    num_parameters = model.num_parameters()
    trained = 4.0 * num_trained(config, model) if config.grpo.use_grpo else 0.0
    return lambda settings: _memory(settings, model, num_parameters, trained)


def _memory(config: Config, model: Any, num_parameters: int, trained: float) -> Memory:
    shape, size = model.config.get_text_config(), 2 if uses_bf16(config.model) else 4
    limits, data, num_ranks = config.rollout, config.data, config.run.num_gpus or 1
    groups = -(-limits.tasks_per_step // num_ranks)
    trials = len(data.domains) * data.eval_tasks_per_domain * config.evaluation.eval_trials
    episodes = max(groups * limits.num_generations, -(-trials // num_ranks))
    episodes = min(limits.max_concurrent_episodes, episodes)
    is_frozen = config.model.use_peft and not config.is_supervised
    held = size if is_frozen else 4
    is_for_gpu = on_gpu() or size == 2
    memory = Memory()
    memory.keeps_cache, memory.episodes = not is_for_gpu, episodes
    logits = 3 * 4 * shape.vocab_size  # three fp32 copies
    of_one = limits.max_tokens * _cached_per_token(shape) * size
    memory.per_episode = float((shape.num_hidden_layers + 1) * of_one + logits)
    memory |= {
        f"weights ({'fp32' if held == 4 else 'bf16'})": float(held * num_parameters),
        # The sampler uses the memory of weights that have its type.
        "weights of the sampler": float(size * num_parameters * (size < held)),
        CACHE: float(shape.num_hidden_layers * episodes * of_one),
        # One layer's keys and values of chosen rows, logits, and a mask.
        PASS: float(episodes * (of_one + logits) + MASK * size * is_for_gpu),
    }
    if is_for_gpu:
        memory["CUDA and NCCL (assumed)"] = CONTEXT
    if config.grpo.use_grpo:
        memory |= _memory_of_training(config, num_parameters, trained)
        if size < held:  # autocast keeps them for a forward pass
            memory[CASTS] = float(size * num_parameters)
        is_here = num_ranks <= max(1, torch.cuda.device_count())
        budget = token_budget(config, model, memory_of_a_rank(config) if is_here else math.inf)
        chunk = LOGITS_PER_CHUNK_ON_GPU if is_for_gpu else LOGITS_PER_CHUNK
        memory[ACTIVATIONS] = _activations(config, shape, size, groups, budget, chunk)
    return memory


def what_fits(config: Config, tokenizer: Any, have: float) -> str:
    """Return how many episodes, and how long ones, fit into `have` bytes, in words."""
    estimate, now = _estimator(config, tokenizer), config.rollout.max_tokens

    def memory_of(max_tokens: int) -> Memory:
        limits = config.rollout.model_copy(update={"max_tokens": max_tokens})
        return estimate(config.model_copy(update={"rollout": limits}))

    memory = memory_of(now)
    free = have - max(sum(m.values()) for phase in PHASES if CACHE in (m := memory.of(phase)))
    most = max(0, memory.episodes + math.floor(free / memory.per_episode))
    low, high = 0, LONGEST // STEP_OF_CONTEXT
    while low < high:
        middle = (low + high + 1) // 2
        fits = memory_of(middle * STEP_OF_CONTEXT).peak[0] <= have
        low, high = (middle, high) if fits else (low, middle - 1)
    length = f"{low * STEP_OF_CONTEXT}" + " or more" * (low == LONGEST // STEP_OF_CONTEXT)
    return f"{most} episodes of {now} tokens at once, or {memory.episodes} of {length} tokens"


def card_for(need: float) -> tuple[int, float]:
    """Return the smallest GPU (in GB) that holds `need` bytes, or the largest, and its bytes."""
    return next(((gb, gb * 1e9) for gb in CARDS if gb * 1e9 >= need), (CARDS[-1], CARDS[-1] * 1e9))


def _activations(
    config: Config, shape: Any, size: int, groups: int, budget: int, chunk: int
) -> float:
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
    return float(kept + 3 * 4 * min(chunk, tokens * shape.vocab_size))


def _cached_per_token(shape: Any) -> int:
    if latent := getattr(shape, "kv_lora_rank", None):
        return int(latent + shape.qk_rope_head_dim)
    return 2 * _keys_per_token(shape)


def _keys_per_token(shape: Any) -> int:
    heads = widest(shape, "num_attention_heads")
    head_dim = widest(shape, "head_dim") or shape.hidden_size // max(1, heads)
    return (widest(shape, "num_key_value_heads") or heads) * head_dim


def _memory_of_training(config: Config, num_parameters: int, trained: float) -> dict[str, float]:
    grpo, num_ranks = config.grpo, config.run.num_gpus or 1
    moments = 2 * trained / (num_ranks if grpo.shard_optimizer else 1)
    memory = {"LoRA adapters (fp32)": trained} if config.model.use_peft else {}
    memory |= {GRADIENTS: trained, ADAMW: moments}
    if grpo.beta > 0:
        memory["reference policy (fp32)"] = trained
    if grpo.shard_optimizer and num_ranks > 1:
        memory[ON_THEIR_WAY] = moments
    if config.is_supervised:  # it trains all weights, and each rank keeps the whole optimizer state
        memory["gradients of the warm start"] = 4.0 * num_parameters
        memory["AdamW of the warm start"] = 8.0 * num_parameters
    return memory


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
