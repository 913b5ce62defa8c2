"""Stop a run if too many episodes of a domain end in environment errors."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipeline.config.settings import RolloutSettings
from pipeline.distributed.ranks import Ranks
from pipeline.rollout.trajectory import RunRecord, StopReason, Trajectory


class ErrorRates:
    """Numbers of episodes and of environment errors by domain, summed over all ranks."""

    def __init__(self, records: Iterable[RunRecord] = ()) -> None:
        self.counts: dict[str, list[int]] = {}  # [episodes, errors] of each domain
        self.last: dict[str, str] = {}  # text of this rank's last error in each domain
        for record in records:
            self.add(record.domain, 1, record.stop_reason == StopReason.ENVIRONMENT_ERROR)

    def state_dict(self) -> dict[str, Any]:
        return {"error_counts": {domain: list(pair) for domain, pair in self.counts.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.counts = {d: list(pair) for d, pair in state.get("error_counts", {}).items()}

    def add(self, domain: str, episodes: int, errors: int) -> None:
        before = self.counts.get(domain, [0, 0])
        self.counts[domain] = [before[0] + episodes, before[1] + errors]

    def problem(self, limits: RolloutSettings, when: str) -> str | None:
        """Return a message about the first domain whose error rate is above the limit, or None.

        Domains with fewer than `2 * num_generations` episodes are not checked.
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
    """Raise the same RuntimeError on every rank if a domain has too many environment errors.

    `trajectories` are this rank's new episodes. Ranks communicate only if the function raises.
    """
    for t in trajectories:
        if t.stop_reason is StopReason.ENVIRONMENT_ERROR:
            kind = f" (left out: {t.left_out})" if t.left_out else ""
            rates.last[t.domain] = f"{t.domain}/{t.task_id}: {t.error}{kind}"
    if rates.problem(limits, when) is not None:
        for last in ranks.all_gather_objects(rates.last, "environment errors"):
            rates.last |= last
        raise RuntimeError(rates.problem(limits, when))
