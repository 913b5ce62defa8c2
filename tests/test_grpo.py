"""GRPO: the loss in literal numbers, and an update that the number of ranks does not change."""

import math
from random import Random

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from helpers import make_trajectory, play_ranks, small_model

from pipeline.config import GRPOSettings, RolloutSettings
from pipeline.distributed import Ranks
from pipeline.grpo import (
    Updater,
    empty_micro_batch,
    grpo_loss,
    k3,
    learning_rate_at,
    make_micro_batches,
    token_weights,
)
from pipeline.policy import TokenLogprobs
from pipeline.trajectory import MicroBatch

LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo"]
PLAIN = GRPOSettings(epsilon=0.2, epsilon_high=0.28, beta=0.0, entropy_coef=0.0)


def batch_of(old_logprobs, advantages, weights) -> MicroBatch:
    """Only what the loss reads; the rest is empty."""
    nothing = torch.zeros(0, dtype=torch.int64)
    return MicroBatch(
        input_ids=nothing,
        lengths=nothing,
        rows=nothing,
        columns=nothing,
        targets=nothing,
        old_logprobs=torch.tensor(old_logprobs),
        advantages=torch.tensor(advantages),
        weights=torch.tensor(weights),
    )


# Five tokens: ratio 1; too high and good (clipped); too low and good; too high and bad; too low
# and bad (clipped).
RATIOS = torch.tensor([1.0, 1.5, 0.5, 1.5, 0.5])
ADVANTAGES = [1.0, 1.0, 1.0, -1.0, -1.0]
OLD = [-1.0, -2.0, -0.5, -1.5, -1.0]


def example(weights=(0.2,) * 5, settings=PLAIN, entropy=(0.0,) * 5, ref_logprobs=None):
    logprobs = (torch.tensor(OLD) + RATIOS.log()).requires_grad_()
    batch = batch_of(OLD, ADVANTAGES, list(weights))
    loss, stats = grpo_loss(logprobs, torch.tensor(entropy), batch, settings, ref_logprobs)
    loss.backward()
    return loss.detach(), stats, logprobs.grad.tolist()


# The loss


def test_the_clipped_loss_of_five_tokens():
    loss, stats, gradient = example()
    # -(1.0 + 1.28 + 0.5 - 1.5 - 0.8) * 0.2
    assert float(loss) == pytest.approx(-0.096, abs=1e-6)
    assert float(stats.policy_loss) == pytest.approx(-0.096, abs=1e-6)
    assert float(stats.clipped) == 2.0
    assert float(stats.logprob_gap) == pytest.approx(math.log(2), abs=1e-6)
    # d loss / d logprob is -ratio * advantage * weight, and 0 where the ratio is clipped
    assert gradient == pytest.approx([-0.2, 0.0, -0.1, 0.3, 0.0], abs=1e-6)


def test_without_epsilon_high_both_clips_are_epsilon():
    loss, _, _ = example(settings=PLAIN.model_copy(update={"epsilon_high": None}))
    assert float(loss) == pytest.approx(-(1.0 + 1.2 + 0.5 - 1.5 - 0.8) * 0.2, abs=1e-6)


def test_each_token_counts_by_its_weight():
    loss, _, gradient = example(weights=(1.0, 0.5, 0.0, 2.0, 0.25))
    # -1.0 * 1 - 1.28 * 0.5 + 1.5 * 2 + 0.8 * 0.25
    assert float(loss) == pytest.approx(1.56, abs=1e-6)
    assert gradient == pytest.approx([-1.0, 0.0, 0.0, 3.0, 0.0], abs=1e-6)


def test_a_token_of_weight_zero_is_in_no_statistic():
    _, stats, _ = example(weights=(1.0, 0.0, 0.0, 0.0, 0.0), entropy=(0.5,) * 5)
    assert float(stats.clipped) == 0.0
    assert float(stats.entropy) == 0.5
    assert float(stats.logprob_gap) == 0.0


def test_k3_in_literal_numbers():
    logprobs = torch.tensor([-1.0, -1.0, -1.0])
    reference = torch.tensor([-1.0, -1.0 + math.log(2), -1.0 - math.log(2)])
    assert k3(logprobs, reference).tolist() == pytest.approx([0.0, 0.306853, 0.193147], abs=1e-6)


def test_beta_adds_the_divergence_from_the_reference():
    settings = PLAIN.model_copy(update={"beta": 0.5})
    reference = torch.tensor(OLD) + RATIOS.log() + math.log(2)
    loss, stats, gradient = example(settings=settings, ref_logprobs=reference)
    assert float(loss) == pytest.approx(-0.096 + 0.5 * 0.306853, abs=1e-6)
    assert float(stats.kl) == pytest.approx(5 * 0.306853, abs=1e-5)
    assert float(stats.policy_loss) == pytest.approx(-0.096, abs=1e-6)
    # k3's derivative is 1 - exp(d) = -1 at d = log 2: half a unit of beta, times 0.2
    assert gradient == pytest.approx([-0.3, -0.1, -0.2, 0.2, -0.1], abs=1e-6)


def test_the_entropy_bonus_lowers_the_loss():
    settings = PLAIN.model_copy(update={"entropy_coef": 0.1})
    loss, stats, _ = example(settings=settings, entropy=(1.0, 2.0, 3.0, 4.0, 5.0))
    assert float(loss) == pytest.approx(-0.096 - 0.1 * 0.2 * 15, abs=1e-6)
    assert float(stats.entropy) == 15.0


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        ("grpo", [1 / 8, 1 / 16]),  # 4 sequences, of 2 and of 4 tokens
        ("bnpo", [0.1, 0.1]),  # 10 tokens
        ("dapo", [0.1, 0.1]),
        ("dr_grpo", [0.0025, 0.0025]),  # 4 sequences x 100 tokens
    ],
)
def test_the_weight_of_a_token_comes_from_counts_over_all_ranks(loss_type, expected):
    weights = token_weights([2, 4], loss_type, num_sequences=4, num_tokens=10, max_tokens=100)
    assert weights == pytest.approx(expected)


def test_an_episode_without_a_sampled_token_has_a_finite_weight():
    assert token_weights([0], "grpo", 1, 5, 100) == [1.0]
    assert token_weights([0], "dapo", 1, 0, 100) == [1.0]


# Micro-batches


def episodes(count):
    """Random conversations with log-probabilities near the small model's, and advantages."""
    random = Random(count)
    rows = []
    for _ in range(count):
        length = random.randint(1, 40)
        completion = [random.randrange(16) for _ in range(length)]
        mask = [1] + [random.randrange(2) for _ in range(length - 1)]
        rows.append(make_trajectory([1, random.randrange(16)], completion, mask))
    batches = make_micro_batches(rows, [0.0] * count, [1.0] * count, 100_000, 0)
    with torch.no_grad():
        logprobs = TokenLogprobs(small_model(), 1.0)(batches[0])[0]
    noise = torch.randn(len(logprobs), generator=torch.Generator().manual_seed(1)) * 0.1
    order = sorted(range(count), key=lambda i: (-rows[i].num_tokens, i))
    kept = (logprobs + noise).split([rows[i].num_sampled_tokens for i in order])
    for i, values in zip(order, kept, strict=True):
        numbers = iter(values.tolist())
        rows[i] = make_trajectory(
            rows[i].prompt_ids,
            rows[i].completion_ids,
            rows[i].loss_mask,
            logprobs=[next(numbers) if mask else 0.0 for mask in rows[i].loss_mask],
        )
    return rows, [random.choice([-1.0, -0.3, 0.5, 2.0]) for _ in range(count)]


def test_micro_batches_hold_every_sampled_token_once_within_the_budget():
    rows, advantages = episodes(40)
    weights = [1.0 + number for number in range(40)]  # tells the sequences apart
    batches = make_micro_batches(rows, advantages, weights, max_tokens=90, pad_id=7)
    found = []
    for batch in batches:
        assert batch.input_ids.numel() <= 90
        picked = batch.input_ids[batch.rows, batch.columns + 1]
        assert torch.equal(picked, batch.targets)
        for row, length in enumerate(batch.lengths.tolist()):
            assert batch.input_ids[row, length:].tolist() == [7] * (
                batch.input_ids.shape[1] - length
            )
        columns = [
            batch.weights,
            batch.columns,
            batch.targets,
            batch.old_logprobs,
            batch.advantages,
        ]
        found += list(zip(*(column.tolist() for column in columns), strict=True))
    expected = [
        (weights[i], 1 + at, row.completion_ids[at], np.float32(row.logprobs[at]), np.float32(a))
        for i, (row, a) in enumerate(zip(rows, advantages, strict=True))
        for at, mask in enumerate(row.loss_mask)
        if mask
    ]
    assert sorted(found) == sorted(expected)


def test_a_sequence_longer_than_the_budget_stands_alone():
    rows = [make_trajectory([1], [2] * 20), make_trajectory([1], [2] * 3)]
    batches = make_micro_batches(rows, [0.0, 0.0], [1.0, 1.0], max_tokens=8, pad_id=0)
    assert [batch.input_ids.shape for batch in batches] == [(1, 21), (1, 4)]


def test_episodes_that_sampled_nothing_are_left_out():
    rows = [make_trajectory([], []), make_trajectory([1, 2], [3]), make_trajectory([1] * 9, [])]
    batches = make_micro_batches(rows, [1.0] * 3, [1.0] * 3, max_tokens=3, pad_id=0)
    assert [batch.targets.tolist() for batch in batches] == [[3]]
    assert make_micro_batches(rows[:1], [1.0], [1.0], max_tokens=3, pad_id=0) == []


def gradient_of(batches, settings=PLAIN, dtype=torch.float64):
    model = small_model(dtype=dtype)
    for batch in batches:
        logprobs, entropy = TokenLogprobs(model, 1.0)(batch)
        grpo_loss(logprobs, entropy, batch, settings)[0].backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def difference(a, b) -> float:
    """Relative, by norms."""
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_accumulated_micro_batches_have_the_gradient_of_one_batch(loss_type):
    rows, advantages = episodes(24)
    lengths = [row.num_sampled_tokens for row in rows]
    weights = token_weights(lengths, loss_type, 24, sum(lengths), 100)
    settings = PLAIN.model_copy(update={"entropy_coef": 0.01})
    whole = make_micro_batches(rows, advantages, weights, 100_000, 0)
    cut = make_micro_batches(rows, advantages, weights, 90, 0)
    assert (len(whole), len(cut) > 5) == (1, True)
    assert difference(gradient_of(cut, settings), gradient_of(whole, settings)) < 1e-10


def test_a_micro_batch_of_nothing_adds_nothing():
    rows, advantages = episodes(4)
    batches = make_micro_batches(rows, advantages, [0.1] * 4, 100_000, 0)
    alone, joined = gradient_of(batches), gradient_of([*batches, empty_micro_batch(0)])
    assert torch.equal(alone, joined)


def test_different_advantages_give_a_gradient_and_equal_rewards_none():
    rows, advantages = episodes(8)
    learns = gradient_of(make_micro_batches(rows, advantages, [0.1] * 8, 1000, 0))
    rests = gradient_of(make_micro_batches(rows, [0.0] * 8, [0.1] * 8, 1000, 0))
    assert float(learns.norm()) > 1e-3
    assert float(rests.norm()) == 0.0


def test_a_step_against_the_gradient_makes_good_episodes_likelier():
    rows, _ = episodes(2)
    (batch,) = make_micro_batches(rows, [1.0, -1.0], [0.1] * 2, 1000, 0)
    model = small_model()
    module = TokenLogprobs(model, 1.0)
    before, entropy = module(batch)
    grpo_loss(before, entropy, batch, PLAIN)[0].backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 1e-3 * parameter.grad
        moved = module(batch)[0] - before
    assert float((moved * batch.advantages).sum()) > 0


# The update over ranks

SETTINGS = GRPOSettings(
    learning_rate=1e-3, beta=0.1, entropy_coef=0.01, max_tokens_per_microbatch=90, max_grad_norm=0.5
)
WHOLE = list(range(16))
SHARDS = {  # which episodes each of two ranks has
    "even": [WHOLE[::2], WHOLE[1::2]],
    "uneven": [WHOLE[:13], WHOLE[13:]],
    "nothing": [WHOLE, []],
}


def updates_on_this_rank(cases):
    """For each (shards, dtype, loss type): parameters after two updates, and the statistics
    of the last.
    """
    accelerator = Accelerator()
    ranks = Ranks(accelerator.process_index, accelerator.num_processes, 60)
    rows, advantages = episodes(16)
    results = {}
    for name, shards, dtype, loss_type in cases:
        model = small_model(dtype=getattr(torch, dtype))
        updater = Updater(
            accelerator,
            accelerator.prepare(TokenLogprobs(model, 1.0)),
            TokenLogprobs(small_model(seed=1, dtype=getattr(torch, dtype)), 1.0),
            ranks,
            SETTINGS.model_copy(update={"loss_type": loss_type}),
            RolloutSettings(),
            pad_id=0,
        )
        mine = shards[ranks.rank]
        for _ in range(2):
            statistics = updater.update_policy(
                [rows[i] for i in mine], [advantages[i] for i in mine], learning_rate=1e-3
            )
        digest = ranks.check_same_parameters(model, name)
        flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        results[name] = (flat.numpy(), statistics, digest)
    return results


CASES = [("float64", 1e-10, loss_type) for loss_type in LOSS_TYPES] + [("float32", 1e-6, "dapo")]


@pytest.fixture(scope="module")
def updates():
    """Results of one rank, and of two ranks with their episodes spread in several ways."""
    single = [(f"{dtype} {kind}", [WHOLE], dtype, kind) for dtype, _, kind in CASES]
    double = [
        (f"{spread} {dtype} {kind}", shards, dtype, kind)
        for spread, shards in SHARDS.items()
        for dtype, _, kind in CASES
    ]
    one = play_ranks(updates_on_this_rank, 1, single)
    two = play_ranks(updates_on_this_rank, 2, double)
    for result in (*one, *two):
        assert isinstance(result, dict), result
    return one[0], two


@pytest.mark.parametrize(("dtype", "tolerance", "loss_type"), CASES)
@pytest.mark.parametrize("spread", SHARDS)
def test_two_ranks_update_as_one_does(updates, spread, dtype, tolerance, loss_type):
    one, two = updates
    expected, statistics, _ = one[f"{dtype} {loss_type}"]
    parameters, own_statistics, digest = two[0][f"{spread} {dtype} {loss_type}"]
    _, other_statistics, other_digest = two[1][f"{spread} {dtype} {loss_type}"]
    assert difference(parameters, expected) < tolerance
    assert digest == other_digest
    assert own_statistics == other_statistics
    assert own_statistics == pytest.approx(statistics, rel=1e-3)


def test_the_update_moves_the_parameters_and_reports_it(updates):
    before = torch.cat([p.detach().flatten() for p in small_model().parameters()])
    parameters, statistics, _ = updates[0]["float32 dapo"]
    assert difference(parameters, before) > 1e-4
    assert statistics["train/learning_rate"] == 1e-3
    assert statistics["train/trained_episodes"] == 16
    assert statistics["train/kl"] > 0 and statistics["train/entropy"] > 0
    assert 0 <= statistics["train/clip_ratio"] < 0.5
    assert statistics["train/grad_norm"] > 0


def test_means_of_each_rank_averaged_would_be_another_gradient():
    rows, advantages = episodes(16)

    def gradient(indices, num_tokens):
        chosen = [rows[i] for i in indices]
        weights = [1 / num_tokens] * len(indices)
        batches = make_micro_batches(chosen, [advantages[i] for i in indices], weights, 1000, 0)
        return gradient_of(batches)

    count = [sum(rows[i].num_sampled_tokens for i in shard) for shard in SHARDS["uneven"]]
    whole = gradient(WHOLE, sum(count))
    ours = sum(gradient(shard, sum(count)) for shard in SHARDS["uneven"])
    means = sum(gradient(s, n) / 2 for s, n in zip(SHARDS["uneven"], count, strict=True))
    assert difference(ours, whole) < 1e-10
    assert difference(means, whole) > 0.1


def update_without_tokens():
    accelerator = Accelerator()
    ranks = Ranks(accelerator.process_index, accelerator.num_processes, 60)
    model = small_model()
    module = accelerator.prepare(TokenLogprobs(model, 1.0))
    updater = Updater(accelerator, module, None, ranks, PLAIN, RolloutSettings(), pad_id=0)
    statistics = updater.update_policy([], [], learning_rate=0.5)
    same = all(
        torch.equal(a, b)
        for a, b in zip(model.parameters(), small_model().parameters(), strict=True)
    )
    return statistics, same


def test_a_step_whose_groups_are_all_dead_changes_nothing():
    statistics, same = play_ranks(update_without_tokens, 1)[0]
    assert same
    assert statistics == {"train/learning_rate": 0.5, "train/trained_episodes": 0}


# The learning rate


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("linear", {0: 0.2, 4: 1.0, 5: 1.0, 30: 0.775, 55: 0.55, 104: 0.109, 105: 0.1, 300: 0.1}),
        ("cosine", {0: 0.2, 4: 1.0, 5: 1.0, 30: 0.868198, 55: 0.55, 105: 0.1, 300: 0.1}),
        ("constant", {0: 0.2, 4: 1.0, 5: 1.0, 55: 1.0, 300: 1.0}),
    ],
)
def test_the_learning_rate_of_a_stage_warms_up_and_falls_to_its_end_share(kind, expected):
    settings = GRPOSettings(
        learning_rate=1.0, warmup_steps=5, lr_scheduler_type=kind, lr_end_share=0.1
    )
    found = {done: learning_rate_at(done, 105, settings) for done in expected}
    assert found == pytest.approx(expected, abs=1e-6)


def test_without_warm_up_the_first_step_has_the_peak():
    assert learning_rate_at(0, 10, GRPOSettings(learning_rate=2.0, warmup_steps=0)) == 2.0
