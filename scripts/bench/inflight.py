"""Measure rollouts with slow customers: the wall time against the least possible time.

Each episode talks with a customer of its own, whose replies take lognormal times, as replies of a
language model behind an endpoint do. The tiny model samples the agent's messages. The same episodes
are also played with customers who reply at once, in the thread of the rollout.

No rollout can be faster than the longest episode's own sum of latencies, or than the sampler's work
at zero latency. The script prints the wall time divided by the larger of the two, and ends with
exit code 1 if the ratio is above 1.5, or if more than 1 % of the episodes have other tokens than at
zero latency. (The random numbers are the same; rounding depends on the batch and may rarely turn a
token.)

    python scripts/bench/inflight.py --customers 64 --turns 16 --median 1 --steps 8 \\
        --partial-rollout-tokens 48

With `--partial-rollout-tokens`, the script plays `--steps` steps, in each of which one episode per
customer begins: to its end, and as partial rollouts, of which the last step plays all to their
end. It prints episodes per second of both, without any update, and ends with exit code 1 if partial
rollouts are less than 1.5 times as fast.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean
from typing import Any

import torch
from common import machine, parser_of, write_json

from pipeline.config.settings import RolloutSettings
from pipeline.data.rng import stream_key
from pipeline.data.tasks import Task
from pipeline.environments import Domain
from pipeline.models.chat.template import Chat
from pipeline.models.tiny import tiny_model, tiny_tokenizer
from pipeline.rollout.episode import Episode
from pipeline.rollout.rollout import Rollout, RolloutRequest, SamplerPolicy
from pipeline.rollout.samplers.own import RowSampler
from pipeline.rollout.trajectory import Trajectory

MOST_RATIO = 1.5  # of the wall time to the least possible time
LEAST_RATIO = 1.5  # of episodes per second with partial rollouts to those without
MOST_TURNED = 0.01  # share of episodes with other tokens than at zero latency
MESSAGE_TOKENS = 48  # largest length of a message
STOP_EVERY = 12  # one of this number of token ids ends a message, so that lengths differ


def main(argv: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--customers", type=int, nargs="+", default=[32, 256, 512])
    parser.add_argument("--turns", type=int, default=6, help="replies of each customer")
    parser.add_argument("--median", type=float, default=0.5, help="of a reply's seconds")
    parser.add_argument("--sigma", type=float, default=0.8, help="of the seconds' logarithm")
    parser.add_argument("--partial-rollout-tokens", type=int, default=0)
    parser.add_argument("--max-staleness", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    where = machine()
    figures: dict[str, float] = {}
    if arguments.partial_rollout_tokens:
        return compare_steps(arguments, where)
    print("customers  wall s  longest s  sampler s  ratio  other tokens")
    for count in arguments.customers:
        found = measure(count, arguments)
        print(
            f"{count:9}  {found['wall_s']:6.2f}  {found['longest_s']:9.2f}  "
            f"{found['sampler_s']:9.2f}  {found['ratio']:5.2f}  {found['turned']:12.0f}",
            flush=True,
        )
        figures |= {f"{count}/{name}": value for name, value in found.items()}
    write_json(arguments.json, figures, where, vars(arguments))
    slow = any(figures[f"{count}/ratio"] > MOST_RATIO for count in arguments.customers)
    other = any(figures[f"{n}/turned"] > math.ceil(MOST_TURNED * n) for n in arguments.customers)
    return int(slow or other)


@dataclass(kw_only=True)
class Customer:
    """A customer who replies at once, `turns` times in all; the last reply is None."""

    name: str
    turns: int
    median: float
    sigma: float
    turn: int = 0

    def answer(self) -> str | None:
        self.turn += 1
        return None if self.turn == self.turns else f"customer {self.name} says {self.turn}"

    def reply(self, message: str) -> Any:
        return self.answer()


class Slow(Customer):
    """A customer whose replies take the seconds of `latency`."""

    async def reply(self, message: str) -> Any:
        await asyncio.sleep(latency(self.name, self.turn, self.median, self.sigma))
        return self.answer()


def latency(customer: str, turn: int, median: float, sigma: float) -> float:
    """The seconds of a customer's reply."""
    return Random(f"{customer}/{turn}").lognormvariate(math.log(median), sigma)


def environment_of(kind: type[Customer], **fields: Any) -> type[Any]:
    class Desk:
        def reset(self, **row: Any) -> None:
            self.user = kind(name=row["id"], **fields)

    return Desk


class TimedSampler(RowSampler):
    """Adds up the seconds of all calls."""

    busy_s = 0.0

    def _timed(self, call: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
        begun = time.perf_counter()
        result = call(*arguments, **settings)
        self.busy_s += time.perf_counter() - begun
        return result

    def open(self, *arguments: Any) -> Any:
        return self._timed(super().open, *arguments)

    def sample(self, *arguments: Any, **settings: Any) -> Any:
        return self._timed(super().sample, *arguments, **settings)


def measure(count: int, arguments: argparse.Namespace) -> dict[str, float]:
    times = {"median": arguments.median, "sigma": arguments.sigma}
    fields = {"turns": arguments.turns, **times}
    at_once, busy_s, _ = play(count, environment_of(Customer, **fields))
    slow, _, wall_s = play(count, environment_of(Slow, **fields))
    turned = sum(a.completion_ids != b.completion_ids for a, b in zip(at_once, slow, strict=True))
    # An episode whose message was too long has made fewer calls.
    longest_s = max(
        sum(latency(t.task_id, turn, **times) for turn in range(num_replies(t, arguments.turns)))
        for t in slow
    )
    return {
        "wall_s": wall_s,
        "longest_s": longest_s,
        "sampler_s": busy_s,
        "ratio": wall_s / max(longest_s, busy_s),
        "turned": turned,
    }


def compare_steps(arguments: argparse.Namespace, where: dict[str, Any]) -> int:
    """Compare steps that wait for their longest episode with steps of partial rollouts."""
    figures: dict[str, float] = {}
    print("customers  episodes/s  ... partial  ratio  staleness: mean  most")
    for count in arguments.customers:
        whole, _ = play_steps(count, arguments, math.inf)
        partial, staleness = play_steps(count, arguments, arguments.partial_rollout_tokens)
        found = {"whole": whole, "partial": partial, "ratio": partial / whole}
        found |= {"staleness": fmean(staleness), "most": max(staleness)}
        print(
            f"{count:9}  {whole:10.2f}  {partial:11.2f}  {found['ratio']:5.2f}  "
            f"{found['staleness']:15.2f}  {found['most']:4.0f}",
            flush=True,
        )
        figures |= {f"{count}/{name}": value for name, value in found.items()}
    write_json(arguments.json, figures, where, vars(arguments))
    return int(any(figures[f"{count}/ratio"] < LEAST_RATIO for count in arguments.customers))


def play_steps(count: int, arguments: argparse.Namespace, tokens: float) -> tuple[float, list[int]]:
    """Return episodes per second of steps, and the staleness of each token."""
    fields = {"turns": arguments.turns, "median": arguments.median, "sigma": arguments.sigma}
    rollout, _ = rollout_of(environment_of(Slow, **fields), 10 * count)
    staleness = list[int]()
    playing = list[Episode]()
    begun = time.perf_counter()
    for step in range(arguments.steps):
        names = (f"{step}-{number}" for number in range(count))
        playing += rollout.begin([replace(request(name), begun=step) for name in names])
        for episode in playing:
            must_end = (
                step + 1 == arguments.steps or step - episode.begun >= arguments.max_staleness
            )
            episode.pace.most = math.inf if must_end else tokens
            episode.pace.version = step
        rollout.go_on(playing)
        ended = [episode for episode in playing if episode.has_ended]
        staleness += [step - version for t in rollout.end(ended) for version in t.versions]
        rollout.drop(ended)
        playing = [episode for episode in playing if episode not in ended]
    return arguments.steps * count / (time.perf_counter() - begun), staleness


def num_replies(trajectory: Trajectory, turns: int) -> int:
    is_over = trajectory.stop_reason == "completed"
    return turns if is_over else sum(m["role"] == "user" for m in trajectory.messages) - 1


def play(count: int, environment: type[Any]) -> tuple[list[Trajectory], float, float]:
    """Play one episode with each customer; return (episodes, sampler's seconds, wall seconds)."""
    rollout, sampler = rollout_of(environment, count)
    requests = [request(str(number)) for number in range(count)]
    begun = time.perf_counter()
    trajectories = rollout(requests)
    wall_s = time.perf_counter() - begun
    errors: Sequence[str] = [t.error for t in trajectories if t.error]
    assert not errors, errors[0]
    return trajectories, sampler.busy_s, wall_s


def rollout_of(environment: type[Any], most: int) -> tuple[Rollout, TimedSampler]:
    """Return a rollout of at most so many episodes at once, and its sampler."""
    tokenizer = tiny_tokenizer()
    chat = Chat(tokenizer)
    model = tiny_model(tokenizer, seed=1)
    stops = range(0, len(tokenizer), STOP_EVERY)
    sampler = TimedSampler(model, chat.end_of_turn_id, 1.0, torch.float32, other_stops=stops)
    limits = RolloutSettings(
        max_turns=1000,
        max_tokens=4000,
        max_tokens_per_turn=MESSAGE_TOKENS,
        max_concurrent_episodes=most,
    )
    domains = {"desk": Domain(name="desk", environment=environment)}
    return Rollout(SamplerPolicy(sampler, chat, limits), chat, domains, limits), sampler


def request(name: str) -> RolloutRequest:
    prompt = ({"role": "user", "content": f"customer {name} says 0"},)
    task = Task(domain="desk", id=name, prompt=prompt, payload="{}")
    return RolloutRequest(task=task, trial=0, key=stream_key(1, name))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
