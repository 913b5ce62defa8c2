"""What is trained and what it is compared with: adapters, reference, and both after a resume."""

import contextlib
import copy
import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from pipeline.before_grpo import before_training
from pipeline.config.cli import parse
from pipeline.config.settings import ModelSettings
from pipeline.distributed.ranks import parameter_hash
from pipeline.models import lora
from pipeline.models.tiny import tiny_model
from pipeline.run import main as command
from pipeline.train import train
from pipeline.training.micro_batches import micro_batch
from pipeline.training.token_logprobs import TokenLogprobs
from pipeline.training.updater import Reference
from scripts.proofs.grid import make_episodes, small_model
from scripts.proofs.ranks import play_ranks
from tests.support.helpers import start_unwatched, tokenizer
from tests.support.messages import says

ROWS, ADVANTAGES = make_episodes(12)
BATCH = micro_batch([(row, 1.0, 1.0) for row in ROWS], 0)


def policy(use_peft: bool) -> TokenLogprobs:
    model = small_model()
    if use_peft:
        model = lora.attach(model, ModelSettings(lora_r=4), "base", 0)
    return TokenLogprobs(model, 0.8)


@torch.no_grad()
def move(module, by=0.05):
    for number, parameter in enumerate(p for p in module.parameters() if p.requires_grad):
        generator = torch.Generator().manual_seed(number)
        parameter += torch.randn(parameter.shape, generator=generator) * by


@torch.no_grad()
def spoken(module):
    return module(BATCH)[0]


# The reference


@pytest.mark.parametrize("use_peft", [False, True], ids=["whole", "adapters"])
def test_the_reference_is_the_policy_as_it_was_and_leaves_it_alone(use_peft):
    module = policy(use_peft)
    move(module)
    frozen = copy.deepcopy(module)
    reference = Reference(module)
    assert torch.equal(reference.logprobs(BATCH), spoken(frozen))
    move(module)
    assert float((spoken(module) - spoken(frozen)).abs().max()) > 0.1
    before = parameter_hash(module.named_parameters())
    assert torch.equal(reference.logprobs(BATCH), spoken(frozen))
    assert not reference.logprobs(BATCH).requires_grad
    assert parameter_hash(module.named_parameters()) == before
    reference.refresh()
    assert torch.equal(reference.logprobs(BATCH), spoken(module))
    move(module)
    assert not torch.equal(reference.logprobs(BATCH), spoken(module))


def test_with_fresh_adapters_the_reference_is_the_base_model():
    module = policy(use_peft=True)
    reference = Reference(module)
    assert all(".lora_" in name for name in reference.parameters)
    move(module)
    with module.model.disable_adapter():
        assert torch.equal(reference.logprobs(BATCH), spoken(module))
    assert torch.equal(reference.logprobs(BATCH), spoken(TokenLogprobs(small_model(), 0.8)))
    assert not torch.equal(reference.logprobs(BATCH), spoken(module))


# Whole runs, several in one process for each rank

SMALL = [
    *("--tasks-per-step", "2", "--num-generations", "2", "--tasks-per-domain", "8"),
    *("--max-turns", "5", "--max-tokens-per-turn", "12"),
    *("--eval-tasks-per-domain", "1", "--eval-trials", "1", "--validation-steps", "0"),
    *("--domains", "airline,retail", "--max-steps", "4", "--save-steps", "1"),
    *("--save-total-limit", "9", "--report-to", "none", "--no-drop-zero-std-groups"),
    *("--beta", "0.1", "--entropy-coef", "0.05", "--learning-rate", "3e-3", "--lora-r", "4"),
]
RESUME = ["--resume-from-checkpoint"]


def start_run(folder, *flags):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return start_unwatched(parse(["--output-dir", str(folder), *flags]))


def play_run(folder, *flags):
    """A run from its start to its last checkpoint; the hash of its last reference."""
    run = start_run(folder, *flags)
    with run.log, contextlib.redirect_stdout(io.StringIO()):
        before_training(run)
        if run.config.grpo.use_grpo:
            train(run)
    for file in run.watchdog.not_for_children:  # as the watchdog does at the end
        file.close()
    updater = run.learner.updater
    reference = None if updater is None else updater.reference
    return None if reference is None else parameter_hash(reference.parameters.items())


def copied(folder, name, *checkpoints):
    """A copy of a run's folder that holds these checkpoints alone, made by rank 0."""
    there = folder.parent / name
    if Accelerator().is_main_process:
        shutil.copytree(folder, there)
        for path in (there / "checkpoints").iterdir():
            if path.is_dir() and path.name not in checkpoints:
                shutil.rmtree(path)
    Accelerator().wait_for_everyone()
    return there


def begin(where):
    """An undisturbed run of adapters, each stage with a reference of its own."""
    torch.manual_seed(Accelerator().process_index)  # adapters must not come from a rank's own
    flags = ["--use-peft", "--reference-per-stage", "--warm-start-steps", "2"]
    flags += ["--shard", "optimizer"]
    return {"undisturbed": play_run(where / "adapters", *SMALL, *flags)}


def resume(where):
    """The same run, gone on with in new processes on other optimizer shards."""
    torch.manual_seed(5)
    kept = ("warm-start", "stage-1-airline", "step-000003")
    there = copied(where / "adapters", "resumed", *kept)
    found = {there.name: play_run(there, *RESUME, "step-000003", "--shard", "none")}
    if Accelerator().is_main_process:
        (where / "adapters").rename(where / "elsewhere")
    Accelerator().wait_for_everyone()
    return found


def one_rank(where, adapters):
    """Without `reference_per_stage` and warm start: a fresh model, and one made of adapters."""
    flags = [*SMALL, "--warm-start-steps", "0", "--max-steps", "2"]
    found = {"fresh": play_run(where / "fresh", *flags)}
    there = copied(where / "fresh", "fresh-resumed", "stage-1-airline")
    found[there.name] = play_run(there, *RESUME, "stage-1-airline")
    found["on"] = play_run(where / "on", *flags, "--use-peft", "--model", str(adapters))
    there = copied(where / "on", "on-resumed", "base", "stage-1-airline")
    found[there.name] = play_run(there, *RESUME, "stage-1-airline")
    for folder, flag in (
        ("on-resumed", "--no-peft"),
        ("fresh-resumed", "--use-peft"),
        ("on-resumed", "--lora-alpha=3"),
    ):
        resume = [*RESUME, "stage-1-airline", "--output-dir", str(where / folder)]
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            code = command([*resume, flag, "--override"])
        found[folder, flag] = code, said.getvalue().removeprefix("running on CPU: 1 rank\n")
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    where = tmp_path_factory.mktemp("two-ranks")
    results = [{}, {}]
    for part in (begin, resume):
        for found, result in zip(play_ranks(part, 2, where, timeout_s=300), results, strict=True):
            assert isinstance(found, dict), found
            result |= found
    return where, results


@pytest.fixture(scope="module")
def one(two, tmp_path_factory):
    where = tmp_path_factory.mktemp("one-rank")
    adapters = two[0] / "elsewhere" / "checkpoints" / "stage-2-retail"
    (found,) = play_ranks(one_rank, 1, where, adapters, timeout_s=300)
    assert isinstance(found, dict), found
    return where, found, adapters


def records(folder: Path, *kinds: str):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] in (kinds or ["train"])]


def weights(folder: Path, stage: str = "stage-2-retail"):
    (path,) = (folder / "checkpoints" / stage).glob("*.safetensors")
    return load_file(path)


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def assert_same_run(folder: Path, undisturbed: Path) -> None:
    assert records(folder, "train", "eval") == records(undisturbed, "train", "eval")
    assert same(weights(folder), weights(undisturbed))


def test_with_reference_per_stage_each_stage_starts_from_its_own_reference(two):
    divergences = [record["train/kl"] for record in records(two[0] / "elsewhere")]
    assert [kl > 0 for kl in divergences] == [False, True, False, True]
    last = weights(two[0] / "elsewhere")
    assert not same(weights(two[0] / "elsewhere", "stage-1-airline"), last)


def test_a_run_with_adapters_resumed_on_other_shards_ends_bit_by_bit_as_undisturbed(two):
    assert_same_run(two[0] / "resumed", two[0] / "elsewhere")
    references = {found[name] for found in two[1] for name in ("undisturbed", "resumed")}
    assert len(references) == 1 and None not in references


def test_without_reference_per_stage_the_reference_stays_the_model_as_it_came(one):
    where, found, _ = one
    for name in ("fresh", "on"):
        assert [record["train/kl"] > 0 for record in records(where / name)] == [False, True]
    assert found["fresh"] == parameter_hash(fresh_model().named_parameters())


def fresh_model():
    return TokenLogprobs(tiny_model(tokenizer(), 1), 1.0)


def test_without_reference_per_stage_a_resumed_run_ends_as_the_undisturbed(one):
    where, found, _ = one
    assert_same_run(where / "fresh-resumed", where / "fresh")
    assert_same_run(where / "on-resumed", where / "on")
    assert found["fresh-resumed"] == found["fresh"]
    assert found["on-resumed"] == found["on"]


def test_a_resume_with_another_kind_of_training_is_refused_in_one_line(one):
    _, found, _ = one
    for run, flag, words in (
        ("on-resumed", "--no-peft", ("use_peft: got false", "LoRA adapters", "its value")),
        ("fresh-resumed", "--use-peft", ("use_peft: got true", "a whole model", "its value")),
        ("on-resumed", "--lora-alpha=3", ("lora_alpha: got 3", "stage-1-airline", "of 32")),
    ):
        code, said = found[run, flag]
        assert (code, said.count("\n")) == (2, 1)
        says(said, "error: ", *words)
