"""Failed allocations of memory, and the return of memory."""

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

import torch

M_MMAP_THRESHOLD = -3  # bytes from which on glibc returns a block to the system when it is freed
LARGE = 1 << 28  # bytes from which on memory counts more than the time to get it again, on a CPU

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


@contextmanager
def returned_when_freed() -> Iterator[None]:
    """Let the CPU's allocator return freed tensors to the system.

    Otherwise, glibc keeps freed blocks of up to 32 MB, and other tensors do not fit into the gaps.
    """
    _glibc("mallopt", M_MMAP_THRESHOLD, 1 << 21)
    try:
        yield
    finally:
        _glibc("mallopt", M_MMAP_THRESHOLD, 1 << 25)  # the highest that glibc sets by itself
        _glibc("malloc_trim", 0)


def saver_for(model: torch.nn.Module) -> Callable[[], AbstractContextManager[None]]:
    """Return `returned_when_freed` if training the model takes more than LARGE bytes.

    Otherwise the context does nothing. Activations do not count.
    """
    size = 4 * sum(p.nbytes for p in model.parameters())  # with gradients and moments
    return returned_when_freed if size > LARGE else nullcontext


def _glibc(function: str, *arguments: int) -> None:
    with suppress(AttributeError, OSError, TypeError):  # other libraries have no such function
        getattr(ctypes.CDLL(None), function)(*arguments)
