"""Find domains in which GRPO learns nothing, and domains that lost what the warm start gave."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import sqrt
from statistics import fmean, stdev
from typing import Any

from pipeline.config.settings import EvaluationSettings
from pipeline.data.curriculum import Stage
from pipeline.distributed.ranks import Ranks
from pipeline.evaluation.transfer_metrics import Z95, succeeded
from pipeline.rollout.trajectory import RunRecord, StopReason

DEAD_STEPS = 10  # number of steps in a row without a gradient that makes a domain dead
ADVICE = {
    StopReason.COMPLETED: "check get_reward, or give the warm start demonstrations that succeed",
    StopReason.MAX_TURNS: "raise max_turns, or give the warm start demonstrations that succeed",
    StopReason.MAX_TOKENS: "raise max_tokens_per_turn and max_tokens, or shorten tool results",
    StopReason.MALFORMED_CALL: "give the warm start demonstrations of the tools' calls",
    StopReason.REPEATED_CALL: "raise max_repeated_calls, or give demonstrations without repeats",
    StopReason.ENVIRONMENT_ERROR: "mend the environment",
}


class DeadDomains:
    """Counts, for each domain, the steps in a row whose groups all had equal rewards.

    Only steps of a domain's own stage with groups of the domain count. A step in which all episodes
    succeeded is not dead. The counts are equal on all ranks.
    """

    def __init__(self) -> None:
        self.steps: dict[str, int] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"dead_steps": dict(self.steps)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = dict(state.get("dead_steps", {}))

    def add(self, stage: Stage, metrics: Mapping[str, float]) -> None:
        """Count a step with the metrics of all ranks."""
        for domain in stage.own:
            share = metrics.get(f"rollout/frac_reward_zero_std/{domain}")
            if share is not None:
                is_dead = share == 1 and metrics[f"rollout/all_solved/{domain}"] < 1
                self.steps[domain] = self.steps.get(domain, 0) + 1 if is_dead else 0

    def messages(self, stage: Stage, records: Iterable[RunRecord], ranks: Ranks) -> list[str]:
        """Return a message for each dead domain, whose count then begins anew.

        `records` are this rank's episodes of the stage. Ranks communicate only if a domain is dead.
        """
        lines = []
        for domain in [domain for domain, count in self.steps.items() if count >= DEAD_STEPS]:
            self.steps[domain] = 0
            reasons = [record.stop_reason for record in records if record.domain == domain]
            gathered = ranks.all_gather_objects(Counter(reasons), "stop reasons")
            counts = sum(gathered, Counter[StopReason]())
            reason = max(StopReason, key=counts.__getitem__)
            share = 100 * counts[reason] / max(1, counts.total())
            lines.append(
                f"{domain}: all groups of {DEAD_STEPS} steps in a row had equal rewards, so stage "
                f"{stage.name} learns nothing; {share:.0f} % of its episodes ended with {reason}: "
                f"{ADVICE[reason]}"
            )
        return lines


def lost_domains(
    evaluations: Sequence[Mapping[str, Any]], stages: Sequence[Stage], settings: EvaluationSettings
) -> list[str]:
    """Return a message for each domain that lost its success before its own stage, the last stage.

    A domain has lost its success if more than half of the success before GRPO is gone, and the 95 %
    interval of the paired change over tasks excludes 0.
    """
    names = {"warm_start": "the warm start", "rft": "rejection fine-tuning"}
    given = [entry for entry in evaluations if entry["after"] in names][-1:]
    earlier = {domain for stage in stages[:-1] for domain in stage.own}
    lines = []
    for domain in stages[-1].own if given else ():
        tasks = [entry["success"][domain]["tasks"] for entry in (given[0], evaluations[-1])]
        before, now = (
            [fmean(succeeded(r, settings.success_threshold) for r in of[task]) for task in tasks[0]]
            for of in tasks
        )
        changes = [b - a for a, b in zip(before, now, strict=True)]
        spread = Z95 * stdev(changes) / sqrt(len(changes)) if len(changes) > 1 else 0.0
        change = fmean(changes)
        is_lost = fmean(now) < fmean(before) / 2 and change + spread < 0
        if domain not in earlier and is_lost:
            lines.append(
                f"{domain}: success fell from {fmean(before):.2f} after "
                f"{names[given[0]['after']]} to "
                f"{fmean(now):.2f} before its own stage (change {change:+.2f} "
                f"[{change - spread:+.2f}, {change + spread:+.2f}]); raise `preview`, put it "
                "earlier in `order`, or train all domains together (curriculum mixed)"
            )
    return lines
