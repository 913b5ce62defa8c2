"""Check and measure one GPU, in at most eight minutes.

    python scripts/bench/gpu.py --device cuda --json gpu.json

Checks: log-probabilities of sampler and training on the same tokens; loss and gradient of the GPU
against the CPU's; the embedded recipe learns; a killed run resumes; a group of one rank exchanges
over NCCL; a sharded model of one rank has the gradient of a whole one. Measures, with random
weights in the shape `--shape`: tokens per second of the update and the share of the card's peak
FLOPs (MFU); the time of a sharded update against a whole one; tokens per second of sampling against
the bound of the measured memory bandwidth; our sampler against `generate` and continuous batching;
a whole step against TRL; the peak memory of rollout and update against `--check`'s estimate.

A part that fails is one row that says so; the others go on, and the exit code is 1. On a CPU
(`--device cpu`, the default) all parts run with the tiny model: a test of this script.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
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

from pipeline.common.errors import UserError
from pipeline.config.settings import Config, GRPOSettings
from pipeline.distributed.sharding import Sharded, shard_model, whole
from pipeline.models.layers import outer_layers, recompute_layers
from pipeline.models.memory import Memory
from pipeline.models.tiny import tiny_model, tiny_tokenizer
from pipeline.rollout.samplers.own import RowSampler
from pipeline.rollout.trajectory import Trajectory
from pipeline.training.grpo import grpo_loss
from pipeline.training.micro_batches import micro_batch
from pipeline.training.token_logprobs import TokenLogprobs

HERE = Path(__file__).resolve().parent
PEAK_TFLOPS = {"H100": 989, "H200": 989, "A100": 312, "L40S": 362, "4090": 165}  # dense bf16
GIB = 1 << 30
CLOSE = {"cpu": 1e-5, "cuda": 0.05}  # mean difference of log-probabilities, in nats
PARTS = ("exchange", "logprobs", "loss", "update", "sharded", "sampling", "memory")
RUNS = ("resume", "learning", "methods", "trl")  # other processes
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
        tiny = self.options.shape == "tiny"
        return tiny_model(tiny_tokenizer(), 0) if tiny else model_of(self.options.shape)

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
        while process.poll() is None:
            if metrics.is_file() and '"step": 3' in metrics.read_text():
                process.kill()
            time.sleep(0.05)
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
        flags += ["--tasks-per-step", "4", "--trl-settings", "32:1"]
        if self.device != "cuda":
            flags += ["--warm-start-steps", "2", "--num-generations", "2", "--tasks-per-step", "2"]
            flags += ["--trl-settings", "4:1", "--steps", "1"]
        ratio = self.other("vs_trl.py", *flags)["step_vs_trl"]
        self.figures["step_vs_trl"] = ratio
        yield "a step against TRL", f"{ratio:.2f} times as fast", True


def main() -> int:
    parser = parser_with_device(__doc__)
    parser.set_defaults(shape="")
    parser.add_argument("--parts", nargs="+", choices=PARTS + RUNS, default=[*PARTS, *RUNS])
    options = parser.parse_args()
    options.shape = options.shape or ("tiny" if options.device == "cpu" else "qwen3-0.6b")
    where = machine(options.device)
    begun = time.perf_counter()
    fine = True
    print("  ".join(f"{name} {value}" for name, value in where.items()), flush=True)
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        bench = Bench(options, Path(folder))
        for part in options.parts:
            for what, shown, is_right in rows_of(getattr(bench, part), part):
                mark = {True: "ok", False: "BROKEN", None: "skipped"}[is_right]
                print(f"{what:<42}{mark:<9}{shown}", flush=True)
                fine = fine and is_right is not False
    print(f"{time.perf_counter() - begun:.0f} s", flush=True)
    write_json(options.json, bench.figures, where, vars(options))
    return 0 if fine else 1


def rows_of(part: Callable[[], Iterator[Row]], name: str) -> Sequence[Row]:
    """Return the rows of a part; a part that fails has one row with its exception."""
    begun = time.perf_counter()
    try:
        rows = [*part()]
    except Exception as error:  # a part must not end the others
        text = " ".join(str(error).split())[-300:]
        return [(name, f"failed after {time.perf_counter() - begun:.0f} s: {text}", False)]
    return rows


if __name__ == "__main__":
    sys.exit(main())
