"""Find domains in which GRPO learns nothing, and domains whose success falls."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import sqrt
from statistics import fmean, stdev
from typing import Any, NamedTuple

from pipeline.config.settings import Config, EvaluationSettings
from pipeline.data.curriculum import Stage
from pipeline.distributed.ranks import Ranks
from pipeline.evaluation.one_action import advice
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


class Fall(NamedTuple):
    """A success rate that fell: before and now, and the paired change with its interval."""

    before: float
    now: float
    change: str


def fall(before: Mapping[str, float], now: Mapping[str, float]) -> Fall | None:
    """Return how the success of the same tasks fell, or None.

    It fell if more than half of the success before is gone, and the 95 % interval of the paired
    change over tasks excludes 0. A run that goes on with `override` may have other tasks.
    """
    if before.keys() != now.keys():
        return None
    changes = [now[task] - success for task, success in before.items()]
    spread = Z95 * stdev(changes) / sqrt(len(changes)) if len(changes) > 1 else 0.0
    change = fmean(changes)
    was = fmean(before.values())
    is_now = fmean(now.values())
    if is_now >= was / 2 or change + spread >= 0:
        return None
    interval = f"[{change - spread:+.2f}, {change + spread:+.2f}]"
    return Fall(was, is_now, f"change {change:+.2f} {interval}")


def lost_domains(
    evaluations: Sequence[Mapping[str, Any]], stages: Sequence[Stage], settings: EvaluationSettings
) -> list[str]:
    """Return a message for each domain whose success fell before its own stage, the last stage."""
    names = {"warm_start": "the warm start", "rft": "rejection fine-tuning"}
    given = [entry for entry in evaluations if entry["after"] in names][-1:]
    earlier = {domain for stage in stages[:-1] for domain in stage.own}
    lines = []
    for domain in stages[-1].own if given else ():
        before, now = (
            {
                task: fmean(succeeded(r, settings.success_threshold) for r in rewards)
                for task, rewards in entry["success"][domain]["tasks"].items()
            }
            for entry in (given[0], evaluations[-1])
        )
        found = fall(before, now)
        if found and domain not in earlier:
            lines.append(
                f"{domain}: success fell from {found.before:.2f} after "
                f"{names[given[0]['after']]} to {found.now:.2f} before its own stage "
                f"({found.change}); raise `preview`, put it "
                "earlier in `order`, or train all domains together (curriculum mixed)"
            )
    return lines


def fallen_domains(
    validations: Sequence[Mapping[str, Any]], stage: Stage, config: Config
) -> list[str]:
    """Return a message for each of a stage's domains whose success fell while GRPO trained it.

    The newest validation is compared with the stage's best one before it. A domain is named once in
    a stage.
    """
    threshold = config.evaluation.success_threshold
    lines = []
    for domain in stage.own:
        history = [
            (v["step"], {t: succeeded(r, threshold) for t, r in v["success"][domain].items()})
            for v in validations
            if v["step"] >= stage.first_step and domain in v["success"]
        ]
        best = [max(history[:n], key=_rate) for n in range(1, len(history))]
        falls = [fall(of[1], now[1]) for of, now in zip(best, history[1:], strict=True)]
        if falls and (found := falls[-1]) and not any(falls[:-1]):
            kept = "--checkpoint best has" if config.run.keep_best else "--keep-best would keep"
            lines.append(
                f"{domain}: validation success fell from {found.before:.2f} at step {best[-1][0]} "
                f"to {found.now:.2f} ({found.change}); {advice(config)}; {kept} the best policy"
            )
    return lines


def _rate(validation: tuple[int, Mapping[str, bool]]) -> float:
    return fmean(validation[1].values())
