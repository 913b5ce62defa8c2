"""Memory that goes back to the system."""

import platform

import psutil
import pytest
import torch

from pipeline.models.allocation import LARGE, returned_when_freed

MB = 1 << 20


def left_of(num_tensors: int, size: int) -> int:
    """Make tensors and free every second one; return the resident bytes that are left."""
    process = psutil.Process()
    before = process.memory_info().rss
    tensors = [torch.ones(size // 4) for _ in range(num_tensors)]
    assert process.memory_info().rss - before > 0.9 * num_tensors * size
    del tensors[::2]
    left = process.memory_info().rss - before
    tensors.clear()
    return left


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_freed_tensors_of_a_large_model_leave_no_gaps():
    torch.empty(31 * MB // 4)  # freed at once, after which glibc keeps what is smaller
    with returned_when_freed(torch.nn.Linear(LARGE // 16 // 1024, 1025)):
        assert left_of(40, 4 * MB) == pytest.approx(20 * 4 * MB, rel=0.1)
    with returned_when_freed(torch.nn.Linear(1, 1)):
        assert left_of(40, 4 * MB) > 30 * 4 * MB
