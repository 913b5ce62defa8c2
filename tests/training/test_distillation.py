"""On-policy distillation: gradients in closed form, and the values of teachers."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from accelerate import Accelerator

from pipeline.config.settings import Config
from pipeline.data.tasks import Task
from pipeline.distributed.ranks import Ranks
from pipeline.rollout.trajectory import Trajectory
from pipeline.training.collect import RolloutBatch, Sample
from pipeline.training.distillation import teach
from pipeline.training.grpo import grpo_loss
from pipeline.training.micro_batches import micro_batch
from pipeline.training.token_logprobs import TokenLogprobs
from pipeline.training.updater import Reference, Updater
from scripts.proofs.grid import (
    in_float64,
    make_trajectory,
    small_model,
)

PLAIN = {"entropy_coef": 0.0, "max_grad_norm": 1e9}


def table(seed: int) -> torch.Tensor:
    """Log-probabilities of 4 tokens, [token before, token]; the token before may be the prompt."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((5, 4), generator=generator, dtype=torch.float64).log_softmax(-1)


def test_the_expected_gradient_is_that_of_the_reverse_kl_of_each_token():
    """All messages of two tokens stand in one batch, each with its probability as its weight."""
    logits = table(1).clone().requires_grad_()
    student, teacher = logits.log_softmax(-1), table(2)
    items = list(product(range(4), range(4)))
    before = torch.tensor([[4, first] for first, _ in items]).flatten()
    targets = torch.tensor(items).flatten()
    old = student.detach()[before, targets]
    one = make_trajectory([1], [2, 3], advantages=[0.0, 0.0])
    batch = replace(
        micro_batch([(one, 0.0, 0.0)] * len(items), 0),
        old_logprobs=old,
        advantages=teacher[before, targets] - old,
        weights=old.view(-1, 2).sum(1).exp().repeat_interleave(2),
    )
    settings = Config(grpo=PLAIN).grpo
    logprobs = student[before, targets]
    loss, _ = grpo_loss(logprobs, torch.zeros_like(logprobs), batch, settings, len(targets))
    (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
    # KL(student || teacher) of the first token and, as often as the first token comes, of the next.
    divergence = (student.exp() * (student - teacher)).sum(-1)
    often = torch.cat([student.detach()[4].exp(), torch.ones(1)])
    (expected,) = torch.autograd.grad((often * divergence).sum(), logits)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    assert found.abs().max() > 0.01


def conversation(seed: int) -> list[Trajectory]:
    """Episodes of two domains with common prefixes; the second one has two sequences."""
    rows = [
        make_trajectory([1, 2], [3, 4, 5, 6, 7], [1, 1, 0, 0, 1], domain="desk"),
        make_trajectory([1, 2], [3, 9], domain="shop"),
        make_trajectory([1, 2], [3, 4, 8], [1, 1, 0], domain="desk"),
        make_trajectory([5], [2, 2, 2], domain="shop"),
        make_trajectory([5], [], domain="shop"),
        make_trajectory([7, 7], [1], domain="desk", left_out="reset"),
    ]
    rows[1].further.append(make_trajectory([1, 2, 3], [4, 5], domain="shop"))
    for number, sequence in enumerate(one for row in rows for one in row.sequences):
        sequence.logprobs = [(-1 - seed - number) * sampled for sampled in sequence.loss_mask]
    return rows


def batch_of(rows: list[Trajectory]) -> RolloutBatch:
    tasks = [Task(domain=row.domain, id="t", prompt=(), payload="") for row in rows[::1]]
    samples = [Sample(trajectory=row, index=2 * i, kept=False) for i, row in enumerate(rows)]
    return RolloutBatch(
        samples=samples, num_first=len(rows), rounds=[len(rows)], tasks=tasks, memory=None
    )


def updater_of(model, **grpo) -> Updater:
    config = Config(grpo={**PLAIN, **grpo.pop("grpo", {})}, **grpo)
    return Updater(Accelerator(), TokenLogprobs(model, 1.0), Ranks(0, 1, 60), config)


def teachers_of(updater: Updater) -> dict[str, Reference]:
    teachers = {}
    for seed, domain in enumerate(("desk", "shop"), 1):
        teachers[domain] = Reference(updater.module, aside=True)
        with teachers[domain].in_place():
            updater.model.load_state_dict(in_float64(small_model(seed)).state_dict())
    return teachers


def direct(model, row: Trajectory) -> torch.Tensor:
    """Log-probabilities of the sampled tokens of a sequence."""
    logprobs = model(torch.tensor([row.ids])).logits[0].log_softmax(-1)
    places = [i for i, sampled in enumerate(row.loss_mask, len(row.prompt_ids)) if sampled]
    return torch.stack([logprobs[place - 1, row.ids[place]] for place in places])


MANNERS = [
    {},
    {"grpo": {"share_prefixes": False}},
    {"grpo": {"padding_free": True, "max_tokens_per_microbatch": 4}},
    {"grpo": {"max_tokens_per_microbatch": 1}},
    {"run": {"deterministic": True}},
    {"grpo": {"num_iterations": 2}},
]


@pytest.mark.parametrize("manner", MANNERS, ids=str)
def test_each_token_has_its_teachers_advantage_and_the_gradient_is_the_hand_written_one(manner):
    model = in_float64(small_model())
    start = {name: value.clone() for name, value in model.state_dict().items()}
    updater = updater_of(model, **manner)
    teachers = teachers_of(updater)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in start.items())
    rows = conversation(0)
    batch = batch_of(rows)
    config = Config(rollout={"num_generations": 2}, grpo={"domain_advantage_scale": {"shop": 3.0}})
    metrics = teach(batch, teachers, updater, updater.ranks, config)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in start.items())
    experts = {d: in_float64(small_model(s)) for s, d in enumerate(("desk", "shop"), 1)}
    gaps: dict[str, list[float]] = {"desk": [], "shop": []}
    loss = torch.zeros(())
    for row in (one for episode in rows[:4] for one in episode.sequences):
        old = torch.tensor([p for p in row.logprobs if p])
        with torch.no_grad():
            gap = direct(experts[row.domain], row) - old
        gaps[row.domain] += gap.tolist()
        scale = 3.0 if row.domain == "shop" else 1.0
        own = [a for a, sampled in zip(row.advantages, row.loss_mask, strict=True) if sampled]
        assert own == pytest.approx((scale * gap).tolist(), abs=1e-9)
        ratio = (direct(model, row) - old).exp()
        clipped = ratio.clamp(0.8, 1.28)
        loss = loss - torch.minimum(ratio * scale * gap, clipped * scale * gap).sum()
    count = {domain: len(of) for domain, of in gaps.items()}
    assert count == {"desk": 5, "shop": 7}
    for domain, of in gaps.items():
        assert metrics[f"train/teacher_kl/{domain}"] == pytest.approx(-sum(of) / count[domain])
    assert metrics["train/teacher_kl"] == pytest.approx(-sum(map(sum, gaps.values())) / 12)
    assert [sample.kept for sample in batch.samples] == [True] * 5 + [False]
    assert batch.samples[0].advantage == pytest.approx(sum(gaps["desk"][:3]) / 3)
    expected = torch.autograd.grad(loss / 12, list(model.parameters()))
    found: list[torch.Tensor] = []
    updater.optimizer.register_step_pre_hook(
        lambda *_: found.extend(p.grad.clone() for p in model.parameters())
    )
    statistics = updater.update_policy(
        rows, [0.0] * len(rows), 1e-3, [sample.kept for sample in batch.samples]
    )
    assert statistics["train/trained_episodes"] == 5
    assert len(found) == len(expected)
    for mine, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-7)  # advantages are in float32
    assert max(float(gradient.abs().max()) for gradient in found) > 0.01


def test_an_episode_whose_rewards_are_equal_teaches_until_the_student_is_the_teacher():
    model = in_float64(small_model())
    updater = updater_of(model)
    teacher = Reference(updater.module, aside=True)
    row = make_trajectory([1, 2], [3, 4], domain="desk")
    row.logprobs = direct(model, row).tolist()
    batch = batch_of([row])
    config = Config(rollout={"num_generations": 2})
    metrics = teach(batch, {"desk": teacher}, updater, updater.ranks, config)
    assert metrics["train/teacher_kl"] == pytest.approx(0.0, abs=1e-12)
    assert batch.samples[0].kept
    assert not math.isnan(batch.samples[0].advantage)


def test_with_an_inexact_sampler_the_advantage_is_of_the_trainers_logprob():
    model = in_float64(small_model())
    updater = updater_of(model, rollout={"sampler": "vllm"})
    assert updater.corrects
    rows = conversation(0)  # whose log-probabilities are not the model's
    config = Config(rollout={"num_generations": 2})
    metrics = teach(batch_of(rows), teachers_of(updater), updater, updater.ranks, config)
    experts = {d: in_float64(small_model(s)) for s, d in enumerate(("desk", "shop"), 1)}
    total = 0.0
    for row in (one for episode in rows[:4] for one in episode.sequences):
        with torch.no_grad():
            expected = (direct(experts[row.domain], row) - direct(model, row)).tolist()
        own = [a for a, sampled in zip(row.advantages, row.loss_mask, strict=True) if sampled]
        assert own == pytest.approx(expected, abs=1e-9)
        total -= sum(expected)
    assert metrics["train/teacher_kl"] == pytest.approx(total / 12)
