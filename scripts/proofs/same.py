"""Play short runs in this checkout and in another commit, and compare them bit by bit.

    python scripts/proofs/same.py --against COMMIT

A change that only moves code must leave every run as it is. Of each run these are compared: the
lines of `metrics.jsonl`, every transcript (tokens, log-probabilities, messages, rewards), and the
weights and optimizer states of all its checkpoints. Both sides train from the other commit's warm
start, so that a change of the warm start shows in the first two runs alone. The exit code is 1 if
anything differs. `--model FOLDER` adds a run of a real model.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.common import ROOT, finish_run, machine, start_run
from scripts.proofs.chaos import LIMIT_S, family, saved_step, send, still_alive

SHORT = (
    "--report-to none --tasks-per-step 6 --num-generations 4 --eval-tasks-per-domain 6 "
    "--eval-trials 1 --validation-steps 2 --validation-tasks 4 --max-steps 3 --save-steps 2 "
    "--warm-start-steps 0"
)
ONE_DOMAIN = "--domains airline --max-steps 2"
# Of each run its ranks and its flags. `MODEL` is the warm start, `WINDOW` a model whose cache does
# not hold all turns, so that transformers' `generate` samples, `REWARDS` an async reward function.
RUNS = {
    "default, 1 rank": (1, "--warm-start-steps 60"),
    "default, 2 ranks": (2, "--warm-start-steps 60"),
    "deterministic, 1 rank": (1, f"--model MODEL --deterministic {ONE_DOMAIN}"),
    "deterministic, 2 ranks": (2, f"--model MODEL --deterministic {ONE_DOMAIN}"),
    "deterministic, 3 ranks": (3, f"--model MODEL --deterministic {ONE_DOMAIN}"),
    "mixed": (
        2,
        "--model MODEL --curriculum mixed --dynamic-sampling --beta 0.02 --num-iterations 2",
    ),
    "LoRA": (2, f"--model MODEL --use-peft {ONE_DOMAIN}"),
    "RFT": (2, f"--model MODEL --rft-rounds 1 --rft-tasks 8 {ONE_DOMAIN}"),
    "own dataset": (
        2,
        "--model MODEL --domains sums --tasks '{sums: examples/one_digit_sums.jsonl}' "
        "--reward-funcs REWARDS --max-tokens-per-turn 12 --max-steps 2 "
        "--no-drop-zero-std-groups --entropy-coef 0.01",
    ),
    "killed and resumed": (2, "--model MODEL --save-steps 1"),
    "generate": (1, f"--model WINDOW --warm-start-steps 60 {ONE_DOMAIN}"),
}
REAL = "--config smollm2_sums --tasks-per-step 4 --num-generations 4 --max-steps 2 "
REAL += "--eval-tasks-per-domain 4 --eval-trials 1 --validation-steps 0 --report-to none"
REWARD = '''"""A reward function that waits, as one that asks a service does."""

import asyncio


async def digits(completions, answer, **columns):
    await asyncio.sleep(0.01)
    return [sum(map(text.count, right)) / 10 for text, right in zip(completions, answer)]
'''
KILLED = "killed and resumed"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--against", required=True, metavar="COMMIT")
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--model", type=Path, help="a folder of SmolLM2-135M-Instruct")
    parser.add_argument(
        "--kept", type=Path, help="keep the other commit's runs here, and use what is kept"
    )
    options = parser.parse_args(argv)
    commit = git("rev-parse", "--short", options.against)
    runs = {name: RUNS[name] for name in options.runs}
    if options.model is not None:
        runs["real model"] = (2, f"{REAL} --model {options.model.resolve()}")
    num_different = 0
    with tempfile.TemporaryDirectory(prefix="same-") as temporary, checkout(commit) as other:
        place = Path(temporary)
        theirs = (options.kept or place / "kept").resolve() / commit
        theirs.mkdir(parents=True, exist_ok=True)
        (theirs / "waiting_rewards.py").write_text(REWARD, encoding="utf-8")
        warm = theirs / "warm start"
        if not warm.is_dir():
            flags = "--warm-start-steps 150 --max-steps 0 --eval-tasks-per-domain 1 --eval-trials 1"
            play(other, theirs, warm, 2, f"{flags} --report-to none")
        save_window_model(warm / "checkpoints" / "warm-start", theirs / "window")
        for name, (num_ranks, flags) in runs.items():
            if name != "real model":
                flags = f"{SHORT} {flags}"
            begun = time.perf_counter()
            if not (theirs / name / "report.html").is_file():
                shutil.rmtree(theirs / name, ignore_errors=True)
                play(other, theirs, theirs / name, num_ranks, flags)
            play(ROOT, theirs, place / name, num_ranks, flags)
            differences = list(compared(theirs / name, place / name))
            num_different += bool(differences)
            seconds = time.perf_counter() - begun
            print(f"{name:<24}{'DIFFERS' if differences else 'equal':<9}{seconds:6.1f} s")
            print(*(f"  {line}\n" for line in differences[:12]), sep="", end="", flush=True)
    print("  ".join(f"{name} {value}" for name, value in machine().items()))
    print(f"{len(runs) - num_different} of {len(runs)} runs equal those of {commit} bit by bit")
    return int(num_different > 0)


def git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout.strip()


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """The files of a commit in a folder of their own, which is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="same-") as temporary:
        packed = Path(temporary) / "files.tar"
        git("archive", "--output", str(packed), commit)
        folder = Path(temporary) / "checkout"
        folder.mkdir()
        subprocess.run(["tar", "-xf", str(packed), "-C", str(folder)], check=True)
        yield folder


def save_window_model(tokenizer: Path, folder: Path) -> None:
    """Save a random Gemma 3 whose attention sees fewer tokens than a conversation has."""
    import torch
    from transformers import AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig

    if folder.is_dir():
        return
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    config = Gemma3TextConfig(
        vocab_size=len(loaded),
        hidden_size=64,
        intermediate_size=128,
        head_dim=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=48,
        bos_token_id=None,
        eos_token_id=loaded.eos_token_id,
        pad_token_id=loaded.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Gemma3ForCausalLM(config).save_pretrained(folder)
    loaded.save_pretrained(folder)


def play(code: Path, shared: Path, folder: Path, num_ranks: int, flags: str) -> None:
    """Run a checkout's pipeline into a folder; KILLED is killed after its first checkpoint."""
    places = {
        "MODEL": str(shared / "warm start" / "checkpoints" / "warm-start"),
        "WINDOW": str(shared / "window"),
        "REWARDS": "waiting_rewards:digits",
    }
    given = [places.get(word, word) for word in shlex.split(flags)]
    flags = [*given, "--num-gpus", str(num_ranks), "--output-dir", str(folder)]
    log = folder.with_name(f"{folder.name}.log")
    place: dict[str, Any] = {"script": code / "pipeline" / "run.py", "cwd": code}
    place["PYTHONPATH"] = f"{code}:{shared}"
    if folder.name == KILLED:
        run = start_run(flags, log, **place)
        while run.poll() is None and not saved_step(folder):
            time.sleep(0.05)
        assert run.poll() is None, "the run has ended before its kill"
        everyone = family(run.pid)
        send(signal.SIGKILL, everyone)
        assert not still_alive(everyone, LIMIT_S)
        flags.append("--resume-from-checkpoint=latest")
    finish_run(flags, log, **place)


def compared(theirs: Path, ours: Path) -> Iterator[str]:
    """One line for each file or metric that differs between two run folders."""
    yield from compared_lines(theirs / "metrics.jsonl", ours / "metrics.jsonl")
    for pattern in ("trajectories/*/*", "checkpoints/*/*.safetensors", "checkpoints/*/*.pt"):
        names = {
            str(path.relative_to(side)) for side in (theirs, ours) for path in side.glob(pattern)
        }
        for name in sorted(names):
            if digest(theirs / name) != digest(ours / name):
                missing = [s for s in (theirs, ours) if not (s / name).is_file()]
                yield f"{name}: {'only on one side' if missing else 'other content'}"


def compared_lines(theirs: Path, ours: Path) -> Iterator[str]:
    rows = [[json.loads(line) for line in side.read_text().splitlines()] for side in (theirs, ours)]
    if len(rows[0]) != len(rows[1]):
        yield f"metrics.jsonl: {len(rows[0])} lines there, {len(rows[1])} here"
    for number, (their, our) in enumerate(zip(*rows, strict=False), 1):
        for key in sorted({*their, *our}):
            if their.get(key) != our.get(key):
                yield f"metrics.jsonl:{number} {key}: {their.get(key)} there, {our.get(key)} here"


def digest(path: Path) -> str:
    """SHA-256 of a file's content, unpacked; "" if there is no such file."""
    if not path.is_file():
        return ""
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return hashlib.sha256(content).hexdigest()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
