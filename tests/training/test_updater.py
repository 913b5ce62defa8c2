"""The update: its steps, its statistics, its order; what ranks change is in test_invariance.py."""

import pytest
import torch
from accelerate import Accelerator

from pipeline.config.settings import Config, GRPOSettings, RunSettings
from pipeline.data.curriculum import learning_rate_at
from pipeline.distributed.ranks import Ranks
from pipeline.training.grpo import grpo_loss
from pipeline.training.micro_batches import make_plan
from pipeline.training.token_logprobs import TokenLogprobs
from pipeline.training.updater import Updater
from scripts.proofs.grid import in_float64, make_episodes, make_trajectory, small_model
from scripts.proofs.ranks import play_ranks


def config_of(**grpo) -> Config:
    return Config.model_validate({"grpo": {"entropy_coef": 0.0, **grpo}})


def updater_of(model, **grpo) -> Updater:
    accelerator = Accelerator()
    ranks = Ranks(accelerator.process_index, accelerator.num_processes, 60)
    return Updater(accelerator, TokenLogprobs(model, 1.0), ranks, config_of(**grpo))


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_episodes_that_are_not_kept_take_no_part():
    rows, advantages = make_episodes(8)
    kept = [True, False, True, True, False, True, True, True]
    whole, part = small_model(), small_model()
    with_all = updater_of(whole).update_policy(rows, advantages, 1e-3, kept)
    chosen = [i for i, keep in enumerate(kept) if keep]
    with_some = updater_of(part).update_policy(
        [rows[i] for i in chosen], [advantages[i] for i in chosen], 1e-3
    )
    assert torch.equal(flat(whole), flat(part))
    assert with_all == with_some
    assert with_all["train/trained_episodes"] == 6


def test_a_model_that_cannot_share_prefixes_is_told_of_and_trained_all_the_same(capsys):
    rows, advantages = make_episodes(8)
    model, eager = small_model(), small_model()
    eager.set_attn_implementation("eager")
    found = updater_of(eager).update_policy(rows, advantages, 1e-3)
    assert "warning: share_prefixes is ignored; it needs sdpa" in capsys.readouterr().err
    assert found == pytest.approx(updater_of(model).update_policy(rows, advantages, 1e-3), rel=1e-4)
    assert capsys.readouterr().err == ""


def test_a_step_whose_groups_are_all_dead_changes_nothing():
    model = small_model()
    rows, advantages = make_episodes(4)
    statistics = updater_of(model).update_policy(rows, advantages, 0.5, [False] * 4)
    assert torch.equal(flat(model), flat(small_model()))
    assert statistics == {
        "train/learning_rate": 0.5,
        "train/trained_episodes": 0,
        "train/skipped": 0,
    }


def crowded(num_episodes):
    """The last rank has so many groups, the others one each; counts of micro-batches, parameters.

    There is a parameter that only the last rank's tokens reach.
    """
    model = small_model()
    module = TokenLogprobs(model, 1.0)
    module.own = torch.nn.Parameter(torch.ones(()))
    accelerator = Accelerator()
    is_last, plain, calls = accelerator.is_last_process, module.forward, []

    def forward(batch):
        calls.append(batch)
        logprobs, entropy = plain(batch)
        return (logprobs * module.own if is_last else logprobs), entropy

    module.forward = forward
    ranks = Ranks(accelerator.process_index, accelerator.num_processes, 60)
    config = config_of(max_tokens_per_microbatch=90, balance_ranks=False)
    updater = Updater(accelerator, module, ranks, config)
    rows, advantages = make_episodes(num_episodes + 8)
    mine = slice(8, None) if is_last else slice(0, 8)
    for _ in range(2):
        updater.update_policy(rows[mine], advantages[mine], 1e-3)
    return len(calls), float(module.own), flat(model).tolist()


def test_ranks_may_have_different_numbers_of_micro_batches_and_reach_different_parameters():
    one, two = play_ranks(crowded, 2, 32)
    assert one[0] < two[0]
    assert one[1:] == two[1:]
    assert one[1] != 1.0


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
    settings = GRPOSettings(stage_warmup_steps=5, stage_lr_decay=kind, min_lr_rate=0.1)
    found = {done: learning_rate_at(done, 105, 1.0, settings) for done in expected}
    assert found == pytest.approx(expected, abs=1e-6)


def test_without_warm_up_the_first_step_has_the_peak():
    assert learning_rate_at(0, 10, 2.0, GRPOSettings(stage_warmup_steps=0)) == 2.0


@pytest.mark.parametrize(
    ("scale_lr", "tasks", "expected"),
    [
        ("none", 96, 1e-4),
        ("linear", 24, 1e-4),
        ("linear", 96, 4e-4),
        ("sqrt", 96, 2e-4),
        ("sqrt", 6, 5e-5),
    ],
)
def test_the_learning_rate_follows_the_tasks_of_a_step_and_not_the_ranks(scale_lr, tasks, expected):
    def peak(num_gpus):
        tree = {
            "grpo": {
                "learning_rate": 1e-4,
                "scale_lr": scale_lr,
                "reference_tasks_per_step": 24,
            },
            "rollout": {"tasks_per_step": tasks},
            "run": {"num_gpus": num_gpus},
        }
        return Config.model_validate(tree).peak_learning_rate

    assert peak(1) == peak(8) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("loss_type", "deterministic"), [("grpo", True), ("dapo", False), ("dr_grpo", False)]
)
def test_all_conversations_of_an_episode_have_its_advantage_and_share_its_weight(
    loss_type, deterministic
):
    """An episode of two conversations (3 and 1 sampled tokens) beside a plain one of 2 tokens."""
    seen = {}

    def loss(logprobs, entropy, batch, settings, num_tokens, ref_logprobs):
        tokens = zip(batch.targets.tolist(), batch.advantages.tolist(), strict=True)
        for (token, advantage), weight in zip(tokens, batch.weights.tolist(), strict=True):
            seen[token] = advantage, weight
        return grpo_loss(logprobs, entropy, batch, settings, num_tokens, ref_logprobs)

    plain = make_trajectory([1], [2, 3])
    several = make_trajectory([1], [4, 5, 6])
    several.further = [make_trajectory([1, 1], [7])]
    config = config_of(loss_type=loss_type).model_copy(
        update={"run": RunSettings(deterministic=deterministic)}
    )
    config = config.model_copy(
        update={"rollout": config.rollout.model_copy(update={"num_generations": 2})}
    )
    module = TokenLogprobs(small_model(), 1.0)
    updater = Updater(Accelerator(), module, Ranks(0, 1, 60), config, loss=loss)
    statistics = updater.update_policy([plain, several], [0.5, -2.0], 1e-3)
    assert statistics["train/trained_episodes"] == 2
    of_plain, of_several = {
        "grpo": (1 / (2 * 2), 1 / (4 * 2)),  # over all 4 sampled tokens of the episode
        "dapo": (1 / 6, 1 / 6),
        "dr_grpo": (1 / (2 * config.rollout.max_tokens),) * 2,
    }[loss_type]
    wanted = dict.fromkeys((2, 3), (0.5, of_plain)) | dict.fromkeys(range(4, 8), (-2.0, of_several))
    assert seen == {token: pytest.approx(pair) for token, pair in wanted.items()}


# Sequences that move to other ranks


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
