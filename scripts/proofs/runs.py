"""Whole runs on real ranks with their tokens kept, to be compared or forced on other ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from pipeline.config.cli import parse
from pipeline.data.rng import stream_key, uniforms
from pipeline.rollout.row_sampler import RowSampler
from pipeline.rollout.sampler import make_sampler
from pipeline.rollout.sequences import cumulative
from pipeline.rollout.trajectory import Trajectory
from pipeline.train import Training, main
from pipeline.trainer import Trainer
from scripts.proofs.ranks import play_ranks

Place = tuple[str, int, str, str, int]  # stage or evaluation, step, domain, task, trial


@dataclass(frozen=True, kw_only=True)
class Said:
    """What was sampled in one episode."""

    ids: list[int]
    logprobs: list[float]


@dataclass(kw_only=True)
class Played:
    """A run: every episode of all ranks, the parameters at its end, and what was forced."""

    episodes: dict[Place, Said] = field(default_factory=dict)
    parameters: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(0))
    num_forced: int = 0
    ties: list[float] = field(default_factory=list)  # of forced tokens; see ForcedSampler.misses
    update_gap: float = 0.0  # largest relative difference of parameters after any one step

    @property
    def num_tokens(self) -> int:
        return sum(len(said.ids) for said in self.episodes.values())

    def largest_gap(self, other: Played) -> float:
        """The largest difference of log-probabilities of the same tokens of training episodes."""
        return max(
            abs(mine - theirs)
            for place, said in self.episodes.items()
            if not place[0].startswith("evaluation-")
            for mine, theirs in zip(said.logprobs, other.episodes[place].logprobs, strict=True)
        )

    def forced_streams(self, seed: int) -> dict[int, list[int]]:
        """The training episodes' tokens by the keys of their draws."""
        return {
            stream_key(seed, "rollout", stage, step - 1, domain, task, trial): said.ids
            for (stage, step, domain, task, trial), said in self.episodes.items()
            if not stage.startswith("evaluation-")
        }


class ForcedSampler(RowSampler):
    """The real sampler, made to say given tokens instead of those that it draws.

    `forced` holds, for each key, the tokens of its stream in order; other keys are drawn as ever.
    `misses` says, for each forced token by key and position, how far its draw lies from that
    token's share of the cumulative distribution; None where the token would have been drawn.
    """

    forced: Mapping[int, Sequence[int]] = {}

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.misses: dict[tuple[int, int], float | None] = {}

    def sample_tokens(self, logprobs_BV: Any, keys: Any, positions: Any, greedy: bool) -> Any:
        picked = super().sample_tokens(logprobs_BV, keys, positions, greedy)
        for row, (key, position) in enumerate(zip(keys.tolist(), positions.tolist(), strict=True)):
            tokens = self.forced.get(key, ())
            if position >= len(tokens):  # a free stream, or one that is at its end
                continue
            # A row that has finished its message is asked again with the next one.
            self.misses[key, position] = None
            if picked[row] != tokens[position]:
                picked[row] = tokens[position]
                line = [0.0, *cumulative(logprobs_BV[row : row + 1])[0].tolist()]
                draw = float(uniforms(keys[row], positions[row])) * line[-1]
                low, high = line[tokens[position]], line[tokens[position] + 1]
                self.misses[key, position] = max(low - draw, draw - high)
        return picked


class Unreported(Training):
    """A run without the pages and pictures at its end, which take longer than a small run."""

    def finish(self) -> None:
        if self.ranks.is_main:
            self._write_results()
        self.ranks.barrier("end")


def play_run(
    num_ranks: int,
    flags: Sequence[str],
    output_dir: Path,
    forced: Mapping[int, Sequence[int]] | None = None,
    weights: Path | None = None,
) -> Played:
    """The pipeline's `main` on so many ranks, with these flags over the default recipe.

    It samples the `forced` streams where given. It keeps its parameters after each step in its
    folder; given another run's folder as `weights`, it compares them with that run's and goes on
    with those, so that what is compared is each step by itself.
    """
    argv = [*flags, "--output-dir", str(output_dir), "--report-to", "none"]
    argv += ["--num-gpus", str(num_ranks)]
    results = play_ranks(_run_on_this_rank, num_ranks, argv, forced, weights, timeout_s=1800)
    failed = [result for result in results if isinstance(result, str)]
    if failed:
        raise RuntimeError(failed[0])
    whole = Played(parameters=results[0].parameters)
    for result in results:
        whole.episodes |= result.episodes
        whole.num_forced += result.num_forced
        whole.ties += result.ties
        whole.update_gap = max(whole.update_gap, result.update_gap)
    return whole


def _run_on_this_rank(
    argv: list[str], forced: Mapping[int, Sequence[int]] | None, weights: Path | None
) -> Played:
    played, trainers = Played(), []

    def keep(trainer: Trainer, name: str, trajectories: Sequence[Trajectory]) -> None:
        trainers.append(trainer)
        for t in trajectories:
            ids = [i for i, mask in zip(t.completion_ids, t.loss_mask, strict=True) if mask]
            logprobs = [p for p, mask in zip(t.logprobs, t.loss_mask, strict=True) if mask]
            place = (name, trainer.state.step, t.domain, t.task_id, t.trial)
            assert place not in played.episodes
            played.episodes[place] = Said(ids=ids, logprobs=logprobs)
        if name.startswith("evaluation-"):
            return
        policy, step = trainer.policy, trainer.state.step
        found = flat(policy.model)
        if weights is not None:
            theirs = np.load(weights / f"parameters-{step}.npy")
            gap = np.linalg.norm(found - theirs) / np.linalg.norm(theirs)
            played.update_gap = max(played.update_gap, float(gap))
            vector_to_parameters(torch.from_numpy(theirs), policy.model.parameters())
            policy.rollout.load_weights(policy.model)
        elif trainer.ranks.is_main:
            np.save(trainer.folder / f"parameters-{step}.npy", found)

    hooks: dict[str, Any] = {"on_batch": keep}
    if forced is not None:
        ForcedSampler.forced = forced
        hooks["make_sampler"] = partial(make_sampler, row_sampler=ForcedSampler)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        main(parse(argv), partial(Unreported, **hooks))
    played.parameters = flat(trainers[-1].policy.model)
    if forced is not None:
        misses = trainers[-1].policy.rollout.sampler.misses
        played.num_forced = len(misses)
        played.ties = [distance for distance in misses.values() if distance is not None]
    return played


def flat(model: Any) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        return parameters_to_vector(model.parameters()).numpy().copy()
