"""Metrics of a training step: means over the episodes of all ranks, determined by the seed."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from statistics import fmean

import torch

from pipeline.checkpoints.checkpoint import TrainState
from pipeline.config.settings import Config
from pipeline.distributed.ranks import Ranks
from pipeline.evaluation.transfer import succeeded
from pipeline.grpo.algorithm import zero_std_groups
from pipeline.grpo.collect import RolloutBatch
from pipeline.grpo.collect import left_out as is_left_out
from pipeline.rollout.rewards import RewardFunctions
from pipeline.rollout.trajectory import LEFT_OUT, StopReason, Trajectory

# Metrics of zero-std groups (groups with equal rewards), and the outcomes that a metric counts.
ZERO_STD = {
    "frac_reward_zero_std": ("failed", "solved", "few"),
    "all_failed": ("failed",),
    "all_solved": ("solved",),
    "too_few_left": ("few",),
}


def rollout_metrics(
    batch: RolloutBatch, ranks: Ranks, config: Config, reward_names: Sequence[str] = ()
) -> tuple[dict[str, float], dict[str, tuple[int, int]]]:
    """Return a step's metrics, and each domain's numbers of episodes and of environment errors.

    The replacement groups of dynamic sampling count only in tool errors, environment errors and
    left-out episodes. Mean rewards do not count left-out episodes. `reward_names` are the names of
    the sources of rewards; as in TRL, `rewards/NAME/mean` and `rewards/NAME/std` count the episodes
    to which the source NAME applies.
    """
    counts = _counts(batch, config) | _reward_sums(batch, reward_names)
    total = dict(zip(counts, ranks.sum([*counts.values()]), strict=True))
    size = config.rollout.num_generations
    domains = config.data.domains
    episodes = total["episodes"]
    groups = {d: count for d in domains if (count := total[f"groups {d}"])}
    judged = {d: count for d in domains if (count := total[f"judged {d}"])}
    metrics: dict[str, float] = {}
    if judged:
        rewards = {domain: total[f"reward {domain}"] for domain in judged}
        metrics["reward/mean"] = sum(rewards.values()) / sum(judged.values())
        metrics |= {f"reward/{domain}": rewards[domain] / n for domain, n in judged.items()}
    for name in reward_names:
        if count := total[f"count {name}"]:
            mean = total[f"sum {name}"] / count
            variance = max(0.0, total[f"squares {name}"] - count * mean**2) / max(1, count - 1)
            metrics |= {f"rewards/{name}/mean": mean, f"rewards/{name}/std": variance**0.5}
    left_out = {f"{kind}/{d}": total[f"left {kind} {d}"] for kind in LEFT_OUT for d in domains}
    metrics |= {
        "rollout/episodes": episodes,
        "rollout/sampled_tokens": total["tokens"],
        "rollout/turns": total["turns"] / episodes,
        "rollout/tool_errors": total["tool errors"],
        "rollout/environment_errors": sum(total[f"errors {domain}"] for domain in domains),
        "rollout/left_out": sum(left_out.values()),
        **{f"rollout/left_out/{name}": count for name, count in left_out.items() if count},
    }
    for kind in ZERO_STD:
        metrics[f"rollout/{kind}"] = sum(total[f"{kind} {d}"] for d in groups) * size / episodes
        metrics |= {f"rollout/{kind}/{d}": total[f"{kind} {d}"] / n for d, n in groups.items()}
    stops = {f"rollout/stop/{r}": total[f"stop {r}"] / episodes for r in StopReason}
    if not config.rollout.max_repeated_calls:
        del stops[f"rollout/stop/{StopReason.REPEATED_CALL}"]
    metrics |= stops
    if config.grpo.dynamic_sampling:
        replacements = sum(batch.rounds[1:])
        metrics["rollout/rounds"] = len(batch.rounds) - 1
        metrics["rollout/replaced_groups"] = replacements
        metrics["rollout/extra_episodes"] = replacements * size
    return metrics, {d: (int(total[f"played {d}"]), int(total[f"errors {d}"])) for d in domains}


def _counts(batch: RolloutBatch, config: Config) -> dict[str, float]:
    """Return sums over this rank's episodes; all ranks return the names in the same order."""
    size = config.rollout.num_generations
    threshold = config.evaluation.success_threshold
    first = batch.first
    played = batch.trajectories
    rewards = torch.tensor([t.reward for t in first], dtype=torch.float64)
    is_zero_std = zero_std_groups(rewards, size, ~is_left_out(first)).tolist()
    counts: dict[str, float] = {
        "episodes": len(first),
        "tokens": sum(t.num_sampled_in_all for t in first),
        "turns": sum(t.num_turns for t in first),
        "tool errors": sum(t.num_tool_errors for t in played),
        **{f"stop {r}": sum(t.stop_reason == r for t in first) for r in StopReason},
    }
    for domain in config.data.domains:
        judged = [t.reward for t in first if t.domain == domain and not t.left_out]
        all_of = [t for t in played if t.domain == domain]
        groups = [i for i in range(0, len(first), size) if first[i].domain == domain]
        outcomes = [_outcome(first[i : i + size], threshold) for i in groups if is_zero_std[i]]
        counts |= {
            f"reward {domain}": sum(judged),
            f"judged {domain}": len(judged),
            f"groups {domain}": len(groups),
            f"played {domain}": len(all_of),
            f"errors {domain}": sum(t.stop_reason is StopReason.ENVIRONMENT_ERROR for t in all_of),
            **{f"{kind} {domain}": sum(map(outcomes.count, of)) for kind, of in ZERO_STD.items()},
            **{f"left {why} {domain}": sum(t.left_out == why for t in all_of) for why in LEFT_OUT},
        }
    return counts


def _reward_sums(batch: RolloutBatch, names: Sequence[str]) -> dict[str, float]:
    sums = dict[str, float]()
    for name in names:
        rewards = [r for t in batch.first if (r := t.rewards.get(name)) is not None]
        squares = sum(reward**2 for reward in rewards)
        sums |= {f"count {name}": len(rewards), f"sum {name}": sum(rewards)}
        sums[f"squares {name}"] = squares
    return sums


def logged_by_reward_functions(
    rewards: RewardFunctions | None, ranks: Ranks, state: TrainState, prefix: str
) -> dict[str, float]:
    """Return means over all ranks of the values of `log_metric`, and forget the values.

    Each name gets the `prefix`, in place of a `train/` of its own. The new calls of async functions
    on all ranks are added to the `state`, whose step becomes the `global_step` that reward
    functions see.
    """
    if rewards is None:
        return {}
    mine = {name: list(values) for name, values in rewards.metrics.items()}, rewards.num_calls
    rewards.metrics.clear()
    rewards.num_calls = 0
    rewards.trainer_state.global_step = state.step
    gathered = ranks.all_gather_objects(mine, "reward functions")
    state.num_reward_calls += sum(count for _, count in gathered)
    found = defaultdict[str, list[float]](list)
    for name, values in chain.from_iterable(of.items() for of, _ in gathered):
        found[prefix + name.removeprefix("train/")] += values
    return {name: fmean(values) for name, values in sorted(found.items())}


def _outcome(group: Sequence[Trajectory], threshold: float) -> str:
    rewards = [t.reward for t in group if not t.left_out]
    if len(rewards) < 2:
        return "few"
    return "solved" if succeeded(rewards[0], threshold) else "failed"


def over_iterations(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the means of metrics over the updates of a step.

    Skipped updates do not count, unless all updates are skipped. `sampling_logp_difference` is the
    value of the first update.
    """
    done = [update for update in updates if not update["train/skipped"]] or updates
    means = {name: sum(update[name] for update in done) / len(done) for name in done[0]}
    means["train/skipped"] = sum(update["train/skipped"] for update in updates) / len(updates)
    return means | {name: updates[0][name] for name in means if "sampling_logp_difference" in name}
