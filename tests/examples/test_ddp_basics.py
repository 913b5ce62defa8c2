"""What the example says of DDP is true on two real ranks, and what is not true is told."""

import io
import random
from contextlib import redirect_stdout

import pytest
import torch

from examples import ddp_basics
from pipeline.distributed.ranks import Ranks
from scripts.proofs.ranks import play_ranks

pytestmark = pytest.mark.whole_run


def played(*faults):
    """The example on this rank, with a fault in each of some claims: exit code and what it says."""
    rate, barrier, gather = ddp_basics.rate, Ranks.barrier, Ranks.all_gather_objects
    ddp_basics.rate = lambda model: rate(model, steps=1)
    if "a" in faults:
        ddp_basics.sum_gradients = lambda module: module
    if "b" in faults:
        network = ddp_basics.network
        ddp_basics.network = lambda width=8: network(width).apply(move)
    if "c" in faults:
        Ranks.all_gather_objects = lambda *given: gather(*given)[::-1]
    if "d" in faults:
        Ranks.barrier = lambda self, name: name == "d" or barrier(self, name)
    if "e" in faults:
        Ranks.is_main = property(lambda _: True, lambda *_: None)
    with redirect_stdout(io.StringIO()) as said:
        try:
            code = ddp_basics.main()
        except SystemExit as end:
            code = end.code
    return code, said.getvalue()


def move(module):
    """Give each network that is made other weights."""
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            parameter += random.random()


def test_every_claim_is_true_on_two_ranks():
    (code, said), other = play_ranks(played, 2)
    lines = said.splitlines()
    assert code == 0 and other == (0, ""), said
    assert [line[:9] for line in lines[:8]] == [f"true  ({c})" for c in "aabbbcde"]
    assert "[{'rank': 0, 'rewards': []}, {'rank': 1, 'rewards': [1.0]}]" in lines[5]
    assert lines[8].startswith("      (f) ") and lines[9].split()[0] == "ranks"
    assert [line.split()[0] for line in lines[10:]] == ["1", "2"]


@pytest.mark.parametrize(("faults", "false"), [("acde", "acde"), ("b", "abbb")])
def test_a_claim_that_is_not_true_is_told_on_every_rank(faults, false):
    results = play_ranks(played, 2, *faults)
    assert [code for code, _ in results] == [1, 1], results
    found = [line[7] for line in results[0][1].splitlines() if line.startswith("FALSE")]
    assert "".join(found) == false


def test_one_rank_is_told_how_to_start_two():
    ((code, said),) = play_ranks(played, 1)
    assert "torchrun --nproc-per-node 2" in code and said == ""
