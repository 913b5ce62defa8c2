"""The metrics of a step, which the seed determines: means over its episodes on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipeline.config.settings import Config
from pipeline.distributed.ranks import Ranks
from pipeline.evaluation.transfer_metrics import succeeded
from pipeline.grpo.algorithm import zero_std_groups
from pipeline.grpo.collect import RolloutBatch
from pipeline.grpo.collect import left_out as is_left_out
from pipeline.rollout.trajectory import LEFT_OUT, StopReason, Trajectory

# Metrics of groups without a signal, by how these groups ended; `few`: all episodes are left out,
# or all but one.
ENDS = ("failed", "solved", "few")
DEAD = {
    "frac_reward_zero_std": ENDS,
    "all_failed": ("failed",),
    "all_solved": ("solved",),
    "too_few_left": ("few",),
}


def rollout_metrics(
    batch: RolloutBatch, ranks: Ranks, config: Config
) -> tuple[dict[str, float], dict[str, tuple[int, int]]]:
    """Means over the episodes of the stage's own groups on all ranks, and error counts.

    The means are reward (of episodes that are not left out), zero-std groups, stop reasons and
    tokens, also by domain. Further episodes of dynamic sampling are only counted, so that runs
    with and without it can be compared. Errors and left-out episodes are counted among all.
    The second value has, for each domain, the numbers of all episodes and of environment errors.
    """
    size, domains = config.rollout.num_generations, config.data.domains
    counts = _counts(batch, size, domains, config.evaluation.success_threshold)
    total = dict(zip(counts, ranks.sum(list(counts.values())), strict=True))
    here = [domain for domain in domains if total[f"groups {domain}"]]
    judged = [domain for domain in here if total[f"judged {domain}"]]
    episodes = total["episodes"]
    metrics: dict[str, float] = {}
    if judged:
        rewards, count = (sum(total[f"{n} {d}"] for d in judged) for n in ("reward", "judged"))
        metrics["reward/mean"] = rewards / count
        metrics |= {f"reward/{d}": total[f"reward {d}"] / total[f"judged {d}"] for d in judged}
    left_out = {f"{kind}/{d}": total[f"{kind} {d}"] for kind in LEFT_OUT for d in domains}
    metrics |= {
        "rollout/episodes": episodes,
        "rollout/sampled_tokens": total["tokens"],
        "rollout/turns": total["turns"] / episodes,
        "rollout/tool_errors": total["tool errors"],
        "rollout/environment_errors": sum(total[f"errors {domain}"] for domain in domains),
        "rollout/left_out": sum(left_out.values()),
        **{f"rollout/left_out/{name}": count for name, count in left_out.items() if count},
    }
    for kind, ends in DEAD.items():
        dead = {d: sum(total[f"{end} {d}"] for end in ends) for d in here}
        metrics[f"rollout/{kind}"] = sum(dead.values()) * size / episodes
        metrics |= {f"rollout/{kind}/{d}": dead[d] / total[f"groups {d}"] for d in here}
    metrics |= {f"rollout/stop/{r}": total[f"stop {r}"] / episodes for r in StopReason}
    if config.grpo.dynamic_sampling:
        replacements = sum(batch.rounds[1:])
        metrics["rollout/rounds"] = len(batch.rounds) - 1
        metrics["rollout/replaced_groups"] = replacements
        metrics["rollout/extra_episodes"] = replacements * size
    return metrics, {d: (int(total[f"played {d}"]), int(total[f"errors {d}"])) for d in domains}


def _counts(
    batch: RolloutBatch, size: int, domains: Sequence[str], threshold: float
) -> dict[str, float]:
    """Sums of this rank; the same names in the same order on every rank."""
    first, played = batch.first, batch.trajectories
    rewards = torch.tensor([t.reward for t in first], dtype=torch.float64)
    dead = zero_std_groups(rewards, size, ~is_left_out(first)).tolist()
    groups = range(0, len(first), size)
    ends = [(first[i].domain, dead[i] and _end(first[i : i + size], threshold)) for i in groups]
    counts: dict[str, float] = {
        "episodes": len(first),
        "tokens": sum(t.num_sampled_tokens for t in first),
        "turns": sum(t.num_turns for t in first),
        "tool errors": sum(t.num_tool_errors for t in played),
        **{f"stop {r}": sum(t.stop_reason == r for t in first) for r in StopReason},
    }
    for domain in domains:
        judged = [t.reward for t in first if t.domain == domain and not t.left_out]
        all_of = [t for t in played if t.domain == domain]
        counts |= {
            f"reward {domain}": sum(judged),
            f"judged {domain}": len(judged),
            f"groups {domain}": sum(of_group == domain for of_group, _ in ends),
            f"played {domain}": len(all_of),
            f"errors {domain}": sum(t.stop_reason is StopReason.ENVIRONMENT_ERROR for t in all_of),
            **{f"{end} {domain}": ends.count((domain, end)) for end in ENDS},
            **{f"{kind} {domain}": sum(t.left_out == kind for t in all_of) for kind in LEFT_OUT},
        }
    return counts


def _end(group: Sequence[Trajectory], threshold: float) -> str:
    """How a zero-std group ended."""
    rewards = [t.reward for t in group if not t.left_out]
    if len(rewards) < 2:
        return "few"
    return "solved" if succeeded(rewards[0], threshold) else "failed"


def over_iterations(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means over the updates of one step that were not skipped, or over all if all were.

    The difference from the sampler is taken from the first update.
    """
    done = [row for row in updates if not row["train/skipped"]] or updates
    means = {name: sum(row[name] for row in done) / len(done) for name in done[0]}
    means["train/skipped"] = sum(row["train/skipped"] for row in updates) / len(updates)
    return means | {name: updates[0][name] for name in means if "sampling_logp_difference" in name}
