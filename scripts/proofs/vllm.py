"""Check the sampler `vllm` on vLLM itself, in the environment that setup_vllm.sh makes.

    python scripts/proofs/vllm.py [--model FOLDER]

- syncs: models in the shapes of Llama, Qwen3 and Gemma 3, tied and untied, whole and with LoRA.
  After each of `--syncs` updates, large and small, vLLM's log-probabilities of what it samples are
  those of the trainer. The distance from the trainer, relative to the update's own change, must
  be at most 1 % with LoRA. Then each kind of weight is left out in turn, adapters are scaled twice,
  and one projection is missing: the probe must find each.
- fewer: with top_k, top_p and other temperatures, vLLM's log-probabilities are of all tokens, as
  the trainer's are.
- cache: conversations of two messages in an engine whose cache has room for few, which makes
  vLLM preempt some, have the tokens that they have with room for all and alone.
- ranks: 30 steps over three stages on 1 rank, on 2 ranks, and on 2 ranks of which one is killed and
  the run resumed. Rewards and sampled tokens must be equal.
- speed: tokens per CPU second of 64 conversations of 64 tokens, in turns with the own sampler, and
  what the processor's matrix products alone would allow (with `--model`).

The exit code is 1 if a bound is broken.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch

sys.path.pop(0)  # else `import vllm` finds this file
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeline.common.errors import RunError
from pipeline.config.settings import ModelSettings, RolloutSettings
from pipeline.models import lora
from pipeline.models.chat.template import Chat
from pipeline.models.sampling_copy import trained_weights
from pipeline.models.tiny import tiny_tokenizer
from pipeline.rollout.samplers.own import RowSampler
from pipeline.rollout.samplers.vllm import VLLMSampler
from pipeline.training.learner import WeightProbe
from pipeline.training.token_logprobs import TokenLogprobs
from scripts.bench.common import finish_run, machine, parser_of, start_run, write_json

GAP = 1e-4  # nats
LORA_SHARE = 0.01  # largest distance from the trainer, relative to the change by the adapters
SPEED = 1.6  # least ratio to the own sampler
RUN = [
    *("--tasks-per-step", "6", "--num-generations", "4", "--max-steps", "30"),
    *("--tasks-per-domain", "120", "--eval-tasks-per-domain", "8", "--eval-trials", "1"),
    *("--validation-steps", "0", "--warm-start-steps", "0", "--save-steps", "5"),
    *("--report-to", "none", "--sampler", "vllm", "--vllm-memory", "0.2", "--deterministic"),
]


class Alone:
    """What the probe needs of an Accelerator."""

    device = torch.device("cpu")

    def autocast(self) -> Any:
        return torch.autocast("cpu", enabled=False)


def main(argv: Sequence[str]) -> int:
    parser = parser_of(__doc__)
    parts = [*PARTS]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--syncs", type=int, default=30)
    parser.add_argument("--model", type=Path, help="a real model, for the speed")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    wrong: list[str] = []
    for part in options.parts:
        for name, value, fine in PARTS[part](options):
            print(f"{'' if fine else 'WRONG: '}{name}: {value:.4g}", flush=True)
            figures[name] = value
            wrong += [] if fine else [name]
    print("  ".join(f"{name} {value}" for name, value in machine().items()))
    print(f"{len(figures) - len(wrong)} of {len(figures)} hold")
    write_json(options.json, figures, machine(), vars(options))
    return int(bool(wrong))


# The transfer of weights


def shapes(vocab_size: int) -> dict[str, Any]:
    """Configurations of small models by the name of their architecture."""
    import transformers

    size = {"vocab_size": vocab_size, "hidden_size": 128, "intermediate_size": 256}
    size |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    size |= {"head_dim": 32, "max_position_embeddings": 1024}
    return {
        "Llama": transformers.LlamaConfig(**size),
        "Qwen3": transformers.Qwen3Config(**size),
        "Gemma 3": transformers.Gemma3TextConfig(**size, sliding_window=256),
    }


def syncs(options: argparse.Namespace) -> Iterator[tuple[str, float, bool]]:
    from transformers import AutoModelForCausalLM

    chat = Chat(tiny_tokenizer())
    for name, config in shapes(len(chat.tokenizer)).items():
        for tied in (True, False):
            for use_peft in (False, True):
                config.tie_word_embeddings = tied
                torch.manual_seed(0)
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
                if use_peft:
                    model = lora.attach(model, ModelSettings(lora_r=8), "base", 0)
                case = f"{name}, {'tied' if tied else 'untied'}{', LoRA' if use_peft else ''}"
                yield from synced(case, model, chat, options.syncs)


def synced(case: str, model: Any, chat: Chat, count: int) -> Iterator[tuple[str, float, bool]]:
    sampler = engine(model, chat)
    probe = WeightProbe(chat, torch.float32)
    module = TokenLogprobs(model, 1.0)
    largest = 0.0
    lost = 0.0
    for number in range(count):
        before = {name: tensor.clone() for name, tensor in trained_weights(model)}
        move(model, number, (0.05, 1e-3)[number % 2])
        sampler.load_weights(trained_weights(model))
        probe.check(sampler, module, Alone(), f"sync {number}")
        ids, found = said(sampler, number)
        trained = logprobs(model, ids)
        with_weights(model, before)
        change = trained - logprobs(model, ids)
        with_weights(model, before)  # back: the two have changed places
        largest = max(largest, float((found - trained).abs().max()))
        lost = max(lost, float((found - trained).norm() / change.norm()))
    yield f"{case}: largest difference after {count} syncs, nats", largest, largest <= GAP
    if hasattr(model, "peft_config"):
        yield f"{case}: difference / change by an update", lost, lost <= LORA_SHARE
    sampler.end()
    missed = [what for what, is_found in faults(model, chat, probe, module) if not is_found]
    yield f"{case}: faults that the probe misses {missed or ''}", len(missed), not missed


def engine(model: Any, chat: Chat, **sampling: Any) -> VLLMSampler:
    limits = RolloutSettings(sampler="vllm", max_tokens=128, vllm_memory=0.1, **sampling)
    return VLLMSampler(model, limits, torch.float32, [chat.end_of_turn_id])


def faults(
    model: Any, chat: Chat, probe: WeightProbe, module: TokenLogprobs
) -> Iterator[tuple[str, bool]]:
    """Give the sampler wrong weights after an update, and yield whether the probe finds it."""
    sampler = engine(model, chat)
    names = [name for name, _ in trained_weights(model)]
    if hasattr(model, "peft_config"):
        for what, factor in (("scaled twice", 2.0), ("missing", 0.0)):
            kinds = [""] if factor else sorted({name.split(".")[-3] for name in names})
            for kind in kinds:
                move(model, len(what), 0.05)
                given = {
                    name: tensor * (factor if "lora_B" in name and kind in name else 1)
                    for name, tensor in trained_weights(model)
                }
                sampler.load_weights(iter(given.items()))
                yield f"{kind} {what}", is_found(sampler, probe, module)
                sampler.load_weights(trained_weights(model))
                probe.check(sampler, module, Alone(), "again")
        sampler.end()
        return
    middle = {name.rpartition("layers.1.")[2]: name for name in names}
    last = [] if "lm_head.weight" in names else ["lm_head.weight"]
    for seed, left_out in enumerate([*middle.values(), *last]):
        move(model, seed, 0.05)
        real = sampler._engine.collective_rpc

        def partly(name: str, kwargs: Any, out: str = left_out, send: Any = real) -> None:
            weights = (pair for pair in kwargs["weights_iterator"] if pair[0] != out)
            send(name, kwargs={"weights_iterator": weights})

        sampler._engine.collective_rpc = partly
        sampler.load_weights(trained_weights(model))
        ids, found = said(sampler, seed)
        # The table of a tied model comes with the output layer, too.
        is_harmless = float((found - logprobs(model, ids)).abs().max()) <= GAP
        yield f"without {left_out}", is_harmless or is_found(sampler, probe, module)
        sampler._engine.collective_rpc = real
        if found.isnan().any():  # NaN stays in the cache, as a run that has ended does not
            sampler.end()
            sampler = engine(model, chat)
        sampler.load_weights(trained_weights(model))
        probe.check(sampler, module, Alone(), "again")
    sampler.end()


def is_found(sampler: VLLMSampler, probe: WeightProbe, module: TokenLogprobs) -> bool:
    try:
        probe.check(sampler, module, Alone(), "fault")
    except RunError:
        return True
    return False


PROMPT = [5, 9, 2, 40, 7, 11, 3]


def said(sampler: VLLMSampler, key: int) -> tuple[list[int], torch.Tensor]:
    conversations = sampler.open([PROMPT] * 4, [4 * key + n for n in range(4)])
    messages = sampler.sample(conversations, [24] * 4)
    for conversation in conversations:
        sampler.close(conversation)
    longest = max((m for m in messages if m is not None), key=lambda m: len(m.ids))
    return longest.ids, torch.tensor(longest.logprobs)


@torch.no_grad()
def logprobs(model: Any, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    logits = model(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]


@torch.no_grad()
def move(model: Any, seed: int, by: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _, tensor in trained_weights(model):
        tensor += by * torch.randn(tensor.shape, generator=generator)


@torch.no_grad()
def with_weights(model: Any, other: dict[str, torch.Tensor]) -> None:
    """Exchange the trained weights of the model for others, which get the model's."""
    for name, tensor in trained_weights(model):
        mine = tensor.clone()
        tensor.copy_(other[name])
        other[name] = mine


# Fewer tokens


FEWER: list[dict[str, Any]] = [
    *({"top_p": 0.9}, {"top_k": 5}, {"temperature": 1.5}),
    {"top_p": 0.7, "top_k": 50, "temperature": 0.6},
]


def fewer(options: argparse.Namespace) -> Iterator[tuple[str, float, bool]]:
    from transformers import AutoModelForCausalLM

    chat = Chat(tiny_tokenizer())
    config = shapes(len(chat.tokenizer))["Qwen3"]
    for sampling in FEWER:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        sampler = engine(model, chat, **sampling)
        largest = 0.0
        for number in range(3):
            move(model, number, 0.05)
            sampler.load_weights(trained_weights(model))
            sampler.logprobs(PROMPT)
            ids, found = said(sampler, number)
            expected = logprobs(model, ids, sampling.get("temperature", 1.0))
            largest = max(largest, float((found - expected).abs().max()))
        yield f"{sampling}: largest difference, nats", largest, largest <= GAP
        sampler.end()


# A cache that is too small


def cache(options: argparse.Namespace) -> Iterator[tuple[str, float, bool]]:
    """Play the same conversations of two messages with room for all, for few, and alone."""
    from transformers import AutoModelForCausalLM

    chat = Chat(tiny_tokenizer())
    torch.manual_seed(0)
    config = shapes(len(chat.tokenizer))["Qwen3"]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    found = {}
    for name, share, at_once in (("large", 0.1, 24), ("small", 0.0012, 24), ("alone", 0.1, 1)):
        limits = RolloutSettings(sampler="vllm", max_tokens=512, vllm_memory=share)
        sampler = VLLMSampler(model, limits, torch.float32, [chat.end_of_turn_id])
        found[name] = [
            ids
            for first in range(0, 24, at_once)
            for ids in conversed(sampler, range(first, first + at_once))
        ]
        blocks = sampler._engine.vllm_config.cache_config.num_gpu_blocks
        yield f"blocks of the {name} cache", float(blocks), True
        sampler.end()
    for name in ("small", "alone"):
        differ = sum(a != b for a, b in zip(found["large"], found[name], strict=True))
        yield f"conversations of 24 that differ with the cache {name}", differ, differ == 0


def conversed(sampler: VLLMSampler, keys: range) -> list[list[int]]:
    """What is said in two long messages of each conversation."""
    conversations = sampler.open([PROMPT] * len(keys), keys)
    first = sampler.sample(conversations, [200] * len(keys), until=len(keys) // 2 or None)
    left = [c for c, message in zip(conversations, first, strict=True) if message is None]
    rest = iter(sampler.sample(left, [200] * len(left)) if left else [])
    whole = [message or next(rest) for message in first]
    for conversation in conversations:
        sampler.extend(conversation, PROMPT)
    second = sampler.sample(conversations, [200] * len(keys))
    for conversation in conversations:
        sampler.close(conversation)
    pairs = zip(whole, second, strict=True)
    return [[*a.ids, *b.ids] for a, b in pairs if a is not None and b is not None]


# Whole runs


def ranks(options: argparse.Namespace) -> Iterator[tuple[str, float, bool]]:
    with TemporaryDirectory(prefix="vllm-proof-") as temporary:
        start = Path(temporary) / "start"
        finish_run(["--max-steps", "0", "--output-dir", str(start)], start.with_suffix(".log"))
        model = str(start / "checkpoints" / "warm-start")
        folders = {name: Path(temporary) / name for name in ("1", "2", "killed")}
        for name, folder in folders.items():
            flags = [*RUN, "--model", model, "--output-dir", str(folder)]
            flags += ["--num-gpus", "1" if name == "1" else "2"]
            log = folder.with_suffix(".log")
            if name == "killed":
                kill_a_rank(flags, folder, log)
                flags += ["--resume-from-checkpoint", "latest"]
            finish_run(flags, log, ACCELERATE_USE_CPU="true")
        found = {name: episodes(folder) for name, folder in folders.items()}
    alone = found["1"]
    for name in ("2", "killed"):
        differ = sum(said != found[name].get(place) for place, said in alone.items())
        yield f"episodes of {name} ranks that differ, of {len(alone)}", differ, differ == 0
    rewards = [reward for _, reward in alone.values()]
    yield "mean reward of training episodes", sum(rewards) / len(rewards), max(rewards) > 0


def kill_a_rank(flags: Sequence[str], folder: Path, log: Path) -> None:
    process = start_run(flags, log, ACCELERATE_USE_CPU="true")
    metrics = folder / "metrics.jsonl"
    while not (metrics.is_file() and '"step": 12' in metrics.read_text()):
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)
    own = [p for p in psutil.Process(process.pid).children() if "RANK" in p.environ()]
    own[-1].kill()
    process.wait()


def episodes(folder: Path) -> dict[tuple[Any, ...], tuple[list[str], float]]:
    """What the model said in each training episode of a run, and its reward."""
    found = {}
    for path in sorted(folder.glob("trajectories/*/step-*")):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for row in map(json.loads, file):
                place = (path.parent.name, path.name[:11], row["task_id"], row["trial"])
                texts = [m["content"] or str(m.get("tool_calls")) for m in row["messages"]]
                found[place] = texts, row["reward"]
    return found


# Speed


def speed(options: argparse.Namespace) -> Iterator[tuple[str, float, bool]]:
    from transformers import AutoModelForCausalLM

    if options.model is None:
        return
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    limits = RolloutSettings(sampler="vllm", max_tokens=128, vllm_memory=0.5)
    samplers = {
        "own": RowSampler(model, -1, 1.0, torch.float32, max_tokens=128),
        "vllm": VLLMSampler(model, limits, torch.float32, []),
    }
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(10, 1000, (8, 32), generator=generator).tolist() * 8
    rates: dict[str, list[float]] = {name: [] for name in samplers}
    for number in range(4):  # the first warms up
        for name, sampler in samplers.items():
            sampler.load_weights(trained_weights(model))
            begun = time.process_time()
            conversations = sampler.open(prompts, range(64 * number, 64 * number + 64))
            messages = sampler.sample(conversations, [64] * 64)
            count = sum(len(m.ids) for m in messages if m is not None)
            rates[name].append(count / (time.process_time() - begun))
            for conversation in conversations:
                sampler.close(conversation)
    for name, found in rates.items():
        yield f"{name}, tokens per CPU second", median(found[1:]), True
    yield "torch's matrix products alone, tokens per CPU second", products(model, 64), True
    ratio = median(b / a for a, b in zip(rates["own"][1:], rates["vllm"][1:], strict=True))
    yield "vllm / own", ratio, ratio >= SPEED
    samplers["vllm"].end()


@torch.no_grad()
def products(model: Any, num_rows: int) -> float:
    """Tokens per CPU second of all linear layers of one pass over so many rows."""
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    rows = {layer.in_features: torch.randn(num_rows, layer.in_features) for layer in layers}
    times = []
    for _ in range(8):
        begun = time.process_time()
        for layer in layers:
            layer(rows[layer.in_features])
        times.append(time.process_time() - begun)
    return num_rows / median(times[1:])


PARTS = {"syncs": syncs, "fewer": fewer, "cache": cache, "ranks": ranks, "speed": speed}

if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # libraries of vLLM complain of themselves at an ordinary end
