"""Check and measure one GPU, in at most eight minutes.

    python scripts/bench/gpu.py --device cuda --json gpu.json
    python scripts/bench/gpu.py --device cuda --parts domains --model FOLDER --json step.json

Checks: log-probabilities of sampler and training on the same tokens; loss and gradient of the GPU
against the CPU's; the embedded recipe learns; a killed run resumes; a group of one rank exchanges
over NCCL; a sharded model of one rank has the gradient of a whole one. Measures, with random
weights in the shape `--shape`: tokens per second of the update and the share of the card's peak
FLOPs (MFU); the time of a sharded update against a whole one; tokens per second of sampling against
the bound of the measured memory bandwidth; a step of decoding with and without CUDA graphs, and
the time to capture them; a GRPO step on three domains (of the model `--model`), split into its
parts, and how long the card was busy in it; our sampler against `generate` and continuous batching;
a whole step against TRL; the peak memory of rollout and update against `--check`'s estimate.

A part that fails, or takes longer than its seconds, is one row that says so; the others go on, and
the exit code is 1. The figures are written after each part. A part that hangs inside a library ends
only with the process, so give the command a `timeout`. On a CPU (`--device cpu`, the default) all
parts run with the tiny model: a test of this script. The part `graph` then decodes through a
stand-in for CUDA graphs, and counts the operations of SmolLM2's shape on a GPU without hardware.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
from common import (
    finish_run,
    machine,
    model_of,
    parser_with_device,
    results_of,
    seconds_of,
    start_run,
    write_json,
)
from torch import distributed
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.common.errors import UserError
from pipeline.config.settings import Config, GRPOSettings
from pipeline.distributed.sharding import Sharded, shard_model, whole
from pipeline.models.layers import outer_layers, recompute_layers
from pipeline.models.memory import Memory
from pipeline.models.rank_memory import give_memory_back
from pipeline.models.tiny import tiny_model, tiny_tokenizer
from pipeline.rollout.rollout import TURN_SHARE_GPU
from pipeline.rollout.samplers.own import RowSampler
from pipeline.rollout.trajectory import Trajectory
from pipeline.training.grpo import grpo_loss
from pipeline.training.micro_batches import micro_batch
from pipeline.training.token_logprobs import TokenLogprobs
from scripts.proofs.ranks import play_ranks
from tests.support.fake_gpu import build_guard, operations_of
from tests.support.recorded_graphs import RecordedGraphs

HERE = Path(__file__).resolve().parent
PEAK_TFLOPS = {"H100": 989, "H200": 989, "A100": 312, "L40S": 362, "4090": 165}  # dense bf16
GIB = 1 << 30
CLOSE = {"cpu": 1e-5, "cuda": 0.05}  # mean difference of log-probabilities, in nats
# The parts, and after how many seconds each is given up: 8 minutes for all that run by default.
SECONDS = {
    **{"exchange": 20, "logprobs": 20, "loss": 20, "graph": 60, "sampling": 30, "update": 30},
    **{"memory": 20, "domains": 180, "resume": 50, "methods": 50},
    **{"trl": 90, "sharded": 60, "learning": 240},
}
DEFAULT = tuple(SECONDS)[:-3]
SMOLLM2 = {  # the shape of SmolLM2-135M
    **{"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "head_dim": 64},
    **{"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3},
}
KINDS = {  # groups of kernels, by parts of their names; the first that fits counts
    "attention": ("flash", "fmha", "attention"),
    "softmax": ("softmax",),
    "products": ("gemm", "gemv", "cublas", "cutlass", "xmma", "nvjet"),
    "copies": ("memcpy", "memset", "copy", "cat", "index", "gather", "scatter"),
    "optimizer": ("adam", "multi_tensor"),
    "sums and others": ("",),
}
Row = tuple[str, str, bool | None]  # what, the finding, whether it is right; None: not done


@dataclass
class Bench:
    """The parts; each yields its rows, and keeps its figures."""

    options: argparse.Namespace
    folder: Path
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def device(self) -> str:
        return str(self.options.device)

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables of a run on the device."""
        return {} if self.device == "cuda" else {"ACCELERATE_USE_CPU": "true"}

    def model(self) -> Any:
        if self.options.shape == "tiny":
            return tiny_model(tiny_tokenizer(), 0)
        return model_of(self.options.shape, device=self.device)

    def sampler(self, model: Any, max_tokens: int = 0) -> Any:
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        return RowSampler(model, -1, 1.0, dtype, max_tokens=max_tokens)  # no token ends a message

    def conversations(self, sampler: Any, count: int, prompt: int, length: int) -> list[Any]:
        """Return trajectories of one sampled message of `length` tokens each."""
        draw = torch.Generator().manual_seed(0)
        vocabulary = sampler.model.config.vocab_size
        ids = torch.randint(vocabulary, (prompt,), generator=draw).tolist()
        episodes = sampler.open([ids] * count, range(count))
        made = []
        for message in sampler.sample(episodes, [length] * count):
            made.append(Trajectory(domain="", task_id="", prompt_ids=ids))
            made[-1].append(message.ids, message.logprobs)
        for episode in episodes:
            sampler.close(episode)
        return made

    @contextmanager
    def group(self) -> Iterator[str]:
        """A process group of one rank over NCCL (gloo on a CPU)."""
        backend = "nccl" if self.device == "cuda" else "gloo"
        store = distributed.HashStore()
        distributed.init_process_group(backend, store=store, rank=0, world_size=1)
        try:
            yield backend
        finally:
            distributed.destroy_process_group()

    def keep_files(self) -> None:
        """Copy logs and timings of runs beside the figures."""
        if self.options.json is not None:
            for path in (*self.folder.glob("*.log"), *self.folder.glob("*/timings.jsonl")):
                name = "-".join(path.relative_to(self.folder).parts)
                shutil.copy(path, self.options.json.parent / name)

    def exchange(self) -> Iterator[Row]:
        """A process group of one rank sums."""
        with self.group() as backend:
            tensor = torch.ones(1 << 20, device=self.device)
            distributed.all_reduce(tensor)
            is_right = bool((tensor == 1).all())
        yield f"one rank over {backend}", "all-reduce returns", is_right

    def logprobs(self) -> Iterator[Row]:
        """Sampler and training give the same log-probabilities to sampled tokens."""
        model = self.model().to(self.device)
        played = self.conversations(self.sampler(model), 8, 64, 32)
        batch = micro_batch([(t, 0.0, 1.0) for t in played], 0).to(self.device)
        with torch.no_grad(), torch.autocast(self.device, torch.bfloat16, self.device == "cuda"):
            trained = TokenLogprobs(model, 1.0).eval()(batch)[0]
        gap = (trained - batch.old_logprobs).abs()
        self.figures["logprobs_mean"] = mean = float(gap.mean())
        shown = f"mean {mean:.2g}, max {float(gap.max()):.2g} nats, at most {CLOSE[self.device]}"
        yield "log-probabilities, sampler and training", shown, mean <= CLOSE[self.device]

    def loss(self) -> Iterator[Row]:
        """Loss and norm of the gradient are the CPU's, in fp32."""
        played = self.conversations(self.sampler(tiny_model(tiny_tokenizer(), 0)), 8, 64, 32)
        items = [(t, 1.0 - index % 2 * 2.0, 1 / 256) for index, t in enumerate(played)]
        items.sort(key=lambda item: item[0].ids)
        found = []
        for device in ("cpu", self.device):
            module = TokenLogprobs(tiny_model(tiny_tokenizer(), 1).to(device), 1.0).eval()
            batch = micro_batch(items, 0, share_prefixes=True).to(device)
            loss, _ = grpo_loss(*module(batch), batch, GRPOSettings(), 256.0)
            loss.backward()
            gradients = [p.grad.float().norm() for p in module.parameters() if p.grad is not None]
            found.append((float(loss.detach()), float(torch.stack(gradients).norm())))
        (loss_cpu, norm_cpu), (loss_here, norm_here) = found
        gap = max(abs(loss_here / loss_cpu - 1), abs(norm_here / norm_cpu - 1))
        self.figures["loss_gap"] = gap
        yield "loss and gradient against the CPU's", f"{gap:.1e} apart, at most 1e-3", gap <= 1e-3

    def batch(self, model: Any) -> Any:
        """Return a micro-batch of episodes with a common prompt."""
        count, prompt, length = (8, 1024, 1024) if self.device == "cuda" else (2, 32, 16)
        played = self.conversations(self.sampler(model), count, prompt, length)
        items = sorted(((t, 0.0, 1.0) for t in played), key=lambda item: item[0].ids)
        return micro_batch(items, 0, share_prefixes=True).to(self.device)

    def seconds_of_pass(self, model: Any, batch: Any, sharded: Sharded | None = None) -> float:
        """Return the seconds of a forward and backward pass that recomputes its layers."""
        recompute_layers(model)
        module = TokenLogprobs(model, 1.0, sharded=sharded).eval()

        def work() -> None:
            with torch.autocast(self.device, torch.bfloat16, self.device == "cuda"):
                module(batch)[0].sum().backward()
            model.zero_grad(set_to_none=False)

        work()
        return median(seconds_of(work, self.device) for _ in range(3))

    def gradient(self, model: Any, batch: Any, sharded: Sharded | None = None) -> torch.Tensor:
        TokenLogprobs(model, 1.0, sharded=sharded).eval()(batch)[0].sum().backward()
        found = [whole(p.grad).flatten() for p in model.parameters()]
        return torch.cat(found)

    def sharded(self) -> Iterator[Row]:
        """A model that is sharded over one rank has the gradient of a whole one, in fp32."""
        with self.group():
            alone, spread = (tiny_model(tiny_tokenizer(), 0).to(self.device) for _ in range(2))
            batch = self.batch(alone)
            try:
                sharded = shard_model(spread, outer_layers(spread), None, reshards=True)
            except UserError:  # of an older torch
                yield "sharded, one rank", f"needs torch 2.13, here is {torch.__version__}", None
                return
            expected = self.gradient(alone, batch)
            gap = float((self.gradient(spread, batch, sharded) - expected).norm() / expected.norm())

            model = self.model().to(self.device)
            batch = self.batch(model)
            seconds = self.seconds_of_pass(model, batch)
            compute = torch.bfloat16 if self.device == "cuda" else None
            sharded = shard_model(model, outer_layers(model), compute, reshards=True)
            ratio = self.seconds_of_pass(model, batch, sharded) / seconds
        self.figures |= {"sharded_gap": gap, "sharded_time": ratio}
        shown = f"gradient {gap:.1e} apart, at most 1e-5; {ratio:.2f} times a whole update"
        yield "sharded, one rank", shown, gap <= 1e-5

    def update(self) -> Iterator[Row]:
        """Forward and backward pass of one micro-batch with a shared prompt."""
        model = self.model().to(self.device)
        batch = self.batch(model)
        seconds = self.seconds_of_pass(model, batch)
        tokens = batch.input_ids.numel()
        # Forward, the recomputed forward, and two products in the backward pass: 8 FLOPs a weight.
        flops = 8 * model.num_parameters() * tokens / seconds
        self.figures |= {"update_tokens_per_s": tokens / seconds, "update_tflops": flops / 1e12}
        shown = f"{tokens / seconds:,.0f} tokens/s, {flops / 1e12:.3g} TFLOPs"
        if peak := self.peak():
            self.figures["mfu"] = 0.75 * flops / peak  # the recomputed forward does not count
            shown += f", MFU {0.75 * flops / peak:.0%}"
        yield "update, 8 episodes with a common prompt", shown, True

    def peak(self) -> float:
        """The card's dense bf16 FLOPs per second, or 0 if it is not known."""
        name = str(machine(self.device).get("gpu", ""))
        return next((1e12 * tflops for part, tflops in PEAK_TFLOPS.items() if part in name), 0.0)

    def bandwidth(self) -> float:
        """Bytes per second that the device reads, measured with a sum over a large tensor."""
        size = 4 * GIB if self.device == "cuda" else GIB // 16
        large = torch.ones(size // 4, device=self.device)
        large.sum()
        return size / median(seconds_of(large.sum, self.device) for _ in range(5))

    def sampling(self) -> Iterator[Row]:
        """Decoding against the time to read weights and keys once for each token."""
        model = self.model().to(self.device)
        sampler = self.sampler(model)
        count = 64 if self.device == "cuda" else 4
        prompt, length = (512, 128) if self.device == "cuda" else (16, 8)
        self.conversations(sampler, count, prompt, length)
        whole = seconds_of(lambda: self.conversations(sampler, count, prompt, length), self.device)
        first = seconds_of(lambda: self.conversations(sampler, count, prompt, 1), self.device)
        seconds = (whole - first) / (length - 1)  # of one token of each row
        shape = model.config
        size = 2 if self.device == "cuda" else 4
        keys = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim
        read = size * (model.num_parameters() + keys * count * (prompt + length / 2))
        least = read / self.bandwidth()
        rate = count / seconds
        self.figures |= {"sampling_tokens_per_s": rate, "sampling_of_bound": least / seconds}
        shown = f"{rate:,.0f} tokens/s, {least / seconds:.0%} of the bandwidth's bound"
        yield f"sampling, {count} rows", shown, True

    def graph(self) -> Iterator[Row]:
        """Decoding with CUDA graphs against steps that Python starts; the time to capture."""
        if self.device == "cpu":
            yield from self.graph_on_cpu()
            return
        with torch.device("cuda"):
            config = LlamaConfig(**SMOLLM2, tie_word_embeddings=True)
            models = {"SmolLM2": LlamaForCausalLM(config), self.options.shape: self.model()}
        for name, model in models.items():
            found = {}
            graphs = 0
            for kind in ("graphs", "Python"):
                sampler = self.sampler(model, max_tokens=512)
                if kind == "Python":
                    sampler._blocks._graphs = None
                found[kind] = self.step_of(sampler, 96)
                graphs = graphs or sampler._blocks.num_graphs
                sampler.end()
            (ms, ids), (ms_python, ids_python) = found.values()
            key = name.lower()
            self.figures |= {f"{key}_step_ms": ms, f"{key}_step_ms_python": ms_python}
            same = sum(a == b for a, b in zip(ids, ids_python, strict=True))
            shown = (
                f"{ms:.2f} ms, from Python {ms_python:.2f}; {same} of {len(ids)} messages equal; "
            )
            shown += f"{graphs} graphs"
            yield f"a step of decoding, 96 rows, {name}", shown, same == len(ids) and graphs > 0
            yield from self.capture_of(name, model)

    def step_of(self, sampler: Any, count: int) -> tuple[float, list[list[int]]]:
        """Return milliseconds of a token of all rows, and the messages."""
        seconds = []
        for length in (201, 9, 201):  # the first captures
            episodes = sampler.open([[5] * 256] * count, range(count))
            messages = list[Any]()
            work = partial(sampler.sample, episodes, [length] * count)
            seconds.append(seconds_of(lambda: messages.extend(work()), self.device))  # noqa: B023
            for episode in episodes:
                sampler.close(episode)
        return 1e3 * (seconds[2] - seconds[1]) / 192, [message.ids for message in messages]

    def capture_of(self, name: str, model: Any) -> Iterator[Row]:
        """The time of captures, and of a pass over several tokens."""
        sampler = self.sampler(model, max_tokens=512)
        spent = list[float]()
        held = 0.0
        capture = sampler._blocks._captured

        def timed(*arguments: Any) -> Any:
            nonlocal held
            made = list[Any]()
            before = torch.cuda.memory_reserved()
            spent.append(seconds_of(lambda: made.append(capture(*arguments)), self.device))
            held += (torch.cuda.memory_reserved() - before) / GIB
            return made[0]

        sampler._blocks._captured = timed
        self.step_of(sampler, 96)
        episodes = sampler.open([[5] * 64] * 96, range(96))
        sampler.sample(episodes, [1] * 96)
        for episode in episodes:
            sampler.extend(episode, [7] * 16)
        one = seconds_of(lambda: sampler.sample(episodes, [1] * 96), self.device)
        sampler.end()
        self.figures |= {
            f"{name.lower()}_capture_s": max(spent),
            f"{name.lower()}_pass_ms": 1e3 * one,
        }
        shown = f"{len(spent)} graphs of {max(spent):.2f} s at most, {held:.2f} GiB; "
        shown += f"a pass {1e3 * one:.1f} ms"
        yield f"captures, {name}", shown, True

    def graph_on_cpu(self) -> Iterator[Row]:
        """Equal tokens through a stand-in; operations of a token on a GPU without hardware."""
        model = self.model()
        recorded = RecordedGraphs()
        ways = {"CPU": self.sampler(model, 256)}
        for name, graphs in (("Python", None), ("replayed", recorded)):
            ways[name] = self.sampler(model, 256)
            ways[name].decode_with(graphs)
        played = {name: self.conversations(way, 12, 40, 60) for name, way in ways.items()}
        replayed = played.pop("replayed")
        gaps = {}
        for name, others in played.items():
            pairs = list(zip(replayed, others, strict=True))
            same = sum(a.completion_ids == b.completion_ids for a, b in pairs)
            both = (zip(a.logprobs, b.logprobs, strict=True) for a, b in pairs)
            gaps[name] = max(abs(x - y) for pair in both for x, y in pair)
            self.figures |= {f"equal_{name}": same / len(pairs), f"gap_{name}": gaps[name]}
            shown = f"{same} of {len(pairs)} messages equal, {gaps[name]:.1e} nats apart"
            is_right = same == len(pairs) and gaps[name] <= CLOSE["cpu"]
            yield f"replayed on a stand-in, against {name}'s", shown, is_right
        passes, ticks = self.passes()
        self.figures["passes"] = passes
        shown = f"{passes} over several tokens in {ticks} ticks of 96 episodes, at most 10"
        yield "passes", shown, passes <= 10
        if shutil.which("g++") is None:
            yield "operations of a token", "needs g++", None
            return
        guard = str(build_guard(self.folder))
        (found,) = play_ranks(operations_of, 1, guard, "SmolLM2-135M", timeout_s=200)
        if isinstance(found, str):
            raise RuntimeError(found)
        self.figures |= {f"operations_{at}": found[at] for at in ("inside", "outside")}
        shown = f"{found['inside']} in a step, {found['outside']:.2f} outside, "
        shown += f"{found['waits']} waits of the host"
        is_right = found["inside"] <= 1460 and found["outside"] <= 4 and not found["waits"]
        yield "operations of a token, SmolLM2", shown, is_right

    def passes(self) -> tuple[int, int]:
        """Count passes over several tokens in a rollout of 12 tasks, 8 times each, as on a GPU."""
        sampler = self.sampler(self.model(), 1024)
        sampler.decode_with(None)
        count = 0
        forward = sampler._forward

        def counted(rows: Any, tokens: Any, *others: Any) -> Any:
            nonlocal count
            count += tokens.shape[1] > 1
            return forward(rows, tokens, *others)

        sampler._forward = counted
        draw = Random(0)
        prompts = [[7] * 80 + [8 + task] * draw.randint(40, 200) for task in range(12)]
        episodes = sampler.open([prompt for prompt in prompts for _ in range(8)], range(96))
        left = {episode: draw.randint(3, 4) for episode in episodes}  # turns
        room = {episode: draw.randint(3, 30) for episode in episodes}
        ticks = 0
        while left:
            ticks += 1
            until = ceil(len(left) * TURN_SHARE_GPU)
            asked = [*left]
            messages = sampler.sample(asked, [room[e] for e in asked], until=until)
            for episode, message in zip(asked, messages, strict=True):
                if message is None:
                    continue
                left[episode] -= 1
                room[episode] = draw.randint(3, 30)
                sampler.extend(episode, [9] * draw.randint(15, 60))
                if not left[episode]:
                    del left[episode]
                    sampler.close(episode)
        return count, ticks

    def memory(self) -> Iterator[Row]:
        """Peak bytes of a rollout's cache and of the update, against `--check`'s terms."""
        if self.device != "cuda":
            yield "memory against --check", "needs a GPU", None
            return

        rollout = {"max_tokens": 2048, "max_concurrent_episodes": 32, "tasks_per_step": 4}
        sections: Any = {"rollout": rollout, "warm_start": {"steps": 0}}
        sections["model"] = {"mixed_precision": "bf16"}
        told = Memory(Config.model_validate(sections)).terms()

        model = tiny_model(tiny_tokenizer(), 0).to("cuda")
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.conversations(self.sampler(model, max_tokens=2048), 32, 1900, 100)
        used = torch.cuda.max_memory_allocated() - before
        cache = told["key-value cache"]
        most = sum(size for name, size in told.items() if "weights (" not in name)
        self.figures |= {"rollout_bytes": used, "check_bytes": most}
        shown = f"{used / GIB:.2f} GiB, {cache / GIB:.2f} for keys, --check {most / GIB:.2f}"
        yield "memory of a rollout", shown, cache <= used <= most

    def flags(self, out: Path, *flags: str) -> list[str]:
        """The flags of a short run of airline in a folder."""
        return [
            *("--domains", "airline", "--kl-probe-tasks", "0", "--validation-steps", "0"),
            *("--report-to", "none", "--num-gpus", "1", "--eval-trials", "1", *flags),
            *("--output-dir", str(out)),
        ]

    def resume(self) -> Iterator[Row]:
        """A run that is killed after its third step ends with as many steps as it was to have."""
        out = self.folder / "resumed"
        log = self.folder / "resumed.log"
        metrics = out / "metrics.jsonl"
        flags = self.flags(
            out,
            *("--max-steps", "4", "--warm-start-steps", "2", "--save-steps", "1"),
            *("--tasks-per-step", "3", "--eval-tasks-per-domain", "2"),
        )
        process = start_run(flags, log, **self.variables)
        try:
            while process.poll() is None:
                if metrics.is_file() and '"step": 3' in metrics.read_text():
                    process.kill()
                time.sleep(0.05)
        finally:
            process.kill()
        finish_run([*flags, "--resume-from-checkpoint", "auto"], log, **self.variables)
        lines = map(json.loads, metrics.read_text().splitlines())
        steps = [line["step"] for line in lines if line["kind"] == "train"]
        yield "killed and resumed", f"steps {steps}", steps == [1, 2, 3, 4]

    def learning(self) -> Iterator[Row]:
        """The embedded recipe, shortened, raises the success of airline."""
        steps = 40 if self.device == "cuda" else 1
        fewer = ["--warm-start-steps", "2", "--tasks-per-step", "2", "--eval-tasks-per-domain", "4"]
        small = [] if self.device == "cuda" else fewer
        out = self.folder / "learned"
        flags = self.flags(out, "--max-steps", str(steps), *small)
        finish_run(flags, self.folder / "learned.log", **self.variables)
        evaluations = results_of(out)["evaluations"]
        first, *_, last = (e["success"]["airline"]["mean"] for e in evaluations[1:])
        self.figures["learning_gain"] = last - first
        learns = last - first >= 0.05 or self.device != "cuda"
        yield "the embedded recipe learns", f"success {first:.2f} to {last:.2f}", learns

    def domains(self) -> Iterator[Row]:
        """A GRPO step on three domains: its parts, and how long the card was busy in it."""
        out = self.folder / "domains"
        log = self.folder / "domains.log"
        is_tiny = self.options.model is None
        named = [] if is_tiny else ["--config", "pretrained", "--model", str(self.options.model)]
        steps, warm = (5, 40) if self.device == "cuda" else (3, 2)
        few = [] if self.device == "cuda" else ["--tasks-per-step", "2", "--num-generations", "2"]
        flags = [
            *(*named, *few, "--domains", "airline,retail,telecom"),
            *("--max-steps", str(steps), "--warm-start-steps", str(warm), "--profile", str(steps)),
            *("--kl-probe-tasks", "0", "--validation-steps", "0", "--eval-tasks-per-domain", "4"),
            *("--eval-trials", "1", "--report-to", "none", "--num-gpus", "1"),
            *("--output-dir", str(out)),
        ]
        finish_run(flags, log, **self.variables)
        lines = map(json.loads, (out / "timings.jsonl").read_text(encoding="utf-8").splitlines())
        rows = [line for line in lines if line["kind"] == "train"][1:-1]  # the last is profiled
        spent = {
            n: median(row[f"perf/{n}_s"] for row in rows) for n in ("step", "sample", "update")
        }
        spent["environment"] = median(row["perf/environment_s"] for row in rows)
        rates = {
            n: median(row[f"perf/{n}_tokens_per_s"] for row in rows) for n in ("sample", "update")
        }
        trace = json.loads(gzip.decompress(next((out / "profile").iterdir()).read_bytes()))
        events = [event for event in trace["traceEvents"] if event.get("dur")]
        load = sum(
            e["dur"]
            for e in events
            if e["name"] == "load weights" and e["cat"] == "user_annotation"
        )
        self.figures |= {f"step_{name}_s": value for name, value in spent.items()}
        self.figures |= {f"step_{name}_tokens_per_s": value for name, value in rates.items()}
        self.figures["step_load_s"] = load / 1e6
        shown = f"{spent['step']:.2f} s: sample {spent['sample']:.2f} with environments "
        shown += (
            f"{spent['environment']:.2f}, update {spent['update']:.2f} with load {load / 1e6:.2f}"
        )
        shown += "; {sample:,.0f} and {update:,.0f} tokens/s".format(**rates)
        yield "a step on three domains", shown, True
        yield self.busy(events)

    def busy(self, events: Sequence[Any]) -> Row:
        """The share of a profiled step in which the card computes, by groups of kernels."""
        kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
        what = "the card busy in a profiled step"
        if not kernels:
            return what, "needs a GPU", None
        phases = [
            e for e in events if e["name"] in ("sample", "update") and e["cat"] == "user_annotation"
        ]
        wall = sum(e["dur"] for e in phases)
        of_kinds = dict.fromkeys(KINDS, 0.0)
        for kernel in kernels:
            name = kernel["name"].lower()
            kind = next(k for k, parts in KINDS.items() if any(part in name for part in parts))
            of_kinds[kind] += kernel["dur"]
        self.figures["busy_share"] = share = sum(of_kinds.values()) / wall
        parts = ", ".join(f"{kind} {spent / wall:.0%}" for kind, spent in of_kinds.items())
        return what, f"{share:.0%} of {wall / 1e6:.2f} s, {len(kernels):,} kernels: {parts}", True

    def other(self, script: str, *flags: str) -> dict[str, float]:
        """Run another benchmark; return its figures."""
        file = self.folder / "figures.json"
        words = ["--device", self.device, *flags, "--json", str(file)]
        finish_run(words, self.folder / "other.log", script=HERE / script)
        found: dict[str, float] = json.loads(file.read_text(encoding="utf-8"))["figures"]
        return found

    def methods(self) -> Iterator[Row]:
        """Our sampler against `generate` and continuous batching."""
        small = ["--turns", "2", "--group-sizes", "2", "--prompt-tokens", "16", "--repeats", "1"]
        large = ["--turns", "4", "--group-sizes", "8", "--prompt-tokens", "512", "--groups", "4"]
        cell = [*large, "--message-tokens", "64"] if self.device == "cuda" else small
        found = self.other("sampler.py", "--shape", self.options.shape, *cell)
        for name in ("generate", "batching"):
            self.figures[f"sampling_vs_{name}"] = ratio = found[f"sampling_vs_{name}"]
            yield f"sampling against {name}", f"{ratio:.2f} times as fast", True

    def trl(self) -> Iterator[Row]:
        """A whole step against TRL's trainer."""
        flags = ["--parts", "step", "--ranks", "1", "--shape", self.options.shape, "--steps", "2"]
        flags += ["--warm-start-steps", "2", "--tasks-per-step", "4", "--trl-settings", "32:1"]
        if self.device != "cuda":
            flags += ["--num-generations", "2", "--tasks-per-step", "2"]
            flags += ["--trl-settings", "4:1", "--steps", "1"]
        ratio = self.other("vs_trl.py", *flags)["step_vs_trl"]
        self.figures["step_vs_trl"] = ratio
        yield "a step against TRL", f"{ratio:.2f} times as fast", True


def main() -> int:
    parser = parser_with_device(__doc__)
    parser.set_defaults(shape="")
    parser.add_argument("--parts", nargs="+", choices=[*SECONDS], default=[*DEFAULT])
    parser.add_argument("--model", help="a folder with a model, for the part `domains`")
    options = parser.parse_args()
    options.shape = options.shape or ("tiny" if options.device == "cpu" else "qwen3-0.6b")
    if options.device == "cpu":
        torch.set_num_threads(options.threads)
    where = machine(options.device)
    begun = time.perf_counter()
    fine = True
    print("  ".join(f"{name} {value}" for name, value in where.items()), flush=True)
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        bench = Bench(options, Path(folder))
        for part in options.parts:
            begun_part = time.perf_counter()
            for what, shown, is_right in rows_of(getattr(bench, part), part, SECONDS[part]):
                mark = {True: "ok", False: "BROKEN", None: "skipped"}[is_right]
                print(f"{what:<42}{mark:<9}{shown}", flush=True)
                fine = fine and is_right is not False
            bench.figures[f"{part}_s"] = time.perf_counter() - begun_part
            write_json(options.json, bench.figures, where, vars(options))
            bench.keep_files()
            give_memory_back()
    print(f"{time.perf_counter() - begun:.0f} s", flush=True)
    return 0 if fine else 1


def rows_of(part: Callable[[], Iterator[Row]], name: str, seconds: float) -> Iterator[Row]:
    """Yield the rows of a part; one that fails or takes too long ends with its exception."""

    def give_up(*_: Any) -> None:
        raise TimeoutError(f"given up after {seconds} s")

    begun = time.perf_counter()
    signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield from part()
    except Exception as error:  # a part must not end the others
        text = " ".join(str(error).split())[-300:]
        yield name, f"failed after {time.perf_counter() - begun:.0f} s: {text}", False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    sys.exit(main())
