"""Failed allocations of memory, and the return of memory."""

import gc

import torch

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
    """Free memory that reference cycles and the allocator's cache occupy."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing in a process that uses no GPU
