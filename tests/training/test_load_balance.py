"""Load balancing: which sequences move to other ranks, and that an update stays the same."""

import pytest
import torch
from accelerate import Accelerator

from pipeline.config.settings import Config
from pipeline.distributed.ranks import Ranks
from pipeline.training.micro_batches import make_plan
from pipeline.training.token_logprobs import TokenLogprobs
from pipeline.training.updater import Updater
from scripts.proofs.grid import in_float64, make_episodes, small_model
from scripts.proofs.ranks import play_ranks


def unmoved(costs):
    return [[rank] * (len(row) // 2) for rank, row in enumerate(costs)]


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


def lopsided(balance_ranks):
    """Statistics and parameters after an update, and counts of this rank.

    Of two ranks the first has three groups, and the second one.
    """
    accelerator, model = Accelerator(), in_float64(small_model())
    ranks = Ranks(accelerator.process_index, accelerator.num_processes, 60)
    config = Config.model_validate({"grpo": {"balance_ranks": balance_ranks}})
    updater = Updater(accelerator, TokenLogprobs(model, 1.0), ranks, config)
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
