"""The warm start: a short supervised stage on demonstrations, with the Updater of GRPO.

With LoRA, it trains the adapters. As in the update of GRPO, a micro-batch computes common prefixes
once, a step that runs out of memory is repeated in smaller micro-batches, and steps that are not
finite are skipped.

All ranks of the run take part in the warm start. `models/chat/template.py` makes the tokens of both
demonstrations and rollouts. The expert of a domain follows the domain's rules in only a share of
the demonstrations (`warm_start.rule_share`), so that GRPO can improve the policy. `fine_tune` also
trains on examples that are no demonstrations.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import count, groupby, islice
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from pipeline.checkpoints.moments import load_optimizer
from pipeline.common.errors import UserError
from pipeline.config.settings import Config
from pipeline.data.rng import permutation
from pipeline.data.tasks import Message
from pipeline.distributed.ranks import Ranks
from pipeline.distributed.sharding import Sharded
from pipeline.environments.demonstrations import Demonstrations
from pipeline.models.chat.template import Chat
from pipeline.models.layers import recompute_layers
from pipeline.models.rank_memory import give_memory_back
from pipeline.rollout.trajectory import Trajectory
from pipeline.training.grpo import TokenStats
from pipeline.training.micro_batches import MicroBatch
from pipeline.training.token_logprobs import TokenLogprobs
from pipeline.training.updater import Updater

SFTExample = dict[str, list[int]]  # has the keys `input_ids` and `labels`
IGNORED = -100  # label of tokens without a loss, as in transformers
MIN_LR_RATE = 0.1  # share of the peak learning rate at the end
SETTINGS = {  # of GRPO's section, as a supervised stage has them
    **{"adam_beta1": 0.9, "adam_beta2": 0.98, "weight_decay": 0.01, "max_grad_norm": 1.0},
    **{"loss_type": "dapo", "beta": 0.0, "entropy_coef": 0.0},
    "vllm_importance_sampling_correction": False,
    "partial_rollout_correction": False,
}


class Schedule(NamedTuple):
    """How long and how fast a supervised stage trains."""

    num_steps: int
    batch_size: int  # examples of a step, over all ranks
    learning_rate: float  # peak
    num_warmup_steps: int


def warm_start_schedule(config: Config) -> Schedule:
    settings = config.warm_start
    assert settings.learning_rate is not None, "the settings were not fitted to the model"
    return Schedule(
        num_steps=settings.steps,
        batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        num_warmup_steps=settings.warmup_steps,
    )


def fine_tune(
    config: Config,
    accelerator: Any,
    ranks: Ranks,
    model: Any,
    examples: Sequence[SFTExample],
    schedule: Schedule,
    *,
    sharded: Sharded | None = None,
    state: dict[str, Any] | None = None,
    resumed: Path | None = None,
    on_step: Callable[[float, torch.optim.Optimizer], None] = lambda *_: None,
) -> float:
    """Train `model`, which may be `sharded`, in place on examples in their order.

    Every rank must call this function with the same `examples`: those of all steps,
    `schedule.batch_size` for each step. `on_step` is called with the loss of each optimizer step,
    a mean over tokens. Returns the mean loss of the last eighth of the steps. Raises Interrupted on
    all ranks, after a step, if a signal has come.

    `state` is kept up to date with what a checkpoint needs. With the `state` of the checkpoint
    `resumed`, whose weights `model` has, the training goes on there.
    """
    state = {} if state is None else state
    losses: list[float] = state.setdefault("losses", [])
    config = config.changed("grpo", **SETTINGS)
    if config.grpo.gradient_checkpointing:
        recompute_layers(model)
    module = TokenLogprobs(model, temperature=1.0, trains_entropy=False, sharded=sharded)
    module.eval()  # without dropout
    updater = Updater(
        accelerator, module, ranks, config, loss=supervised_loss, decays_vectors=False
    )
    if losses:
        assert resumed is not None, "the moments are in a checkpoint"
        load_optimizer(resumed, updater.optimizer)
        updater.load_state_dict(state)
    for step in range(len(losses), schedule.num_steps):
        batch = examples[step * schedule.batch_size : (step + 1) * schedule.batch_size]
        group = config.rollout.num_generations if config.run.deterministic else 0
        mine = [trajectory_of(example) for example in share_of(batch, ranks, group)]
        statistics = updater.update_policy(
            mine, [0.0] * len(mine), supervised_rate_at(step, schedule)
        )
        losses.append(statistics.get("train/loss", 0.0))
        state |= updater.state_dict()
        on_step(losses[-1], updater.optimizer)
        ranks.agree("step of supervised training")
    del updater, module
    model.zero_grad()  # frees the gradients
    accelerator.free_memory()
    give_memory_back()
    return fmean(losses[-max(1, schedule.num_steps // 8) :])


def supervised_loss(
    logprobs: torch.Tensor, entropy: torch.Tensor, batch: MicroBatch, *_: Any
) -> tuple[torch.Tensor, TokenStats]:
    """Return the cross entropy, with the signature of `grpo_loss`; the other statistics are 0."""
    loss = -(logprobs * batch.weights).sum()
    zeros = dict.fromkeys((field.name for field in fields(TokenStats)), torch.zeros_like(loss))
    return loss, TokenStats(**zeros | {"loss": loss.detach()})


def supervised_rate_at(done: int, schedule: Schedule) -> float:
    """Return the learning rate after `done` steps: `cosine_with_min_lr` of transformers.

    As in transformers, the first step of the warm-up has the rate 0.
    """
    peak = schedule.learning_rate
    warmup = schedule.num_warmup_steps
    if done < warmup:
        return peak * done / warmup
    share = (done - warmup) / max(1, schedule.num_steps - warmup)
    return peak * (MIN_LR_RATE + (1 - MIN_LR_RATE) * (1 + math.cos(math.pi * share)) / 2)


def share_of(examples: Sequence[SFTExample], ranks: Ranks, group: int = 0) -> list[SFTExample]:
    """Return this rank's examples of a step: neighbours in lexicographic order.

    With `group`, the ranks take turns in groups of `group` examples, as an Updater that is
    `deterministic` sums them.
    """
    ordered = sorted(examples, key=itemgetter("input_ids"))
    if not group:
        first, end = (len(ordered) * i // ranks.num_ranks for i in (ranks.rank, ranks.rank + 1))
        return ordered[first:end]
    mine = range(group * ranks.rank, len(ordered), group * ranks.num_ranks)
    return [example for i in mine for example in ordered[i : i + group]]


def trajectory_of(example: SFTExample) -> Trajectory:
    """Return an example as an episode, whose sampled tokens are those with a label."""
    ids = example["input_ids"]
    is_sampled = [label != IGNORED for label in example["labels"]]
    first = max(1, is_sampled.index(True) if any(is_sampled) else len(ids))
    return Trajectory(
        domain="supervised training",
        task_id="",
        prompt_ids=ids[:first],
        completion_ids=ids[first:],
        loss_mask=is_sampled[first:],
        logprobs=[0.0] * len(ids[first:]),
    )


def sft_examples(
    config: Config,
    chat: Chat,
    demonstrations: Mapping[str, Demonstrations],
    alive: Callable[[], None] = lambda: None,
) -> list[SFTExample]:
    """Return the examples of all steps of the warm start, in the order of the steps.

    Each domain gives the same number of examples. A file with fewer demonstrations is read in
    passes, each in an order of its own. `alive` is called after each demonstration.
    """
    examples = dict[str, list[SFTExample]]()
    repeated = dict[str, Iterator[int]]()
    positions = list[tuple[str, int]]()
    num_examples = config.warm_start.steps * config.warm_start.batch_size
    seed = config.run.seed
    for name, source in demonstrations.items():
        own = examples[name] = []
        for _, messages, tools in source:
            own.append(encode(chat, messages, tools or []))
            alive()
        source.forget()
        size = len(own)
        if source.file is not None:
            repeated[name] = epochs(size, seed, "warm start", name)
            size = source.count
        positions += [(name, index) for index in range(size)]
    if not positions:
        raise UserError("demonstrations: got none for the warm start; give --warm-start-steps 0")
    order = islice(epochs(len(positions), seed, "warm start"), num_examples)
    return [
        examples[name][next(repeated[name]) if name in repeated else index]
        for name, index in (positions[i] for i in order)
    ]


def epochs(size: int, *key: int | str) -> Iterator[int]:
    """Yield the numbers below `size` again and again, each time in a random order of its own."""
    return (i for number in count() for i in permutation(size, *key, number))


def encode(chat: Chat, messages: Sequence[Message], tools: list[dict[str, Any]]) -> SFTExample:
    """Return tokens and labels of a conversation; only tokens of assistant messages have a loss."""
    parts = tokens_of_messages(chat, messages, tools)
    return {
        "input_ids": [i for _, ids in parts for i in ids],
        "labels": [i if is_sampled else IGNORED for is_sampled, ids in parts for i in ids],
    }


def tokens_of_messages(
    chat: Chat, messages: Sequence[Message], tools: list[dict[str, Any]]
) -> list[tuple[bool, list[int]]]:
    """Return (is sampled, token ids) of the prompt, each assistant message and each reply."""
    is_assistant = [message["role"] == "assistant" for message in messages]
    first = is_assistant.index(True)
    end = len(messages) - is_assistant[::-1].index(True)
    parts = [(False, chat.prompt_ids(messages[:first], tools))]
    for is_sampled, group in groupby(messages[first:end], lambda m: m["role"] == "assistant"):
        run = list(group)
        pieces = map(chat.message_ids, run) if is_sampled else [chat.reply_ids(run)]
        parts += [(is_sampled, ids) for ids in pieces]
    return parts
