"""Functions that measure two trainers alternately: processes, model, tasks, given messages.

A side is one trainer on one or more ranks, and each rank is a process. A side sets itself up, does
one unit of work (such as a step) to warm up, prints one line of JSON, and waits. For each line that
a side receives, the side does the next unit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import finish_run, memory_mb, model_of, ready

from scripts.proofs.ranks import free_port

if TYPE_CHECKING:
    from pipeline.data.tasks import Task
    from pipeline.preflight.parts import Parts

HERE = Path(__file__).resolve().parent
PLAIN_RUN = [  # flags of all compared runs
    *("--curriculum", "mixed", "--replay", "0", "--warm-start-steps", "0", "--save-steps", "0"),
    *("--stage-lr-decay", "constant", "--stage-warmup-steps", "0", "--validation-steps", "0"),
    *("--eval-tasks-per-domain", "8", "--report-to", "none"),
]
TOOL_TURNS = 4  # tool calls of an episode with given messages
PARTING_TURN = 2  # first turn in which the episodes of a group differ
# Environment variables that a launcher sets for each rank.
PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of a side. Its processes get the fields as JSON."""

    kind: str  # "step", "sampling" (of a step), "update" (on fixed episodes) or "block" (of steps)
    flags: list[str]  # flags of pipeline/run.py for both trainers
    num_units: int  # number of units, including the warm-up
    device: str = "cpu"
    forced: bool = False  # Episodes get the messages of `script_of`.
    batch: int = 8  # TRL's per_device_train_batch_size
    steps_per_generation: int = 1
    exchange: str = ""  # folder with the trajectories of an update
    microbatch_tokens: int = 0  # our token budget in an update; 0: TRL's
    rank: int = 0  # separate run: the rank whose work the process does
    of: int = 1  # separate run: the number of ranks
    block: int = 1  # steps per unit


class Gate:
    """Makes a process of a side wait between units."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._begun = (time.perf_counter(), time.process_time())
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # sends output of libraries to the log
        self._level = memory_mb("VmRSS")

    def __call__(self, facts: Mapping[str, float]) -> None:
        """Report the finished unit and wait for the next unit. Exit if there is no other unit."""
        ready(self._device)
        now = (time.perf_counter(), time.process_time())
        seconds, cpu_s = (b - a for a, b in zip(self._begun, now, strict=True))
        answer = {"seconds": seconds, "cpu_s": cpu_s, "peak_mb": self._peak_mb()}
        answer |= {"whole_mb": memory_mb("VmHWM"), **facts}
        print(json.dumps(answer), file=self._out, flush=True)
        if not sys.stdin.readline():
            os._exit(0)  # An open gloo group may abort a normal exit.
        self._begun = (time.perf_counter(), time.process_time())

    def _peak_mb(self) -> float:
        if self._device == "cuda":
            import torch

            return torch.cuda.max_memory_allocated() / 1e6
        return memory_mb("VmHWM") - self._level


class Side:
    """The parent's connection to the processes of one trainer."""

    def __init__(self, script: str, work: Work, num_ranks: int, threads: int, log: Path) -> None:
        self._name = script
        self._log = log
        port = free_port()
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
        """Combine the reports of all ranks: longest time, largest memory, sums of counts."""
        answers: list[dict[str, float]] = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            while line and not line.startswith("{"):  # skips output of imported libraries
                line = process.stdout.readline()
            if not line:
                said = self._log.read_text(encoding="utf-8", errors="replace")[-3000:]
                raise RuntimeError(f"{self._name} ended before its work was done:\n{said}")
            answers.append(json.loads(line))
        worst = ("seconds", "sample_s", "peak_mb", "whole_mb", "padded_tokens")
        return {
            name: (max if name in worst else sum)(answer[name] for answer in answers)
            for name in answers[0]
        }

    def unit(self) -> dict[str, float]:
        """Make the side do one unit of work, and return its facts."""
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
    """Run units of two sides alternately; the side that starts a pair alternates, too."""
    pairs = []
    for number in range(repeats):
        found: dict[Side, dict[str, float]] = {}
        for side in (ours, theirs) if number % 2 == 0 else (theirs, ours):
            found[side] = complete(side.unit(), kind)
        pairs.append((found[ours], found[theirs]))
    return pairs


def complete(facts: Mapping[str, float], kind: str) -> dict[str, float]:
    """Add derived figures to a unit's facts; `s` is the compared time in seconds."""
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


def without_users(parts: Parts) -> Parts:
    """The parts of a run, without tasks that have a user, because TRL has no user."""
    from trl_adapter import rows_without_user

    sets = dict(parts.tasks)
    for domain, tasks in parts.train.items():
        classes = {name: domain.environment for name, domain in parts.domains.items()}
        kept = {row["id"] for row in rows_without_user(tasks, classes)}
        train = [task for task in tasks if task.id in kept]
        sets[domain] = dataclasses.replace(parts.tasks[domain], train=train)
    return dataclasses.replace(parts, tasks=sets)


def script_of(task: Task, parts: Parts, sibling: int) -> list[list[int]]:
    """The tokens of the given messages of an episode.

    The first `TOOL_TURNS` messages call the tool that the domain's expert calls first; the last
    message is "Done.". Until `PARTING_TURN`, the messages of all episodes of a group are equal;
    later messages look up different ids.
    """
    from pipeline.environments import run_expert
    from pipeline.environments.embedded.cases import IDS

    domain = parts.domains[task.domain]
    assert domain.expert is not None, f"{domain.name} has no expert to begin with"
    messages, _ = run_expert(domain.make(), domain.expert, task)
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
    """Number the occurrences of each name, in order."""
    seen: Counter[Any] = Counter()
    found = []
    for name in names:
        found.append(seen[name])
        seen[name] += 1
    return found


def make_model(options: argparse.Namespace, folder: Path) -> str:
    """The folder of the initial model of both sides: warm-started, or with random weights."""
    if options.shape != "tiny":
        return random_model(folder / "random", options, options.shape)
    flags = [
        *("--max-steps", "0", "--warm-start-steps", str(options.warm_start_steps)),
        *("--eval-tasks-per-domain", "8", "--eval-trials", "1", "--report-to", "none"),
        *("--num-gpus", "1", "--output-dir", str(folder / "warm")),
    ]
    finish_run(flags, folder / "warm.log")
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
