"""Ranks that differ in data or code are refused in one line, which names rank and host."""

import os
import platform
from pathlib import Path

import pytest

from pipeline.checkpoints import resume
from pipeline.config.cli import parse
from pipeline.distributed.ranks import Ranks
from pipeline.errors import UserError
from scripts.proofs.ranks import play_ranks

HOST = platform.node()


def _opened(folder: str, differing: str) -> str:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    has = f"{differing} of {rank}"
    if differing == "versions":
        resume.code_hash = lambda: has
    os.chdir(folder)
    about = {"airline": {"sha256": has if differing == "about" else "same"}}
    config = parse(["--output-dir", "run", "--report-to", "none"])
    try:
        resume.open_together(config, Ranks(rank, 2, 60), {"a": 1}, about, Path("run"))
    except UserError as error:
        return str(error)
    return "opened"


@pytest.mark.parametrize(
    ("differing", "lines"),
    [
        ("nothing", ["opened"]),
        ("about", [f"about: rank 1 on {HOST} has other data of a domain than rank 0 on {HOST}; "]),
        (
            "versions",
            [
                f"versions: rank 1 on {HOST} has python {platform.python_version()}, torch ",
                f"code versions of 1, rank 0 on {HOST} has ",
            ],
        ),
    ],
)
def test_ranks_that_differ_are_refused_on_every_rank(tmp_path, differing, lines):
    results = play_ranks(_opened, 2, str(tmp_path), differing)
    assert results[0] == results[1]
    assert all(line in results[0] for line in lines), results[0]
    assert "\n" not in results[0]
