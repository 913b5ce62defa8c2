"""Rejection fine-tuning (RFT): supervised training on the policy's own successes.

RFT (Yuan et al. 2023, arXiv 2308.01825, section 3.3) samples several episodes of each training
task, rejects the failures, and trains on different successes. Here, each round samples with the
policy of the round before, and the tokens of an example are the sampled tokens themselves.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import chain, compress, islice
from typing import Any, NamedTuple

from pipeline.config.settings import Config
from pipeline.rollout.trajectory import EpisodeRecord, Trajectory, grouped, succeeded
from pipeline.training.sft import IGNORED, Schedule, SFTExample, epochs

MOST_PER_TASK = 4  # maximum number of kept episodes of a task, so that easy tasks do not prevail
NUM_EPOCHS = 2  # number of passes over the kept episodes of a round


class Kept(NamedTuple):
    """A success on which a round trains."""

    domain: str
    task_id: str
    trial: int
    example: SFTExample


def kept_of(episodes: Sequence[Trajectory], size: int, threshold: float) -> list[Kept]:
    """Return at most MOST_PER_TASK different successes of each group of `size` episodes.

    Two successes are different if their sampled tokens are. A success has at least the reward
    `threshold`.
    """
    kept: list[Kept] = []
    for i in range(0, len(episodes), size):
        different: dict[tuple[int, ...], Trajectory] = {}
        for t in episodes[i : i + size]:
            if not t.left_out and succeeded(t.reward, threshold):
                said = (compress(one.completion_ids, one.loss_mask) for one in t.sequences)
                different.setdefault(tuple(chain.from_iterable(said)), t)
        for t in islice(different.values(), MOST_PER_TASK):
            examples = map(example_of_episode, t.sequences)
            kept += [Kept(t.domain, t.task_id, t.trial, example) for example in examples]
    return kept


def example_of_episode(trajectory: Trajectory) -> SFTExample:
    """Return an episode's tokens as an example; only sampled tokens have a loss."""
    tokens = zip(trajectory.completion_ids, trajectory.loss_mask, strict=True)
    labels = [i if is_sampled else IGNORED for i, is_sampled in tokens]
    return {"input_ids": trajectory.ids, "labels": [IGNORED] * len(trajectory.prompt_ids) + labels}


def examples_of(kept: Sequence[Kept], batch_size: int, *key: int | str) -> list[SFTExample]:
    """Return the examples of all steps of a round: about NUM_EPOCHS passes, in whole batches.

    The order of each pass is random; `key` names the stream of random numbers. The result depends
    neither on the order of `kept` nor on the number of ranks.
    """
    ordered = sorted(kept, key=lambda one: one[:3])
    num_steps = -(-NUM_EPOCHS * len(ordered) // batch_size)
    order = islice(epochs(len(ordered), *key), num_steps * batch_size)
    return [ordered[i].example for i in order]


def schedule_of_round(config: Config, num_examples: int) -> Schedule:
    """Return the schedule of a round: batches and warm-up are the warm start's."""
    rate = config.rft.rft_learning_rate
    assert rate is not None, "the settings were not fitted to the model"
    num_steps = num_examples // config.warm_start.batch_size
    return Schedule(
        num_steps=num_steps,
        batch_size=config.warm_start.batch_size,
        learning_rate=rate,
        num_warmup_steps=min(config.warm_start.warmup_steps, num_steps // 10),
    )


def summary_of(
    number: int, records: Sequence[EpisodeRecord], kept: Sequence[Kept], threshold: float
) -> dict[str, Any]:
    """Return an entry of `rft` in `results.json`: counts of the round, also by domain."""
    counts = Counter(one.domain for one in kept)
    domains = {
        domain: {
            "episodes": len(of),
            "successes": sum(succeeded(r.reward, threshold) for r in of if not r.left_out),
            "kept": counts[domain],
        }
        for domain, of in grouped(records, "domain").items()
    }
    sums = {name: sum(of[name] for of in domains.values()) for name in ("episodes", "successes")}
    return {"round": number, **sums, "kept": len(kept), "domains": domains}


def round_in_words(entry: dict[str, Any]) -> str:
    """Return the line of a round for the terminal."""
    name = f"rft round {entry['round']}"
    if not entry["kept"]:
        return (
            f"warning: {name}: none of {entry['episodes']:,} episodes succeeds, so nothing is "
            "trained; give the warm start demonstrations that succeed, or raise rft_tasks"
        )
    by_domain = ", ".join(f"{domain} {of['kept']:,}" for domain, of in entry["domains"].items())
    return (
        f"{name}: {entry['successes']:,} of {entry['episodes']:,} episodes succeed; trained on "
        f"{entry['kept']:,} ({by_domain}) in {entry['steps']} step(s), loss {entry['loss']:.3f}"
    )


def metrics_of(entry: dict[str, Any]) -> dict[str, float]:
    """Return the `rft/` metrics of a round."""
    found = {f"rft/{name}": entry[name] for name in ("round", "kept", "loss") if name in entry}
    for domain, of in entry["domains"].items():
        found[f"rft/{domain}/success"] = of["successes"] / of["episodes"]
    return found
