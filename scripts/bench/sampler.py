"""Compare our sampler with `model.generate` and with transformers' continuous batching.

    python scripts/bench/sampler.py
    python scripts/bench/sampler.py --model FOLDER --dtype bf16 --turns 1 --group-sizes 8 \\
        --groups 8 --prompt-tokens 32 --message-tokens 64 --without-batching

A cell has `groups` x G conversations with random weights and tokens. The members of a group share
one prompt. Each turn is a sampled message and a reply, both of fixed length. All methods sample at
temperature 1 in the same precision; only ours also keeps log-probabilities. The members of a group
differ from their first token on, so our sampler can share only the prompt. `generate` and
continuous batching (`generate_batch`, whose blocks share prefixes) get the whole conversation at
every turn. Measurements of the methods alternate, on a CPU in CPU seconds of one process. A ratio
is the median over repeats of the other method's time divided by ours. With `--model`, `generate`
also computes attention in its other way (`eager`), and the gap is how far the log-probabilities of
our sampled tokens are from those that training computes.
"""

from __future__ import annotations

import argparse
import copy
import logging
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from common import machine, model_of, parser_with_device, ready, write_json
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from pipeline.models.layers import weight_of_logits
from pipeline.models.sampling_copy import trained_weights
from pipeline.models.tiny import tiny_model, tiny_tokenizer
from pipeline.rollout.samplers.own import RowSampler
from pipeline.rollout.trajectory import Trajectory
from pipeline.training.micro_batches import make_micro_batches
from pipeline.training.token_logprobs import TokenLogprobs

Play = Callable[[], float]


def main() -> int:
    parser = parser_with_device(__doc__)
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--group-sizes", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--message-tokens", type=int, default=16)
    parser.add_argument("--reply-tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", help="folder of a model, instead of random weights")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], help="[bf16 on a GPU, else fp32]")
    parser.add_argument("--without-batching", action="store_true", help="no continuous batching")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    bench = Bench(options)
    where = machine(options.device)
    figures: dict[str, float] = {}
    print(f"{'turns':>5} {'G':>3} {'prompt':>6} {'ours, s':>8} {'tokens/s':>9}", *bench.others)
    for turns in options.turns:
        for size in options.group_sizes:
            for length in options.prompt_tokens:
                figures |= bench.cell(turns, size, length)
                if options.model:
                    figures |= bench.gaps(turns, size, length)
    for name in bench.others:
        ratios = [ratio for cell, ratio in figures.items() if cell.endswith(f"/vs_{name}")]
        figures[f"sampling_vs_{name}"] = median(ratios)
        print(f"median over cells: {median(ratios):.1f} times as fast as {name}")
    write_json(options.json, figures, where, vars(options))
    return 0


class Bench:
    """One model with three sampling methods, and the measurement of each method."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        if options.model:
            model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        else:
            small = options.shape == "tiny"
            model = tiny_model(tiny_tokenizer(), 0) if small else model_of(options.shape)
            model.config.max_position_embeddings = 40960
        self.trained = model.to(options.device).eval()
        precision = options.dtype or ("bf16" if options.device == "cuda" else "fp32")
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        # Messages end at their limit, because no token ends a message.
        self.sampler = RowSampler(self.trained, -1, 1.0, dtype)
        self.model = copy.deepcopy(self.trained).to(dtype)
        self.model.generation_config.eos_token_id = None
        self.batched = copy.deepcopy(self.model)
        self.others = ["generate"] + ["eager"] * bool(options.model)
        self.others += ["batching"] * (not options.without_batching)

    def cell(self, turns: int, size: int, length: int) -> dict[str, float]:
        """Measure a cell and print a line: our seconds, and the ratios of the other methods."""
        prompts, replies = self.texts(turns, size, length)
        # A run always knows the limit.
        turn = self.options.message_tokens + self.options.reply_tokens
        self.sampler.max_tokens = length + turns * turn
        plays: dict[str, Play] = {
            "ours": lambda: self.timed(self.ours, prompts, replies),
            "generate": lambda: self.timed(self.generate, prompts, replies, "sdpa"),
            "eager": lambda: self.timed(self.generate, prompts, replies, "eager"),
            "batching": lambda: self.timed(self.batching, prompts, replies),
        }
        names = ["ours", *self.others]
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for number in range(self.options.repeats + 1):  # The first repeat warms up.
            for name in names if number % 2 else names[::-1]:
                seconds[name].append(plays[name]())
        seconds = {name: found[1:] for name, found in seconds.items()}
        ratios = {
            name: median(b / a for a, b in zip(seconds["ours"], seconds[name], strict=True))
            for name in self.others
        }
        ours = median(seconds["ours"])
        rate = len(prompts) * turns * self.options.message_tokens / ours
        shown = "  ".join(f"{ratio:.1f} x" for ratio in ratios.values())
        print(f"{turns:5} {size:3} {length:6} {ours:8.3f} {rate:9.0f}  {shown}", flush=True)
        cell = f"turns-{turns}/G-{size}/prompt-{length}"
        found = {f"{cell}/vs_{name}": ratio for name, ratio in ratios.items()}
        return {f"{cell}/tokens_per_s": rate, **found}

    def texts(self, turns: int, size: int, length: int) -> tuple[list[list[int]], list[list[int]]]:
        """Return a prompt for each conversation, and a reply for each turn."""
        vocabulary = self.model.config.vocab_size
        generator = torch.Generator().manual_seed(turns * size * length)

        def some(count: int) -> list[int]:
            return torch.randint(vocabulary, (count,), generator=generator).tolist()

        prompts = [some(length) for _ in range(self.options.groups)]
        replies = [some(self.options.reply_tokens) for _ in range(turns)]
        return [prompt for prompt in prompts for _ in range(size)], replies

    def gaps(self, turns: int, size: int, length: int) -> dict[str, float]:
        """Return how far the sampled log-probabilities of a cell are from training's, in nats."""
        prompts, _ = self.texts(turns, size, length)
        episodes = self.sampler.open(prompts, range(len(prompts)))
        messages = self.sampler.sample(episodes, [self.options.message_tokens] * len(episodes))
        rows = []
        for prompt, episode, message in zip(prompts, episodes, messages, strict=True):
            self.sampler.close(episode)
            assert message is not None
            row = Trajectory(domain="", task_id="", prompt_ids=prompt)
            row.append(message.ids, message.logprobs)
            rows.append((row, 0.0, 0.0))
        module = TokenLogprobs(self.trained, 1.0).eval()
        device = self.options.device
        is_bf16 = weight_of_logits(self.model.get_output_embeddings()) is not None
        found = []
        with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=is_bf16):
            for batch in make_micro_batches(rows, 2048, 0):
                there = batch.to(torch.device(device))
                found.append((module(there)[0] - there.old_logprobs).abs())
        gap = torch.cat(found)
        print(
            f"gap to training: {float(gap.mean()):.2g} in the mean, {float(gap.max()):.2g} at most"
        )
        cell = f"turns-{turns}/G-{size}/prompt-{length}"
        return {f"{cell}/gap_mean": float(gap.mean()), f"{cell}/gap_max": float(gap.max())}

    def timed(self, play: Callable[..., None], *arguments: Any) -> float:
        clock = time.perf_counter if self.options.device == "cuda" else time.process_time
        ready(self.options.device)
        begun = clock()
        play(*arguments)
        ready(self.options.device)
        return clock() - begun

    def ours(self, prompts: list[list[int]], replies: list[list[int]]) -> None:
        self.sampler.load_weights(trained_weights(self.trained))  # clears cached prompts
        episodes = self.sampler.open(prompts, range(len(prompts)))
        room = [self.options.message_tokens] * len(episodes)
        for reply in replies:
            self.sampler.sample(episodes, room)
            for episode in episodes:
                self.sampler.extend(episode, reply)
        for episode in episodes:
            self.sampler.close(episode)

    def generate(self, prompts: list[list[int]], replies: list[list[int]], attention: str) -> None:
        self.model.set_attn_implementation(attention)
        held = torch.tensor(prompts, device=self.options.device)
        for reply in replies:
            said = self.model.generate(
                held,
                attention_mask=torch.ones_like(held),
                max_new_tokens=self.options.message_tokens,
                do_sample=True,
                top_k=0,
                top_p=1.0,
                temperature=1.0,
                pad_token_id=0,
            )
            more = torch.tensor(reply, device=said.device).expand(len(said), -1)
            held = torch.cat([said, more], 1)

    def batching(self, prompts: list[list[int]], replies: list[list[int]]) -> None:
        how = GenerationConfig(
            max_new_tokens=self.options.message_tokens,
            do_sample=True,
            top_k=0,
            top_p=1.0,
            eos_token_id=-1,
            pad_token_id=0,
        )
        # One manager serves all cells, so its pages must hold the largest cell.
        options, cuda = self.options, self.options.device == "cuda"
        turn = options.message_tokens + options.reply_tokens
        longest = max(options.prompt_tokens) + max(options.turns) * turn
        pages = options.groups * max(options.group_sizes) * (longest // 256 + 2)
        config = ContinuousBatchingConfig(
            num_blocks=None if cuda else pages, max_batch_tokens=None if cuda else 2048
        )
        held = prompts
        for reply in replies:
            found = self.batched.generate_batch(
                held, how, config, persistent_manager=True, warmup=False
            )
            said = [
                found[name].generated_tokens
                for name in sorted(found, key=lambda name: int(name.rpartition("_")[2]))
            ]
            lengths = [len(ids) for ids in said]
            assert lengths == [options.message_tokens] * len(held), "continuous batching gave up"
            held = [[*ids, *new, *reply] for ids, new in zip(held, said, strict=True)]


if __name__ == "__main__":
    sys.exit(main())
