"""Measure an update against the plain matrix products that it cannot do without.

    python scripts/bench/update.py --model FOLDER --tokens 12 48

A step has 8 tasks with 8 episodes each; all groups are kept. Prompts have 40 tokens, of which 30
are common to all, as a system prompt is. The tokens are random. The products are those of forward
and backward passes, with `torch.mm` and `torch.bmm` into memory that is there already: three for
each linear layer of a micro-batch (output, gradient of the input, gradient of the weight), three of
the output layer at the positions before sampled tokens (a second computation of logits does not
count), and seven for attention along each path of the prefix tree (all pairs, without the causal
half that kernels leave out; the backward pass of fused attention computes the scores again).
Micro-batches are the update's own. Seconds are of the processor, the least of `--repeats` turns.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from common import machine, parser_of, write_json
from torch import nn

from pipeline.config.settings import Config
from pipeline.distributed.ranks import Ranks
from pipeline.grpo.micro_batches import MicroBatch, make_micro_batches
from pipeline.grpo.token_logprobs import TokenLogprobs
from pipeline.grpo.updater import Updater
from pipeline.models.loading import load_folder
from pipeline.rollout.trajectory import Trajectory

TASKS, GENERATIONS, PROMPT, COMMON = 8, 8, 40, 30


def main(argv: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--model", required=True, help="a folder")
    parser.add_argument("--tokens", type=int, nargs="+", default=[12, 48], help="of an episode")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    where, figures = machine(), dict[str, float]()
    for count in options.tokens:
        found = measure(options, count)
        figures |= {f"{name}_{count}": value for name, value in found.items()}
        update, products = found["update_cpu_s"], found["products_cpu_s"]
        print(
            f"{count} tokens: update {update:.2f} CPU s, products {products:.2f} "
            f"({found['products_tflop']:.2f} TFLOP), ratio {update / products:.2f}",
            flush=True,
        )
    write_json(options.json, figures, where, vars(options))
    return 0


def measure(options: argparse.Namespace, count: int) -> dict[str, float]:
    rollout = {"max_tokens": PROMPT + count, "num_generations": GENERATIONS}
    config = Config.model_validate({"grpo": {"entropy_coef": 0.0}, "rollout": rollout})
    model = load_folder(options.model, config.model)
    accelerator = Accelerator(cpu=True)
    ranks = Ranks(accelerator.process_index, accelerator.num_processes, 600)
    module = TokenLogprobs(model, 1.0, trains_entropy=False).eval()
    updater = Updater(accelerator, module, ranks, config, 0)
    rows = episodes(count, len(model.get_input_embeddings().weight))
    advantages = [(-1.0) ** i for i in range(len(rows))]
    items = [(row, 0.0, 1.0) for row in rows]
    budget = updater.max_tokens_per_microbatch
    batches = make_micro_batches(items, budget, 0, share_prefixes=updater.shares_prefixes)
    works: list[tuple[str, Callable[[], Any]]] = [
        ("update_cpu_s", partial(updater.update_policy, rows, advantages, 1e-9)),
        ("products_cpu_s", partial(multiply, [*products_of(model, batches)])),
    ]
    found: dict[str, float] = {}
    for turn in range(options.repeats + 1):
        for name, work in works if turn % 2 else works[::-1]:
            begun = time.process_time()
            work()
            if turn:  # the first turn warms up
                seconds = time.process_time() - begun
                found[name] = min(found.get(name, seconds), seconds)
    flop = sum(2 * n * a * b * c * times for n, a, b, c, times in products_of(model, batches))
    return {**found, "products_tflop": flop / 1e12}


def episodes(count: int, vocabulary: int) -> list[Trajectory]:
    draw = random.Random(0)

    def tokens(number: int) -> list[int]:
        return [draw.randrange(vocabulary // 40, vocabulary) for _ in range(number)]

    first, found = tokens(COMMON), []
    for task in range(TASKS):
        prompt = first + tokens(PROMPT - COMMON)
        for trial in range(GENERATIONS):
            row = Trajectory(domain="", task_id=str(task), trial=trial, prompt_ids=prompt)
            row.append(tokens(count), [-10.0] * count)
            found.append(row)
    return found


Product = tuple[int, int, int, int, int]  # (batch, M, K, N, how often), a product of [M, K], [K, N]


def products_of(model: Any, batches: Sequence[MicroBatch]) -> Iterator[Product]:
    """Yield the products of the forward and backward passes of all micro-batches."""
    head, shape = model.get_output_embeddings(), model.config.get_text_config()
    linear = [m for m in model.get_decoder().modules() if isinstance(m, nn.Linear)]
    heads, layers = shape.num_attention_heads, shape.num_hidden_layers
    size = getattr(shape, "head_dim", None) or shape.hidden_size // heads
    for batch in batches:
        places = torch.stack([batch.rows, batch.columns]).unique(dim=1).shape[1]
        pairs = [(layer.weight.shape, batch.input_ids.numel()) for layer in linear]
        for (wide, deep), tokens in [*pairs, (head.weight.shape, places)]:
            yield 1, tokens, deep, wide, 1
            yield 1, tokens, wide, deep, 1
            yield 1, wide, tokens, deep, 1
        for count, queries, keys in batch.tree.blocks if batch.tree else ():
            for _ in range(layers):
                yield count * heads, queries, size, keys, 3  # scores, again, gradient of weights
                yield count * heads, queries, keys, size, 2  # outputs, gradient of queries
                yield count * heads, keys, queries, size, 2  # gradients of keys and values


def multiply(products: Sequence[Product]) -> None:
    """Do each product, with operands in memory that other products have used, too."""
    largest = max(max(n * a * b, n * b * c, n * a * c) for n, a, b, c, _ in products)
    if not MEMORY or len(MEMORY[0]) < largest:
        MEMORY[:] = [torch.ones(largest) for _ in range(3)]
    for n, a, b, c, times in products:
        left, right, out = (
            tensor[: n * x * y].view(n, x, y)
            for tensor, x, y in zip(MEMORY, (a, b, a), (b, c, c), strict=True)
        )
        for _ in range(times):
            if n == 1:
                torch.mm(left[0], right[0], out=out[0])
            else:
                torch.bmm(left, right, out=out)


MEMORY: list[torch.Tensor] = []

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
