"""Measure the CPU time of a request at the address of a policy, beside `policy.message`.

    python scripts/bench/address.py

The same episodes of the embedded airline are played with a warm tiny model, by a loop that asks
`policy.message`, and by one that sends requests. Its client is a cheap one (aiohttp, one session
for all episodes); the client and the environment run in a thread of their own, whose time is given
apart. The judged figure is the rest of the process, that is the sampler, `policy.message` and the
server: the exit code is 1 if it is above 4.5 ms with 64 episodes. Other jobs on the machine make
CPU times longer, so of each way the least of several rollouts counts.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.config.settings import RolloutSettings
from pipeline.data.rng import stream_key
from pipeline.data.tasks import Message, Task
from pipeline.environments import Domain
from pipeline.models.chat.template import Chat
from pipeline.rollout.rollout import Rollout, RolloutRequest, SamplerPolicy
from pipeline.rollout.samplers.own import RowSampler
from pipeline.rollout.trajectory import Trajectory
from scripts.bench.common import finish_run, machine, parser_of, write_json
from scripts.proofs.agents_airline import TOOLS, generate_tasks, play_direct, played_with

MOST_MS = 4.5
JUDGED = 64  # episodes
GROUP = 8
LIMITS = RolloutSettings(max_turns=32, max_tokens_per_turn=40, max_tokens=256)
WARM_START = (
    "--domains airline --warm-start-steps 150 --max-steps 0 --eval-tasks-per-domain 1 "
    "--eval-trials 1 --report-to none"
)
Loop = Callable[[Any, Task], Any]


def main(argv: Sequence[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, help="folder of a warm start (default: makes one)")
    parser.add_argument("--episodes", type=int, nargs="+", default=[JUDGED, 256])
    parser.add_argument("--times", type=int, default=5, help="rollouts of each way")
    options = parser.parse_args(argv)
    where = machine()
    with tempfile.TemporaryDirectory(prefix="address-") as temporary:
        model = options.model or warm_start(Path(temporary))
        figures = measure(model, options.episodes, options.times)
    print("  ".join(f"{name} {value}" for name, value in where.items()))
    write_json(options.json, figures, where, vars(options))
    judged = figures.get(f"{JUDGED}/address/ms", 0.0)
    return int(judged > MOST_MS)


def warm_start(folder: Path) -> Path:
    """Train a tiny model on demonstrations of the airline; return the folder of its checkpoint."""
    finish_run([*WARM_START.split(), "--output-dir", str(folder / "warm")], folder / "warm.log")
    return folder / "warm" / "checkpoints" / "warm-start"


def measure(model: Path, sizes: Sequence[int], times: int) -> dict[str, float]:
    """Print and return the milliseconds of a request, by number of episodes and way."""
    torch.set_num_threads(1)
    figures = dict[str, float]()
    ways: dict[str, Loop] = {"policy.message": play_direct, "address": play_cheaply}
    print("episodes  way             requests  ms  of it main  server  apart: loop and client")
    for size in sizes:
        best = dict[str, dict[str, float]]()
        for _ in range(times):  # in turns, so that the machine is the same to both
            for way, loop in ways.items():
                found = cost(model, loop, size)
                best[way] = min(best.get(way, found), found, key=lambda of: of["ms"])
        for way, of in best.items():
            print(
                f"{size:8}  {way:14}  {of['requests']:8.0f}  {of['ms']:4.2f}  {of['main']:8.2f}  "
                f"{of['server']:6.2f}  {of['apart']:6.2f}",
                flush=True,
            )
            figures |= {f"{size}/{way}/{name}": value for name, value in of.items()}
    return figures


def cost(model: Path, loop: Loop, size: int) -> dict[str, float]:
    """The milliseconds of CPU of a request: in the main thread, the server's and the loops'."""
    clocks = list[tuple[int, float]]()  # of the thread of the loops, from the first call on

    async def watched(policy: Any, task: Task) -> float:
        if not clocks:
            clocks.append((threading.get_ident(), time.thread_time()))
        return float(await loop(policy, task))

    rollout = rollout_of(model, watched)
    asked = requests(size // GROUP, GROUP)
    gc.collect()
    whole, main = time.process_time(), time.thread_time()
    episodes = rollout(asked)
    whole, main = time.process_time() - whole, time.thread_time() - main
    [(thread, begun)] = clocks
    apart = time.clock_gettime(time.pthread_getcpuclockid(thread)) - begun
    for running, session in sessions.items():
        asyncio.run_coroutine_threadsafe(session.close(), running).result()
    sessions.clear()
    if errors := errors_of(episodes):
        raise RuntimeError(errors[0])
    count = sum(episode.num_turns for episode in episodes)
    of = {"ms": whole - apart, "main": main, "server": whole - apart - main, "apart": apart}
    return {"requests": count, **{name: 1e3 * seconds / count for name, seconds in of.items()}}


sessions = dict[Any, Any]()  # of each event loop


async def play_cheaply(policy: Any, task: Task) -> float:
    """Play with one session of aiohttp for all episodes."""
    import aiohttp

    running = asyncio.get_running_loop()
    if running not in sessions:
        sessions[running] = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    url = f"{policy.base_url}/chat/completions"

    async def ask(messages: list[Message]) -> Message:
        body = {"messages": messages, "tools": TOOLS}
        async with sessions[running].post(url, json=body) as reply:
            found = await reply.json()
        if reply.status != 200:
            raise RuntimeError(found)
        message: Message = found["choices"][0]["message"]
        return message

    return await played_with(ask, task)


class CountingSampler(RowSampler):
    """Counts messages. The first `num_slow` calls take `slow_s` more, and wait for `is_held`."""

    num_messages = 0
    num_slow = 0
    slow_s = 0.7
    is_held: Callable[[], bool] | None = None

    def sample(self, *arguments: Any, **settings: Any) -> Any:
        if self.num_slow > 0:
            self.num_slow -= 1
            time.sleep(self.slow_s)
            while self.is_held is not None and self.is_held():
                time.sleep(0.05)
        messages = super().sample(*arguments, **settings)
        self.num_messages += sum(message is not None for message in messages)
        return messages


def rollout_of(model: Path, loop: Loop, deterministic: bool = False) -> Rollout:
    """A rollout of the domain `desk` with a loop, sampled by a model in a folder."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    chat = Chat(tokenizer)
    sampler = CountingSampler.of_settings(loaded, LIMITS, torch.float32, [chat.end_of_turn_id])
    domains = {"desk": Domain(name="desk", loop=loop)}
    return Rollout(SamplerPolicy(sampler, chat, LIMITS), chat, domains, LIMITS, deterministic)


def requests(num_tasks: int, size: int) -> list[RolloutRequest]:
    """Groups of `size` episodes of tasks."""
    tasks = generate_tasks(0, num_tasks, "train", "medium")
    return [
        RolloutRequest(task=task, trial=trial, key=stream_key(0, task.id, trial))
        for task in tasks
        for trial in range(size)
    ]


def errors_of(episodes: Sequence[Trajectory]) -> list[str]:
    """The errors of episodes, with their numbers."""
    counts = Counter(episode.error for episode in episodes if episode.error)
    return [f"{count} x {error}" for error, count in counts.items()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
