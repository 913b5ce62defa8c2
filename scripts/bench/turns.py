"""What measuring two trainers in turns needs: processes, the model, tasks, forced messages.

A side is one trainer on one or more ranks, each a process of its own. It sets itself up, does one
unit of its work (a step, say) to warm up, answers with one line of JSON, and stands still until it
is sent a line, for which it does the next unit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import ROOT, model_of, ratios_of, ready

if TYPE_CHECKING:
    from pipeline.data.tasks import Task
    from pipeline.preflight.prepare import Prepared

HERE = Path(__file__).resolve().parent
TOOL_TURNS = 4  # of a forced episode, before its last message
PARTING_TURN = 2  # in which the forced siblings of a group begin to differ
# What a launcher tells a process of its place.
PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a side does, handed to its processes as JSON."""

    kind: str  # what a unit is: a step, sampling (of a step's episodes) or update (on fixed ones)
    flags: list[str]  # of pipeline/run.py; TRL's settings are made from them as well
    num_units: int  # with the one to warm up
    device: str = "cpu"
    forced: bool = False  # every episode says what `script_of` its task holds
    batch: int = 8  # per_device_train_batch_size of TRL
    steps_per_generation: int = 1
    exchange: str = ""  # the folder with the trajectories of an update
    microbatch_tokens: int = 0  # of ours in an update; 0: as many as TRL's batch has


class Gate:
    """Where a side's process stands between units."""

    def __init__(self, device: str) -> None:
        self._device, self._begun = device, (time.perf_counter(), time.process_time())
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print goes to the log
        self._level = resident_mb("VmRSS")

    def __call__(self, facts: Mapping[str, float]) -> None:
        """Answer for the unit that ends here, and wait for the next; without one, exit."""
        ready(self._device)
        now = (time.perf_counter(), time.process_time())
        seconds, cpu_s = (b - a for a, b in zip(self._begun, now, strict=True))
        answer = {"seconds": seconds, "cpu_s": cpu_s, "peak_mb": self._peak_mb(), **facts}
        print(json.dumps(answer), file=self._out, flush=True)
        if not sys.stdin.readline():
            os._exit(0)  # a live gloo group may abort the process on its way out
        self._begun = (time.perf_counter(), time.process_time())

    def _peak_mb(self) -> float:
        if self._device == "cuda":
            import torch

            return torch.cuda.max_memory_allocated() / 1e6
        return resident_mb("VmHWM") - self._level


def resident_mb(name: str) -> float:
    """Resident memory of this process in MB, now (VmRSS) or at its peak (VmHWM).

    Unlike `ru_maxrss`, the peak leaves out what the parent held when it started the process.
    """
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError(f"/proc/self/status has no {name}")


class Side:
    """One trainer's processes, from the parent's end."""

    def __init__(self, script: str, work: Work, num_ranks: int, threads: int, log: Path) -> None:
        self._name, self._log = script, log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environ = {key: value for key, value in os.environ.items() if key not in PLACE}
        environ |= {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
        environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"}
        if work.device == "cpu":
            environ["ACCELERATE_USE_CPU"] = "true"
        self._processes = []
        for rank in range(num_ranks):
            if num_ranks > 1:
                values = [rank, rank, num_ranks, num_ranks, "127.0.0.1", port]
                environ |= {name: str(v) for name, v in zip(PLACE, values, strict=True)}
            with log.open("a") as file:
                command = [sys.executable, str(HERE / script), json.dumps(asdict(work))]
                process = subprocess.Popen(
                    command,
                    env=environ,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=file,
                    text=True,
                )
            self._processes.append(process)

    def wait(self) -> dict[str, float]:
        """The answer of all ranks: the longest time, the largest memory, sums of what they did."""
        answers: list[dict[str, float]] = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            while line and not line.startswith("{"):  # a library prints as it is imported
                line = process.stdout.readline()
            if not line:
                said = self._log.read_text(encoding="utf-8", errors="replace")[-3000:]
                raise RuntimeError(f"{self._name} ended before its work was done:\n{said}")
            answers.append(json.loads(line))
        worst = ("seconds", "sample_s", "peak_mb", "padded_tokens")
        return {
            name: (max if name in worst else sum)(answer[name] for answer in answers)
            for name in answers[0]
        }

    def unit(self) -> dict[str, float]:
        """Do one unit of work."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        return self.wait()

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()


def in_turns(
    ours: Side, theirs: Side, repeats: int, kind: str
) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Pairs of units, one after the other; who goes first alternates."""
    found: tuple[list[dict[str, float]], list[dict[str, float]]] = ([], [])

    def once(side: Side, kept: list[dict[str, float]]) -> float:
        kept.append(complete(side.unit(), kind))
        return kept[-1]["s"]

    ratios_of(partial(once, ours, found[0]), partial(once, theirs, found[1]), repeats)
    return list(zip(*found, strict=True))


def complete(facts: Mapping[str, float], kind: str) -> dict[str, float]:
    """A unit's facts, and what follows from them; `s` is the time of what is compared."""
    sample_s = facts.get("sample_s", 0.0)
    rest_s = facts["seconds"] - sample_s
    seconds = rest_s if kind == "update" else facts["seconds"]
    return {
        **facts,
        **{"s": seconds, "sample_s": sample_s, "rest_s": rest_s},
        "episodes_per_s": facts["episodes"] / seconds,
        "tokens_per_s": facts["tokens"] / seconds,
        "tokens_per_episode": facts["tokens"] / facts["episodes"],
        "reward": facts["reward"] / facts["episodes"],
    }


def without_users(parts: Prepared) -> Prepared:
    """The parts of a run, with only those tasks that TRL can play: the ones without a user."""
    from pipeline.environments.trl_adapter import rows_without_user

    train: dict[str, Sequence[Task]] = {}
    for domain, tasks in parts.train.items():
        kept = {row["id"] for row in rows_without_user(tasks, parts.environments)}
        train[domain] = [task for task in tasks if task.id in kept]
    return dataclasses.replace(parts, train=train)


def script_of(task: Task, parts: Prepared, sibling: int) -> list[list[int]]:
    """The messages of a forced episode, in tokens; they depend on the task and its sibling alone.

    The look-up that the domain's expert begins with, `TOOL_TURNS` times, then "Done.". The siblings
    of a group say the same until `PARTING_TURN`, from which on each asks for other ids.
    """
    from pipeline.embedded.generation import IDS
    from pipeline.environments import run_expert

    domain = parts.domains[task.domain]
    assert domain.expert is not None, f"{domain.name} has no expert to begin with"
    messages, _ = run_expert(domain.environment(), domain.expert, task)
    look_up = next(message for message in messages if message.get("tool_calls"))
    function = look_up["tool_calls"][0]["function"]
    said: list[dict[str, Any]] = []
    for turn in range(TOOL_TURNS):
        other = IDS[(sibling * TOOL_TURNS + turn) % len(IDS)]
        parted = turn >= PARTING_TURN
        arguments = {
            name: other if parted and value in IDS else value
            for name, value in function["arguments"].items()
        }
        changed = {**function, "arguments": arguments}
        said.append({**look_up, "tool_calls": [{"type": "function", "function": changed}]})
    said.append({"role": "assistant", "content": "Done."})
    return [parts.chat.message_ids(message) for message in said]


def siblings(names: Sequence[Any]) -> list[int]:
    """Which sibling each is of those with its name, in the order that they come in."""
    seen: Counter[Any] = Counter()
    found = []
    for name in names:
        found.append(seen[name])
        seen[name] += 1
    return found


def make_model(options: argparse.Namespace, folder: Path) -> str:
    """The folder of the model that both sides start from: warm-started, or random weights."""
    if options.shape != "tiny":
        return random_model(folder / "random", options, options.shape)
    flags = ["--max-steps", "0", "--warm-start-steps", str(options.warm_start_steps)]
    flags += ["--eval-tasks-per-domain", "8", "--eval-trials", "1", "--report-to", "none"]
    flags += ["--num-gpus", "1", "--output-dir", str(folder / "warm")]
    run = [sys.executable, str(ROOT / "pipeline" / "run.py"), *flags]
    subprocess.run(run, check=True, stdout=subprocess.DEVNULL)
    return str(folder / "warm" / "checkpoints" / "warm-start")


def random_model(path: Path, options: argparse.Namespace, shape: str, **fields: int) -> str:
    """The folder of a model with random weights and the embedded tokenizer."""
    from transformers.utils import logging

    from pipeline.models.tiny import tiny_tokenizer

    logging.disable_progress_bar()
    own = {"num_hidden_layers": options.layers, "vocab_size": options.vocab_size}
    fields |= {name: value for name, value in own.items() if value is not None}
    model_of(shape, **fields).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)
