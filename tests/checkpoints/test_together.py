"""Ranks that differ in data or code are refused in one line, which names rank and host."""

import os
import platform
from pathlib import Path

import pytest
import torch

from pipeline.checkpoints import resume
from pipeline.checkpoints.disks import Disk
from pipeline.config.cli import parse
from pipeline.distributed.ranks import Ranks
from pipeline.errors import UserError
from scripts.proofs.ranks import play_ranks

HOST = platform.node()


class Tokenizer:
    def get_vocab(self) -> dict[str, int]:
        return {"a": 1}


def _opened(folder: str, differing: str) -> str:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    has = f"{differing} of {rank}"
    if differing == "versions":
        resume.code_hash = lambda: has
    os.chdir(folder)
    about = {"airline": {"sha256": has if differing == "about" else "same"}}
    made_of = {"training tasks of airline": has if differing == "tasks" else "same"}
    ranks = Ranks(rank, 2, 60)
    config = parse(["--output-dir", "run", "--report-to", "none"])
    disk = Disk(Path("run").absolute(), ranks)
    disk.hosts = ("one", "two")
    try:
        resume.open_together(config, disk, Tokenizer(), about, made_of)
        weights = torch.full((2, 2), float(rank if differing == "model" else 0))
        model = torch.nn.ParameterDict({"weight": weights})
        disk.refuse_other_weights(model)
    except UserError as error:
        return str(error)
    return "opened"


@pytest.mark.parametrize(
    ("differing", "lines"),
    [
        ("nothing", ["opened"]),
        ("about", [f"about: rank 1 on {HOST} has others than rank 0 on {HOST}; give all the same"]),
        (
            "tasks",
            [f"training tasks of airline: rank 1 on {HOST} has others than rank 0 on {HOST}; "],
        ),
        ("model", ["model: rank 1 on two has other weights than rank 0 on one; give all the same"]),
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
