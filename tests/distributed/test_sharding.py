"""Weights, gradients and moments that are spread over real ranks change no result."""

import errno
import resource
import signal
from itertools import product

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

from pipeline.checkpoints.checkpoint import Checkpointer, TrainState
from pipeline.checkpoints.moments import load_optimizer
from pipeline.checkpoints.run_folder import find_checkpoint, problem, read_state
from pipeline.config.settings import Config, ModelSettings, RunSettings
from pipeline.distributed.ranks import Ranks
from pipeline.distributed.sharding import shard_model, whole
from pipeline.models import lora
from pipeline.models.layers import outer_layers, recompute_layers
from pipeline.training.token_logprobs import TokenLogprobs
from pipeline.training.updater import Reference, Updater
from scripts.proofs.grid import (
    Cell,
    difference,
    in_float64,
    make_episodes,
    play_updates,
    small_model,
)
from scripts.proofs.ranks import play_ranks
from scripts.proofs.runs import play_run
from tests.support.coin import COIN, warm_started
from tests.support.helpers import tokenizer

pytestmark = pytest.mark.whole_run

FEW = [
    Cell(num_ranks=2, shard="full", layout="shared", count=4, recomputes=True),
    Cell(num_ranks=2, shard="full", layout="balanced", count=4, reshards=False),
    Cell(num_ranks=2, shard="full", count=4, adapters=True),
    Cell(num_ranks=2, shard="optimizer", layout="shared", count=4, spread="idle"),
    Cell(num_ranks=3, shard="full", count=3, spread="idle"),
    Cell(num_ranks=2, shard="full", count=4, adapters=True, taught=True),
    Cell(num_ranks=2, shard="full", layout="shared", count=4, reshards=False, taught=True),
    Cell(num_ranks=3, shard="full", layout="shared", count=3, spread="idle", taught=True),
    Cell(num_ranks=3, shard="optimizer", layout="packed", count=2, taught=True),
]


def test_gradient_and_step_are_those_of_one_process_with_whole_weights():
    """`scripts/proofs/sharded.py` has every loss on 2 to 4 ranks."""
    kinds = product((False, True), (False, True))
    alone = {
        (adapters, taught): Cell(adapters=adapters, taught=taught) for adapters, taught in kinds
    }
    found = play_updates([*alone.values(), *FEW])
    for cell in FEW:
        expected = found[alone[cell.adapters, cell.taught]]
        assert difference(found[cell].gradient, expected.gradient) < 1e-12, cell
        assert difference(found[cell].parameters, expected.parameters) < 1e-12, cell
        assert found[cell].statistics["train/kl"] == pytest.approx(expected.statistics["train/kl"])
        assert found[cell].same


def go_on(folder, shard, adapters, num_updates=2):
    """Updates from the last checkpoint, or from the start, and a checkpoint; in float64."""
    accelerator = Accelerator()
    ranks = Ranks(accelerator.process_index, accelerator.num_processes, 60)
    path, _ = find_checkpoint(folder, "auto")
    model = small_model(dtype=torch.float64)
    if path is not None and not adapters:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    model = in_float64(model)
    if adapters:
        model = lora.attach(model, ModelSettings(lora_r=4), "base", 0, torch.float64).double()
    if adapters and path is not None:
        lora.load(model, path)
    sharded = None
    if shard == "full":
        sharded = shard_model(model, outer_layers(model), None, reshards=True)
    config = Config(grpo={"shard": shard})
    updater = Updater(accelerator, TokenLogprobs(model, 1.0, sharded=sharded), ranks, config)
    state = TrainState()
    if path is not None:
        state.load_state_dict(read_state(path))
        load_optimizer(path, updater.optimizer)
    rows, advantages = make_episodes(12)
    mine = range(ranks.rank, 12, ranks.num_ranks)
    for _ in range(num_updates):
        state.step += 1
        rate = 1e-2 / state.step
        updater.update_policy([rows[i] for i in mine], [advantages[i] for i in mine], rate)
    checkpointer = Checkpointer(folder, ranks, RunSettings(save_total_limit=9), state, tokenizer())
    checkpointer.save(f"step-{state.step:06d}", model, updater.optimizer)
    weights = [(name, whole(p.detach())) for name, p in model.named_parameters()]
    return {name: weight.numpy().copy() for name, weight in weights}


@pytest.mark.parametrize(
    "adapters", [False, pytest.param(True, marks=pytest.mark.proof)], ids=["whole", "LoRA"]
)
def test_a_checkpoint_goes_on_on_any_ranks_sharded_or_not(tmp_path, adapters):
    """Its moments are parts of each rank, or whole; its weights are plain files."""
    ends = []
    for name, parts in {
        "alone": [(1, "none", 8)],
        "mixed": [(2, "full", 2), (1, "none", 2), (3, "full", 2), (2, "optimizer", 2)],
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / ".lock").touch()
        for num_ranks, shard, num_updates in parts:
            found = play_ranks(go_on, num_ranks, folder, shard, adapters, num_updates)
            assert all(isinstance(end, dict) for end in found), found
        ends.append(found[0])
    alone, end = ends
    assert end.keys() == alone.keys()
    for name, weight in end.items():
        assert np.abs(weight - alone[name]).max() < 1e-9, name
    checkpoint = tmp_path / "mixed" / "checkpoints" / "step-000002"
    own = "adapter_model" if adapters else "model-00001-of-00001"
    assert {
        path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*.safetensors")
    } == {
        f"{own}.safetensors",
        "moments/shard-00001-model-00001-of-00001.safetensors",
        "moments/shard-00002-model-00001-of-00001.safetensors",
    }
    assert problem(checkpoint) is None


@pytest.mark.parametrize("steps", [2, pytest.param(12, marks=pytest.mark.proof)])
def test_a_sharded_run_draws_what_a_run_on_one_rank_draws(tmp_path, steps):
    """Its tokens are forced, and each step starts from its weights, so rounding does not add up."""
    flags = [*COIN, "--num-generations", "16", "--tasks-per-step", "4", "--save-steps", "0"]
    flags += ["--max-tokens-per-turn", "8", "--max-steps", str(steps)]
    flags += warm_started(tmp_path)
    alone = play_run(1, flags, tmp_path / "alone")
    forced = alone.forced_streams(seed=1)
    again = play_run(
        2, [*flags, "--shard", "full"], tmp_path / "again", forced, weights=tmp_path / "alone"
    )
    assert again.num_forced == sum(map(len, forced.values())) > 120 * steps
    assert alone.largest_gap(again) <= 1e-5
    assert again.update_gap <= 1e-6
    assert all(distance <= 1e-5 for distance in again.ties), again.ties


def limit_memory(layer, place, most_tokens):
    """Let memory run out in larger passes through the layer: `place` is forward or backward."""

    def fails(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def hook(_, inputs, output):
        if output[..., 0].numel() <= most_tokens:
            return
        if place == "backward" and output.requires_grad:
            output.register_hook(fails)
        elif place == ("forward" if torch.is_grad_enabled() else "reference"):
            fails()

    layer.mlp.register_forward_hook(hook)


def updates_without_memory(cases):
    """For each case: this rank's budget, and the gradient, of an update that starts over."""
    accelerator = Accelerator()
    ranks = Ranks(accelerator.process_index, accelerator.num_processes, 60)
    rows, advantages = make_episodes(12)
    mine = range(ranks.rank, 12, ranks.num_ranks)
    found = []
    for reshards, place, recomputes, adapters, short_of_memory in cases:
        model = in_float64(small_model(dtype=torch.float64))
        if adapters:
            model = lora.attach(model, ModelSettings(lora_r=4), "base", 0, torch.float64).double()
        sharded = shard_model(model, outer_layers(model), None, reshards=reshards)
        if recomputes:
            recompute_layers(model)
        module = TokenLogprobs(model, 1.0, sharded=sharded)
        config = {"shard": "full", "beta": 0.1, "share_prefixes": False}
        updater = Updater(
            accelerator, module, ranks, Config(grpo=config), reference=Reference(module)
        )
        gradients = []
        updater.optimizer.register_step_pre_hook(
            lambda *_, model=model, gradients=gradients: gradients.extend(
                whole(p.grad).clone() for p in model.parameters() if p.requires_grad
            )
        )
        if ranks.rank in short_of_memory:
            limit_memory(outer_layers(model)[short_of_memory[ranks.rank]], place, 50)
        updater.update_policy([rows[i] for i in mine], [advantages[i] for i in mine], 1e-3)
        numbers = [gradient.numpy().copy() for gradient in gradients]
        found.append((updater.max_tokens_per_microbatch, numbers))
    return found


def test_ranks_that_run_out_of_memory_agree_on_smaller_micro_batches():
    """A rank that fails inside a pass still takes its part in the exchanges of the others."""
    layers = {1: 1}
    kinds = [(True, place, False, False) for place in ("forward", "backward", "reference")]
    kinds.append((False, "backward", False, False))
    kinds += [(True, "backward", True, False), (True, "backward", False, True)]
    cases = [(*kind, layers) for kind in kinds]
    cases += [(True, "forward", False, False, {0: 0, 1: 1}), (True, "backward", False, True, {})]
    cases += [(True, "forward", False, False, {})]
    here, there = play_ranks(updates_without_memory, 2, cases, timeout_s=200)
    assert isinstance(here, list), here
    *_, (_, of_adapters), (most_tokens, expected) = here
    for case, (budget, gradients), (other, _) in zip(cases, here, there, strict=True):
        assert budget == other, case
        assert (budget < most_tokens) == bool(case[-1]), case
        for gradient, alone in zip(gradients, of_adapters if case[3] else expected, strict=True):
            assert np.abs(gradient - alone).max() < 1e-12, case


def save_without_room(folder):
    """What a rank raises if the disk of the main rank is full, and what the save leaves."""
    accelerator = Accelerator()
    ranks = Ranks(accelerator.process_index, accelerator.num_processes, 60)
    model = small_model()
    shard_model(model, outer_layers(model), None, reshards=True)
    checkpointer = Checkpointer(folder, ranks, RunSettings(), TrainState(), tokenizer())
    if ranks.is_main:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # the write fails with EFBIG
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        checkpointer.save("step-000001", model)
    except OSError as error:
        return error.errno, [path.name for path in (folder / "checkpoints").iterdir()]
    return "written"


def test_a_sharded_save_that_fails_on_one_rank_fails_on_all_and_leaves_nothing(tmp_path):
    (tmp_path / ".lock").touch()
    (main, left), (other, _) = play_ranks(save_without_room, 2, tmp_path)
    assert main == other == errno.EFBIG
    assert left == []
