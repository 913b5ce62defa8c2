"""Failed allocations of memory, and the return of memory."""

import ctypes
import gc
from contextlib import suppress

import torch

M_TRIM_THRESHOLD = -1  # bytes at the heap's end from which on glibc returns them to the system
M_MMAP_THRESHOLD = -3  # bytes from which on glibc returns a block to the system when it is freed
LARGE = 1 << 28  # bytes from which on training takes so much memory that its pages take time

NO_MEMORY = (  # texts in the RuntimeError of a failed allocation
    "can't allocate memory",
    "not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


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
