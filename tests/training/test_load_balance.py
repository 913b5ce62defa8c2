"""Load balancing: which sequences move to other ranks, and that an update stays the same."""

from random import Random

import pytest
import torch
from accelerate import Accelerator

from pipeline.config.settings import Config
from pipeline.distributed.ranks import Ranks
from pipeline.training.micro_batches import costs_of, make_plan
from pipeline.training.token_logprobs import TokenLogprobs
from pipeline.training.updater import Updater
from scripts.proofs.grid import in_float64, make_episodes, small_model
from scripts.proofs.ranks import play_ranks


def loads(costs, plan):
    """The cost of each rank: its first sequence has no common prefix with an earlier one."""
    found, last = [0.0] * len(costs), None
    for row, owners in zip(costs, plan, strict=True):
        for number, owner in enumerate(owners):
            found[owner] += row[2 * number + (owner == last)]
            last = owner
    return found


def unmoved(costs):
    return [[rank] * (len(row) // 2) for rank, row in enumerate(costs)]


def test_attention_costs_each_token_what_the_tokens_before_it_cost():
    sequences = [[1, 2, 3], [1, 2, 3, 4], [1, 2, 9]]
    assert costs_of(sequences, True, pair=0.5) == [5.25, 5.25, 8, 2.75, 5.25, 2.25]
    tokens = [[*[12, 12] * 4], [*[3, 3] * 16]]  # even in tokens, but not in pairs of tokens
    assert make_plan(tokens) == unmoved(tokens)
    costs = [costs_of([[n] * 12 for n in range(4)], True, 1.0)]
    costs.append(costs_of([[n] * 3 for n in range(16)], True, 1.0))
    assert costs == [[84, 84] * 4, [7.5, 7.5] * 16]
    assert make_plan(costs) == [[0, 0, 0, 1], [1] * 16]


@pytest.mark.parametrize(
    "costs",
    [
        [[40, 40], [39, 39]],  # even enough
        [[40, 40], []],  # one sequence cannot be cut
        [[], [40, 40]],
        [[40, 40, 40, 1], []],  # both need the common prefix
        [[10, 10]],
        [[], []],
    ],
)
def test_nothing_moves_where_that_would_not_help(costs):
    assert make_plan(costs) == unmoved(costs)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_uneven_ranks_become_even_within_a_few_percent(num_ranks):
    for seed in range(20):
        random = Random(seed)
        costs = []
        for _ in range(num_ranks):
            costs.append([])
            for _ in range(random.randint(0, 8)):
                prompt, lengths = random.randint(10, 30), random.sample(range(5, 30), 8)
                costs[-1] += [prompt + lengths[0]] * 2
                costs[-1] += [n for length in lengths[1:] for n in (prompt + length, length)]
        plan = make_plan(costs)
        found, mean = loads(costs, plan), sum(sum(row[1::2]) for row in costs) / num_ranks
        if sum(map(len, plan)) >= 4 * 8 * num_ranks:
            assert max(found) <= 1.06 * mean, (seed, found)
        assert max(found) <= max(sum(row[1::2]) for row in costs)


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
