"""How many episodes of each domain end in errors of their environment, and how many are too many.

One such episode is data, and is counted, whether it earned nothing or was left out of training.
Where most of a domain's are, the run would learn from rewards that say nothing of the policy, or
from few, so it stops.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.config.settings import RolloutSettings
from pipeline.distributed.ranks import Ranks
from pipeline.rollout.trajectory import RunRecord, StopReason, Trajectory


@dataclass
class ErrorRates:
    """Episodes and errors of each domain over all ranks; every rank holds the same.

    `last` holds this rank's last errors as text; a checkpoint leaves it out.
    """

    counts: dict[str, list[int]] = field(default_factory=dict)  # by domain: episodes, errors
    last: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, records: Iterable[RunRecord]) -> ErrorRates:
        """Of the records of all ranks."""
        rates = cls()
        for record in records:
            rates.add(record.domain, 1, record.stop_reason == StopReason.ENVIRONMENT_ERROR)
        return rates

    def state_dict(self) -> dict[str, Any]:
        """The counts, for a checkpoint."""
        return {"error_counts": {domain: list(pair) for domain, pair in self.counts.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        counts = state.get("error_counts", {})
        self.counts = {domain: list(pair) for domain, pair in counts.items()}

    def add(self, domain: str, episodes: int, errors: int) -> None:
        before = self.counts.get(domain, [0, 0])
        self.counts[domain] = [before[0] + episodes, before[1] + errors]

    def remember(self, trajectories: Iterable[Trajectory]) -> None:
        """Keep the texts of the last errors among this rank's episodes."""
        for t in trajectories:
            if t.stop_reason is StopReason.ENVIRONMENT_ERROR:
                kind = f" (left out: {t.left_out})" if t.left_out else ""
                self.last[t.domain] = f"{t.domain}/{t.task_id}: {t.error}{kind}"

    def problem(
        self, limit: float, at_least: int, when: str = "since the stage began"
    ) -> str | None:
        """What is wrong with the first domain whose share is above the limit; None if none is.

        Domains with fewer than `at_least` episodes are not judged. A limit of 1 is never passed.
        """
        for domain, (episodes, errors) in self.counts.items():
            if episodes >= at_least and errors > limit * episodes:
                last = f"; the last: {self.last[domain]}" if domain in self.last else ""
                return (
                    f"rollout.max_error_share: {errors} of {episodes} episodes of {domain} "
                    f"({100 * errors / episodes:.0f} %) ended in environment errors {when}{last}; "
                    "mend the environment, or raise the limit"
                )
        return None


def stop_on_errors(
    ranks: Ranks,
    rates: ErrorRates,
    limits: RolloutSettings,
    trajectories: Sequence[Trajectory] = (),
    when: str = "since the stage began",
) -> None:
    """Raise RuntimeError, on every rank the same, where a domain has too many errors.

    `trajectories` are this rank's, among which the last errors are found. Ranks talk only where it
    raises: what is decided on is the same on all of them.
    """
    rates.remember(trajectories)
    limit, at_least = limits.max_error_share, 2 * limits.num_generations
    if rates.problem(limit, at_least, when) is None:
        return
    for last in ranks.all_gather_objects(rates.last, "environment errors"):
        rates.last |= last
    raise RuntimeError(rates.problem(limit, at_least, when))
