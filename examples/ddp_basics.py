"""What texts about data-parallel training (DDP) claim, with the numbers of this machine.

torchrun --nproc-per-node 2 examples/ddp_basics.py   # on CPU, over gloo

The work is a regression in float64. The exit code is 1 if a claim is not true on every rank.
The table of speeds is printed, not judged.
"""

import os
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import mse_loss

from pipeline.distributed.ranks import Ranks, sum_gradients

EQUAL = 1e-12  # rounding in float64 stays below it; a wrong method does not
Claims = list[tuple[str, bool]]


def network(width: int = 8) -> nn.Module:
    torch.manual_seed(0)  # the same weights on every rank
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)).double()


def backward(module: nn.Module, rows: Iterable[int], scale: float = 1.0) -> nn.Module:
    """Add the gradient of `scale` times the mean loss over the examples `rows`."""
    inputs = torch.stack([torch.arange(8.0).add(row).sin().double() for row in rows])
    (scale * mse_loss(module(inputs), inputs.square().sum(1, keepdim=True))).backward()
    return module


def difference(module: nn.Module, reference: nn.Module) -> float:
    """Return the largest difference of two gradients, as a share of the reference's largest."""
    pairs = zip(module.parameters(), reference.parameters(), strict=True)
    one, other = (
        torch.cat([p.grad.flatten() for p in side if p.grad is not None])
        for side in zip(*pairs, strict=True)
    )
    return float((one - other).abs().max() / other.abs().max())


def sums_and_means(accelerator: Accelerator, ranks: Ranks) -> Claims:
    count = 4 * ranks.num_ranks + 1  # rank 0 has one example more than the others
    own = ranks.shard(count)
    one = backward(network(), range(count))
    summed = sum_gradients(accelerator.prepare(network()))
    right = difference(backward(summed, own, len(own) / count), one)
    wrong = difference(backward(accelerator.prepare(network()), own), one)
    text = f"ranks with 5 and 4 examples, mean of the loss over all {count}"
    return [
        (f"(a) {text}: the gradient of one process, up to {right:.1e}", right < EQUAL),
        (f"(a) mean over each rank's own, as plain DDP: it differs by {wrong:.1e}", wrong > 1e-3),
    ]


def large_batch(accelerator: Accelerator, ranks: Ranks) -> Claims:
    number = ranks.num_ranks
    parts = torch.arange(8 * number).chunk(number)
    own = parts[ranks.rank].tolist()
    large = backward(network(), range(8 * number))
    ddp = backward(accelerator.prepare(network()), own)
    accumulated, both = network(), accelerator.prepare(network())
    for part in parts:
        backward(accumulated, part.tolist(), 1 / number)
    with accelerator.no_sync(both):  # the ranks exchange nothing before the last micro-batch
        backward(both, own[:4], 0.5)
    backward(both, own[4:], 0.5)
    named = {
        f"DDP over {number} ranks": ddp,
        f"accumulation over {number} micro-batches on one rank": accumulated,
        f"DDP over {number} ranks, each accumulating over 2": both,
    }
    found = {name: difference(module, large) for name, module in named.items()}
    text = f"the gradient of one batch of {8 * number}, up to"
    return [(f"(b) {name}: {text} {off:.1e}", off < EQUAL) for name, off in found.items()]


def exchanges(ranks: Ranks) -> Claims:
    objects = ranks.all_gather_objects({"rank": ranks.rank, "rewards": [1.0] * ranks.rank}, "c")
    wanted = [{"rank": rank, "rewards": [1.0] * rank} for rank in range(ranks.num_ranks)]
    time.sleep(0.2 * ranks.rank)  # each rank comes later than the one before
    came = time.monotonic()
    ranks.barrier("d")
    times = ranks.all_gather_objects((came, time.monotonic()), "times")
    waits = ", ".join(f"{left - came:.2f} s" for came, left in times)
    together = min(left for _, left in times) >= max(came for came, _ in times)
    with tempfile.TemporaryDirectory() as own:  # all ranks use that of rank 0
        folder = Path(ranks.all_gather_objects(own, "folder")[0])
        if ranks.is_main:
            (folder / f"written-by-rank-{ranks.rank}").touch()
        ranks.barrier("all may read")
        files = os.listdir(folder)
        ranks.barrier("all have read")
    return [
        (f"(c) all_gather_object gives every rank {objects}", objects == wanted),
        (f"(d) no rank leaves a barrier before the last one comes; waits: {waits}", together),
        (
            f"(e) rank 0 alone writes; after a barrier every rank sees {files}",
            files == ["written-by-rank-0"],
        ),
    ]


def rate(model: nn.Module, steps: int = 20) -> float:
    """Return the examples per second of this rank in training steps; the first one warms up."""
    inputs = torch.randn(256, 512, dtype=torch.float64)
    begun = 0.0
    for step in range(steps + 1):
        begun = time.perf_counter() if step == 1 else begun
        model.zero_grad()
        model(inputs).square().mean().backward()
    return steps * len(inputs) / (time.perf_counter() - begun)


def speeds(accelerator: Accelerator, ranks: Ranks) -> str:
    ddp, rounds = accelerator.prepare(network(512)), []
    for _ in range(3):
        alone = rate(network(512)) if ranks.is_main else 0.0  # the others wait in the sum
        rounds.append([ranks.sum([alone])[0], ranks.sum([rate(ddp)])[0]])
    alone, together = map(max, zip(*rounds, strict=True))
    cores, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    rows = [(1, alone), (ranks.num_ranks, together)]
    table = "".join(f"\n{n:9}{found:13.0f}{found / alone:11.2f}" for n, found in rows)
    head = f"(f) best of 3 on {cores} cores, each rank with {threads} thread(s) and 256 examples"
    return f"      {head}\n    ranks   examples/s   speed-up{table}"


def main() -> int:
    accelerator = Accelerator(cpu=True)
    ranks = Ranks(accelerator.process_index, accelerator.num_processes, timeout_s=60)
    if ranks.num_ranks == 1:
        sys.exit("one rank; start it with: torchrun --nproc-per-node 2 examples/ddp_basics.py")
    claims = [*sums_and_means(accelerator, ranks), *large_batch(accelerator, ranks)]
    claims += exchanges(ranks)
    of_ranks = ranks.all_gather_objects([is_true for _, is_true in claims], "claims")
    true = [all(verdicts) for verdicts in zip(*of_ranks, strict=True)]
    table = speeds(accelerator, ranks)
    if ranks.is_main:
        for (text, _), is_true in zip(claims, true, strict=True):
            print(f"{'true ' if is_true else 'FALSE'} {text}")
        print(table, flush=True)
    accelerator.end_training()  # ends the process group
    return int(not all(true))


if __name__ == "__main__":
    sys.exit(main())
