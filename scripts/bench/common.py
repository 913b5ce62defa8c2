"""Shared functions of the benchmarks: models, timing, facts about the machine, JSON output."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.data.tasks import Task

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

# Architectures of published models. The weights are random.
SHAPES: dict[str, dict[str, int]] = {
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    "qwen3-1.7b": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    "qwen3-4b": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser with the flags of every benchmark."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--shape",
        choices=["tiny", *SHAPES],
        default="tiny",
        help="the embedded model, or random weights in the shape of a published one",
    )
    parser.add_argument("--threads", type=int, default=1, help="of each process, on CPU")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    return parser


def model_of(shape: str, vocab_size: int = 151936, **fields: Any) -> Any:
    """A Qwen3 of a published shape with random weights, in fp32 on CPU."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocab_size,
        head_dim=128,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        **{**SHAPES[shape], **fields},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen3ForCausalLM(config)


def ready(device: str) -> None:
    """Wait for the device to finish its work. Call this function before reading a clock."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def seconds_of(work: Callable[[], Any], device: str = "cpu") -> float:
    ready(device)
    begun = time.perf_counter()
    work()
    ready(device)
    return time.perf_counter() - begun


def ratios_of(
    ours: Callable[[], float], theirs: Callable[[], float], repeats: int
) -> tuple[list[float], list[float]]:
    """Measure two functions alternately, and return the seconds of both."""
    first: list[float] = []
    second: list[float] = []
    for number in range(repeats):
        pairs: list[tuple[list[float], Callable[[], float]]] = [(first, ours), (second, theirs)]
        for seconds, work in pairs if number % 2 == 0 else pairs[::-1]:
            seconds.append(work())
    return first, second


def in_fresh_process(arguments: Sequence[str], **variables: str) -> dict[str, Any]:
    """Run a Python script in a new process, and return the JSON object that it prints last."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def machine(device: str = "cpu") -> dict[str, Any]:
    """The hardware and the software versions of this machine."""
    import torch

    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    found = {
        "processor": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "load_before": round(os.getloadavg()[0], 2),
    }
    return found | ({"gpu": torch.cuda.get_device_name()} if device == "cuda" else {})


def write_json(
    path: Path | None, figures: Mapping[str, float], where: Mapping[str, Any], settings: Any
) -> None:
    """Write `{"figures": ..., "machine": ..., "settings": ...}` if a path is given."""
    if path is None:
        return
    content = {"figures": dict(figures), "machine": dict(where), "settings": settings}
    path.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")


def save_tasks(tasks: Iterable[Task], path: Path) -> None:
    """Write tasks to a JSON Lines file that `load_tasks` can read."""
    keys = ("domain", "id", "family", "branch")
    with path.open("w", encoding="utf-8") as file:
        for task in tasks:
            row = {key: getattr(task, key) for key in keys} | json.loads(task.columns)
            row["prompt"] = task.prompt[0]["content"] if task.is_text else task.prompt
            row["payload"] = json.loads(task.payload)
            file.write(json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n")
