"""Checkpoints: whole or not there, loadable by others, restored exactly."""

import json
import os

import pytest
import torch
from accelerate import Accelerator
from helpers import make_episodes, play_ranks, small_model, tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline import checkpoint
from pipeline.checkpoint import (
    TrainState,
    load_optimizer,
    load_state,
    prune,
    save,
    write_text,
)
from pipeline.config import Config, UserError
from pipeline.distributed import Ranks, parameter_hash, whole_state
from pipeline.policy import TokenLogprobs
from pipeline.run_folder import find_checkpoint
from pipeline.updater import Updater


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.98))


def state_of(model):
    return adamw(model).state_dict()


def train(model, optimizer, steps, start=0):
    for step in range(start, start + steps):
        ids = torch.randint(0, 16, (2, 9), generator=torch.Generator().manual_seed(step))
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def save_plain(folder, name, step=0, seed=0):
    return save(folder, name, small_model(seed), tokenizer(), TrainState(step=step))


# What is saved


def test_others_load_a_checkpoint_by_from_pretrained(tmp_path):
    model = small_model()
    path = save(tmp_path, "stage-1-airline", model, tokenizer(), TrainState(), state_of(model))
    assert path == tmp_path / "stage-1-airline"
    assert (path / "model.safetensors").is_file()
    assert same(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), model)
    loaded = AutoTokenizer.from_pretrained(path)
    assert loaded("cancel K07")["input_ids"] == tokenizer()("cancel K07")["input_ids"]
    assert loaded.chat_template == tokenizer().chat_template


def test_the_state_comes_back_as_it_was(tmp_path):
    state = TrainState(
        stage="retail",
        step=57,
        evaluations=[{"after": "start", "step": 0, "success": {"airline": {"mean": 0.1}}}],
        training={"airline": {"episodes": 9}},
    )
    path = save(tmp_path, "step-000057", small_model(), tokenizer(), state)
    assert load_state(path) == state
    assert load_state(path).evaluated("start")
    assert not load_state(path).evaluated("airline")


def test_training_goes_on_exactly_as_without_the_checkpoint(tmp_path):
    model = small_model()
    optimizer = adamw(model)
    train(model, optimizer, steps=3)
    path = save(
        tmp_path, "step-000003", model, tokenizer(), TrainState(step=3), optimizer.state_dict()
    )
    train(model, optimizer, steps=2, start=3)

    resumed = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    fresh = adamw(resumed)
    load_optimizer(path, fresh)
    train(resumed, fresh, steps=2, start=3)
    assert same(resumed, model)
    for mine, theirs in zip(fresh.state.values(), optimizer.state.values(), strict=True):
        assert torch.equal(mine["exp_avg"], theirs["exp_avg"])
        assert torch.equal(mine["exp_avg_sq"], theirs["exp_avg_sq"])
        assert mine["step"] == theirs["step"] == 5


def test_without_its_optimizer_training_would_go_on_differently(tmp_path):
    model = small_model()
    optimizer = adamw(model)
    train(model, optimizer, steps=3)
    path = save(tmp_path, "warm-start", model, tokenizer(), TrainState())
    train(model, optimizer, steps=2, start=3)
    resumed = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    fresh = adamw(resumed)
    load_optimizer(path, fresh)  # a warm start has none
    train(resumed, fresh, steps=2, start=3)
    assert not same(resumed, model)


# On other ranks, with moments spread over them or not


def update(folder, shard_optimizer, resume):
    """Three updates from the start, saved, or three more from there; the hash of the parameters.

    A deterministic run, so that the number of ranks changes no bit.
    """
    accelerator = Accelerator()
    rank, num_ranks = accelerator.process_index, accelerator.num_processes
    config = Config.model_validate(
        {
            "grpo": {"shard_optimizer": shard_optimizer, "max_tokens_per_microbatch": 100},
            "rollout": {"num_generations": 4},
            "run": {"deterministic": True},
        }
    )
    model = small_model()
    if resume:
        path = find_checkpoint(folder, "latest")
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ranks = Ranks(rank, num_ranks, 60)
    updater = Updater(accelerator, TokenLogprobs(model, 1.0), ranks, config, 0)
    if resume:
        load_optimizer(path, updater.optimizer)
    rows, advantages = make_episodes(24)
    mine = [i for i in range(24) if i // 4 % num_ranks == rank]  # whole groups
    for step in range(3):
        rate = 1e-2 / (1 + step)
        updater.update_policy([rows[i] for i in mine], [advantages[i] for i in mine], rate)
    if not resume:
        state = whole_state(updater.optimizer, rank)
        if ranks.is_main:
            save(folder / "checkpoints", "step-000003", model, tokenizer(), TrainState(), state)
        ranks.barrier("saved")
    return parameter_hash(model.named_parameters())


def hash_after(num_ranks, folder, shard_optimizer, resume) -> str:
    hashes = play_ranks(update, num_ranks, folder, shard_optimizer, resume)
    assert len(set(hashes)) == 1 and len(hashes[0]) == 64, hashes
    return hashes[0]


def test_sharded_or_not_on_any_ranks_training_goes_on_bit_by_bit(tmp_path):
    halfway = hash_after(2, tmp_path / "sharded", True, False)
    assert hash_after(1, tmp_path / "whole", False, False) == halfway
    end = hash_after(1, tmp_path / "whole", False, True)
    assert end != halfway
    assert hash_after(2, tmp_path / "whole", True, True) == end
    assert hash_after(1, tmp_path / "sharded", False, True) == end
    assert hash_after(3, tmp_path / "sharded", True, True) == end


# Interrupted


def break_tokenizer(monkeypatch):
    monkeypatch.setattr(tokenizer(), "save_pretrained", fail, raising=False)


def break_optimizer(monkeypatch):
    monkeypatch.setattr(checkpoint.torch, "save", fail)


def break_sync(monkeypatch):
    calls = iter(range(100))
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: fail() if next(calls) == 3 else fsync(handle))


def break_pointer(monkeypatch):
    monkeypatch.setattr(checkpoint, "write_text", fail)


def fail(*arguments, **options):
    raise OSError("no space left on device")


@pytest.mark.parametrize("interrupt", [break_tokenizer, break_optimizer, break_sync, break_pointer])
def test_an_interrupted_save_leaves_the_earlier_checkpoint_and_latest(
    tmp_path, monkeypatch, interrupt
):
    folder = tmp_path / "checkpoints"
    first, second = small_model(seed=0), small_model(seed=1)
    save(folder, "step-000010", first, tokenizer(), TrainState(step=10), state_of(first))
    with monkeypatch.context() as broken:
        interrupt(broken)
        with pytest.raises(OSError, match="no space left"):
            save(folder, "step-000020", second, tokenizer(), TrainState(step=20), state_of(second))
    found = find_checkpoint(tmp_path, "latest")
    assert found.name == "step-000010"
    assert load_state(found).step == 10
    assert same(AutoModelForCausalLM.from_pretrained(found, dtype=torch.float32), first)

    save(folder, "step-000020", second, tokenizer(), TrainState(step=20), state_of(second))
    assert load_state(find_checkpoint(tmp_path, "latest")).step == 20
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["latest", "step-000010", "step-000020"]


def test_a_checkpoint_is_replaced_only_when_the_new_one_is_whole(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoints"
    save_plain(folder, "warm-start", step=1, seed=0)
    with monkeypatch.context() as broken:
        break_sync(broken)
        with pytest.raises(OSError, match="no space left"):
            save_plain(folder, "warm-start", step=2, seed=1)
    assert load_state(find_checkpoint(tmp_path, "latest")).step == 1
    save_plain(folder, "warm-start", step=2, seed=1)
    assert load_state(find_checkpoint(tmp_path, "latest")).step == 2
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "warm-start"]


def test_a_small_file_is_replaced_in_one_step(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    write_text(path, "first")
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="no space left"):
            write_text(path, "second")
    assert path.read_text() == "first"
    write_text(path, "second")
    assert path.read_text() == "second"


# Found and pruned


def names_after_prune(folder, limit):
    prune(folder, limit)
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def pretend(folder, *names, latest):
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "state.json").write_text(json.dumps({"stage": "airline", "step": 1}))
    (folder / "latest").write_text(f"{latest}\n")


def test_the_newest_of_save_steps_are_kept_and_all_of_stages(tmp_path):
    steps = ["step-000050", "step-000100", "step-000150"]
    pretend(tmp_path, "stage-1-airline", "warm-start", *steps, latest="step-000150")
    kept = ["stage-1-airline", "step-000100", "step-000150", "warm-start"]
    assert names_after_prune(tmp_path, 2) == kept
    assert names_after_prune(tmp_path, 2) == kept
    assert names_after_prune(tmp_path, 1) == ["stage-1-airline", "step-000150", "warm-start"]


def test_what_latest_names_is_never_removed(tmp_path):
    steps = ["step-000050", "step-000060", "step-000100", "step-000150"]  # resumed from 50
    pretend(tmp_path, *steps, latest="step-000060")
    assert names_after_prune(tmp_path, 1) == ["step-000060", "step-000150"]


def test_a_checkpoint_is_found_by_name_path_or_as_the_latest(tmp_path):
    folder = tmp_path / "checkpoints"
    pretend(folder, "stage-1-airline", "step-000050", latest="step-000050")
    assert find_checkpoint(tmp_path, "latest") == folder / "step-000050"
    assert find_checkpoint(tmp_path, "stage-1-airline") == folder / "stage-1-airline"
    assert find_checkpoint(tmp_path, str(folder / "stage-1-airline")) == folder / "stage-1-airline"


def refusal(output_dir, name) -> str:
    with pytest.raises(UserError) as refused:
        find_checkpoint(output_dir, name)
    return str(refused.value)


def test_a_missing_checkpoint_is_refused_with_what_there_is(tmp_path):
    assert refusal(tmp_path, "latest") == (
        f"resume_from_checkpoint: {tmp_path} holds no checkpoint; check --output-dir, or "
        "remove the folder and start anew"
    )
    assert refusal(tmp_path, "step-000050") == (
        "resume_from_checkpoint: got 'step-000050'; checkpoints here: none"
    )
    folder = tmp_path / "checkpoints"
    pretend(folder, "stage-1-airline", "warm-start", latest="gone")
    (folder / ".step-000010.writing").mkdir()
    for name, shown in (("step-000050", "step-000050"), ("latest", "gone")):
        assert refusal(tmp_path, name) == (
            f"resume_from_checkpoint: got '{shown}'; checkpoints here: stage-1-airline, warm-start"
        )
