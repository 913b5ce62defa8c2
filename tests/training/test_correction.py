"""The correction of an inexact sampler in the update: ranks, layouts, iterations, little memory."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from pipeline.config.settings import Config
from pipeline.distributed.ranks import Ranks
from pipeline.train import warn_of_disagreement
from pipeline.training.token_logprobs import TokenLogprobs
from pipeline.training.updater import Reference, Updater
from scripts.proofs.grid import in_float64, make_episodes, make_trajectory, small_model
from scripts.proofs.ranks import play_ranks

MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
GROUP = 8
RATE = 1e-3
RATIO, GAP = "train/importance_sampling_ratio_", "train/sampling_logp_difference_"


def of_proof(modes, *late):
    """The modes; those of `late` are left to the proofs."""
    return [pytest.param(m, marks=pytest.mark.proof if m in late else ()) for m in modes]


def episodes():
    """Groups of episodes with common prefixes; two differ in the sampler's values alone."""
    rows, advantages = make_episodes(4 * GROUP)
    rows[5].further = [make_trajectory(row.prompt_ids, [9, 3], [1, 1]) for row in rows[:2]]
    last = rows[-1]
    rows[3] = make_trajectory(
        *(last.prompt_ids, last.completion_ids, last.loss_mask),
        logprobs=[0.9 * value for value in last.logprobs],
    )
    return rows, advantages


def config_of(sampler="vllm", deterministic=False, **grpo) -> Config:
    clips = {"vllm_importance_sampling_clip_min": 0.9, "vllm_importance_sampling_clip_max": 1.2}
    settings = {**clips, "num_iterations": 3, "epsilon": 0.01, "epsilon_high": 0.01, **grpo}
    rollout = {"sampler": sampler, "num_generations": GROUP}
    run = {"deterministic": deterministic}
    return Config.model_validate({"grpo": settings, "rollout": rollout, "run": run})


def updated(options, dtype=torch.float64, num_steps=1):
    """Statistics of the three updates of each step, parameters, and bytes between ranks.

    Of two ranks the first has three groups and the second one, without balance all and none;
    with `deterministic`, they take turns.
    """
    config, accelerator = config_of(**options), Accelerator()
    ranks = Ranks(accelerator.process_index, accelerator.num_processes, 60)
    models = [small_model(seed) for seed in (0, 1)]
    models = [in_float64(m) if dtype == torch.float64 else m for m in models]
    module = TokenLogprobs(models[0], 1.0)
    reference = Reference(TokenLogprobs(models[1], 1.0)) if config.grpo.beta > 0 else None
    updater = Updater(accelerator, module, ranks, config, reference=reference)
    rows, advantages = episodes()
    shares = [range(3), range(3, 4)] if config.grpo.balance_ranks else [range(4), range(0)]
    shares = [range(0, 4, 2), range(1, 4, 2)] if config.run.deterministic else shares
    groups = shares[ranks.rank] if ranks.num_ranks > 1 else range(4)
    mine = [group * GROUP + i for group in groups for i in range(GROUP)]
    given = [rows[i] for i in mine], [advantages[i] for i in mine]
    found = []
    for iteration in (0, 1, 2) * num_steps:
        found.append(updater.update_policy(*given, RATE, is_last=iteration == 2))
    assert updater._trainer_logprobs == {}
    parameters = torch.cat([p.detach().flatten() for p in models[0].parameters()])
    return found, parameters.tolist(), ranks.bytes.get("messages", 0)


@pytest.mark.parametrize("mode", of_proof(MODES, *MODES[:3]))
def test_two_balanced_ranks_correct_as_one_rank_does(mode):
    options = {"vllm_importance_sampling_mode": mode, "beta": 0.1}
    options |= {"max_tokens_per_microbatch": 90}
    one, two = play_ranks(partial(updated, num_steps=2), 2, options)
    statistics, parameters, _ = updated(options, num_steps=2)
    assert one[2] > 0  # groups have moved
    for rank in (one, two):
        assert rank[1] == pytest.approx(parameters, abs=1e-11)
        for found, expected in zip(rank[0], statistics, strict=True):
            assert found == pytest.approx(expected, rel=1e-6)
    kinds = ("min", "mean", "max")
    low, mean, high = (statistics[0][RATIO + kind] for kind in kinds)
    assert (low, high) == (0.9, 1.2) if mode.endswith("truncate") else (low == 0 and high <= 1.2)
    assert low < mean < high
    ratios = [{n: v for n, v in step.items() if "sampling" in n} for step in statistics]
    for later, first in ((1, 0), (2, 0), (4, 3), (5, 3)):
        assert ratios[later] == pytest.approx(ratios[first], rel=1e-9)
    assert ratios[3] != pytest.approx(ratios[0], rel=1e-3)  # the second step's trainer is another
    assert [step["train/clip_ratio"] > 0.05 for step in statistics] == [False, True, True] * 2


def test_deterministic_updates_correct_alike_bit_by_bit_on_one_and_two_ranks():
    options = {"deterministic": True, "vllm_importance_sampling_mode": "token_mask"}
    one, two = play_ranks(updated, 2, options, torch.float32)
    _, parameters, _ = updated(options, torch.float32)
    assert one[1] == two[1] == parameters


def test_with_an_exact_sampler_nothing_is_corrected():
    samplers = ("vllm", "auto", "own", "generate")
    assert [config_of(name).corrects_sampling for name in samplers] == [True, False, False, False]
    plain = updated({"sampler": "vllm", "vllm_importance_sampling_correction": False})
    found = updated({"sampler": "own", "vllm_importance_sampling_mode": "token_mask"})
    assert found == plain
    assert not any(name.startswith(RATIO) for name in found[0][0])
    assert found[0][1][GAP + "mean"] != found[0][0][GAP + "mean"]  # of the policy now


NAN = float("nan")
FAR = "train/sampling_logp_difference_mean is {} and above max_sampling_logp_difference {}"
SPOILT = "train/importance_sampling_ratio_mean is {} and about 1 is right"


@pytest.mark.parametrize(
    ("corrects", "gap", "ratio", "limit", "expected"),
    [
        (False, 0.25, None, None, [FAR.format(0.25, "0.0001")]),
        (True, 0.25, 0.2, None, []),
        (True, 0.25, 1.0, 0.2, [FAR.format(0.25, 0.2)]),
        (True, 5.8, 6e-16, None, [FAR.format(5.8, 0.3), SPOILT.format("6e-16")]),
        (True, 5.8, 3.0, None, [FAR.format(5.8, 0.3)]),  # every ratio was truncated
        (True, 0.1, 0.0, None, [SPOILT.format("0")]),  # every ratio was masked
        (True, 0.1, 0.0999, None, [SPOILT.format("0.1")]),
        (True, 0.1, 1e30, None, [SPOILT.format("1e+30")]),  # without an upper clip
        (True, 0.1, float("inf"), None, [SPOILT.format("inf")]),
        (True, NAN, NAN, None, [FAR.format("nan", 0.3), SPOILT.format("nan")]),
        (False, NAN, None, None, [FAR.format("nan", "0.0001")]),
    ],
)
def test_a_sampler_that_disagrees_or_a_correction_that_leaves_nothing_is_a_line(
    corrects, gap, ratio, limit, expected
):
    lines = []
    clips = {"max_sampling_logp_difference": limit}
    config = config_of(vllm_importance_sampling_correction=corrects, **clips)
    run = SimpleNamespace(config=config, say=lines.append, warned_of=set())
    run.accelerator = SimpleNamespace(mixed_precision="no")
    statistics = {f"{GAP}mean": gap} | ({f"{RATIO}mean": ratio} if corrects else {})
    for _ in range(2):  # each line comes once
        warn_of_disagreement(run, "warning: step 1:", statistics)
    assert len(lines) == len(expected)
    for line, part in zip(lines, expected, strict=True):
        assert line.startswith(f"warning: step 1: {part}")
