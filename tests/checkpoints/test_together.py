"""Ranks that differ in data or code are refused in one line, which names rank and host."""

import os
import platform
from types import SimpleNamespace

import pytest
import torch
from transformers import PretrainedConfig

from pipeline.checkpoints import resume
from pipeline.common.errors import UserError
from pipeline.config.cli import parse
from pipeline.distributed.ranks import Ranks
from scripts.proofs.ranks import play_ranks

KEPT = {"python_version": platform.python_version}


def _opened(folder: str) -> list[str]:
    """What this rank says of each of DIFFERING, one after the other."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    said = []
    for differing in DIFFERING:
        os.chdir(folder)
        with pytest.MonkeyPatch.context() as patched:
            said.append(_opened_where(differing, int(os.environ["RANK"]), patched))
    return said


def _opened_where(differing: str, rank: int, patched: pytest.MonkeyPatch) -> str:
    has = f"{differing} of {rank}"
    if differing == "versions":
        patched.setattr(resume, "code_hash", lambda: has)
    about = {"airline": {"sha256": has if differing == "about" else "same"}}
    made_of = {"training tasks of airline": has if differing == "tasks" else "same"}
    words = {has if differing == "tokens" else "same": 1}
    tokenizer = SimpleNamespace(get_vocab=lambda: words)
    ranks = Ranks(rank, 2, 60)
    output = ["--output-dir", differing, "--report-to", "none"]
    config = parse(output)
    machine = SimpleNamespace(node=lambda: "two" if rank else "one", **KEPT)
    patched.setattr(resume, "platform", machine)
    patched.setattr(resume, "LATE_S", 0.0)
    if differing == "folder":
        patched.setattr(resume.os.path, "exists", lambda path: rank == 0)
    if differing == "setting" and rank:
        config = parse([*output, "--learning-rate", "1"])
    try:
        folder = resume.share_folder(config, ranks)
        resume.open_together(config, folder, ranks, tokenizer, about, made_of)
        weights = torch.full((2, 2), float(rank if differing == "model" else 0))
        model = torch.nn.ParameterDict({"weight": weights})
        model.config = PretrainedConfig(rope_theta=rank if differing == "configuration" else 0)
        late = {"module my_tools": has if differing == "module" else "same"}
        patched.setattr(resume, "hashes_of_late_modules", lambda names: dict(late))
        patched.setattr(resume, "hash_of_stops", lambda *_: "same")
        resume.agree_on_model(config, model, None, [], ranks, is_new=True)
    except UserError as error:
        return str(error)
    return "opened"


DIFFERING = {
    "nothing": "opened",
    "about": "about: rank 1 on two has {'airline': {'sha256': 'about of 1'}}, rank 0 on one",
    "tasks": "training tasks of airline: rank 1 on two has 'tasks of 1', rank 0 on one has ",
    "tokens": "tokens: rank 1 on two has '",
    "model": "model: rank 1 on two has '",
    "configuration": "configuration of the base model: rank 1 on two has '",
    "module": "module my_tools: rank 1 on two has 'module of 1', rank 0 on one has 'module of 0'",
    "folder": "output_dir: rank 1 on two has 'no such folder', rank 0 on one has '/",
    "setting": "grpo.learning_rate: rank 1 on two has 1.0, rank 0 on one has 0.0004; start ",
    "versions": f"versions: rank 1 on two has 'python {platform.python_version()}, torch ",
}


def test_ranks_that_differ_are_refused_on_every_rank(tmp_path):
    first, second = play_ranks(_opened, 2, str(tmp_path))
    assert first == second
    assert [said[: len(line)] for said, line in zip(first, DIFFERING.values(), strict=True)] == [
        *DIFFERING.values()
    ]
    assert not any("\n" in said for said in first)
