"""The rate of episodes of each domain that end in an error of their environment, and its limit.

A single such episode is data: it is counted, and earns nothing or is left out of training. If most
episodes of a domain end so, rewards are no longer about the policy, and the run stops.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipeline.config.settings import RolloutSettings
from pipeline.distributed.ranks import Ranks
from pipeline.rollout.trajectory import RunRecord, StopReason, Trajectory


class ErrorRates:
    """Episodes and errors of each domain over all ranks; every rank has the same `counts`.

    `last` holds the text of this rank's last error of each domain; checkpoints leave it out.
    """

    def __init__(self, records: Iterable[RunRecord] = ()) -> None:
        self.counts: dict[str, list[int]] = {}  # by domain: episodes, errors
        self.last: dict[str, str] = {}
        for record in records:
            self.add(record.domain, 1, record.stop_reason == StopReason.ENVIRONMENT_ERROR)

    def state_dict(self) -> dict[str, Any]:
        """The counts, for a checkpoint."""
        return {"error_counts": {domain: list(pair) for domain, pair in self.counts.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        counts = state.get("error_counts", {})
        self.counts = {domain: list(pair) for domain, pair in counts.items()}

    def add(self, domain: str, episodes: int, errors: int) -> None:
        before = self.counts.get(domain, [0, 0])
        self.counts[domain] = [before[0] + episodes, before[1] + errors]

    def problem(self, limits: RolloutSettings, when: str) -> str | None:
        """A message about the first domain whose rate is above the limit; None if none is.

        Domains with fewer episodes than two groups are not checked.
        """
        for domain, (episodes, errors) in self.counts.items():
            if episodes >= 2 * limits.num_generations and errors > limits.max_error_rate * episodes:
                last = f"; the last: {self.last[domain]}" if domain in self.last else ""
                return (
                    f"rollout.max_error_rate: {errors} of {episodes} episodes of {domain} "
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
    """Raise RuntimeError, on every rank the same, if a domain has too many errors.

    `trajectories` are this rank's; the message names the last error among them. All ranks have the
    same counts, so they communicate only before they raise.
    """
    for t in trajectories:
        if t.stop_reason is StopReason.ENVIRONMENT_ERROR:
            kind = f" (left out: {t.left_out})" if t.left_out else ""
            rates.last[t.domain] = f"{t.domain}/{t.task_id}: {t.error}{kind}"
    if rates.problem(limits, when) is not None:
        for last in ranks.all_gather_objects(rates.last, "environment errors"):
            rates.last |= last
        raise RuntimeError(rates.problem(limits, when))
