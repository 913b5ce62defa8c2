"""What is logged of a step: means over its episodes on all ranks, and where its seconds went."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from pipeline.session import Run
from pipeline.trajectory import StopReason, Trajectory


def rollout_metrics(run: Run, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Means over the step's episodes on all ranks: reward per domain, stop reasons, dead groups,
    tokens.
    """
    domains, size = run.config.data.domains, run.config.rollout.num_generations
    groups = [trajectories[i : i + size] for i in range(0, len(trajectories), size)]
    alike = [group for group in groups if len({t.reward for t in group}) == 1]
    per_domain = [[t.reward for t in trajectories if t.domain == domain] for domain in domains]
    numbers = [
        float(len(trajectories)),
        float(len(groups)),
        float(sum(group[0].reward == 0 for group in alike)),
        float(sum(group[0].reward != 0 for group in alike)),
        float(sum(t.num_sampled_tokens for t in trajectories)),
        float(sum(t.num_turns for t in trajectories)),
        *(float(sum(t.stop_reason == reason for t in trajectories)) for reason in StopReason),
        *(float(len(rewards)) for rewards in per_domain),
        *(sum(rewards) for rewards in per_domain),
    ]
    episodes, num_groups, failed, solved, tokens, turns, *rest = run.ranks.sum(numbers)
    stops, counts = (
        rest[: len(StopReason)],
        rest[len(StopReason) : len(StopReason) + len(domains)],
    )
    sums = rest[len(StopReason) + len(domains) :]
    metrics = {
        "reward/mean": sum(sums) / episodes,
        **{f"reward/{d}": s / c for d, s, c in zip(domains, sums, counts, strict=True) if c},
        "rollout/episodes": episodes,
        "rollout/sampled_tokens": tokens,
        "rollout/turns": turns / episodes,
        "rollout/dead_groups": (failed + solved) / num_groups,
        "rollout/all_failed": failed / num_groups,
        "rollout/all_solved": solved / num_groups,
    }
    metrics |= {
        f"rollout/stop/{r}": count / episodes for r, count in zip(StopReason, stops, strict=True)
    }
    return metrics


class Timer:
    """Where the seconds of a step went, on this rank."""

    def __init__(self, run: Run) -> None:
        self._run, self._waited = run, run.ranks.seconds
        self._begun = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._laps[f"perf/{name}"] = now - self._last
        self._last = now

    def record(self, kind: str, stage: str, step: int, metrics: dict[str, float]) -> dict[str, Any]:
        seconds = time.perf_counter() - self._begun
        return {
            "kind": kind,
            "stage": stage,
            "step": step,
            **self._laps,
            "perf/wait_s": self._run.ranks.seconds - self._waited,
            "perf/step_s": seconds,
            "perf/episodes_per_s": metrics["rollout/episodes"] / seconds,
        }
