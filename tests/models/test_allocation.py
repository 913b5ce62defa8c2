"""Memory that goes back to the system."""

import platform
from contextlib import nullcontext

import psutil
import pytest
import torch

from pipeline.models.allocation import LARGE, returned_when_freed, saver_for
from scripts.proofs.ranks import play_ranks

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


def left_with_and_without_gaps() -> tuple[int, int]:
    torch.empty(31 * MB // 4)  # freed at once, after which glibc keeps what is smaller
    with returned_when_freed():
        without = left_of(40, 4 * MB)
    return left_of(40, 4 * MB), without


def test_memory_is_saved_for_large_models_with_gradients_and_moments():
    with torch.device("meta"):
        models = [torch.nn.Linear(LARGE // 16 // 1024, 1024 + n) for n in (-1, 1)]
    assert [saver_for(model) for model in models] == [nullcontext, returned_when_freed]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_freed_tensors_leave_no_gaps():
    ((with_gaps, without),) = play_ranks(left_with_and_without_gaps, 1)  # in a fresh process
    assert without == pytest.approx(20 * 4 * MB, rel=0.1)
    assert with_gaps > 30 * 4 * MB
