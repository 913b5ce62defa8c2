"""What `forgetting.py` measures after a run: movement of the policy in KL, answers, correlations.

A point of a run is a policy at the end of a stage: a checkpoint, and the transcripts of its
evaluation on held-out tasks.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from examples import three_desks
from pipeline.checkpoints.run_folder import RUN_SETTINGS
from pipeline.config.cli import parse
from pipeline.config.settings import Config
from pipeline.data.rng import stream_key
from pipeline.environments.domains import Domain, generated, load_domains
from pipeline.models.chat.template import Chat, load_chat
from pipeline.models.loading import load_folder, load_tokenizer
from pipeline.report.run_files import episodes_in

Line = dict[str, Any]  # an episode of a transcript
Floats = NDArray[np.float64]
RESAMPLES = 2000
MOST_ROUNDING = 0.01  # largest mean difference to the sampled log-probabilities, in nats


class Point(NamedTuple):
    """A policy at the end of a stage."""

    stage: str
    own: list[str]  # domains that the stage trained
    checkpoint: Path
    transcripts: Path  # of the evaluation of this policy


class Reader:
    """Token ids of transcripts, and policies, as the run `folder` had them."""

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        self.config: Config = parse(["--config", str(folder / RUN_SETTINGS)])
        self.settings = self.config.model.model_copy(update={"model": str(checkpoint)})
        self.domains: dict[str, Domain] = load_domains(self.config)
        tokenizer = load_tokenizer(self.settings, self.domains.values())
        self.chat: Chat = load_chat(self.settings, tokenizer, self.domains, checkpoint)

    def policy(self, checkpoint: Path) -> Any:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return load_folder(checkpoint, self.settings).to(device).eval()

    def tokens(self, line: Line) -> tuple[list[int], list[int]]:
        """Return the ids of an episode, and the places of those that the policy sampled."""
        ids = list[int]()
        places = list[int]()
        sampled = iter(line["ids"])
        for is_said, of in groupby(line["messages"], lambda m: m["role"] == "assistant"):
            messages = list(of)
            if is_said:
                for said in islice(sampled, len(messages)):
                    places += range(len(ids), len(ids) + len(said))
                    ids += said
            elif not ids:
                ids += self.chat.prompt_ids(messages, self.domains[line["domain"]].tools)
            else:
                ids += self.chat.reply_ids(messages)
        return ids, places


def lines_of(transcripts: Path, domain: str, count: int) -> list[Line]:
    """Return the first sampled trial of `count` tasks of a domain, evenly spread over its tasks."""
    lines = chain.from_iterable(map(episodes_in, sorted(transcripts.glob("step-*.jsonl.gz"))))
    first = sorted(
        (line for line in lines if line["domain"] == domain and line["trial"] == 0),
        key=lambda line: line["task_id"],
    )
    return first[:: max(1, len(first) // count)][:count]


@torch.no_grad()
def logprobs_of(policy: Any, ids: Sequence[int], places: Sequence[int]) -> torch.Tensor:
    """Return log-probabilities of all tokens of the vocabulary at the sampled places, [P, V]."""
    row = torch.tensor([ids], device=policy.device)
    hidden = policy.base_model(input_ids=row).last_hidden_state[0]
    before = torch.tensor(places, device=policy.device) - 1
    return policy.lm_head(hidden[before]).double().log_softmax(-1)


def kl_of(before: torch.Tensor, after: torch.Tensor) -> float:
    """Return the sum over rows of KL(before || after), each over the whole vocabulary, in nats."""
    return float((before.exp() * (before - after)).sum())


def drift(reader: Reader, before: Point, after: Point, domains: Sequence[str], count: int) -> Line:
    """Return KL(policy before a stage || policy after it) per token by domain.

    The episodes are those that the policy before the stage sampled on held-out tasks. At each
    sampled token the divergence is that of the whole distributions, so only the choice of episodes
    is random. Raises ValueError if the ids of a transcript are not those that were sampled.
    """
    first, second = map(reader.policy, (before.checkpoint, after.checkpoint))
    found = Line()
    for domain in domains:
        total = difference = 0.0
        number = 0
        for line in lines_of(before.transcripts, domain, count):
            ids, places = reader.tokens(line)
            old = logprobs_of(first, ids, places)
            total += kl_of(old, logprobs_of(second, ids, places))
            sampled = old[range(len(places)), [ids[place] for place in places]].cpu()
            written = torch.tensor([*chain(*line["logprobs"])], dtype=torch.float64)
            difference += float((sampled - written).abs().sum())
            number += len(places)
        if difference / number > MOST_ROUNDING:
            raise ValueError(
                f"{before.transcripts}: log-probabilities differ by {difference / number:.3f} nats "
                f"from those that {before.checkpoint} gives, so it has not sampled them"
            )
        found[domain] = total / number
    return found


def answers_by_desk(
    config: Config, domains: Mapping[str, Domain], transcripts: Path
) -> dict[str, dict[str, int]]:
    """Count the answers of each desk by whose rules they follow (`three_desks.followed`)."""
    data = config.data
    lines = [*chain.from_iterable(map(episodes_in, sorted(transcripts.glob("step-*.jsonl.gz"))))]
    found = dict[str, dict[str, int]]()
    for name, domain in domains.items():
        tasks = generated(config, domain, data.eval_tasks_per_domain, data.eval_split)
        by_id = {task.id: task for task in tasks}
        of_domain = (line for line in lines if line["domain"] == name)
        decisions = (
            (by_id[line["task_id"]], three_desks.decision_of(line["messages"]))
            for line in of_domain
        )
        found[name] = dict(three_desks.followed(decisions))
    return found


# Dots and correlations


def dots_of(
    owns: Sequence[Sequence[str]],
    drifts: Sequence[Mapping[str, float]],
    matrix: Sequence[Sequence[float]],
) -> list[dict[str, float]]:
    """Return a dot for each later stage: points forgotten in it, and how far the policy moved.

    Args:
        owns: the domains that each stage trained, in order.
        drifts: for each later stage, the KL by domain of `drift`.
        matrix: success by evaluation (the first: before training) and domain, domains in the order
            of their first stages.

    A dot has means over the stage's old domains (learned before, and not trained by it), and over
    its new ones.
    """
    names = list(dict.fromkeys(chain.from_iterable(owns)))
    dots = []
    for t, kl in enumerate(drifts, 1):
        old = [d for d in dict.fromkeys(chain.from_iterable(owns[:t])) if d not in owns[t]]
        lost = [matrix[t][names.index(d)] - matrix[t + 1][names.index(d)] for d in old]
        dot = {"stage": t + 1.0, "forgotten": float(np.mean(lost))}
        dot |= {"kl_old": float(np.mean([kl[domain] for domain in old]))}
        dots.append(dot | {"kl_new": float(np.mean([kl[domain] for domain in owns[t]]))})
    return dots


def ranks_of(values: Floats) -> Floats:
    """Return the ranks of values; equal values have the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray(ends - (counts - 1) / 2)[inverse]


def pearson(x: Floats, y: Floats) -> float:
    """Return Pearson's correlation, or NaN if x or y does not vary."""
    x, y = x - x.mean(), y - y.mean()
    norm = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / norm if norm > 0 else float("nan")


def correlations(runs: Sequence[Sequence[Mapping[str, float]]]) -> dict[str, list[float]]:
    """Return correlations of points forgotten with both KLs, as [value, low, high].

    `runs` has the dots of each run. `spearman_*` are of ranks, `pearson_*` with the logarithm of
    KL, and `spearman_old_minus_new` is the difference of two correlations on the same dots. The
    95 % intervals come from a bootstrap over runs: stages of a run are not independent.
    """
    names = ("forgotten", "kl_old", "kl_new")
    tables = [np.array([[dot[name] for name in names] for dot in run]) for run in runs]
    random = np.random.default_rng(stream_key("correlations"))
    samples = [_correlations(np.vstack(tables))]
    for _ in range(RESAMPLES):
        drawn = random.integers(len(tables), size=len(tables))
        samples.append(_correlations(np.vstack([tables[i] for i in drawn])))
    bounds = np.nanpercentile(np.array(samples[1:]), [2.5, 97.5], axis=0)
    keys = ("spearman_old", "spearman_new", "spearman_old_minus_new", "pearson_old", "pearson_new")
    return {
        key: [float(samples[0][i]), float(bounds[0][i]), float(bounds[1][i])]
        for i, key in enumerate(keys)
    }


def _correlations(table: Floats) -> list[float]:
    forgotten, old, new = table.T
    by_rank = [pearson(ranks_of(kl), ranks_of(forgotten)) for kl in (old, new)]
    logs = (np.log(np.maximum(kl, 1e-9)) for kl in (old, new))
    return [*by_rank, by_rank[0] - by_rank[1], *(pearson(kl, forgotten) for kl in logs)]


# Relearning


def steps_until(rewards: Sequence[float], level: float, window: int = 5) -> int | None:
    """Return the first step after which the mean of the last `window` rewards is at least `level`.

    Steps count from 1. Returns None if it never is.
    """
    for end in range(window, len(rewards) + 1):
        if np.mean(rewards[end - window : end]) >= level:
            return end
    return None


def by_answer(counts: Sequence[Mapping[str, int]]) -> dict[str, float]:
    """Return the shares of summed counts."""
    total = Counter[str]()
    for of in counts:
        total.update(of)
    return {name: number / total.total() for name, number in total.items()}


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
