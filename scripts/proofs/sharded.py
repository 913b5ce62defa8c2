"""Count the memory of sharded training on CPU ranks, and of writing its checkpoint.

    python scripts/proofs/sharded.py

- memory: a rank of a sharded model of about 1 GB (many small layers) does two updates. The growth
  of its largest resident memory is compared with its share of weights, gradients and moments, one
  layer, the sampler's whole copy, and activations (what one rank needs beyond its weights).
- checkpoint: the growth while a checkpoint is written, against the share that a rank holds, and the
  time, against the time of plain writing on rank 0.

The exit code is 1 if a bound is broken. `tests/distributed/test_sharding.py` has gradients, resumes
and draws.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from accelerate import Accelerator
from transformers import Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeline.checkpoints.checkpoint import TrainState, save
from pipeline.checkpoints.moments import whole_moments, write_sharded
from pipeline.config.settings import Config
from pipeline.distributed.ranks import Ranks
from pipeline.distributed.sharding import shard_model
from pipeline.grpo.token_logprobs import TokenLogprobs
from pipeline.grpo.updater import Updater
from pipeline.models.layers import outer_layers
from pipeline.models.sampling_copy import SamplingCopy
from pipeline.models.tiny import tiny_tokenizer
from scripts.proofs.grid import make_episodes
from scripts.proofs.ranks import play_ranks

MEMORY_BOUND = 1.15
HELD_BOUND = 1.2
TIME_BOUND = 1.5


def resident() -> int:
    return psutil.Process().memory_info().rss


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """Return the largest resident memory since `forget_peak`, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


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
    base = resident()
    model = model_of(num_layers, hidden)
    size = sum(p.numel() for p in model.parameters())
    layers = outer_layers(model)
    layer = sum(p.numel() for p in layers[0].parameters())
    copy = SamplingCopy(model)
    if ranks.num_ranks > 1:
        shard_model(model, layers, None, reshards=True)
    config = Config(grpo={"shard": "full", "max_tokens_per_microbatch": 200})
    updater = Updater(accelerator, TokenLogprobs(model, 1.0), ranks, config, 0)
    rows, advantages = make_episodes(8)
    forget_peak()
    for _ in range(2):
        updater.update_policy(rows, advantages, 1e-5)
    found = {"grown": peak() - base, "size": size, "layer": layer}
    del copy
    ranks.barrier("written")
    before = resident()
    forget_peak()
    begun = time.perf_counter()
    path = Path(folder)
    if ranks.num_ranks > 1:
        write_sharded(path, model, updater.optimizer, ranks.is_main)
    else:
        save(
            path,
            "plain",
            model,
            tiny_tokenizer(),
            TrainState().state_dict(),
            whole_moments(updater.optimizer, True),
        )
    ranks.barrier("written")
    return {**found, "seconds": time.perf_counter() - begun, "while_writing": peak() - before}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--hidden", type=int, default=448)
    options = parser.parse_args(argv)
    rows = list[tuple[str, float, float]]()
    results = dict[int, list[dict[str, float]]]()
    for num_ranks in (1, 2, 4):
        with tempfile.TemporaryDirectory() as folder:
            found = play_ranks(
                train, num_ranks, options.layers, options.hidden, folder, timeout_s=1800
            )
        assert all(isinstance(result, dict) for result in found), found
        results[num_ranks] = found
    (alone,) = results[1]
    size = alone["size"]
    # One rank alone shares its weights with the sampler's copy until the first update.
    activations = max(0.0, alone["grown"] - 16 * size)
    for num_ranks in (2, 4):
        share = 16 * size / num_ranks
        most = max(result["grown"] for result in results[num_ranks])
        room = MEMORY_BOUND * share + 4 * (alone["layer"] + size) + activations
        rows.append((f"{num_ranks} ranks: memory / what is allowed", most / room, 1.0))
        held = 12 * size / num_ranks
        most = max(result["while_writing"] for result in results[num_ranks])
        rows.append(
            (
                f"{num_ranks} ranks: share and more while writing / share",
                1 + most / held,
                HELD_BOUND,
            )
        )
        seconds = max(result["seconds"] for result in results[num_ranks])
        rows.append(
            (f"{num_ranks} ranks: time of writing / plain", seconds / alone["seconds"], TIME_BOUND)
        )
    gib = 4 * size / 2**30
    print(f"{gib:.2f} GiB of weights, {options.layers} layers; activations {activations:.3g} bytes")
    for name, value, bound in rows:
        verdict = "holds" if value <= bound else "BROKEN"
        print(f"{name:<52}{value:8.2f}  at most {bound:.2f}  {verdict}")
    return int(any(value > bound for _, value, bound in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
