"""Terms of the loss against forgetting: closed forms, ranks, little memory."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from pipeline.common.errors import UserError
from pipeline.config.settings import Config
from pipeline.distributed.ranks import Ranks
from pipeline.evaluation.evaluate import KLProbe
from pipeline.training.grpo import learned_loss
from pipeline.training.micro_batches import micro_batch
from pipeline.training.token_logprobs import TokenLogprobs
from pipeline.training.updater import Reference, Updater
from scripts.proofs.grid import in_float64, make_episodes, make_trajectory, small_model
from scripts.proofs.invariance import remedies
from tests.support.helpers import ALONE

BETA = 0.7


def test_the_mean_over_all_draws_is_the_divergence_and_its_gradient():
    """Of a policy of three words: the gradient of KL(old || now) by its scores is now - old."""
    old = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    words = [make_trajectory([1], [w], logprobs=[math.log(old[w])]) for w in range(3)]
    batch = micro_batch([(t, 0.0, float(old[w])) for w, t in enumerate(words)], 0)
    batch = replace(batch, old_logprobs=old.log())
    for scores, expected, gradient in (
        ([0.0, 0.0, 0.0], math.log(3) - 1.5 * math.log(2), [1 / 3 - 1 / 2, 1 / 12, 1 / 12]),
        ([math.log(2), 0.0, 0.0], 0.0, [0.0, 0.0, 0.0]),  # the old policy
    ):
        scores = torch.tensor(scores, dtype=torch.float64, requires_grad=True)
        loss = learned_loss(scores.log_softmax(0), batch)
        loss.backward()
        assert loss.item() == pytest.approx(expected, abs=1e-15)
        assert scores.grad.tolist() == pytest.approx(gradient, abs=1e-15)


def updated(module, learned, rewarded=(), start=None, **grpo):
    """The gradient of an update without advantages, its statistics, and its Updater."""
    settings = {"entropy_coef": 0.0, "max_grad_norm": 1e9, "learned_beta": BETA, **grpo}
    config = Config.model_validate({"grpo": settings})
    updater = Updater(Accelerator(), module, Ranks(0, 1, 60), config, start=start)
    gradients = []
    updater.optimizer.register_step_pre_hook(
        lambda *_: gradients.extend(p.grad.clone() for p in module.parameters())
    )
    rows = [make_trajectory([1], [2, 3]), make_trajectory([1], [4])]
    found = updater.update_policy(rows, rewarded or [0.0, 0.0], 1e-3, learned=learned)
    return gradients, found, updater


def explicit(model, learned):
    """The mean of r - 1 - log r, from the model's own output."""
    terms = []
    for t in learned:
        logprobs = model(torch.tensor([t.ids])).logits[0, :-1].log_softmax(-1)
        for place, (token, sampled, kept) in enumerate(
            zip(t.completion_ids, t.loss_mask, t.logprobs, strict=True), len(t.prompt_ids) - 1
        ):
            if sampled:
                ratio = logprobs[place, token] - torch.tensor(kept, dtype=torch.float32)
                terms.append(ratio.exp() - 1 - ratio)
    return torch.stack(terms).mean()


def test_the_update_has_the_gradient_of_the_mean_over_the_kept_tokens():
    learned, _ = make_episodes(5)
    module = TokenLogprobs(in_float64(small_model(seed=1)), 1.0)
    mean = explicit(module.model, learned)
    expected = torch.autograd.grad(BETA * mean, [*module.parameters()])
    gradients, statistics, _ = updated(module, learned)
    for found, wanted in zip(gradients, expected, strict=True):
        assert float((found - wanted).abs().max()) < 1e-8 * float(wanted.abs().max())
    assert statistics["train/learned_kl"] == pytest.approx(mean.item(), rel=1e-6)
    assert statistics["train/loss"] == pytest.approx(BETA * mean.item(), rel=1e-6)
    assert statistics["train/policy_loss"] == 0
    assert statistics["train/grad_norm"] > 0.1


def test_a_step_without_signal_leaves_the_term_out():
    module = TokenLogprobs(small_model(), 1.0)
    updater = updated(module, [])[2]
    before = [p.clone() for p in module.parameters()]
    statistics = updater.update_policy([], [], 1e-3, learned=make_episodes(5)[0])
    assert statistics["train/trained_episodes"] == 0
    assert all(map(torch.equal, before, module.parameters()))


def test_the_pull_to_the_start_is_the_distance_times_its_weight_and_is_clipped_too():
    """With no gradient of its own, the update clips coef * (weights - start), also to 1."""
    for coef, largest in ((0.25, 1e9), (0.25, 0.01)):
        module = TokenLogprobs(in_float64(small_model()), 1.0)
        start = Reference(TokenLogprobs(in_float64(small_model(seed=1)), 1.0))
        ends = zip(module.parameters(), start.parameters.values(), strict=True)
        moved = [parameter.detach() - before for parameter, before in ends]
        squares = sum(float(m.square().sum()) for m in moved)
        settings = {"learned_beta": 0.0, "movement_coef": coef, "max_grad_norm": largest}
        gradients, statistics, _ = updated(module, [], start=start, **settings)
        norm = coef * squares**0.5
        assert statistics["train/movement"] == pytest.approx(squares**0.5, rel=1e-12)
        assert statistics["train/grad_norm"] == pytest.approx(norm, rel=1e-12)
        assert statistics["train/loss"] == pytest.approx(coef / 2 * squares, rel=1e-12)
        for gradient, distance in zip(gradients, moved, strict=True):
            expected = coef * distance * min(1.0, largest / norm)
            assert float((gradient - expected).abs().max()) < 1e-7 * norm


class Tight(TokenLogprobs):
    """Has no memory for micro-batches of kept episodes with more tokens than `room`."""

    room = 10**9

    def forward(self, batch):
        if batch.is_learned and batch.input_ids.numel() > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(batch)


def test_memory_that_runs_out_at_kept_episodes_changes_no_gradient(capsys):
    learned, _ = make_episodes(12)
    found = []
    for room in (10**9, 60):
        module = Tight(in_float64(small_model(seed=1)), 1.0)
        module.room = room
        found.append(updated(module, learned, [1.0, -1.0], max_tokens_per_microbatch=300))
    assert capsys.readouterr().err.count("warning: out of memory") >= 1
    (expected, statistics, roomy), (gradients, others, tight) = found
    assert tight.max_tokens_per_microbatch <= 60 < roomy.max_tokens_per_microbatch
    for one, other in zip(expected, gradients, strict=True):
        assert float((one - other).abs().max()) < 1e-12
    assert others["train/learned_kl"] == pytest.approx(statistics["train/learned_kl"], rel=1e-6)


def test_on_ranks_the_remedies_are_those_of_one_process():
    """Shares of kept episodes, sharded moments and weights, and deterministic sums bit by bit."""
    for row in remedies([1, 2, 3]):
        assert row.holds, row


def test_kept_episodes_that_the_loss_lacks_end_a_resumed_run(tmp_path):
    kept = KLProbe(tmp_path, Config(grpo={"learned_beta": 0.1}), ALONE, trains=True)
    with pytest.raises(UserError, match=r"learned_beta: .*/learned/airline.json is gone, whose"):
        kept.load([SimpleNamespace(name="airline")])
    (tmp_path / "learned").mkdir()
    (tmp_path / "learned" / "airline.json").write_text("[{")
    with pytest.raises(UserError, match=r"airline.json is damaged, .*; restore it, or start anew"):
        kept.load([SimpleNamespace(name="airline")])
