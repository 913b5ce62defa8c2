"""bf16: what stays in fp32, how large the error is, and what the run says of it."""

import contextlib
import io

import pytest
import torch
from accelerate import Accelerator

from pipeline.config.cli import parse
from pipeline.config.settings import Config, ModelSettings
from pipeline.distributed.ranks import Ranks
from pipeline.models import lora
from pipeline.train import train
from pipeline.training import grpo
from pipeline.training.token_logprobs import TokenLogprobs
from pipeline.training.updater import Reference, Updater
from scripts.proofs.grid import make_episodes, small_model
from scripts.proofs.ranks import play_ranks
from tests.support.helpers import start_unwatched
from tests.support.messages import says
from tests.support.warm import metrics

# The largest and the mean error of a log-probability of the tiny model, in nats: over 8 seeds
# 0.017 to 0.029 and 0.0037 to 0.0049. The bounds leave a margin of two.
LARGEST = (4e-3, 0.06)
MEAN = (1.8e-3, 0.01)
BF16 = torch.bfloat16


# What stays in fp32


class Types:
    """The types of tensors by what they are, gathered while a model is updated."""

    def __init__(self) -> None:
        self.seen: dict[str, set[str]] = {}

    def note(self, name, *tensors) -> None:
        self.seen.setdefault(name, set()).update(str(t.dtype) for t in tensors)

    def note_loss(self, logprobs, entropy, batch, *others):
        """In place of `grpo_loss`, which it calls; the last of the others is of the reference."""
        self.note("log-probabilities", logprobs, entropy, others[-1], batch.old_logprobs)
        self.note("ratios", grpo.importance_ratios(logprobs, batch, "sequence"))
        loss, stats = grpo.grpo_loss(logprobs, entropy, batch, *others)
        self.note("loss", loss, *vars(stats).values())
        return loss, stats


def watch(use_peft):
    """Two updates on each rank: types, divergences, and the share of weights that moved."""
    accelerator, types, model = Accelerator(mixed_precision="bf16"), Types(), small_model()
    rank, num_ranks = accelerator.process_index, accelerator.num_processes
    activation = model.model.layers[0].mlp.act_fn
    if use_peft:
        model = lora.attach(model, ModelSettings(lora_r=4), "base", 0, BF16)
    activation.register_forward_hook(  # after the check of the adapters, which is in float32
        lambda _, inputs, output: types.note("layers", *inputs, output)
    )
    module, config = TokenLogprobs(model, 1.0), Config.model_validate({"grpo": {"beta": 0.1}})
    ranks, loss = Ranks(rank, num_ranks, 60), types.note_loss
    made = Updater(accelerator, module, ranks, config, reference=Reference(module), loss=loss)
    made.optimizer.register_step_pre_hook(
        lambda *_: types.note("gradients", *(p.grad for p in made.parameters))
    )
    rows, advantages = make_episodes(16)
    before = torch.cat([p.detach().flatten() for p in made.parameters])
    mine = slice(rank, None, num_ranks)
    kl = [made.update_policy(rows[mine], advantages[mine], 1e-6)["train/kl"] for _ in range(2)]
    types.note("parameters", *made.parameters, *made.reference.parameters.values())
    for state in made.optimizer.state.values():
        types.note("moments", state["exp_avg"], state["exp_avg_sq"])
    after = torch.cat([p.detach().flatten() for p in made.parameters])
    moved = float((after != before).float().mean())
    return types.seen, kl[0], moved, float((after.to(BF16) != before.to(BF16)).float().mean())


@pytest.mark.parametrize("use_peft", [False, True], ids=["whole", "adapters"])
def test_under_bf16_everything_but_the_layers_is_fp32(use_peft):
    for found in play_ranks(watch, 2, use_peft):
        types, first_kl, moved, moved_in_bf16 = found
        assert types.pop("layers") == {"torch.bfloat16"}
        names = {"log-probabilities", "ratios", "loss", "gradients", "parameters", "moments"}
        assert types == {name: {"torch.float32"} for name in names}
        assert first_kl == 0, "the reference is computed in another precision"
        assert moved > 0.9
        # Steps that small would be lost on weights in bf16; adapters start at zero.
        assert use_peft or moved_in_bf16 < 0.01


# What the run says of it


SMALL = [
    *("--tasks-per-step", "2", "--num-generations", "3", "--tasks-per-domain", "12"),
    *("--eval-tasks-per-domain", "1", "--eval-trials", "1", "--validation-steps", "0"),
    *("--max-turns", "2", "--max-tokens-per-turn", "12", "--warm-start-steps", "0"),
    *("--domains", "airline", "--max-steps", "2", "--report-to", "none"),
    *("--no-drop-zero-std-groups", "--learning-rate", "3e-3"),
]


def play(folder):
    """A run of two steps in bf16, whose sampler may hardly differ from training.

    What it printed on this rank, and the types of training's layers and the sampler's weights.
    """
    types, said = Types(), io.StringIO()
    flags = ["--mixed-precision", "bf16", "--max-sampling-logp-difference", "1e-4"]
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()):
        run = start_unwatched(parse(["--output-dir", str(folder), *SMALL, *flags]))
        run.learner.model.model.layers[0].mlp.down_proj.register_forward_hook(
            lambda _, inputs, output: (
                types.note("training", *inputs, output) if torch.is_grad_enabled() else None
            )
        )
        types.note("sampler", *run.learner.sampling.sampler.model.parameters())
        with run.log:
            train(run)
    return said.getvalue().splitlines(), types.seen


def test_a_run_in_bf16_logs_the_gap_to_its_sampler_and_says_once_that_it_is_too_large(tmp_path):
    (first, types), (other, _) = play_ranks(play, 2, tmp_path / "bf16")
    assert types == {"training": {"torch.bfloat16"}, "sampler": {"torch.bfloat16"}}
    gap = "sampling_logp_difference"
    lines = metrics(tmp_path / "bf16")
    assert len(lines) == 2
    for line in lines:
        assert LARGEST[0] < line[f"train/{gap}_max"] < LARGEST[1]
        assert MEAN[0] < line[f"train/{gap}_mean"] < MEAN[1]
    (warning,) = [line for line in first + other if f"train/{gap}_mean is" in line]
    mean = lines[0][f"train/{gap}_mean"]
    says(warning, "step 1:", f" {mean:.2g} ", f"max_{gap} 0.0001")
