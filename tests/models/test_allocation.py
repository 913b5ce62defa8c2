"""Memory that a process keeps."""

import platform
import resource

import pytest
import torch

from pipeline.models.allocation import LARGE, empty_caches, keep_freed_memory
from scripts.proofs.ranks import play_ranks

MB = 1 << 20


def faults_again(num_weights: int) -> float:
    """Make and free 40 tensors of 20 MB twice; return the share of pages that fault again."""
    with torch.device("meta"):
        keep_freed_memory(torch.nn.Linear(num_weights // 1024, 1024, bias=False))
    empty_caches()

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        tensors = [torch.ones(20 * MB // 4) for _ in range(40)]
        tensors.clear()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    first = faults()
    return faults() / first


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_a_process_that_trains_a_large_model_keeps_freed_tensors():
    (small,) = play_ranks(faults_again, 1, LARGE // 16 - 1024)  # in a fresh process
    (large,) = play_ranks(faults_again, 1, LARGE // 16 + 1024)
    assert small > 0.8
    assert large < 0.2
