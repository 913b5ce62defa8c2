"""Check sharded training on CPU ranks: gradients, memory, and the writing of a checkpoint.

    python scripts/proofs/sharded.py

- update: one step of every loss with a KL penalty in float64, on 2 to 4 ranks, with and without
  LoRA and shared prefixes, against one process with whole weights.
- memory: a rank of a sharded model of about 1 GB (many small layers) does two updates. Its most
  allocated bytes are compared with its share of weights, gradients and moments, one layer, the
  sampler's whole copy, and activations (what one rank needs beyond what it holds after an update).
- checkpoint: the growth while a checkpoint is written, against the share that a rank holds, and the
  time, against the time of plain writing on rank 0, where each rank has a core.

The exit code is 1 if a bound is broken. `tests/distributed/test_sharding.py` has a small update,
resumes on other ranks, and draws.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers import Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeline.checkpoints.checkpoint import TrainState, save
from pipeline.checkpoints.moments import whole_moments, write_sharded
from pipeline.config.settings import Config
from pipeline.distributed.ranks import Ranks
from pipeline.distributed.sharding import shard_model
from pipeline.models.layers import outer_layers
from pipeline.models.sampling_copy import SamplingCopy
from pipeline.models.tiny import tiny_tokenizer
from pipeline.training.token_logprobs import TokenLogprobs
from pipeline.training.updater import Updater
from scripts.proofs.grid import LOSS_TYPES, Cell, difference, make_episodes, play_updates
from scripts.proofs.ranks import play_ranks

PARTS = ("update", "memory")
WAYS: list[dict[str, Any]] = [
    {"shard": "optimizer"},
    {"shard": "full"},
    {"shard": "full", "reshards": False},
]
CELLS = [
    Cell(num_ranks=n, layout=layout, count=4, loss_type=kind, adapters=adapters, **way)
    for n in (2, 3, 4)
    for way in WAYS
    for layout in ("padded", "shared")
    for kind in LOSS_TYPES
    for adapters in (False, True)
]
MALLINFO = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)
MEMORY_BOUND = 1.15
HELD_BOUND = 1.2
TIME_BOUND = 1.5


class Mallinfo2(ctypes.Structure):
    """The C library's counts of its allocations; see mallinfo2(3)."""

    _fields_ = [(name, ctypes.c_size_t) for name in MALLINFO]


def allocated() -> int:
    """Return the bytes that are allocated now, without what the C library keeps for later."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Mallinfo2
    info = libc.mallinfo2()
    return int(info.uordblks + info.hblkhd)


class Peak:
    """The most bytes that are allocated inside the context, looked at each millisecond."""

    def __enter__(self) -> Peak:
        self.bytes = allocated()
        self._ends = False
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ends:
            self.bytes = max(self.bytes, allocated())
            time.sleep(0.001)

    def __exit__(self, *_: object) -> None:
        self._ends = True
        self._thread.join()


def model_of(num_layers: int, hidden: int) -> Any:
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=hidden // 8,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def train(num_layers: int, hidden: int, folder: str) -> dict[str, float]:
    """Return what a rank holds and needs, in bytes, and the seconds of writing."""
    accelerator = Accelerator()
    ranks = Ranks(accelerator.process_index, accelerator.num_processes, 600)
    base = allocated()
    model = model_of(num_layers, hidden)
    size = sum(p.numel() for p in model.parameters())
    layers = outer_layers(model)
    layer = sum(p.numel() for p in layers[0].parameters())
    copy = SamplingCopy(model)
    sharded = None
    if ranks.num_ranks > 1:
        sharded = shard_model(model, layers, None, reshards=True)
    config = Config(grpo={"shard": "full", "max_tokens_per_microbatch": 200})
    updater = Updater(accelerator, TokenLogprobs(model, 1.0, sharded=sharded), ranks, config)
    rows, advantages = make_episodes(8)
    with Peak() as peak:
        for _ in range(2):
            updater.update_policy(rows, advantages, 1e-5)
    found = {"peak": peak.bytes - base, "held": allocated() - base, "size": size, "layer": layer}
    del copy
    ranks.barrier("written")
    before = allocated()
    begun = time.perf_counter()
    path = Path(folder)
    with Peak() as peak:
        if ranks.num_ranks > 1:
            write_sharded(path, model, updater.optimizer, ranks.is_main)
        else:
            moments = whole_moments(updater.optimizer, True)
            save(path, "plain", model, tiny_tokenizer(), TrainState().state_dict(), moments)
        ranks.barrier("written")
    return {**found, "seconds": time.perf_counter() - begun, "writing": peak.bytes - before}


def updates() -> list[tuple[str, float, float]]:
    """Return the rows of the updates: what differs, by how much, and the bound."""
    alone = {
        (cell.loss_type, cell.adapters): Cell(loss_type=cell.loss_type, adapters=cell.adapters)
        for cell in CELLS
    }
    found = play_updates([*alone.values(), *CELLS])
    rows = list[tuple[str, float, float]]()
    for what in ("gradient", "parameters"):
        worst = max(
            difference(
                getattr(found[cell], what),
                getattr(found[alone[cell.loss_type, cell.adapters]], what),
            )
            for cell in CELLS
        )
        rows.append((f"{len(CELLS)} updates: {what}", worst, 1e-12))
    return rows


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--hidden", type=int, default=448)
    options = parser.parse_args(argv)
    rows = updates() if "update" in options.parts else []
    if "memory" in options.parts:
        rows += memory(options.layers, options.hidden)
    for name, value, bound in rows:
        verdict = "holds" if value <= bound else "BROKEN"
        print(f"{name:<52}{value:8.3g}  at most {bound:.3g}  {verdict}")
    return int(any(value > bound for _, value, bound in rows))


def memory(num_layers: int, hidden: int) -> list[tuple[str, float, float]]:
    """Return the rows of memory and of writing; prints the size of the model."""
    results = dict[int, list[dict[str, float]]]()
    for num_ranks in (1, 2, 4):
        with tempfile.TemporaryDirectory() as folder:
            found = play_ranks(train, num_ranks, num_layers, hidden, folder, timeout_s=1800)
        assert all(isinstance(result, dict) for result in found), found
        results[num_ranks] = found
    (alone,) = results[1]
    size = alone["size"]
    activations = alone["peak"] - alone["held"]
    gib = 4 * size / 2**30
    print(
        f"{gib:.2f} GiB of weights, {num_layers} layers; activations {activations / 2**20:.0f} MiB"
    )
    rows = list[tuple[str, float, float]]()
    for num_ranks in (2, 4):
        share = 16 * size / num_ranks
        most = max(result["peak"] for result in results[num_ranks])
        room = MEMORY_BOUND * share + 4 * (alone["layer"] + size) + activations
        rows.append((f"{num_ranks} ranks: memory / what is allowed", most / room, 1.0))
        held = 12 * size / num_ranks
        most = max(result["writing"] for result in results[num_ranks])
        rows.append(
            (f"{num_ranks} ranks: most held while writing / share", 1 + most / held, HELD_BOUND)
        )
        seconds = max(result["seconds"] for result in results[num_ranks])
        ratio = seconds / alone["seconds"]
        name = f"{num_ranks} ranks: time of writing / plain"
        if num_ranks <= (os.cpu_count() or 1):
            rows.append((name, ratio, TIME_BOUND))
        else:  # ranks that share a core write one after the other
            print(f"{name:<52}{ratio:8.3g}  not judged: more ranks than cores")
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
