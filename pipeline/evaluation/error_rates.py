"""Stop a run if too many episodes of a domain end in environment errors."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipeline.config.settings import RolloutSettings
from pipeline.distributed.ranks import Ranks
from pipeline.errors import RunError
from pipeline.rollout.trajectory import RunRecord, StopReason

Errors = list[tuple[str, str, str]]  # domain, task id and text of each environment error


def errors_of(records: Iterable[RunRecord]) -> Errors:
    failed = (r for r in records if r.stop_reason == StopReason.ENVIRONMENT_ERROR)
    return [(r.domain, r.task_id, r.error) for r in failed]


def commonest(errors: Errors) -> str:
    """Return the commonest text among `errors` and the first task with this text, or ""."""
    if not errors:
        return ""
    counts = Counter(text for _, _, text in errors)
    text = max(sorted(counts), key=counts.__getitem__)
    domain, task_id, _ = next(error for error in errors if error[2] == text)
    return f"; the commonest error, first of {domain}/{task_id}: {text}"


class ErrorRates:
    """Numbers of episodes and of environment errors by domain, summed over all ranks."""

    def __init__(self, records: Iterable[RunRecord] = ()) -> None:
        self.counts: dict[str, list[int]] = {}  # [episodes, errors] of each domain
        self.errors: Errors = []  # this rank's errors since the stage began or the run resumed
        for record in records:
            self.add(record.domain, 1, record.stop_reason == StopReason.ENVIRONMENT_ERROR)

    def state_dict(self) -> dict[str, Any]:
        return {"error_counts": {domain: list(pair) for domain, pair in self.counts.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.counts = {d: list(pair) for d, pair in state.get("error_counts", {}).items()}
        self.errors = []

    def add(self, domain: str, episodes: int, errors: int) -> None:
        before = self.counts.get(domain, [0, 0])
        self.counts[domain] = [before[0] + episodes, before[1] + errors]

    def problem(self, limits: RolloutSettings, when: str) -> str | None:
        """Return a message about the first domain whose error rate is above the limit, or None.

        Domains with fewer than `2 * num_generations` episodes are not checked.
        """
        for domain, (episodes, errors) in self.counts.items():
            if episodes >= 2 * limits.num_generations and errors > limits.max_error_rate * episodes:
                which = commonest([error for error in self.errors if error[0] == domain])
                return (
                    f"rollout.max_error_rate: {errors} of {episodes} episodes of {domain} "
                    f"({100 * errors / episodes:.0f} %) ended in environment errors {when}{which}; "
                    "mend the environment, or raise the limit"
                )
        return None


def stop_on_errors(
    ranks: Ranks,
    rates: ErrorRates,
    limits: RolloutSettings,
    records: Sequence[RunRecord] = (),
    when: str = "since the stage began",
) -> None:
    """Raise the same RunError on every rank if a domain has too many environment errors.

    `records` are this rank's new episodes. Ranks communicate only if the function raises.
    """
    rates.errors += errors_of(records)
    if rates.problem(limits, when) is not None:
        gathered = ranks.all_gather_objects(rates.errors, "environment errors")
        rates.errors = [error for of_rank in gathered for error in of_rank]
        raise RunError(rates.problem(limits, when))
