"""The plan of `--check --plan`: bytes, passes and FLOPs of a small model, and real ranks."""

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.config.cli import parse
from pipeline.config.rules import without_effect
from pipeline.config.settings import Config
from pipeline.distributed.ranks import Ranks
from pipeline.distributed.sharding import local, shard_model
from pipeline.models.layers import outer_layers
from pipeline.models.memory import Memory
from pipeline.models.tiny import tiny_model
from pipeline.preflight import check, plan
from pipeline.training.token_logprobs import TokenLogprobs
from pipeline.training.updater import Updater
from scripts.proofs.grid import make_episodes
from scripts.proofs.ranks import play_ranks
from tests.models.test_memory import storages
from tests.support.helpers import tokenizer
from tests.support.messages import refusal, says

WEIGHTS = 558_528  # of the tiny model, in 4 bytes each
FEW = [
    *("--domains", "airline", "--num-generations", "4", "--tasks-per-step", "3"),
    *("--max-tokens", "96", "--tasks-per-domain", "30", "--eval-tasks-per-domain", "6"),
]
ROW = r"  +(\d+)  (none|optimizer|full) +(\d+\.\d\d) +([\d,]+) +([\d.e-]+) +(\d+\.\d\d)( .*)?"


def memory(num_ranks, shard, *flags):
    return Memory(parse([*FEW, *flags])).on(num_ranks, shard)


# Bytes, micro-batches and FLOPs


@pytest.mark.parametrize(
    ("num_ranks", "shard", "flags", "expected"),
    [
        (1, "none", (), 0),
        (2, "none", (), 2_234_112),  # as a run counts them: docs/scaling.md
        (4, "none", (), 3_351_168),  # 2 x 3/4 x 4 bytes
        (2, "optimizer", (), 3_351_168),  # an all-reduce, and 1/2 x 4 bytes
        # A pass: weights, those of the layers again, gradients. A step: new weights, the probe.
        (2, "full", (), (558_528 + 443_328 + 558_528 + 2 * 558_528) * 4 / 2),
        (2, "full", ("--no-reshard-after-forward",), 4 * 558_528 * 4 / 2),
        (2, "full", ("--beta", "0.1"), (4 * 558_528 + 443_328 + 558_528) * 4 / 2),
        # An update gathers the weights once, however many passes it has.
        (
            2,
            "full",
            ("--no-reshard-after-forward", "--max-tokens-per-microbatch", "96"),
            4 * 558_528 * 4 / 2,
        ),
        # 2 groups of 4 episodes, each in a micro-batch of its own, twice
        (
            2,
            "full",
            ("--max-tokens-per-microbatch", "96", "--num-iterations", "2"),
            (16 * (2 * 558_528 + 443_328) + 2 * 558_528) * 4 / 2,
        ),
        (2, "none", ("--use-peft",), 98_304 * 4),
    ],
)
def test_the_bytes_that_a_rank_sends(num_ranks, shard, flags, expected):
    assert plan.bytes_sent(memory(num_ranks, shard, *flags)) == expected


@pytest.mark.parametrize(
    ("budget", "num_ranks", "expected"),
    [(96, 1, 12), (96, 3, 4), (96, 64, 4), (191, 3, 4), (192, 3, 2), (2048, 2, 1)],
)
def test_the_passes_of_the_busiest_rank(budget, num_ranks, expected):
    flags = ("--max-tokens-per-microbatch", str(budget))
    assert plan.passes(memory(num_ranks, "full", *flags)) == expected


@pytest.mark.parametrize(
    ("flags", "of_update"),
    [
        ((), 6 * WEIGHTS),
        (("--gradient-checkpointing",), 8 * WEIGHTS),
        (("--beta", "0.1", "--num-iterations", "2"), 2 * 8 * WEIGHTS),
        (("--use-peft",), 4 * WEIGHTS + 2 * 98_304),
    ],
)
def test_the_flops_of_a_step(flags, of_update):
    """Of 2 groups, each of 4 episodes of 96 tokens, with a prompt of 20 that is computed once."""
    there = memory(2, "none", *flags)
    there.prompts = {"airline": 20}
    assert plan.flops(there, 2) == 2 * 4 * 96 * of_update + 2 * (4 * 76 + 20) * 2 * WEIGHTS


def mixture(**shape):
    """The shape of Qwen3-30B-A3B, which has 30.5 billion weights, of which a token uses 3.4."""
    shape = {"num_experts": 128, "num_experts_per_tok": 8, **shape}
    shape |= {"hidden_size": 2048, "num_hidden_layers": 48, "moe_intermediate_size": 768}
    shape |= {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    shape = AutoConfig.for_model("qwen3_moe", vocab_size=151_936, **shape)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(shape)


@pytest.mark.parametrize(
    ("shape", "active"), [({}, 3_353_032_704), ({"num_experts_per_tok": 128}, 30_532_122_624)]
)
def test_only_the_experts_that_a_token_uses_compute(shape, active, monkeypatch):
    monkeypatch.setattr("pipeline.models.memory.empty_model", lambda *_: mixture(**shape))
    there = memory(2, "none")
    there.prompts = {"airline": 20}
    assert plan.flops(there, 2) == (2 * 4 * 96 * 6 + 2 * (4 * 76 + 20) * 2) * active
    assert plan.bytes_sent(there) == 4 * 30_532_122_624  # all of them have gradients


# On real ranks


def note_bytes(collective, sizes, *tensors, **options):
    """Do a collective of FSDP2, and note the bytes of its larger tensor, that of all ranks."""
    given = (*tensors, *options.values())
    sizes.append(max(x.nbytes for x in given if isinstance(x, torch.Tensor)))
    return collective(*tensors, **options)


def hold(way, make):
    """An update on a rank: the bytes held at its end, and those gathered and scattered in it."""
    shard, *flags = way
    accelerator = Accelerator()
    ranks = Ranks(accelerator.process_index, accelerator.num_processes, 60)
    model = make()
    sizes = []
    exchanges = {n: getattr(dist, n) for n in ("all_gather_single", "reduce_scatter_single")}
    for name, exchange in exchanges.items():
        setattr(dist, name, partial(note_bytes, exchange, sizes))
    sharded = None
    if shard == "full":
        sharded = shard_model(model, outer_layers(model), None, reshards=not flags)
    for name, exchange in exchanges.items():
        setattr(dist, name, exchange)
    module = TokenLogprobs(model, 1.0, sharded=sharded)
    updater = Updater(accelerator, module, ranks, Config(grpo={"shard": shard}))
    held = {}

    def count(*_):
        found = [local(p.detach()) for p in model.parameters()]
        found += [local(p.grad) for p in model.parameters()]
        found += [local(x) for state in updater.optimizer.state.values() for x in state.values()]
        held.update(storages(found))

    step = updater.optimizer.step
    updater.optimizer.step = lambda: (step(), count())
    rows, advantages = make_episodes(4)
    mine = slice(ranks.rank, None, 2)
    updater.update_policy(rows[mine], advantages[mine], 1e-4)
    return sum(held.values()), sum(sizes)


def tiny():
    return tiny_model(tokenizer(), 0)


WAYS = (*((shard,) for shard in plan.SHARDS), ("full", "--no-reshard-after-forward"))


def hold_all(make):
    return {way: hold(way, make) for way in WAYS}


def test_two_ranks_hold_and_send_what_the_plan_says():
    found = play_ranks(hold_all, 2, tiny)
    assert all(isinstance(row, dict) for row in found), found
    for way in WAYS:
        shard, *flags = way
        there = memory(2, shard, *flags)
        terms = there.terms()
        planned = sum(terms[name] for name in ("weights (fp32)", "gradients", "moments of AdamW"))
        for row in found:
            held, exchanged = row[way]
            assert held == pytest.approx(planned, rel=0.02), (way, held / planned)
            if shard == "full":  # without what the sampler gets
                sent = plan.bytes_sent(there) - 4 * WEIGHTS
                assert exchanged / 2 == pytest.approx(sent, rel=0.02)


# The command


def test_the_plan_of_a_measured_step(capsys):
    assert check.main(parse([*FEW, "--check", "--plan", "2,1"]), measures=True) == 0
    said = capsys.readouterr().out
    assert "\nplan of a step of 3 groups of 4 episodes\n" in said
    rows = re.findall(ROW, said.partition("\nplan of")[2])
    assert [row[:2] for row in rows] == [
        ("1", "none"),
        ("2", "none"),
        ("2", "optimizer"),
        ("2", "full"),
    ]
    assert [row[3] for row in rows] == ["0", "2,234,112", "3,351,168", "5,354,880"]
    assert float(rows[0][5]) == 1
    assert all(0 < float(row[4]) < 60 for row in rows)
    assert "  assumes measured here" in said and "plan_bandwidth 50 GB/s" in said


def test_the_plan_of_counted_flops(capsys):
    flags = ["--check", "--plan", "1,3", "--plan-tflops", "0.001", "--plan-bandwidth", "0.001"]
    assert check.main(parse([*FEW, *flags])) == 0
    said = capsys.readouterr().out
    rows = re.findall(ROW, said.partition("\nplan of")[2])
    # 3 groups and 1 group of 4 x 96 tokens, of which 21 are the prompt's, at 1 GFLOP/s;
    # 2,978,816 bytes at 1 MB/s
    assert [row[4:6] for row in rows[:2]] == [("4.936", "1.00"), ("4.624", "1.07")]
    says(said, "assumes counted: plan_tflops 0.001 of", "plan_bandwidth 0.001 GB/s", "96 tokens")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], ("plan: got 1,8 for a run", "give check")),
        (["--check", "--no-grpo"], ("plan: got ranks for a run without steps", "set use_grpo")),
        (["--check", "--deterministic"], ("plan: got ranks with deterministic", "take one out")),
    ],
)
def test_a_plan_that_is_refused(flags, words):
    says(refusal(parse, ["--plan", "1,8", *flags]), *words)


def test_speeds_without_a_plan_have_no_effect():
    assert without_effect(parse(["--check", "--plan-tflops", "3"])) == [
        "plan_tflops: has no effect without plan"
    ]
    assert without_effect(parse(["--check", "--plan", "1", "--plan-bandwidth", "3"])) == []
