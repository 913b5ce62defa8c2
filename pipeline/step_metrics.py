"""What is logged of a step: means over its episodes on all ranks, and where its seconds went."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pipeline.distributed import Ranks
from pipeline.policy import uses_bf16
from pipeline.session import Run
from pipeline.trajectory import StopReason, Trajectory


def rollout_metrics(run: Run, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Means over the step's episodes on all ranks.

    They are reward per domain, stop reasons, dead groups and tokens.
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
    stops, rest = rest[: len(StopReason)], rest[len(StopReason) :]
    counts, sums = rest[: len(domains)], rest[len(domains) :]
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


def over_iterations(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """Statistics of the updates of one step: their means; the gap to the sampler of the first."""
    means = {name: sum(row[name] for row in found) / len(found) for name in found[0]}
    return means | {name: found[0][name] for name in means if "logprob_gap" in name}


def warn_of_gap(run: Run, statistics: dict[str, float]) -> None:
    """Once a run, say that training computes other log-probabilities than the sampler did."""
    limit = run.config.grpo.logprob_gap_limit
    limit = limit or (0.5 if uses_bf16(run.config.model) else 1e-3)
    gap = statistics.get("train/logprob_gap", 0.0)
    if gap <= limit or run.warned_of_gap:
        return
    run.warned_of_gap = True
    if run.ranks.is_main:
        print(
            f"warning: step {run.state.step + 1}: a log-probability differs by {gap:.2g} between "
            f"sampler and training (logprob_gap_limit {limit:g}); see train/logprob_gap",
            flush=True,
        )


class Timer:
    """Where the seconds of a step went, on this rank: `perf/sample_s` and so on, by phase."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._before = ranks, dict(ranks.seconds)
        self._begun = time.perf_counter()

    def timings(self, metrics: dict[str, float]) -> dict[str, float]:
        """The step's seconds so far, and its rate."""
        seconds = time.perf_counter() - self._begun
        spent = {
            f"perf/{name}_s": self._ranks.seconds[name] - self._before.get(name, 0.0)
            for name in ("sample", "update", "wait")
        }
        rate = metrics["rollout/episodes"] / seconds
        return {**spent, "perf/step_s": seconds, "perf/episodes_per_s": rate}
