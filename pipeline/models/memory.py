"""The memory of a rank: a sum of few terms, for a run with episodes as long as the limits allow.

The sum is an estimate: kernels, fragments and what the libraries allocate are an allowance.
"""

import os
from bisect import bisect_right
from collections.abc import Mapping
from copy import copy
from functools import cached_property
from typing import Any

import torch

from pipeline.common.errors import UserError
from pipeline.config.domain_names import SINGLE_TURN, known_domains
from pipeline.config.settings import DISTILL, Config
from pipeline.distributed.devices import dtype_of, on_gpu, uses_bf16
from pipeline.distributed.main_memory import PROCESS
from pipeline.models import lora
from pipeline.models.capabilities import widest
from pipeline.models.layers import outer_layers
from pipeline.models.loading import empty_model
from pipeline.models.rank_memory import (
    KEPT,
    LOGITS_PER_CHUNK,
    WIDER,
    bytes_per_token,
    memory_of_rank,
    num_cache_rows,
    token_budget,
)

GIB = 1 << 30
ELSEWHERE = 80e9  # bytes of a GPU, for a recipe for another machine
LONGEST = 1 << 20  # tokens of an episode up to which `bounds` tries
CUDA = 1.5 * GIB  # for the driver's context, libraries and NCCL; an allowance, not measured
FOR_GPUS = 2e9  # weights from which on a run of several ranks is for GPUs
CACHE = "key-value cache"
ACTIVATIONS = "activations of a micro-batch"


class Memory:
    """The bytes that a rank needs, from the model's shape and the settings.

    Each method that takes `config` accepts other limits for the same model.
    """

    def __init__(
        self,
        config: Config,
        *,
        prompts: Mapping[str, int] | None = None,
        model: Any = None,
    ) -> None:
        """`prompts` has the tokens of each domain's longest prompt; `model` is the empty model."""
        self.config = config
        self.model = empty_model(config) if model is None else model
        self.prompts = prompts or {}
        self.shape = self.model.config.get_text_config()
        self.dtype = dtype_of(config.model)
        self.num_weights = self.model.num_parameters()
        self.num_trained = num_trained(config, self.model)
        self.num_ranks = config.run.num_gpus or int(os.environ.get("WORLD_SIZE", "1"))
        self.is_here = "RANK" in os.environ or self._could_run_here()
        self.has_gpu = on_gpu() or (not self.is_here and uses_bf16(config.model))

    def _could_run_here(self) -> bool:
        """Return False for a recipe for another machine: of more GPUs, or of GPUs at all."""
        if on_gpu():
            return self.num_ranks <= torch.cuda.device_count()
        is_for_gpus = self.num_ranks > 1 and self.num_weights > FOR_GPUS
        return self.num_ranks <= (os.cpu_count() or 1) and not is_for_gpus

    def on(self, num_ranks: int, shard: str) -> "Memory":
        """Return the memory of a rank of a run on other ranks, with another setting `shard`."""
        other = copy(self)
        other.num_ranks = num_ranks
        other.config = self.config.changed("grpo", shard=shard)
        return other

    @property
    def _is_away(self) -> bool:
        return self.has_gpu and not self.is_here

    @cached_property
    def have(self) -> float:
        """The bytes that a rank has here; if the GPUs are another machine's, of such a GPU."""
        if self._is_away:
            return ELSEWHERE
        num_ranks = os.environ.get("LOCAL_WORLD_SIZE", self.config.run.num_gpus or 1)
        return memory_of_rank(int(num_ranks))

    def terms(self, config: Config | None = None) -> dict[str, float]:
        """Return {term: bytes}. After a rollout, the cache makes room for the activations."""
        config = config or self.config
        grpo = config.grpo
        size = self.dtype.itemsize
        held = size if config.model.use_peft else 4
        trained = 4.0 * self.num_trained * grpo.use_grpo
        ranks = self.num_ranks
        is_whole = grpo.shard != "full"
        cut = 1 if is_whole else ranks
        # On a GPU, they are in main memory.
        is_taught = config.curriculum.last_stage == DISTILL and not self.has_gpu
        num_teachers = len(config.curriculum.order or config.data.domains) * is_taught
        rows = min(config.rollout.max_concurrent_episodes, self.episodes(config))
        tokens = self._tokens(config)
        # Log-probabilities and, in float64, cumulative probabilities of a sampled token; in an
        # update, a chunk of logits and its gradient.
        sampled = 32.0 * rows * self.shape.vocab_size
        chunk = 8.0 * min(LOGITS_PER_CHUNK, tokens * self.shape.vocab_size)
        kept = bytes_per_token(config, self.model) * tokens
        cached = _cached_per_token(self.shape) * self.shape.num_hidden_layers * size
        held_rows = num_cache_rows(rows) if self._has_own_cache(config) else rows
        cache = float(cached * held_rows * config.rollout.max_tokens)
        has_copy = size < held or not is_whole
        if share := config.rollout.sampler_facts.memory:  # on a GPU, it also holds weights
            have = self.have if self.has_gpu else memory_of_rank()
            cache = getattr(config.rollout, share) * have
            has_copy = not self.has_gpu
        is_shared = grpo.beta > 0 and grpo.reference_per_stage
        has_start = grpo.movement_coef > 0 and not is_shared
        terms = {
            "CUDA or Python, and libraries": CUDA if self.has_gpu else PROCESS,
            f"weights ({'fp32' if held == 4 else 'bf16'})": held * self.num_weights / cut,
            "gathered weights and gradients": 0.0 if is_whole else self._gathered(config),
            "sampling copy": size * self.num_weights * has_copy,
            "LoRA adapters, twice": (1 + 1 / cut) * trained * config.model.use_peft,
            "gradients": trained / cut,
            "moments of AdamW": 2 * trained / (1 if grpo.shard == "none" else ranks),
            "reference policy": trained * (grpo.beta > 0) / cut,
            "teachers": trained * num_teachers / cut,
            "weights at the stage's start": trained * has_start / cut,
            "logits": max(sampled, chunk),
            CACHE: cache,
            ACTIVATIONS: kept * (WIDER if size < 4 else 1),
        }
        return {name: float(value) for name, value in terms.items() if value}

    def _gathered(self, config: Config) -> float:
        """Return the bytes that a rank gathers of a sharded model at once.

        These are what stands outside the layers and two layers, of which one comes early, with the
        gradients of a layer; or all parameters, with all gradients in float32.
        """
        size = self.dtype.itemsize
        if not config.grpo.reshard_after_forward:
            return float(size * self.num_weights + 4 * self.num_trained)
        layers = outer_layers(self.model)
        most = max(sum(p.numel() for p in layer.parameters()) for layer in layers)
        inside = sum(p.numel() for layer in layers for p in layer.parameters())
        outside = self.num_weights - inside
        gradients = 0 if config.model.use_peft else outside + most
        return float(size * (outside + 2 * most + gradients))

    def need(self, config: Config | None = None) -> float:
        """Return the bytes that a rank needs: of cache and activations, the larger counts.

        Both count if a GPU keeps the cache for the next rollout.
        """
        terms = self.terms(config)
        freed = min(terms[CACHE], terms.get(ACTIVATIONS, 0.0))
        return sum(terms.values()) - freed * (not self._keeps_cache(config))

    def _has_own_cache(self, config: Config | None) -> bool:
        """Return True if the own sampler, or perhaps it, keeps a cache on a GPU."""
        sampler = (config or self.config).rollout.sampler
        return self.has_gpu and sampler in ("auto", "own")

    def _keeps_cache(self, config: Config | None = None) -> bool:
        """Return True if the cache stays during the update, for the graphs of the next rollout."""
        return self._has_own_cache(config) and self.terms(config)[CACHE] <= KEPT * self.have

    def lower_episodes(self) -> list[str]:
        """Let as many episodes at once play as fit; return a note if these are fewer than asked.

        Only the run itself plays fewer: the saved settings stay, so a resume elsewhere may play
        more. If not even one fits, nothing changes: another setting must change.
        """
        limits = self.config.rollout
        wanted = min(limits.max_concurrent_episodes, self.episodes(self.config))
        most = self.most("max_concurrent_episodes", wanted)
        if most in (0, wanted):
            return []
        self.config = self.config.changed("rollout", max_concurrent_episodes=most)
        return [f"note: {most:,} of {wanted:,} episodes at once, as many as fit into memory"]

    def refuse_lack(self) -> None:
        """Raise UserError if the run needs more memory than a rank has."""
        need = self.need()
        if need > self.have:
            terms = " + ".join(f"{name} {size / GIB:.1f}" for name, size in self.terms().items())
            larger = "" if self._keeps_cache() else "; of cache and activations the larger"
            raise UserError(
                f"memory: each rank needs {need / GIB:.1f} GiB ({terms}{larger}) and has "
                f"{self.have / GIB:.1f}; lower max_tokens or max_tokens_per_microbatch, set "
                "use_peft or shard full, or take a smaller model or "
                f"{'larger GPUs' if self.has_gpu else 'fewer ranks'}"
                f"{'' if self.is_here or self.has_gpu else '; for GPUs, give mixed_precision bf16'}"
            )

    def table(self) -> list[str]:
        """Return the terms as lines, and the most tokens and episodes that fit."""
        limits = self.config.rollout
        need = self.need()
        all_episodes = self.episodes(self.config)
        episodes = min(limits.max_concurrent_episodes, all_episodes)
        longest = self.most("max_tokens", LONGEST)
        most = self.most("max_concurrent_episodes", all_episodes)
        where = "on a GPU of another machine" if self._is_away else "here"
        fits = "fits" if need <= self.have else "does not fit: a run would be refused"
        added = "sum" if self._keeps_cache() else "sum, with the larger of the last two"
        return [
            "memory per rank, estimated, in GiB",
            *(f"  {name:<34}{size / GIB:>12.2f}" for name, size in self.terms().items()),
            f"  {added:<34}{need / GIB:>12.2f}",
            f"  of {self.have / GIB:.1f} GiB that a rank has {where}: {fits}",
            f"  so much fits: max_tokens {longest:,} with {episodes:,} episodes at once, or "
            f"{most:,} of {all_episodes:,} episodes at once with max_tokens {limits.max_tokens:,}",
        ]

    def most(self, name: str, high: int) -> int:
        """Return the largest value up to `high` of a setting of rollouts that fits into `have`."""

        def need(value: int) -> float:
            return self.need(self.config.changed("rollout", **{name: value}))

        return bisect_right(range(1, high + 1), self.have, key=need)

    def episodes(self, config: Config) -> int:
        """Return the most episodes that a rank plays at once: those of a step or an evaluation."""
        limits = config.rollout
        data = config.data
        trials = len(data.domains) * data.eval_tasks_per_domain * config.evaluation.eval_trials
        groups = self._groups(config, self.num_ranks) * config.grpo.use_grpo
        return max(groups * limits.num_generations, -(-trials // self.num_ranks))

    def _groups(self, config: Config, num_ranks: int) -> int:
        """Return the most groups that a rank has in a step, with those of earlier steps."""
        limits = config.rollout
        num_steps = 1 + limits.max_staleness * limits.is_partial
        return -(-limits.tasks_per_step // num_ranks) * num_steps

    def _tokens(self, config: Config) -> int:
        """Return the most tokens of a micro-batch; 0 if nothing is trained."""
        if not config.grpo.use_grpo:
            return 0
        limits = config.rollout
        longest = self.longest(config)
        # With dynamic sampling, a rank may get the groups of others.
        num_ranks = 1 if config.grpo.dynamic_sampling else self.num_ranks
        groups = self._groups(config, num_ranks)
        return max(longest, min(self.budget(config), groups * limits.num_generations * longest))

    def budget(self, config: Config) -> int:
        """Return the most tokens of a micro-batch of several episodes."""
        memory = ELSEWHERE if self._is_away else memory_of_rank()
        return token_budget(config, self.model, memory, self.has_gpu)

    def longest(self, config: Config) -> int:
        """Return the most tokens of an episode; with one message, these are prompt and turn."""
        limits = config.rollout
        is_one_turn = all(
            known_domains(config)[name].factory == SINGLE_TURN for name in config.data.domains
        )
        if not self.prompts or not is_one_turn or config.customer.url is not None:
            return limits.max_tokens
        return min(limits.max_tokens, max(self.prompts.values()) + limits.max_tokens_per_turn)


def _cached_per_token(shape: Any) -> int:
    if latent := getattr(shape, "kv_lora_rank", None):
        return int(latent + shape.qk_rope_head_dim)
    heads = widest(shape, "num_attention_heads")
    head_dim = widest(shape, "head_dim") or shape.hidden_size // max(1, heads)
    return 2 * (widest(shape, "num_key_value_heads") or heads) * head_dim


def num_trained(config: Config, model: Any) -> int:
    """Return the number of weights that GRPO trains. With LoRA, adapters are added to `model`."""
    if not config.model.use_peft:
        return int(model.num_parameters())
    with torch.device("meta"):
        dtype = dtype_of(config.model)
        attached = lora.attach(model, config.model, config.model.model, config.run.seed, dtype)
    return sum(p.numel() for p in attached.parameters() if p.requires_grad)
