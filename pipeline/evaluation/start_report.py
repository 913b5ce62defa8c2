"""The start report: what GRPO can learn from in each domain, before it has learned.

GRPO compares the episodes of a group, so a group has signal if its rewards are not all equal. The
report takes the last evaluation before GRPO and the groups of the first training step, which the
policy before GRPO has played. `start_report_tasks` adds groups for a firmer estimate.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pipeline.config.settings import Config
from pipeline.distributed.ranks import Ranks
from pipeline.evaluation.dead_domains import ADVICE
from pipeline.evaluation.transfer import mean_over_tasks, rate
from pipeline.evaluation.transfer_metrics import pass_at_k, succeeded
from pipeline.rollout.trajectory import RunRecord, StopReason

Evaluation = Mapping[str, Any]  # an entry of `evaluations` in `results.json`


class Group(NamedTuple):
    """A group of episodes of one task."""

    domain: str
    task_id: str
    rewards: list[float]  # of the episodes that training does not leave out
    stop_reasons: list[StopReason]  # of all episodes

    @property
    def has_signal(self) -> bool:
        return len({*self.rewards}) > 1


def groups_of(episodes: Sequence[RunRecord], size: int) -> list[Group]:
    """Return the groups of episodes that stand group by group, `size` episodes each."""
    parts = [episodes[i : i + size] for i in range(0, len(episodes), size)]
    return [
        Group(
            domain=of[0].domain,
            task_id=of[0].task_id,
            rewards=[episode.reward for episode in of if not episode.left_out],
            stop_reasons=[episode.stop_reason for episode in of],
        )
        for of in parts
    ]


class StartReport:
    """Collects groups before and in the first step. `content` is `start` in `results.json`.

    Only rank 0 makes the `content`, which is empty before the end of the first step.
    """

    def __init__(self) -> None:
        self.content: dict[str, Any] = {}
        self._groups: list[Group] = []  # this rank's groups

    def state_dict(self) -> dict[str, Any]:
        return {"start_report": self.content}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.content = dict(state.get("start_report", {}))

    def add(self, episodes: Sequence[RunRecord], size: int) -> None:
        """Add this rank's episodes, which stand group by group, `size` episodes each."""
        self._groups += groups_of(episodes, size)

    def gathered(self, ranks: Ranks) -> list[Group]:
        """Return the groups of all ranks in an order that does not depend on the ranks."""
        shards = ranks.all_gather_objects(self._groups, "start report")
        self._groups = []
        return sorted(Group(*group) for of_rank in shards for group in of_rank)


def start_report(
    groups: Sequence[Group],
    evaluation: Evaluation,
    config: Config,
    baselines: Mapping[str, Mapping[str, float]],
) -> dict[str, Any]:
    """Return the content of the start report: numbers for each domain, and lines of advice.

    Rates are [value, low, high], or None without tasks. pass@1 and pass@G, where G is
    `num_generations`, are means over the groups; pass@G counts groups without left-out episodes.
    """
    domains: dict[str, dict[str, Any]] = {}
    lines: list[str] = []
    size = config.rollout.num_generations
    threshold = config.evaluation.success_threshold
    trained = config.curriculum.order or config.data.domains
    for domain in config.data.domains:
        own = [group for group in groups if group.domain == domain]
        counts = [
            (sum(succeeded(reward, threshold) for reward in group.rewards), len(group.rewards))
            for group in own
        ]
        best = max(baselines.get(domain, {}).items(), key=lambda of: of[1], default=None)
        domains[domain] = {
            "held_out": rate(evaluation, domain, "mean", threshold),
            "pass@1": mean_over_tasks([c / n for c, n in counts if n], domain),
            f"pass@{size}": mean_over_tasks(
                [pass_at_k(c, n, size) for c, n in counts if n >= size], domain
            ),
            "groups": len(own),
            "groups_with_signal": sum(group.has_signal for group in own),
            "baseline": best and list(best),
        }
        if domain in trained and not domains[domain]["groups_with_signal"]:
            tasks = [*evaluation["success"][domain]["tasks"].values()]
            pass_at_size = (domains[domain][f"pass@{size}"] or [None])[0]
            lines += _advice(domain, own, tasks, threshold, size, pass_at_size)
    return {
        "after": evaluation["after"],
        "num_generations": size,
        "domains": domains,
        "lines": lines,
    }


def _advice(
    domain: str,
    groups: Sequence[Group],
    tasks: Sequence[Sequence[float]],
    threshold: float,
    size: int,
    pass_at_size: float | None,
) -> Iterator[str]:
    """Yield why GRPO cannot learn in a domain whose `groups` have no signal, and what to do.

    `tasks` are the rewards of the trials of each held-out task. Nothing is yielded if these rewards
    show that groups of other tasks would have signal.
    """
    trials = [succeeded(reward, threshold) for of in tasks for reward in of]
    # One trial per task does not show whether the trials of a task differ.
    differ = len(tasks) == len(trials) and 0 < sum(trials) < len(trials)
    if differ or any(len({*of}) > 1 for of in tasks) or (any(trials) and not groups):
        return
    if not groups:
        none = f"none of {len(trials)} held-out trials succeeds"
        yield (
            f"{domain}: {none}, and the first step has no group of {domain}; "
            "--start-report-tasks 8 plays groups before the first step"
        )
        return
    shown = "-" if pass_at_size is None else f"{pass_at_size:.2f}"
    count = "the only group" if len(groups) == 1 else f"none of {len(groups)} groups"
    has = "has no signal" if len(groups) == 1 else "has signal"
    what = f"{domain}: {count} {has} and pass@{size} is {shown}: GRPO has nothing to compare"
    if pass_at_size == 1:
        yield f"{what}; the policy solves these tasks: take harder tasks, or leave {domain} out"
    elif pass_at_size:
        yield f"{what}; the episodes of a task end alike: raise temperature or num_generations"
    else:
        reasons = Counter(reason for group in groups for reason in group.stop_reasons)
        reason = max(StopReason, key=reasons.__getitem__)
        share = 100 * reasons[reason] / reasons.total()
        yield f"{what}; {share:.0f} % of the episodes ended with {reason}: {ADVICE[reason]}"
