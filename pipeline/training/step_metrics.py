"""The numbers of a training step: metrics that the seed determines, and timings.

Metrics are means over the episodes of all ranks. A profiler trace shows where the time goes.
"""

import os
import platform
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from pipeline.checkpoints.checkpoint import TrainState
from pipeline.config.settings import Config
from pipeline.distributed.devices import on_gpu
from pipeline.distributed.ranks import Ranks
from pipeline.rollout.rewards import RewardFunctions
from pipeline.rollout.rollout import Rollout
from pipeline.rollout.trajectory import CAUSES, FAILED, LEFT_OUT, StopReason, Trajectory
from pipeline.training.collect import RolloutBatch, outcome
from pipeline.training.updater import Updater

# Metrics of zero-std groups (groups with equal rewards), and the outcomes that a metric counts.
ZERO_STD = {
    "frac_reward_zero_std": ("failed", "solved", "few"),
    "all_failed": ("failed",),
    "all_solved": ("solved",),
    "too_few_left": ("few",),
}
LEFT = "rollout/left_out/"  # begins metrics that are there if they are not 0
NEW = "rollout/new_sequences/"  # ... too
STALE = "rollout/staleness/"  # begins numbers of sampled tokens, by the staleness behind it
OF_AGENTS = f"rollout/stop/{StopReason.AGENT_ERROR}"  # ... too


def rollout_metrics(
    batch: RolloutBatch,
    ranks: Ranks,
    config: Config,
    reward_names: Sequence[str] = (),
    num_tokens: int = 0,
) -> tuple[dict[str, float], dict[str, tuple[int, int]]]:
    """Return a step's metrics, and each domain's numbers of episodes and of environment errors.

    The replacement groups of dynamic sampling count only in tool errors, environment errors,
    left-out episodes and `train/num_tokens`. Mean rewards do not count left-out episodes.
    `reward_names` are the names of the sources of rewards; as in TRL, `rewards/NAME/mean` and
    `rewards/NAME/std` count the episodes to which the source NAME applies. `num_tokens` is
    `train/num_tokens` of the step before.
    """
    counts, means = _sums(batch, config, reward_names)
    # One exchange, for each takes a while: see `_of_all_episodes` for what stands beside the sums.
    mine = [*counts.values(), *chain(*means.values())], _told_of(batch.first)
    sums, told = zip(*ranks.all_gather_objects(mine, "metrics"), strict=True)
    totals = map(sum, zip(*sums, strict=True))
    counts = {name: next(totals) for name in counts}
    means = {name: (next(totals), next(totals)) for name in means}
    domains = config.data.domains
    played = {d: (int(counts.pop(f"played {d}")), int(counts.pop(f"errors {d}"))) for d in domains}
    metrics = {
        name: total / number
        for name, (total, number) in means.items()
        if number and (total or name != OF_AGENTS)
    }
    rewards = [means[f"reward/{domain}"] for domain in domains]
    if any(number for _, number in rewards):
        sums, numbers = zip(*rewards, strict=True)
        metrics["reward/mean"] = sum(sums) / sum(numbers)
    for name in reward_names:
        squares, count = means[f"rewards/{name}/std"]
        if count:
            excess = squares - count * metrics[f"rewards/{name}/mean"] ** 2
            metrics[f"rewards/{name}/std"] = (max(0.0, excess) / max(1, count - 1)) ** 0.5
    counts["train/num_tokens"] += num_tokens
    metrics |= {n: c for n, c in counts.items() if c or not n.startswith((LEFT, NEW))}
    metrics |= _of_all_episodes(told)
    of_tokens = {int(n.removeprefix(STALE)): c for n, c in metrics.items() if n.startswith(STALE)}
    if num_sampled := sum(of_tokens.values()):
        total = sum(staleness * count for staleness, count in of_tokens.items())
        metrics["rollout/staleness_mean"] = total / num_sampled
    if config.grpo.dynamic_sampling:
        replacements = sum(batch.rounds[1:])
        metrics |= {
            "rollout/rounds": len(batch.rounds) - 1,
            "rollout/replaced_groups": replacements,
            "rollout/extra_episodes": replacements * config.rollout.num_generations,
        }
    return metrics, played


def _sums(
    batch: RolloutBatch, config: Config, reward_names: Sequence[str]
) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """Return metrics that are counts, and sums of means with the numbers that divide them.

    They are of this rank's episodes; all ranks return the names in the same order. A mean whose
    number is 0 on all ranks is left out. The mean `rewards/NAME/std` is that of squares.
    """
    size = config.rollout.num_generations
    threshold = config.evaluation.success_threshold
    first = batch.first
    played = batch.trajectories
    failed = StopReason.ENVIRONMENT_ERROR
    most = config.rollout.max_repeated_calls
    ends = [r for r in StopReason if most or r is not StopReason.REPEATED_CALL]
    counts: dict[str, float] = {
        "train/num_tokens": sum(
            len(one.prompt_ids) + one.num_sampled_tokens for t in played for one in t.sequences
        ),
        "rollout/episodes": len(first),
        "rollout/sampled_tokens": sum(t.num_sampled_in_all for t in first),
        "rollout/tool_errors": sum(t.num_tool_errors for t in played),
        "rollout/environment_errors": sum(t.stop_reason is failed for t in played),
        "rollout/left_out": sum(t.left_out in LEFT_OUT for t in played),
    }
    if config.rollout.is_partial:
        # The staleness of a token: optimizer steps between its weights and those that it trains.
        sequences = (one for t in played for one in t.sequences)
        of_tokens = Counter(batch.step - v for one in sequences for v in one.versions)
        oldest = max(of_tokens, default=0)
        assert oldest <= config.rollout.max_staleness, f"a token is {oldest} steps old"
        counts |= {f"{STALE}{s}": of_tokens[s] for s in range(config.rollout.max_staleness + 1)}
    means: dict[str, tuple[float, float]] = {
        "rollout/turns": (sum(t.num_turns for t in first), len(first)),
        **{f"rollout/stop/{r}": (sum(t.stop_reason == r for t in first), len(first)) for r in ends},
    }
    for domain in config.data.domains:
        judged = [t.reward for t in first if t.domain == domain and not t.left_out]
        all_of = [t for t in played if t.domain == domain]
        groups = [i for i in range(0, len(first), size) if first[i].domain == domain]
        outcomes = [outcome(first[i : i + size], threshold) for i in groups]
        counts |= {
            f"played {domain}": len(all_of),
            f"errors {domain}": sum(t.stop_reason in FAILED for t in all_of),
            **{f"{LEFT}{why}/{domain}": sum(t.left_out == why for t in all_of) for why in LEFT_OUT},
            **{
                f"{NEW}{c}/{domain}": sum(t.new_sequences.get(c, 0) for t in all_of) for c in CAUSES
            },
        }
        means[f"reward/{domain}"] = (sum(judged), len(judged))
        for kind, of in ZERO_STD.items():
            means[f"rollout/{kind}/{domain}"] = (sum(map(outcomes.count, of)), len(groups))
    for kind in ZERO_STD:
        num_groups = sum(means[f"rollout/{kind}/{domain}"][0] for domain in config.data.domains)
        means[f"rollout/{kind}"] = (num_groups * size, len(first))
    for name in reward_names:
        paid = [reward for t in first if (reward := t.rewards.get(name)) is not None]
        means[f"rewards/{name}/mean"] = (sum(paid), len(paid))
        means[f"rewards/{name}/std"] = (sum(reward**2 for reward in paid), len(paid))
    return counts, means


Told = tuple[list[tuple[int, bool]], list[float], list[tuple[Any, ...]]]


def _told_of(episodes: Sequence[Trajectory]) -> Told:
    """Return what `_of_all_episodes` gets of a rank: lengths, rewards and calls of tools.

    A length is the number of sampled tokens of an episode. An episode that a maximum of tokens
    ended is not terminated.
    """
    lengths = [(t.num_sampled_in_all, t.stop_reason is StopReason.MAX_TOKENS) for t in episodes]
    rewards = [t.reward for t in episodes if not t.left_out]
    return lengths, rewards, [(name, *counts) for t in episodes for name, counts in t.tools.items()]


def _of_all_episodes(gathered: Sequence[Told]) -> dict[str, float]:
    """Return TRL's metrics of lengths, of the deviation of rewards, and of calls of tools."""
    lengths, rewards, calls = (list(chain(*of)) for of in zip(*gathered, strict=True))
    if not lengths:
        return {}
    ended = [length for length, is_clipped in lengths if not is_clipped]
    metrics = {"completions/clipped_ratio": 1 - len(ended) / len(lengths)}
    for kind, of in (("", [length for length, _ in lengths]), ("terminated_", ended or [0])):
        metrics |= {
            f"completions/mean_{kind}length": sum(of) / len(of),
            f"completions/min_{kind}length": min(of),
            f"completions/max_{kind}length": max(of),
        }
    if len(rewards) > 1:
        metrics["rollout/reward_std"] = stdev(rewards)
    by_tool = Counter(name for name, count, _ in calls for _ in range(count))
    num_failed = sum(failed for *_, failed in calls)
    return metrics | {
        "tools/call_frequency": by_tool.total() / len(lengths),
        "tools/failure_frequency": num_failed / (by_tool.total() or 1),
        **{f"tools/call_frequency/{n}": by_tool[n] / len(lengths) for n in sorted(by_tool)},
    }


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


def over_iterations(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the means of metrics over the updates of a step.

    Skipped updates do not count, unless all updates are skipped. `sampling_logp_difference` and
    `importance_sampling_ratio` are the values of the first update.
    """
    done = [update for update in updates if not update["train/skipped"]] or updates
    means = {name: sum(update[name] for update in done) / len(done) for name in done[0]}
    means["train/skipped"] = sum(update["train/skipped"] for update in updates) / len(updates)
    first = ("sampling_logp_difference", "importance_sampling_ratio")
    return means | {n: updates[0][n] for n in means if any(name in n for name in first)}


class Meter:
    def __init__(self, ranks: Ranks, rollout: Rollout, updater: Updater) -> None:
        self._ranks = ranks
        self._rollout = rollout
        self._updater = updater
        self._on_gpu = updater.accelerator.device.type == "cuda"
        self._spent: dict[str, float] = {}

    @contextmanager
    def step(self) -> Iterator[None]:
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
        before = self._counters()
        yield
        self._spent = {name: value - before[name] for name, value in self._counters().items()}

    def timings(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Return the `perf/` numbers of the last step; `trajectories` are this rank's episodes.

        Seconds are means over the ranks. `sample_s` contains `environment_s`; `update_s` contains
        the all-reduce of gradients. `sample_s` and `update_s` do not contain the waits for other
        ranks. Tokens per second count the tokens of all ranks. Memory is the largest peak of any
        rank: of GPU memory in the step or, without a GPU, of the process. `exchanged_bytes` counts
        the bytes that all ranks sent.
        """
        sampled = sum(t.num_sampled_in_all for t in trajectories)
        spent = {**self._spent, "sampled": sampled, "episodes": len(trajectories)}
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        memory = torch.cuda.max_memory_allocated() if self._on_gpu else memory
        of_ranks = self._ranks.all_gather_numbers([*spent.values(), memory / 1e6])
        *columns, memories = zip(*of_ranks, strict=True)
        total = {name: sum(column) for name, column in zip(spent, columns, strict=True)}
        return {**rates(total, self._ranks.num_ranks), "perf/peak_memory_mb": max(memories)}

    def _counters(self) -> dict[str, float]:
        policy: Any = self._rollout.policy
        phases: dict[str, Any] = {"sample": policy.sampler, "update": self._updater}
        return {
            **{f"{name}_s": self._ranks.seconds[name] for name in ("sample", "update", "wait")},
            "environment_s": self._rollout.environment_s,
            **{f"{name}_tokens": of.num_tokens for name, of in phases.items()},
            **{f"{name}_padded": of.num_padded_tokens for name, of in phases.items()},
            "bytes": sum(self._ranks.bytes.values()),
            "step_s": time.perf_counter(),
        }


def rates(total: Mapping[str, float], num_ranks: int) -> dict[str, float]:
    """Return the `perf/` numbers from sums over the ranks."""
    metrics = {name: total[name] / num_ranks for name in total if name.endswith("_s")}
    metrics |= {
        "episodes_per_s": total["episodes"] / metrics["step_s"],
        "tokens_per_s": total["sampled"] / metrics["step_s"],
        "exchanged_bytes": total["bytes"],
    }
    for phase, tokens in (("sample", total["sampled"]), ("update", total["update_tokens"])):
        seconds = total[f"{phase}_s"] or 1
        padded = total[f"{phase}_padded"]
        metrics[f"{phase}_tokens_per_s"] = tokens / (seconds / num_ranks)
        metrics[f"{phase}_padding_share"] = (padded - total[f"{phase}_tokens"]) / (padded or 1)
    return {f"perf/{name}": value for name, value in metrics.items()}


@contextmanager
def step_profile(
    step: int, steps: Collection[int], folder: Path, ranks: Ranks, device: torch.device
) -> Iterator[None]:
    """Profile this context if `step` is in `steps`; each rank writes a trace into `folder`."""
    if step not in steps:
        yield
        return
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler prints only errors
    gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    with profile(activities=[ProfilerActivity.CPU, *gpu]) as profiler:
        yield
    path = _trace(folder, step, ranks.rank)
    path.parent.mkdir(exist_ok=True)
    profiler.export_chrome_trace(str(path))
    if ranks.is_main:
        print(f"profile of step {step}: {path}; open it in https://ui.perfetto.dev", flush=True)


def tell_missed(
    steps: Collection[int], done: int, folder: Path, say: Callable[[str], None]
) -> None:
    """Say of which `steps` a run that goes on after step `done` will have no trace."""
    for step in steps:
        if step <= done and not _trace(folder, step, 0).exists():
            say(f"note: profile: step {step} is over, and has no trace; name later steps")


def _trace(folder: Path, step: int, rank: int) -> Path:
    return folder / "profile" / f"step-{step:06d}.rank-{rank}.json.gz"


def machine(num_ranks: int) -> dict[str, Any]:
    return {
        "host": platform.node(),
        "device": torch.cuda.get_device_name() if on_gpu() else platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "num_ranks": num_ranks,
        "torch": torch.__version__,
    }
