"""What is trained and what it is compared with: adapters, reference, and both after a resume."""

import contextlib
import copy
import io
import json
import os
import shutil

import pytest
import torch

from pipeline.before_grpo import before_training
from pipeline.config.cli import parse
from pipeline.config.settings import ModelSettings
from pipeline.distributed.ranks import parameter_hash
from pipeline.models import lora
from pipeline.models.layers import ALIGNMENT
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
from tests.support.warm import metrics

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


# Where weights are


def addresses_of(folder, *flags):
    """The addresses of a run's weights on this rank, in bytes after a new tensor's."""
    if os.environ["WORLD_SIZE"] == "1":  # one rank without a launcher copies nothing by itself
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
    flags = ["--model", str(folder), "--domains", "airline", "--max-tokens", "600", *flags]
    run = start_run(folder / "out", *flags, "--report-to", "none")
    models = run.learner.model, run.learner.sampling.sampler.model
    return {p.data_ptr() % ALIGNMENT for model in models for p in model.parameters()}


def test_deterministic_ranks_have_the_weights_of_a_folder_where_new_tensors_are(tmp_path):
    """Products of some CPUs round by addresses: MKL_ENABLE_INSTRUCTIONS=SSE4_2 shows it."""
    tiny_model(tokenizer(), seed=1).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    plain = play_ranks(addresses_of, 1, tmp_path)
    assert plain != [{0}], "the file's weights are there by chance"
    shutil.rmtree(tmp_path / "out")
    for num_ranks in (1, 2):
        found = play_ranks(addresses_of, num_ranks, tmp_path, "--deterministic")
        assert found == [{0}] * num_ranks
        shutil.rmtree(tmp_path / "out")


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
    *("--no-eval-on-start", "--no-eval-greedy"),
    *("--beta", "0.1", "--entropy-coef", "0.05", "--learning-rate", "3e-3", "--lora-r", "4"),
]
RESUME = ["--resume-from-checkpoint"]
LAST = "checkpoints/stage-2-retail"


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


# Flags of runs, and the checkpoints with which a copy goes on from the last of them.
RUNS = {
    "adapters": (
        [
            *("--use-peft", "--reference-per-stage", "--warm-start-steps", "2"),
            *("--learned-beta", "0.5", "--learned-beta-tasks", "3", "--movement-coef", "0.1"),
        ],
        ["warm-start", "stage-1-airline", "step-000003"],
    ),
    "fresh": (
        ["--warm-start-steps", "0", "--movement-coef", "0.05"],
        ["stage-1-airline", "step-000003"],
    ),
    "on": (
        [
            *("--use-peft", "--warm-start-steps", "0", "--max-steps", "2"),
            *("--model", "adapters/checkpoints/stage-2-retail"),
        ],
        ["base", "stage-1-airline"],
    ),
}


def play_all(where):
    """Each of RUNS and its copy that goes on: their references; then what is refused."""
    os.chdir(where)
    references, refusals = {}, {}
    for name, (flags, kept) in RUNS.items():
        references[name] = play_run(where / name, *SMALL, *flags)
        there = shutil.copytree(where / name, where / f"{name}-resumed")
        for path in (there / "checkpoints").iterdir():
            if path.is_dir() and path.name not in kept:
                shutil.rmtree(path)
        references[there.name] = play_run(there, *RESUME, kept[-1])
    for name, flag in REFUSED:
        resume = [*RESUME, "stage-1-airline", "--output-dir", str(where / name)]
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            code = command([*resume, flag, "--override"])
        refusals[name, flag] = code, said.getvalue().removeprefix("running on CPU: 1 rank\n")
    return references, refusals


REFUSED = {  # a copy that goes on, a flag, and what the line says
    ("on-resumed", "--no-peft"): ("use_peft: got false", "LoRA adapters", "its value"),
    ("fresh-resumed", "--use-peft"): ("use_peft: got true", "a whole model", "its value"),
    ("on-resumed", "--lora-alpha=3"): ("lora_alpha: got 3", "stage-1-airline", "of 32"),
}


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    where = tmp_path_factory.mktemp("runs")
    (found,) = play_ranks(play_all, 1, where, timeout_s=300)
    assert isinstance(found, tuple), found
    return where, *found


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_ends_bit_by_bit_as_the_undisturbed_with_its_reference(played, name):
    where, references, _ = played
    folder, resumed = where / name, where / f"{name}-resumed"
    for kind in ("train", "eval"):
        assert metrics(resumed, kind) == metrics(folder, kind)
    ends = [next((at / LAST).glob("*.safetensors")).read_bytes() for at in (folder, resumed)]
    assert ends[0] == ends[1]
    assert references[name] == references[resumed.name] is not None


def test_a_reference_is_that_of_its_stage_or_stays_the_model_as_it_came(played):
    where, references, _ = played
    for name, grows in (("adapters", [False, True] * 2), ("fresh", [0, 1, 1, 1]), ("on", [0, 1])):
        assert [record["train/kl"] > 0 for record in metrics(where / name)] == grows
    fresh = TokenLogprobs(tiny_model(tokenizer(), 1), 1.0)
    assert references["fresh"] == parameter_hash(fresh.named_parameters())


def test_a_later_stage_keeps_to_the_policy_at_the_end_of_the_stage_before(played):
    where, *_ = played
    first, second, *later = metrics(where / "adapters")
    assert "train/learned_kl" not in first | second
    at_first, then = (record["train/learned_kl"] for record in later)
    assert at_first < 1e-9 < then
    kept = json.loads((where / "adapters" / "learned" / "airline.json").read_text())
    assert [(episode["domain"], len(episode)) for episode in kept] == [("airline", 7)] * 3
    assert "train/learned_kl" not in metrics(where / "fresh")[-1]
    for name in ("adapters", "fresh"):
        assert [record["train/movement"] > 0 for record in metrics(where / name)] == [0, 1] * 2
    assert "train/movement" not in metrics(where / "on")[-1]


def test_a_resume_with_another_kind_of_training_is_refused_in_one_line(played):
    for (run, flag), words in REFUSED.items():
        code, said = played[2][run, flag]
        assert (code, said.count("\n")) == (2, 1)
        says(said, "error: ", *words)
