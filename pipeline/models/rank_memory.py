"""The memory of a rank: failed allocations, freed memory, and the tokens of a micro-batch."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress
from typing import Any

import torch

from pipeline.config.settings import Config
from pipeline.distributed.devices import dtype_of, on_gpu
from pipeline.distributed.main_memory import main_memory
from pipeline.models.capabilities import attention_size, widest

M_TRIM_THRESHOLD = -1  # bytes at the heap's end from which on glibc returns them to the system
M_MMAP_THRESHOLD = -3  # bytes from which on glibc returns a block to the system when it is freed
LARGE = 1 << 28  # bytes from which on training takes so much memory that its pages take time

NO_MEMORY = (  # texts in the RuntimeError of a failed allocation
    "can't allocate memory",
    "not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)

KEPT = 0.1  # share of a GPU that the own sampler's cache may keep during an update
FEWEST_ROWS = 4  # of this cache on a GPU

LEAST_TOKENS = 2048
MOST_TOKENS_GPU = 1 << 16  # of a micro-batch, by default
# In bf16, the backward pass keeps some tensors in float32. Counted on Qwen3-4B and 8B with LoRA.
WIDER = 1.5
SHARE = 0.5  # share of the memory beside weights, gradients and moments that a micro-batch may take
RANKS_OF_A_MACHINE = 8  # a fixed number, so that the number of ranks does not change micro-batches


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if the error means that an allocation failed, on GPU or CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in NO_MEMORY)


def give_memory_back() -> None:
    """Free memory that reference cycles and the allocators' caches occupy."""
    gc.collect()
    empty_caches()


def empty_caches() -> None:
    """Return to the system the freed memory that the allocators of GPU and CPU keep."""
    torch.cuda.empty_cache()  # does nothing in a process that uses no GPU
    _glibc("malloc_trim", 0)


def keep_freed_memory(model: torch.nn.Module) -> None:
    """Let the CPU's allocator keep freed tensors if training the model takes more than LARGE bytes.

    Otherwise, glibc returns large tensors and the heap's end to the system, which fills the pages
    with zeros when they come again: a fifth of the time of an update. Activations do not count.
    """
    size = 4 * sum(p.nbytes for p in model.parameters())  # with gradients and moments
    if size > LARGE:
        _glibc("mallopt", M_MMAP_THRESHOLD, 1 << 25)  # the highest that glibc allows
        _glibc("mallopt", M_TRIM_THRESHOLD, (1 << 31) - 1)


def _glibc(function: str, *arguments: int) -> None:
    with suppress(AttributeError):  # musl has no such function
        getattr(ctypes.CDLL(None), function)(*arguments)


def memory_of_rank(num_ranks: int = RANKS_OF_A_MACHINE) -> float:
    """Return the bytes that a rank has: the smallest GPU or, on CPUs, a share of main memory.

    `num_ranks` ranks share the main memory that the system, or a container's limit, allows.
    """
    if on_gpu():
        devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        return float(min(device.total_memory for device in devices))
    return float(main_memory()[0]) / num_ranks


def bucket(number: int, least: int) -> int:
    """Return the smallest of least, 1.5 least, 2 least, 3 least, 4 least, ... >= `number`.

    `least` must be a power of 2. With CUDA graphs, each number of rows and each length needs a
    graph of its own, so there are few.
    """
    size = least
    while size < number:
        size = size * 3 // 2 if size & (size - 1) == 0 else size // 3 * 4
    return size


def num_cache_rows(num_episodes: int) -> int:
    """Return the rows of the own sampler's cache on a GPU, for so many episodes at once."""
    return -(-bucket(num_episodes, FEWEST_ROWS) // FEWEST_ROWS) * FEWEST_ROWS


def token_budget(config: Config, model: Any, memory: float, has_gpu: bool) -> int:
    """Return `max_tokens_per_microbatch`; if it is null, as many tokens as a group may have.

    A GPU computes more groups at once, up to MOST_TOKENS_GPU tokens. A group whose micro-batches
    would not fit into `memory` (bytes) gets smaller ones, which compute common prefixes several
    times.
    """
    if (budget := config.grpo.max_tokens_per_microbatch) is not None:
        return budget
    longest = config.rollout.max_tokens
    frozen = dtype_of(config.model).itemsize
    whole = max(LEAST_TOKENS, config.rollout.num_generations * longest)
    # Weights, gradients and two moments are in float32; LoRA trains few weights.
    of_weight = frozen if config.model.use_peft else 16
    of_token = bytes_per_token(config, model)
    if has_gpu:
        whole = max(whole, MOST_TOKENS_GPU)
        of_weight += 0 if config.model.use_peft else frozen  # of the sampler's copy
        of_token *= WIDER
    fits = SHARE * (memory - model.num_parameters() * of_weight) / of_token
    return int(min(whole, max(LEAST_TOKENS, longest, fits)))


def bytes_per_token(config: Config, model: Any) -> float:
    """Estimate the bytes that a forward pass keeps for the backward pass, per token."""
    shape = model.config.get_text_config()
    size = dtype_of(config.model).itemsize
    intermediate_size = widest(shape, "intermediate_size") or 4 * int(shape.hidden_size)
    # A layer keeps about 16 hidden and 3 MLP vectors, and keys and values of two paths.
    layer = 16 * shape.hidden_size + 3 * intermediate_size + 4 * attention_size(shape)
    if config.grpo.gradient_checkpointing:  # one layer's, and every layer's input
        return float(size * (layer + shape.num_hidden_layers * shape.hidden_size))
    return float(size * layer * shape.num_hidden_layers)


def cost_of_a_pair(model: Any) -> float:
    """Return the FLOPs of one token's attention to another, over those of the token's layers.

    All experts of a layer count, so the result is too small for a mixture of experts.
    """
    shape = model.config.get_text_config()
    head = model.get_output_embeddings().weight
    outside = {id(w): w.numel() for w in (model.get_input_embeddings().weight, head)}
    layers = max(1, model.num_parameters() - sum(outside.values()))
    return float(2 * shape.num_hidden_layers * attention_size(shape) / layers)


# Maximum number of logits that are in memory at the same time: 883 rows of Qwen's vocabulary. Fewer
# rows leave a GPU idle, and a CPU converts the weights to float32 for each chunk.
LOGITS_PER_CHUNK = 1 << 27
