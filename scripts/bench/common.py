"""Shared functions of benchmarks and proofs: runs, models, timing, the machine, JSON output."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "pipeline" / "run.py"
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
    """A parser with the flag of every benchmark."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    return parser


def parser_with_device(description: str | None) -> argparse.ArgumentParser:
    """A parser with the flags of the benchmarks that also run on a GPU."""
    parser = parser_of(description)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--shape",
        choices=["tiny", *SHAPES],
        default="tiny",
        help="the embedded model, or random weights in the shape of a published one",
    )
    parser.add_argument("--threads", type=int, default=1, help="of each process, on CPU")
    return parser


def start_run(
    flags: Sequence[str], log: Path, *, script: Path = RUN, cwd: Path = ROOT, **variables: str
) -> subprocess.Popen[bytes]:
    """Start a run with one thread for each rank; its output is added to `log`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, str(script), *flags],
            cwd=cwd,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def finish_run(flags: Sequence[str], log: Path, **settings: Any) -> str:
    """Make a whole run, and return its output. The settings are those of `start_run`."""
    process = start_run(flags, log, **settings)
    try:
        code = process.wait()
    finally:
        process.kill()  # if this process gives up
    said = log.read_text(encoding="utf-8", errors="replace")
    if code:
        raise RuntimeError(f"exit code {code} of {' '.join(flags)}:\n{said[-3000:]}")
    return said


def results_of(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return read


def model_of(shape: str, vocab_size: int = 151936, device: str = "cpu", **fields: Any) -> Any:
    """A Qwen3 of a published shape with random weights, made in fp32 on the device."""
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
    with torch.random.fork_rng(devices=[0] if device == "cuda" else []), torch.device(device):
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


def memory_mb(kind: str) -> float:
    """Memory of this process: `VmRSS` (now), `RssAnon` (without mapped files) or `VmHWM` (peak).

    Unlike `ru_maxrss`, the peak excludes memory of the parent process.
    """
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(text.partition(f"{kind}:")[2].split()[0]) * 1024 / 1e6


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
