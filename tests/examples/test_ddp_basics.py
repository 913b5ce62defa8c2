"""What the example says of DDP is true on two real ranks."""

import io
from contextlib import redirect_stdout

import pytest

from examples import ddp_basics
from scripts.proofs.ranks import play_ranks

pytestmark = pytest.mark.whole_run


def played():
    """The example on this rank: exit code and what it says."""
    rate = ddp_basics.rate
    ddp_basics.rate = lambda model: rate(model, steps=1)
    with redirect_stdout(io.StringIO()) as said:
        try:
            code = ddp_basics.main()
        except SystemExit as end:
            code = end.code
    return code, said.getvalue()


def test_every_claim_is_true_on_two_ranks():
    (code, said), other = play_ranks(played, 2)
    lines = said.splitlines()
    assert code == 0 and other == (0, ""), said
    assert [line[:9] for line in lines[:8]] == [f"true  ({c})" for c in "aabbbcde"]
    assert "[{'rank': 0, 'rewards': []}, {'rank': 1, 'rewards': [1.0]}]" in lines[5]
    assert lines[8].startswith("      (f) ") and lines[9].split()[0] == "ranks"
    assert [line.split()[0] for line in lines[10:]] == ["1", "2"]


def test_one_rank_is_told_how_to_start_two():
    ((code, said),) = play_ranks(played, 1)
    assert "torchrun --nproc-per-node 2" in code and said == ""
