"""Updates on several numbers of ranks, for the tests and for `invariance.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from transformers import Qwen3Config, Qwen3ForCausalLM

from pipeline.config.settings import LOSSES, Config, ModelSettings
from pipeline.data.tasks import Task
from pipeline.distributed.ranks import Ranks, parameter_hash
from pipeline.distributed.sharding import fill, shard_model, whole
from pipeline.models import lora
from pipeline.models.layers import outer_layers, recompute_layers
from pipeline.models.tiny import tiny_model, tiny_tokenizer
from pipeline.rollout.trajectory import StopReason, Trajectory
from pipeline.training.collect import RolloutBatch, Sample
from pipeline.training.distillation import teach
from pipeline.training.micro_batches import (
    Item,
    MicroBatch,
    cuts,
    empty_batch,
    make_micro_batches,
    micro_batch,
    shared_cuts,
)
from pipeline.training.token_logprobs import TokenLogprobs
from pipeline.training.updater import Reference, Updater
from scripts.proofs.ranks import play_ranks

LAYOUTS = ("padded", "token-budget", "packed", "shared", "balanced")
LEVELS = ("token", "sequence")
LOSS_TYPES = tuple(LOSSES)
GROUP = 4
TAUGHT = ("desk", "shop", "phone")  # domains of the groups of a taught update, in turns


def small_model(seed: int = 0, dtype: torch.dtype = torch.float32, vocab_size: int = 16) -> Any:
    """A Qwen3 of 2 layers and few tokens. Large weights make token distributions uneven."""
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).to(dtype)


def in_float64(model: Any) -> Any:
    """Convert a model to float64, and its norms, which transformers computes in float32."""
    model = model.double()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_rms_norm, module)
    return model


def _rms_norm(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    return norm.weight * hidden * scale


def make_trajectory(
    prompt: Sequence[int] = (1, 2, 3),
    completion: Sequence[int] = (4, 5),
    mask: Sequence[int] | None = None,
    **fields: Any,
) -> Trajectory:
    """An episode of given ids. `mask` marks sampled tokens; without a mask, all are sampled."""
    loss_mask = [True] * len(completion) if mask is None else [bool(m) for m in mask]
    values: dict[str, Any] = {
        "domain": "desk",
        "task_id": "t1",
        "family": "",
        "branch": "",
        "trial": 0,
        "prompt_ids": list(prompt),
        "completion_ids": list(completion),
        "loss_mask": loss_mask,
        "logprobs": [-1.0 if m else 0.0 for m in loss_mask],
        "stop_reason": StopReason.COMPLETED,
        "reward": 0.0,
        "num_turns": 1,
    }
    return Trajectory(**{**values, **fields})


def make_episodes(count: int) -> tuple[list[Trajectory], list[float]]:
    """Random episodes with advantages; log-probabilities are the small model's plus noise."""
    random = Random(count)
    rows = []
    for _ in range(count):
        length = random.randint(1, 40)
        completion = [random.randrange(16) for _ in range(length)]
        mask = [1] + [random.randrange(2) for _ in range(length - 1)]
        rows.append(make_trajectory([1, random.randrange(16)], completion, mask))
    batch = micro_batch([(row, 0.0, 1.0) for row in rows], 0)
    with torch.no_grad():
        logprobs = TokenLogprobs(small_model(), 1.0)(batch)[0]
    noise = torch.randn(len(logprobs), generator=torch.Generator().manual_seed(1)) * 0.1
    kept = (logprobs + noise).split([row.num_sampled_tokens for row in rows])
    for i, values in enumerate(kept):
        numbers = iter(values.tolist())
        rows[i] = make_trajectory(
            rows[i].prompt_ids,
            rows[i].completion_ids,
            rows[i].loss_mask,
            logprobs=[next(numbers) if mask else 0.0 for mask in rows[i].loss_mask],
        )
    return rows, [random.choice([-1.0, -0.3, 0.5, 2.0]) for _ in range(count)]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The settings of one update in the grid.

    `count` is the number of micro-batches. The layout `balanced` is `shared` with load balancing.
    With the spread `idle`, the last rank has no trajectories. `means` normalises by the counts of
    each rank, which is a fault that the grid must detect.
    """

    num_ranks: int = 1
    count: int = 1
    layout: str = "padded"
    dtype: str = "float64"
    spread: str = "even"
    loss_type: str = "dapo"
    level: str = "token"
    model: str = "small"
    means: bool = False
    shard: str = "none"
    reshards: bool = True
    adapters: bool = False  # of LoRA, which alone are trained
    recomputes: bool = False  # layers in the backward pass
    taught: bool = False  # by a teacher of each domain, in place of the advantages
    learned_beta: float = 0.0
    movement_coef: float = 0.0  # to the reference
    deterministic: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Gradient, parameters and statistics after an update, on rank 0."""

    gradient: np.ndarray[Any, Any]  # flat gradient after clipping
    parameters: np.ndarray[Any, Any]
    statistics: dict[str, float]
    same: bool


def batch() -> tuple[list[Trajectory], list[float]]:
    """40 episodes of different lengths in groups of 4.

    One group has zero advantages, and one episode has no sampled token.
    """
    rows, advantages = make_episodes(40)
    advantages[8:12] = [0.0] * GROUP
    rows[17] = make_trajectory(rows[17].prompt_ids, [], reward=0.0)
    return rows, advantages


def share(num_groups: int, rank: int, num_ranks: int, spread: str) -> list[int]:
    """The indices of a rank's episodes. With the spread `idle`, the last rank has none."""
    active = num_ranks - (spread == "idle")
    groups = range(rank, num_groups, active) if rank < active else range(0)
    return [group * GROUP + i for group in groups for i in range(GROUP)]


def cut(items: Sequence[Item], layout: str, count: int) -> list[MicroBatch]:
    """Make at most `count` micro-batches: of equal numbers of rows, or of a token budget."""
    if layout == "padded":
        kept = [item for item in items if item[0].num_sampled_tokens]
        size = max(1, -(-len(kept) // count))
        return [micro_batch(kept[i : i + size], 0) for i in range(0, len(kept), size)]
    joined, shared = layout == "packed", layout in ("shared", "balanced")
    sequences = sorted(t.ids for t, _, _ in items if t.num_sampled_tokens)
    lengths = sorted(map(len, sequences), reverse=True)

    def number(budget: int) -> int:
        return len(shared_cuts(sequences, budget) if shared else cuts(lengths, budget, joined))

    budget = next(b for b in range(1, 1 << 20) if number(b) <= count)
    return make_micro_batches(items, budget, 0, joined, shared)


def model_of(cell: Cell, seed: int = 0) -> Any:
    small = cell.model == "small"
    model = small_model(seed) if small else tiny_model(tiny_tokenizer(), seed)
    if cell.dtype == "float64":
        model = in_float64(model)
    if cell.adapters:
        model = lora.attach(model, ModelSettings(lora_r=4), "base", seed, model.dtype)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:  # zeros, with which the other half would have no gradient
                parameter.data.normal_(std=0.1, generator=generator)
    return model.double() if cell.dtype == "float64" else model


def update(cell: Cell, accelerator: Any, ranks: Ranks) -> Outcome:
    """Make one AdamW step with the Updater: loss with KL and entropy terms, clipped gradient."""
    clip = 0.1 if cell.level == "token" else 0.01  # small enough that some ratios are clipped
    config = Config.model_validate(
        {
            "grpo": {
                "loss_type": cell.loss_type,
                "importance_sampling_level": cell.level,
                "epsilon": clip,
                "epsilon_high": clip + (1 if cell.loss_type == "cispo" else 0.002),
                "beta": 0.1,
                "entropy_coef": 0.01,
                "max_grad_norm": 0.05,  # below the gradient's norm
                "weight_decay": 0.01,
                "balance_ranks": cell.layout == "balanced",
                "shard": cell.shard,
                "learned_beta": cell.learned_beta,
                "movement_coef": cell.movement_coef,
            },
            "rollout": {"num_generations": GROUP},
            "run": {"deterministic": cell.deterministic},
        }
    )
    model = model_of(cell)
    sharded = None
    if cell.shard == "full":
        sharded = shard_model(model, outer_layers(model), None, reshards=cell.reshards)
    if cell.recomputes:
        recompute_layers(model)
    module = TokenLogprobs(model, 1.0, sharded=sharded)
    with torch.no_grad():  # a pass that leaves no trace in the update
        module(empty_batch(0))
    updater = _CutUpdater(accelerator, module, ranks, config)
    updater.cell = cell
    updater.reference = Reference(module)
    other = TokenLogprobs(model_of(cell, seed=1), 1.0)
    for name, parameter in other.named_parameters():
        if parameter.requires_grad:
            fill(updater.reference.parameters[name], parameter.detach())
    if cell.movement_coef:
        updater.start = updater.reference
    gradients: list[np.ndarray[Any, Any]] = []

    def keep(*_: Any) -> None:
        gradients.append(_flat(whole(p.grad) for p in model.parameters() if p.grad is not None))

    updater.optimizer.register_step_pre_hook(keep)
    rows, advantages = batch()
    mine = share(len(rows) // GROUP, ranks.rank, ranks.num_ranks, cell.spread)
    metrics = taught(cell, rows, mine, updater, ranks, config) if cell.taught else {}
    statistics = metrics | updater.update_policy(
        [rows[i] for i in mine],
        [advantages[i] for i in mine],
        learning_rate=1e-3,
        learned=make_episodes(11)[0] if cell.learned_beta else [],
    )
    named = [(name, whole(p.detach())) for name, p in model.named_parameters()]
    digests = ranks.all_gather_objects(parameter_hash(named), "digests")
    parameters = _flat(p for _, p in named)
    same = len(set(digests)) == 1
    return Outcome(gradient=gradients[0], parameters=parameters, statistics=statistics, same=same)


def taught(
    cell: Cell,
    rows: list[Trajectory],
    mine: Sequence[int],
    updater: Updater,
    ranks: Ranks,
    config: Config,
) -> dict[str, float]:
    """Let a teacher of each domain give the episodes `mine` their advantages."""
    teachers = {}
    for seed, domain in enumerate(TAUGHT, 2):
        teachers[domain] = Reference(updater.module, aside=True)
        other = TokenLogprobs(model_of(cell, seed), 1.0)
        with teachers[domain].in_place():
            for name, parameter in other.named_parameters():
                if parameter.requires_grad:
                    fill(dict(updater.module.named_parameters())[name], parameter.detach())
    domains = [TAUGHT[i // GROUP % len(TAUGHT)] for i in range(len(rows))]
    for row, domain in zip(rows, domains, strict=True):
        row.domain = domain
    batch = RolloutBatch(
        samples=[Sample(trajectory=rows[i], index=i, kept=True) for i in mine],
        num_first=len(mine),
        rounds=[len(rows) // GROUP],
        tasks=[Task(domain=d, id="t1", prompt=(), payload="") for d in domains[::GROUP]],
        memory=None,
    )
    return teach(batch, teachers, updater, ranks, config)


class _CutUpdater(Updater):
    """An Updater with the micro-batches of a cell, and with the fault of `means`."""

    cell: Cell

    def _cut(self, items: Sequence[Item]) -> list[MicroBatch]:
        return cut(items, self.cell.layout, self.cell.count)

    def _counts(self, everyone: Sequence[Sequence[float]]) -> tuple[float, float]:
        if self.cell.means:
            everyone = [everyone[self.ranks.rank]] * self.ranks.num_ranks
        return super()._counts(everyone)


def _flat(tensors: Any) -> np.ndarray[Any, Any]:
    return torch.cat([tensor.double().flatten() for tensor in tensors]).numpy().copy()


def _updates_on_this_rank(cells: Sequence[Cell]) -> dict[Cell, Outcome] | None:
    accelerator = Accelerator()
    ranks = Ranks(accelerator.process_index, accelerator.num_processes, 120)
    outcomes = {cell: update(cell, accelerator, ranks) for cell in cells}
    return outcomes if ranks.is_main else None


def play_updates(cells: Sequence[Cell]) -> dict[Cell, Outcome]:
    """The outcome of every cell. Cells with equal numbers of ranks share processes."""
    found: dict[Cell, Outcome] = {}
    for num_ranks in sorted({cell.num_ranks for cell in cells}):
        here = [cell for cell in cells if cell.num_ranks == num_ranks]
        results = play_ranks(_updates_on_this_rank, num_ranks, here, timeout_s=1800)
        failed = [result for result in results if isinstance(result, str)]
        if failed:
            raise RuntimeError(failed[0])
        found |= results[0]
    return found


def difference(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    """The relative difference |a - b| / |b|, with Euclidean norms."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def update_cells(rank_counts: Sequence[int], counts: Sequence[int], model: str) -> list[Cell]:
    """The cells of the grid of updates."""
    return [
        Cell(num_ranks=n, count=c, layout=layout, dtype=dtype, spread=spread, model=model)
        for n in rank_counts
        for spread in (("even", "idle") if n > 1 else ("even",))
        for c in counts
        for layout in LAYOUTS
        for dtype in ("float64", "float32")
    ]
