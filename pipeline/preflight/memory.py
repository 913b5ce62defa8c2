"""The memory of a rank, phase by phase: what each phase of a run needs, and what a rank has.

Counted is a run whose episodes are as long as the limits allow. On a CPU the sums are those of the
whole process, as `VmHWM` in `/proc/PID/status` shows them.
"""

import os
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch

from pipeline.config.settings import SINGLE_TURN, Config
from pipeline.grpo.micro_batches import KEYS_PER_TOKEN
from pipeline.grpo.token_logprobs import LOGITS_PER_CHUNK
from pipeline.models import lora
from pipeline.models.allocation import LARGE
from pipeline.models.budget import bytes_per_token, main_memory, memory_of, token_budget
from pipeline.models.capabilities import unserved, widest
from pipeline.models.loading import dtype_of, empty_model, on_gpu, uses_bf16
from pipeline.models.packing import packed_bytes
from pipeline.preflight.activations import Activations, activations_of
from pipeline.rollout.kv_cache import LENGTHS, ROWS
from pipeline.rollout.row_sampler import MASK

GIB = 1 << 30
GPUS = (24e9, 40e9, 80e9, 141e9)  # bytes of GPUs, for a recipe for another machine
LONGEST = 1 << 20  # tokens of an episode up to which `bounds` tries
CUDA = 1.5 * GIB  # for the driver's context, libraries and NCCL; an allowance, not measured
PROCESS = 0.6 * GIB  # of Python and the libraries in main memory; measured on CPUs
# Of activations with LoRA on a CPU: small tensors of the adapters stay between large ones that are
# freed, so the heap grows. Measured: SmolLM2-135M 1.5 to 1.7, Gemma 3 270M 1.1 to 1.2.
HEAP = 1.4
FOR_GPUS = 2e9  # weights from which on a run of several ranks is for GPUs
Terms = dict[str, float]


class Memory:
    """The bytes that a rank needs, from the model's shape and the settings.

    Each method that takes `config` accepts other limits for the same model.
    """

    def __init__(
        self, config: Config, tokenizer: Any = None, prompts: Mapping[str, int] | None = None
    ) -> None:
        """`prompts` has the tokens of each domain's longest prompt, which a group shares."""
        self.config, self.model = config, empty_model(config, tokenizer)
        self.prompts = prompts or {}
        self.shape = self.model.config.get_text_config()
        self.dtype, self.num_weights = dtype_of(config.model), self.model.num_parameters()
        self.num_trained = num_trained(config, self.model)
        self.num_ranks, self._gpu = config.run.num_gpus or 1, GPUS[-1]
        self.is_here = "RANK" in os.environ or self._could_run_here()
        self.has_gpu = on_gpu() or (not self.is_here and uses_bf16(config.model))

    def _could_run_here(self) -> bool:
        """Return False for a recipe for another machine: of more GPUs, or of GPUs at all."""
        if on_gpu():
            return self.num_ranks <= torch.cuda.device_count()
        is_for_gpus = self.num_ranks > 1 and self.num_weights > FOR_GPUS
        return self.num_ranks <= (os.cpu_count() or 1) and not is_for_gpus

    def phases(self, config: Config | None = None) -> dict[str, Terms]:
        """Return {phase: {term: bytes}}; what a phase needs is the sum of its terms."""
        config = config or self.config
        held, cache = self._held(config), self._cache(config)
        phases = {"rollout": held | cache | self._rollout(config)}
        if config.grpo.use_grpo:
            trained = held | self._trained(config)
            is_freed = self.has_gpu or cache["key-value cache"] > LARGE  # after a rollout
            kept = {} if is_freed else cache
            without = {} if self.num_ranks > 1 else {"gradients (fp32)": 0.0}
            phases["rollout"] |= trained | without
            phases["update"] = trained | kept | self._update(config)
            phases["checkpoint"] = trained | kept | self._checkpoint(config)
            if config.is_supervised:
                phases["warm start"] = held | self._warm_start(config)
        return {name: {t: b for t, b in of.items() if b} for name, of in phases.items()}

    @cached_property
    def have(self) -> float:
        """The bytes that a rank has here; if the GPUs are another machine's, of a GPU that fits."""
        if not self.has_gpu or self.is_here:
            return memory_of_a_rank(self.config)
        for self._gpu in GPUS:  # the size of micro-batches depends on it
            if self.largest()[1] <= self._gpu:
                break
        return self._gpu

    def bounds(self) -> str:
        """Say the longest context and the most concurrent episodes that fit into `have`."""
        limits = self.config.rollout
        episodes = min(limits.max_concurrent_episodes, self.episodes(self.config))
        longest = self.most("max_tokens", LONGEST)
        most = self.most("max_concurrent_episodes", self.episodes(self.config))
        where = f"into {self.have / GIB:.1f} GiB"
        if self.has_gpu and not self.is_here:
            where += f" (a GPU of {self.have / 1e9:.0f} GB)"
        return (
            f"{where} fit max_tokens {longest:,} with {episodes:,} episodes at once, or {most:,} "
            f"of {self.episodes(self.config):,} episodes at once with max_tokens "
            f"{limits.max_tokens:,}"
        )

    def largest(self, config: Config | None = None) -> tuple[str, float]:
        """Return the phase that needs most, and its bytes."""
        sums = {name: sum(terms.values()) for name, terms in self.phases(config).items()}
        return max(sums.items(), key=lambda item: item[1])

    @cached_property
    def episodes_at_once(self) -> int:
        """`max_concurrent_episodes`, or as many of them as fit into `have` if these are fewer.

        If not even one fits, it stays what it is: another setting must change.
        """
        given = self.config.rollout.max_concurrent_episodes
        if self.largest()[1] <= self.have:
            return given
        return self.most("max_concurrent_episodes", min(given, self.episodes(self.config))) or given

    def most(self, name: str, high: int) -> int:
        """Return the largest value up to `high` of a setting of rollouts that fits into `have`."""
        low = 0
        while low < high:
            middle = (low + high + 1) // 2
            rollout = self.config.rollout.model_copy(update={name: middle})
            config = self.config.model_copy(update={"rollout": rollout})
            fits = self.largest(config)[1] <= self.have
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def episodes(self, config: Config) -> int:
        """Return the most episodes that a rank plays at once: those of a step or an evaluation."""
        limits, data = config.rollout, config.data
        trials = len(data.domains) * data.eval_tasks_per_domain * config.evaluation.eval_trials
        groups = -(-limits.tasks_per_step // self.num_ranks) * config.grpo.use_grpo
        return max(groups * limits.num_generations, -(-trials // self.num_ranks))

    def _longest(self, config: Config) -> int:
        """Return the most tokens of an episode; with one message, these are prompt and turn."""
        limits, data = config.rollout, config.data
        is_one_turn = all(data.factories[name].factory == SINGLE_TURN for name in data.domains)
        if not self.prompts or not is_one_turn or data.customer == "llm":
            return limits.max_tokens
        return min(limits.max_tokens, max(self.prompts.values()) + limits.max_tokens_per_turn)

    def _held(self, config: Config) -> Terms:
        size = self.dtype.itemsize
        held = size if config.model.use_peft else 4
        # The sampler uses the memory of weights that have its type.
        own = size * self.num_weights * (size < held)
        kind = "fp32" if held == 4 else "bf16"
        terms = {f"weights ({kind})": float(held * self.num_weights)}
        terms |= {"weights of the sampler": float(own)}
        if self.has_gpu:
            return terms | {"CUDA and NCCL (an allowance)": CUDA}
        return terms | {"Python and libraries": PROCESS}

    def _trained(self, config: Config) -> Terms:
        trained, grpo = 4.0 * self.num_trained, config.grpo
        adapters = trained * config.model.use_peft
        return {
            "LoRA adapters (fp32)": adapters,
            "adapters of the sampler (fp32)": adapters,
            "gradients (fp32)": trained,
            "AdamW (fp32, two moments)": 2 * trained / self._shards(config),
            "reference policy (fp32)": trained * (grpo.beta > 0),
        }

    def _shards(self, config: Config) -> int:
        return self.num_ranks if config.grpo.shard_optimizer else 1

    def _cache(self, config: Config) -> Terms:
        limits = config.rollout
        rows = min(limits.max_concurrent_episodes, self.episodes(config))
        rows, length = -(-rows // ROWS) * ROWS, -(-limits.max_tokens // LENGTHS) * LENGTHS
        per_token = _cached_per_token(self.shape) * self.shape.num_hidden_layers
        return {"key-value cache": float(per_token * self.dtype.itemsize * rows * length)}

    def _rollout(self, config: Config) -> Terms:
        limits, size = config.rollout, self.dtype.itemsize
        rows = min(limits.max_concurrent_episodes, self.episodes(config))
        heads = widest(self.shape, "num_attention_heads") or 1
        shared = heads // (widest(self.shape, "num_key_value_heads") or heads)
        longest = self._longest(config)
        fed = min(rows * longest, MASK // (shared * longest))
        mask = min(MASK, fed * shared * longest)
        # Rows that are not the first of the cache are copied for attention, layer by layer.
        layer = self._cache(config)["key-value cache"] / self.shape.num_hidden_layers
        masks, feeding = 2.0 * size * mask, 3.0 * 4 * self._intermediate * fed
        # Logits, log-probabilities and, in float64, cumulative probabilities of a token.
        logits = 32.0 * rows * self.shape.vocab_size
        packed = 0 if self.has_gpu else packed_bytes(self.model, self.dtype)
        return {
            "working memory of the sampler": layer + masks + feeding + logits,
            "packed weights of the sampler": float(packed),
        }

    def _update(self, config: Config) -> Terms:
        grpo, limits = config.grpo, config.rollout
        groups = -(-limits.tasks_per_step // self.num_ranks)
        if grpo.dynamic_sampling:  # Without balancing, one rank may get all groups of a step.
            balances = grpo.balance_ranks and not config.run.deterministic
            groups = min(groups + 1, limits.tasks_per_step) if balances else limits.tasks_per_step
        shares = grpo.share_prefixes and not grpo.padding_free and unserved(self.shape) is None
        longest = self._longest(config)
        # A group computes its prompt once.
        prompt = min(longest, *self.prompts.values()) * shares if self.prompts else 0
        trained = groups * (prompt + limits.num_generations * (longest - prompt))
        tokens = max(longest, min(self._budget(config), trained))
        terms = self._training(config, tokens)
        keys = groups * limits.num_generations * longest
        terms["activations of a micro-batch"] += self._gathered(tokens, keys, config)
        return terms

    def _gathered(self, tokens: int, most: int, config: Config) -> float:
        """Return the bytes of keys and values that attention copies for common prefixes."""
        grpo = config.grpo
        if not grpo.share_prefixes or grpo.padding_free:
            return 0.0
        copied = max(0, min(tokens * KEYS_PER_TOKEN, most) - tokens)
        layers = 1 if grpo.gradient_checkpointing else self.shape.num_hidden_layers
        return float(copied * self.dtype.itemsize * layers * 2 * _keys_per_token(self.shape))

    def _budget(self, config: Config) -> int:
        is_away = self.has_gpu and not self.is_here
        memory = self._gpu if is_away else memory_of(torch.device("cuda" if on_gpu() else "cpu"))
        return token_budget(config, self.model, memory)

    def _training(self, config: Config, tokens: int) -> Terms:
        """The terms of a forward and a backward pass over so many tokens."""
        kept, is_trained = self._kept, not config.model.use_peft
        saved = kept.inputs + kept.layer if config.grpo.gradient_checkpointing else kept.saved
        # Gradients inside a layer. Measured on CPU: up to 1.8 vectors of the intermediate size.
        inside = 2.0 * 4 * self._intermediate
        # The gradient of logits takes their place; in bf16, it is rounded and converted.
        logits = 2.0 * 4 * min(LOGITS_PER_CHUNK, tokens * self.shape.vocab_size)
        # A chunk's gradient of the weight, beside the sum of those before it.
        gradient = 8.0 * self.shape.vocab_size * int(self.shape.hidden_size) * is_trained
        copies = 2.0 * self.num_weights * (self.dtype.itemsize < 4) * is_trained
        heap = 1.0 if is_trained or self.has_gpu else HEAP
        return {
            "activations of a micro-batch": heap * (saved + inside) * tokens,
            "output layer": logits + gradient,
            "bf16 copies of the weights": copies,
        }

    def _checkpoint(self, config: Config) -> Terms:
        shards = self._shards(config)
        moments = 8.0 * self.num_trained / shards * (shards > 1)
        return {"moments on the way to rank 0": moments}

    def _warm_start(self, config: Config) -> Terms:
        examples = -(-config.warm_start.batch_size // self.num_ranks)
        longest = config.rollout.max_tokens
        tokens = max(longest, min(self._budget(config), examples * longest))
        terms = self._trained(config) | {"reference policy (fp32)": 0.0}
        terms |= self._training(config, tokens)
        keys = examples * longest
        terms["activations of a micro-batch"] += self._gathered(tokens, keys, config)
        return terms

    @property
    def _intermediate(self) -> int:
        return widest(self.shape, "intermediate_size") or 4 * int(self.shape.hidden_size)

    @cached_property
    def _kept(self) -> Activations:
        autocast = None if self.config.model.use_peft or self.dtype.itemsize > 2 else self.dtype
        try:
            return activations_of(self.model, autocast)
        except Exception:  # A model's own code may raise any exception on `meta`.
            config, layers = self.config, int(self.shape.num_hidden_layers)
            grpo = config.grpo.model_copy(update={"gradient_checkpointing": False})
            whole = bytes_per_token(config.model_copy(update={"grpo": grpo}), self.model)
            inputs = float(layers * self.shape.hidden_size * self.dtype.itemsize)
            return Activations(whole, whole / layers, inputs)


def _cached_per_token(shape: Any) -> int:
    if latent := getattr(shape, "kv_lora_rank", None):
        return int(latent + shape.qk_rope_head_dim)
    return 2 * _keys_per_token(shape)


def _keys_per_token(shape: Any) -> int:
    heads = widest(shape, "num_attention_heads")
    head_dim = widest(shape, "head_dim") or shape.hidden_size // max(1, heads)
    return (widest(shape, "num_key_value_heads") or heads) * head_dim


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
    return main_memory() / int(os.environ.get("LOCAL_WORLD_SIZE", config.run.num_gpus or 1))
