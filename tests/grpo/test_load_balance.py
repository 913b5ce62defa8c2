"""Even shares: which groups move, and that nothing but where they are computed changes."""

import pickle
from random import Random

import pytest
import torch
from accelerate import Accelerator

from pipeline.config.settings import Config
from pipeline.distributed.ranks import Ranks
from pipeline.grpo.micro_batches import costs_of, make_plan, packed
from pipeline.grpo.token_logprobs import TokenLogprobs
from pipeline.grpo.updater import Updater
from scripts.proofs.grid import in_float64, make_episodes, make_trajectory, small_model
from scripts.proofs.ranks import play_ranks


def moves(plan):
    """The groups whose halves have other owners than now."""
    return {place: tuple(owners) for place, owners in plan.items() if set(owners) != {place[0]}}


def loads(costs, plan):
    found = [0.0] * len(costs)
    for (rank, group), owners in plan.items():
        whole, *halves = costs[rank][3 * group : 3 * group + 3]
        parts = zip(owners, [whole, 0.0] if owners[0] == owners[1] else halves, strict=True)
        for owner, cost in parts:
            found[owner] += cost
    return found


def test_a_group_costs_what_is_computed_for_it_and_for_its_halves():
    group = [[1, 2, 3], [1, 2, 9], [1, 2, 3, 4], [1, 8, 8]]
    assert costs_of([group, []], share_prefixes=True) == [7, 4, 5, 0, 0, 0]
    assert costs_of([group], share_prefixes=False) == [13, 7, 6]


def test_the_rank_with_most_gives_the_group_that_evens_it_out():
    costs = [[50, 30, 30, 20, 12, 12, 30, 18, 18], [60, 35, 35]]
    assert moves(make_plan(costs)) == {(0, 1): (1, 1)}
    assert loads(costs, make_plan(costs)) == [80, 80]


def test_half_a_group_moves_where_a_whole_one_is_too_much():
    costs = [[40, 22, 22, 40, 22, 22, 40, 22, 22], [40, 22, 22, 40, 22, 22]]
    assert sorted(loads(costs, make_plan(costs))) == [102, 102]


@pytest.mark.parametrize(
    "costs",
    [
        [[40, 22, 22], [39, 21, 21]],  # even enough
        [[40, 40, 0], []],  # one episode cannot be cut
        [[10, 5, 5]],
        [[], []],
    ],
)
def test_nothing_moves_where_that_would_not_help(costs):
    assert moves(make_plan(costs)) == {}


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_uneven_ranks_become_even_within_a_few_percent(num_ranks):
    for seed in range(20):
        random = Random(seed)
        costs = [
            [
                n
                for _ in range(random.randint(0, 8))
                for n in (random.randint(80, 200),)
                for n in (n, 0.55 * n, 0.55 * n)
            ]
            for _ in range(num_ranks)
        ]
        found = loads(costs, make_plan(costs))
        num_groups = sum(len(row) // 3 for row in costs)
        if num_groups >= 4 * num_ranks:
            assert max(found) <= 1.06 * sum(found) / num_ranks, (seed, found)


def test_what_an_update_needs_of_an_episode_arrives_as_it_was():
    rows, advantages = make_episodes(5)
    rows.append(make_trajectory([1, 2], []))
    items = list(zip(rows, [*advantages, 1 / 3], [0.1 * i for i in range(6)], strict=True))
    for (row, *numbers), (other, *others) in zip(items, pickle.loads(packed(items)), strict=True):
        assert (other.prompt_ids, other.completion_ids) == (row.prompt_ids, row.completion_ids)
        assert other.loss_mask == [bool(mask) for mask in row.loss_mask]
        assert torch.equal(torch.tensor(other.logprobs), torch.tensor(row.logprobs))
        assert (other.task_id, others) == (row.task_id, numbers)
    assert packed([]) == b""


def lopsided(balance_ranks):
    """Statistics and parameters after an update, and counts of this rank.

    Of two ranks the first has three groups, and the second one.
    """
    accelerator, model = Accelerator(), in_float64(small_model())
    ranks = Ranks(accelerator.process_index, accelerator.num_processes, 60)
    config = Config.model_validate({"grpo": {"balance_ranks": balance_ranks}})
    updater = Updater(accelerator, TokenLogprobs(model, 1.0), ranks, config, 0)
    rows, advantages = make_episodes(32)
    mine = slice(24 * ranks.rank, 24 + 8 * ranks.rank if ranks.num_ranks > 1 else 32)
    statistics = updater.update_policy(rows[mine], advantages[mine], 1e-3)
    parameters = [p.detach().flatten() for p in model.parameters()]
    return statistics, torch.cat(parameters).tolist(), updater.num_tokens, dict(ranks.bytes)


def test_an_update_is_the_same_after_groups_have_moved_and_its_work_even():
    (_, _, most, first), (_, _, least, second) = play_ranks(lopsided, 2, False)
    assert most > 2 * least and "messages" not in first | second
    one, two = play_ranks(lopsided, 2, True)
    assert max(one[2], two[2]) < 1.05 * (one[2] + two[2]) / 2
    assert 0 < one[3]["messages"] < 10_000 and two[3]["messages"] == 0
    assert one[3]["gradients"] == two[3]["gradients"] == 8 * len(one[1])
    statistics, parameters, _, nothing = lopsided(True)
    assert nothing == {}
    assert one[0] == two[0] == pytest.approx(statistics, rel=1e-6)
    assert one[1] == two[1] == pytest.approx(parameters, abs=1e-12)
